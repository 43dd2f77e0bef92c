"""mpmd.jit: where a program runs, its outputs in other processes, and its errors."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import create_mesh, mpmd
from flax_mesh.mpmd import MpmdArray, MpmdMesh
from tests.mpmd.fakes import seen_from

P = PartitionSpec
remote = functools.partial(MpmdArray, (8,), jnp.float32)


@pytest.fixture
def mpmd_mesh():
    return MpmdMesh(create_mesh((2, 4), ("pp", "fsdp")), "pp")


@pytest.fixture
def here(mpmd_mesh):
    return NamedSharding(mpmd_mesh.unstack[1], P("fsdp"))


@pytest.fixture
def there():
    """On two devices of process 1, from the view of process 0."""
    return NamedSharding(seen_from(0, [1, 1], (1, 2)), P("fsdp"))


@pytest.fixture
def x(here):
    return mpmd.device_put(np.arange(8, dtype=np.float32), here)


def test_a_program_runs_on_the_devices_of_its_inputs(mpmd_mesh, here, x):
    replicated = NamedSharding(here.mesh, P())
    step = mpmd.jit(lambda x, w: (x * w, jnp.sum(x)), out_shardings=(here, replicated))
    with mpmd_mesh:
        scaled, total = step(x, jax.device_put(jnp.full(8, 2.0), here))
    assert isinstance(scaled, MpmdArray) and isinstance(total, MpmdArray)
    assert scaled.jax_array.devices() == set(mpmd_mesh.unstack[1].devices.flat)
    assert (scaled.sharding, total.sharding, scaled.groups) == (here, replicated, (1,))
    assert np.array_equal(scaled, 2 * np.arange(8)) and np.asarray(total) == 28


def test_groups_come_from_the_inputs_or_the_context(mpmd_mesh, here, x):
    step = mpmd.jit(lambda x: x + 1, out_shardings=here)
    with mpmd_mesh:
        y = mpmd.device_put(x, here)
        assert step(x).groups == (1,)
    assert step(y).groups == (1,)
    with pytest.raises(ValueError, match="This array has no MpmdMesh"):
        step(x).groups  # noqa: B018


def test_inputs_of_every_kind(here, x):
    def total(a: jax.Array, b, c):
        """Adds."""
        return a + b["p"] + b["q"] + c

    step = mpmd.jit(total, out_shardings=here)
    assert (step.__name__, step.__doc__, inspect.signature(step)) == ("total", "Adds.", inspect.signature(total))
    inputs = {"p": np.ones(8, np.float32), "q": jax.device_put(jnp.ones(8), here)}
    assert np.array_equal(step(x, inputs, 3), np.arange(8) + 5)
    # Nothing is committed: runs on the devices of the outputs, as without inputs.
    assert np.array_equal(step(jnp.zeros(8), {"p": 1.0, "q": True}, c=1), [3] * 8)
    assert np.array_equal(mpmd.jit(functools.partial(jnp.arange, 8.0), out_shardings=here)(), np.arange(8))


def test_keyword_static_and_donated_arguments(here, x):
    def step(x, power, *, shift, scale=1.0):
        return scale * x**power + shift

    program = mpmd.jit(step, out_shardings=here, static_argnums=1, static_argnames="scale", donate_argnums=0)
    kept = mpmd.device_put(np.arange(8, dtype=np.float32), here)
    first = program(x, 2, shift=kept)
    assert np.array_equal(first, np.arange(8) ** 2 + np.arange(8))
    assert x.jax_array.is_deleted() and not kept.jax_array.is_deleted()
    second = program(first, 1, shift=kept, scale=10.0)
    assert np.array_equal(second, 10 * (np.arange(8) ** 2 + np.arange(8)) + np.arange(8))
    assert first.jax_array.is_deleted()
    by_name = mpmd.jit(step, out_shardings=here, static_argnames=("power", "scale"), donate_argnames="shift")
    last = by_name(kept, power=3, shift=mpmd.device_put(np.zeros(8, np.float32), here))
    assert np.array_equal(last, np.arange(8) ** 3)


def test_out_shardings_may_be_a_prefix(here, there):
    def step(x):
        return {"a": [x, x + 1, None], "b": (jnp.sum(x), {})}

    for sharded in (here, there):
        x = mpmd.device_put(np.arange(8, dtype=np.float32), sharded)
        replicated = NamedSharding(sharded.mesh, P())
        full = {"a": [sharded, replicated, None], "b": (replicated, {})}
        for prefix in (
            replicated,
            {"a": replicated, "b": (replicated, {})},
            {"a": [sharded, replicated, None], "b": replicated},
            full,
        ):
            got = mpmd.jit(step, out_shardings=prefix)(x)
            assert jax.tree.structure(got) == jax.tree.structure(step(jnp.ones(8)))
            expected = sharded if isinstance(prefix, dict) and isinstance(prefix["a"], list) else replicated
            assert got["a"][0].sharding == expected
            assert [array.sharding for array in (got["a"][1], got["b"][0])] == [replicated, replicated]
            assert [array.shape for array in jax.tree.leaves(got)] == [(8,), (8,), ()]


def test_out_shardings_that_are_not_a_prefix_raise(here, there):
    for sharded in (here, there):
        x = mpmd.device_put(np.arange(8, dtype=np.float32), sharded)
        with pytest.raises(ValueError, match=r"out_shardings.*"):
            mpmd.jit(lambda x: {"a": x}, out_shardings=(sharded,))(x)
        with pytest.raises(ValueError, match=r"out_shardings has None for output \[1\]\['b'\], \[2\]"):
            mpmd.jit(lambda x: (x, {"a": None, "b": x}, x), out_shardings=(sharded, None, None))(x)


def test_errors_name_wrong_arrays_before_inputs_are_donated(mpmd_mesh, here, there, x):
    other = NamedSharding(mpmd_mesh.unstack[0], P("fsdp"))
    elsewhere = mpmd.device_put(x, other)
    double, keep = lambda x: (x, x + 1), lambda x: x
    missing = r"mpmd.jit\(<lambda>\): out_shardings is missing\..*where the outputs are placed"
    for call, message in (
        *((lambda none=none: mpmd.jit(keep, out_shardings=none), missing) for none in (None, (), {"a": None})),
        (lambda: mpmd.jit(keep), missing),
        (
            lambda: mpmd.jit(keep, out_shardings={"a": P("fsdp"), "b": "fsdp", "c": here}),
            r"out_shardings\['a'\] is P\('fsdp',\), out_shardings\['b'\] is 'fsdp'\. Instead of",
        ),
        (
            lambda: mpmd.jit(double, out_shardings=(here, other)),
            r"out_shardings\[0\] on devices 4, 5, 6, 7 of process 0; out_shardings\[1\] on devices 0, 1, 2, 3 of",
        ),
        (lambda: mpmd.jit(double, out_shardings=(here, None), donate_argnums=0)(x), "None for output"),
        (lambda: mpmd.jit(keep, out_shardings=here)(remote(there)), "found x on remote .*; out_shardings on devices 4"),
        (lambda: mpmd.jit(keep, out_shardings=there)(x), "found out_shardings on remote devices .*; x on devices 4"),
        (
            lambda: mpmd.jit(lambda x, y: x, out_shardings=here)(x, [elsewhere, elsewhere.jax_array]),
            r"found x, out_shardings on devices 4.*; y\[\{0\.\.1\}\] on devices 0, 1, 2, 3",
        ),
        (lambda: jax.jit(mpmd.jit(keep, out_shardings=here))(jnp.ones(8)), "inside a trace call the function itself"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not x.jax_array.is_deleted()


def test_the_error_names_all_remote_inputs(here, there, x):
    def step(params, batch, *rest, scale, **more):
        return batch

    params = {"w": remote(there), "b": [remote(there), x]}
    program = mpmd.jit(step, out_shardings=here)
    found = (
        "found params['b'][0], params['w'], rest[1], scale, more['extra'] on remote devices 100, 101 of process 1; "
        "params['b'][1], batch, out_shardings on devices 4, 5, 6, 7 of process 0. Transfer the inputs"
    )
    with pytest.raises(ValueError, match=r"mpmd.jit\(step\): .*" + re.escape(found)):
        program(params, x, 1.0, remote(there), scale=remote(there), extra=remote(there))


def test_remote_outputs_have_shape_dtype_and_sharding():
    mpmd_mesh = MpmdMesh(seen_from(0, [0, 0, 1, 1], (2, 2)), "pp")
    with mpmd_mesh:
        x = mpmd.device_put(np.zeros((8, 2), np.float32), NamedSharding(mpmd_mesh.unstack[1], P("fsdp")))
    replicated = NamedSharding(mpmd_mesh.unstack[1], P())
    y, loss, n = mpmd.jit(
        lambda x, k: (x.astype(jnp.bfloat16).T, jnp.sum(x), k),
        out_shardings=(replicated, replicated, replicated),
        static_argnums=1,
    )(x, 7)
    assert (y.shape, y.dtype, y.sharding, y.groups) == ((2, 8), jnp.bfloat16, replicated, (1,))
    assert (loss.shape, loss.dtype, n.dtype, n.weak_type) == ((), jnp.float32, jnp.int32, True)
    assert all(array.is_fully_remote and array.block_until_ready() is array for array in (y, loss, n))


def test_all_processes_infer_the_same_dtype_from_weakly_typed_arrays(here, there):
    """A process that only traces must infer the dtype that the other processes compute."""
    dtypes = []
    for sharded in (here, there):
        replicated = NamedSharding(sharded.mesh, P())
        weak = mpmd.jit(lambda: 2.0, out_shardings=replicated)()
        half = mpmd.device_put(np.ones(8, jnp.bfloat16), sharded)
        product = mpmd.jit(lambda a, b: a * b, out_shardings=replicated)(weak, half)
        dtypes.append((weak.weak_type, product.dtype, product.weak_type))
    assert dtypes[0] == dtypes[1] == (True, jnp.bfloat16, False)


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_program_is_traced_once_and_a_remote_one_never_compiled(is_remote, here, there, compilations):
    traces, sharding = [], there if is_remote else here
    arrays = [mpmd.device_put(np.zeros(size, np.float32), sharding) for size in (8, 16)]

    def step(x, y):
        traces.append(x.shape)
        return x + y

    program = mpmd.jit(step, out_shardings=sharding, donate_argnums=0)
    array, before = arrays[0], len(compilations)
    for _ in range(4):
        array = program(array, np.ones(8, np.float32))
    assert traces == [(8,)] and len(compilations) == before + (not is_remote)
    assert is_remote or np.array_equal(array, [4] * 8)
    program(arrays[1], 1.0)
    assert traces == [(8,), (16,)]
