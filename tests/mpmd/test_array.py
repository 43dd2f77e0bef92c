"""MpmdArray: its attributes and errors, in processes with and without devices of the array."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_mesh import create_mesh
from flax_mesh.mpmd import (
    MpmdArray,
    MpmdMesh,
    as_jax_array,
    is_fully_local_sharding,
    is_fully_remote_array,
    is_fully_remote_sharding,
    is_local_device,
)
from tests.mpmd.fakes import seen_from

P = PartitionSpec


@pytest.fixture
def mpmd_mesh():
    return MpmdMesh(create_mesh((4, 2), ("pp", "fsdp")), "pp")


@pytest.fixture
def value(mpmd_mesh):
    return jax.device_put(np.arange(8, dtype=np.float32).reshape(4, 2), NamedSharding(mpmd_mesh.unstack[2], P("fsdp")))


def array_of(value, **options):
    return MpmdArray(value.shape, value.dtype, value.sharding, value, **options)


def remote_sharding(*, process=0, owners=(1, 1)):
    return NamedSharding(seen_from(process, owners, (1, len(owners))), P("fsdp"))


def test_a_local_array(mpmd_mesh, value):
    array = array_of(value, mpmd_mesh=mpmd_mesh)
    assert (array.shape, array.dtype, array.sharding) == ((4, 2), np.float32, value.sharding)
    assert array.groups == (2,)
    assert array.jax_array is value and as_jax_array(array) is value
    assert not array.is_fully_remote and not is_fully_remote_array(array)
    assert np.array_equal(np.asarray(array), np.arange(8).reshape(4, 2))
    assert repr(array) == "MpmdArray(f32[4,2], P('fsdp',), groups=(2,))"
    assert jax.tree.leaves({"a": [array]}) == [array] and array != array_of(value, mpmd_mesh=mpmd_mesh)
    assert as_jax_array(value) is value and isinstance(as_jax_array([1, 2]), jax.Array)


def test_a_remote_array():
    sharding = remote_sharding(owners=(1, 2))
    array = MpmdArray((4, 2), "bfloat16", sharding)
    assert (array.shape, array.dtype, array.sharding) == ((4, 2), jnp.bfloat16, sharding)
    assert array.is_fully_remote and is_fully_remote_array(array) and array.block_until_ready() is array
    assert repr(array) == "MpmdArray(bf16[4,2], P('fsdp',), remote)"
    message = r"remote\) is fully remote: process 0 has none of its devices, which belong to processes 1, 2\. Read it"
    for read in (lambda: array.jax_array, lambda: as_jax_array(array), lambda: np.asarray(array)):
        with pytest.raises(ValueError, match=message):
            read()


def test_block_until_ready_waits(value):
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 6_000_000, lambda i, c: jnp.sin(c) + i * 1e-9, x))
    array = array_of(work(value[:1, :1]))
    ready: Any = array.jax_array
    assert not ready.is_ready()
    assert array.block_until_ready() is array and ready.is_ready()


def test_random_keys_and_weak_types(mpmd_mesh):
    sharding = NamedSharding(mpmd_mesh.unstack[0], P())
    keys = array_of(jax.device_put(jax.random.split(jax.random.key(0), 2), sharding))
    assert keys.dtype == jax.random.key(0).dtype and keys.block_until_ready() is keys
    weak = jax.device_put(jnp.asarray(1.0), sharding)
    assert array_of(weak, weak_type=True).weak_type
    with pytest.raises(ValueError, match="its weak_type is True, not False"):
        array_of(weak)


def test_the_value_is_freed_with_the_array(value):
    array = array_of(value + 1)
    alive = weakref.ref(array.jax_array)
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


def test_groups_are_indices_in_the_mesh_argument_or_the_mesh_in_context(mpmd_mesh, value):
    pair = mpmd_mesh.mpmd_submesh([2, 1]).jax_mesh
    spread = jax.device_put(value, NamedSharding(pair, P("pp", "fsdp")))
    assert array_of(spread, mpmd_mesh=mpmd_mesh).groups == (1, 2)
    with mpmd_mesh:
        assert array_of(value).groups == (2,)
        with mpmd_mesh.mpmd_submesh([2, 3]):
            assert array_of(value).groups == (0,)
            assert array_of(value, mpmd_mesh=mpmd_mesh).groups == (2,)
        with mpmd_mesh.mpmd_submesh([0, 1]), pytest.raises(ValueError, match="This array has no MpmdMesh"):
            array_of(value).groups  # noqa: B018
    with pytest.raises(ValueError, match="Create it inside `with mpmd_mesh:`"):
        array_of(value).groups  # noqa: B018
    assert "groups" not in repr(array_of(value))
    foreign = ", ".join(sorted(map(str, value.devices())))
    with pytest.raises(ValueError, match=rf"not in MpmdMesh\(pp:2,fsdp:2, groups along pp\): {foreign}\."):
        array_of(value, mpmd_mesh=mpmd_mesh.mpmd_submesh([0, 1]))


def test_a_remote_array_has_groups():
    mpmd_mesh = MpmdMesh(seen_from(1, [0, 0, 1, 1], (2, 2)), "pp")
    array = MpmdArray((4,), jnp.float32, NamedSharding(mpmd_mesh.unstack[0], P("fsdp")), mpmd_mesh=mpmd_mesh)
    assert array.groups == (0,) and array.is_fully_remote
    assert repr(array) == "MpmdArray(f32[4], P('fsdp',), groups=(0,), remote)"


def test_value_is_required_exactly_if_the_process_has_devices(value):
    with pytest.raises(ValueError, match="Process 0 has devices of the sharding, so value must not be None; got Named"):
        MpmdArray((4, 2), jnp.float32, value.sharding)
    with pytest.raises(ValueError, match="Process 0 has no device of the sharding, so value must be None"):
        MpmdArray((4, 2), jnp.float32, remote_sharding(), value)
    MpmdArray((4, 2), jnp.float32, remote_sharding(process=2))
    with pytest.raises(ValueError, match="Process 1 has devices of the sharding"):
        MpmdArray((4, 2), jnp.float32, remote_sharding(process=1))


def test_a_value_with_another_shape_dtype_or_layout_raises(value):
    with pytest.raises(ValueError, match=r"its shape is \(4, 2\), not \(2, 4\); its dtype is float32, not int32"):
        MpmdArray((2, 4), jnp.int32, value.sharding, value)
    other = NamedSharding(value.sharding.mesh, P(None, "fsdp"))
    with pytest.raises(ValueError, match=r"its sharding is .*'fsdp',.*, not .*None, 'fsdp'"):
        MpmdArray((4, 2), jnp.float32, other, value)
    same = NamedSharding(value.sharding.mesh, P(("pp", "fsdp"), None))  # an equivalent spec
    assert MpmdArray((4, 2), jnp.float32, same, value).sharding == same


def test_local_and_remote_devices_and_shardings(value):
    assert all(map(is_local_device, jax.devices()))
    both = remote_sharding(process=1, owners=(0, 1))
    devices: Any = sorted(both.device_set, key=lambda device: device.id)
    assert [is_local_device(device) for device in devices] == [False, True]
    cases = [
        (value.sharding, True, False),
        (SingleDeviceSharding(jax.devices()[3]), True, False),
        (NamedSharding(create_mesh(), P("fsdp")), True, False),
        (remote_sharding(), False, True),
        (remote_sharding(process=1), True, False),
        (both, False, False),
    ]
    for sharding, fully_local, fully_remote in cases:
        assert is_fully_local_sharding(sharding) == fully_local
        assert is_fully_remote_sharding(sharding) == fully_remote
    assert not is_fully_remote_array(value)
    abstract = NamedSharding(create_mesh().abstract_mesh, P())
    for predicate in (is_fully_local_sharding, is_fully_remote_sharding):
        with pytest.raises(ValueError, match="AbstractMesh"):
            predicate(abstract)
