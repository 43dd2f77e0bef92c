"""Copies between groups of one process: equal to the result of `jax.device_put`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from flax_mesh.jax_compat import device_copy
from flax_mesh.mpmd.transport import local_copy as module
from flax_mesh.mpmd.transport.local_copy import move, mover


def mesh(first, sizes=(2, 2)):
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), ("dp", "tp"))


@pytest.fixture
def slow_puts(monkeypatch):
    """Calls of `jax.device_put`, counted."""
    device_copy(NamedSharding(mesh(0), P()))  # the first call tries the copy on a separate array
    calls, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args, **options: calls.append(args) or put(*args, **options))
    return calls


@pytest.fixture(autouse=True)
def empty_cache():
    mover.cache_clear()
    yield
    mover.cache_clear()


def assert_same(have, want):
    for name in ("sharding", "dtype", "weak_type", "committed"):
        assert getattr(have, name) == getattr(want, name)
    for actual, expected in zip(have.addressable_shards, want.addressable_shards, strict=True):
        assert (actual.device, actual.index) == (expected.device, expected.index)
        np.testing.assert_array_equal(actual.data, expected.data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("spec", [P(), P("dp"), P("dp", "tp"), P(None, ("dp", "tp")), P("tp", None)])
def test_a_copy_equals_device_put_without_calling_it(spec, dtype, slow_puts):
    value = np.arange(64).reshape(8, 8).astype(jnp.dtype(dtype))
    x = jax.device_put(value, NamedSharding(mesh(0), spec))
    there = NamedSharding(mesh(4), spec)
    want = jax.device_put(x, there)
    slow_puts.clear()
    assert_same(move(x, there), want)
    assert not slow_puts


def test_a_weak_type_on_one_device_is_preserved():
    x = jax.jit(lambda: jnp.asarray(1.0))()
    x = jax.device_put(x, NamedSharding(mesh(0, (1, 1)), P()))
    there = NamedSharding(mesh(1, (1, 1)), P())
    assert x.weak_type
    assert_same(move(x, there), jax.device_put(x, there))


OTHERS = {
    "another layout": lambda: NamedSharding(mesh(4), P("tp")),
    "another order of the same devices": lambda: NamedSharding(Mesh(mesh(0).devices[::-1], ("dp", "tp")), P("dp")),
    "another shape": lambda: NamedSharding(mesh(4, (1, 4)), P("dp")),
    "no mesh": lambda: SingleDeviceSharding(jax.devices()[5]),
    "the same": lambda: NamedSharding(mesh(0), P("dp")),
}


def on(first, *spec):
    """An array on the devices from `first` on."""
    return jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh(first), P(*spec)))


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes_than_of_devices_use_device_put(name, slow_puts):
    x, there = on(0, "dp"), OTHERS[name]()
    want = jax.device_put(x, there)
    slow_puts.clear()
    assert_same(move(x, there), want)
    assert slow_puts


def test_random_keys_are_copied():
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), NamedSharding(mesh(0), P()))
    there = NamedSharding(mesh(4), P())
    moved = move(keys, there)
    assert moved.sharding.is_equivalent_to(there, 1)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_a_move_is_an_explicit_transfer():
    x, there = on(0, "dp"), NamedSharding(mesh(4), P("dp"))
    with jax.transfer_guard("disallow"):
        assert_same(move(x, there), jax.device_put(x, there))
    with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="Disallowed device-to-device"):
        move(x, there)


def test_a_buffer_can_be_donated_after_the_move():
    x = jax.device_put(np.ones((256, 256), np.float32), NamedSharding(mesh(0), P("dp")))
    square = jax.jit(lambda x: x @ x / 256, out_shardings=x.sharding)
    increased = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(20):
        x = square(x)  # still computing
        there = move(x, NamedSharding(mesh(4), P("dp")))
        x = increased(x)
        np.testing.assert_array_equal(np.asarray(there) + 1, x)


def test_device_put_is_used_if_the_function_of_jaxlib_is_missing(monkeypatch, slow_puts):
    monkeypatch.setattr(module, "device_copy", lambda target: None)
    x, there = on(0, "dp", "tp"), NamedSharding(mesh(4), P("dp", "tp"))
    slow_puts.clear()
    assert_same(move(x, there), jax.device_put(x, there))
    assert len(slow_puts) == 2
