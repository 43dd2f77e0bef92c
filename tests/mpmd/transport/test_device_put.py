"""mpmd.device_put in one process, between groups, layouts and sizes; and a transport that sends to the same process."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_mesh import create_mesh, mpmd
from flax_mesh.mpmd import MpmdArray, MpmdMesh
from flax_mesh.mpmd.transport.device_put import find_route
from flax_mesh.mpmd.transport.server import CallNames, Transport, address_towards, check_key, transport_of
from tests.mpmd.fakes import seen_from
from tests.multiprocess.processes import assert_all_done, run_workers

P = PartitionSpec
NUMBERS = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def mpmd_mesh():
    return MpmdMesh(create_mesh((2, 2, 2), ("pp", "fsdp", "tp")), "pp")


def on(mpmd_mesh, group, *spec, memory_kind=None):
    return NamedSharding(mpmd_mesh.unstack[group], P(*spec), memory_kind=memory_kind)


def of_each_group(mesh):
    mixed = np.roll(mesh.jax_mesh.devices.ravel(), 2)[:4]
    return NamedSharding(Mesh(mixed, ("all",), axis_types=(AxisType.Explicit,)), P("all"))


TARGETS = {
    "same layout": lambda mesh: on(mesh, 1, "fsdp", "tp"),
    "transposed": lambda mesh: on(mesh, 1, "tp", "fsdp"),
    "one dim": lambda mesh: on(mesh, 1, None, ("fsdp", "tp")),
    "replicated": lambda mesh: on(mesh, 1),
    "same group": lambda mesh: on(mesh, 0, "tp"),
    "same sharding": lambda mesh: on(mesh, 0, "fsdp", "tp"),
    "host memory": lambda mesh: on(mesh, 1, "fsdp", memory_kind="pinned_host"),
    "same group's host memory": lambda mesh: on(mesh, 0, "tp", memory_kind="pinned_host"),
    "all devices": lambda mesh: NamedSharding(mesh.jax_mesh, P(("pp", "tp"), "fsdp")),
    "both groups": lambda mesh: NamedSharding(mesh.jax_mesh, P("fsdp", "tp")),
    "some of each": of_each_group,
    "one device": lambda mesh: SingleDeviceSharding(jax.devices()[5]),
    "one device's host memory": lambda mesh: SingleDeviceSharding(jax.devices()[5], memory_kind="pinned_host"),
    "two devices": lambda mesh: NamedSharding(Mesh(np.array(jax.devices()[5:7]), ("x",)), P(None, "x")),
}


@pytest.mark.parametrize("case", TARGETS)
def test_there_and_back(mpmd_mesh, case):
    source, target = on(mpmd_mesh, 0, "fsdp", "tp"), TARGETS[case](mpmd_mesh)
    array = mpmd.device_put(NUMBERS, source)
    there = mpmd.device_put(array, target)
    back = mpmd.device_put(there, source)
    for moved, sharding in ((there, target), (back, source)):
        assert isinstance(moved, MpmdArray) and moved.sharding == sharding
        assert moved.jax_array.sharding.is_equivalent_to(sharding, 2)
        assert moved.jax_array.sharding.memory_kind == sharding.memory_kind
        assert np.array_equal(moved, NUMBERS)
    for shard in there.jax_array.addressable_shards:  # the shard of every device, not only the global value
        assert np.array_equal(shard.data, NUMBERS[target.devices_indices_map((8, 8))[shard.device]])
    assert np.array_equal(array, NUMBERS)


INPUTS: dict[str, Callable[[], Any]] = {
    "int": lambda: 3,
    "float": lambda: 2.5,
    "bool": lambda: True,
    "float64": lambda: np.float64(2),
    "list": lambda: [1, 2],
    "empty": lambda: np.zeros((0, 2)),
    "int64": lambda: np.arange(4, dtype=np.int64),
    "weak type": lambda: jnp.asarray(1.5),
    "bfloat16": lambda: jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
}


@pytest.mark.parametrize("name", INPUTS)
def test_uncommitted_input_is_put_on_the_requested_devices(mpmd_mesh, name):
    x = INPUTS[name]()
    expected = jnp.asarray(x)
    for group in (0, 1):
        array = mpmd.device_put(x, on(mpmd_mesh, group))
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert array.jax_array.committed and array.jax_array.devices() == set(mpmd_mesh.unstack[group].devices.flat)
        assert np.array_equal(array, expected)
        moved = mpmd.device_put(array, on(mpmd_mesh, 1 - group))
        assert moved.dtype == expected.dtype and np.array_equal(moved, expected)
        assert not array.weak_type and not moved.weak_type


def test_random_keys_are_transferred_and_weak_types_are_dropped(mpmd_mesh):
    keys = jax.random.split(jax.random.key(7, impl="rbg"), 8)
    array = mpmd.device_put(keys, on(mpmd_mesh, 0, "fsdp"))
    weak = jax.jit(lambda: 2.0, out_shardings=on(mpmd_mesh, 0))()
    assert weak.weak_type
    for target in (on(mpmd_mesh, 0), on(mpmd_mesh, 1), SingleDeviceSharding(jax.devices()[7])):
        moved = mpmd.device_put(array, target)
        assert moved.dtype == keys.dtype
        assert np.array_equal(jax.random.key_data(moved.jax_array), jax.random.key_data(keys))
        moved = mpmd.device_put(weak, target)
        assert not moved.weak_type and not moved.jax_array.weak_type


def test_the_sharding_of_an_array_determines_its_groups(mpmd_mesh):
    with mpmd_mesh:
        array = mpmd.device_put(NUMBERS, on(mpmd_mesh, 0, "tp"))
    assert array.groups == (0,)
    assert mpmd.device_put(array, on(mpmd_mesh, 1)).groups == (1,)
    assert mpmd.device_put(array, NamedSharding(mpmd_mesh.jax_mesh, P())).groups == (0, 1)


def test_an_array_with_the_requested_sharding_is_returned_itself(mpmd_mesh):
    array = mpmd.device_put(NUMBERS, on(mpmd_mesh, 0, "tp"))
    assert mpmd.device_put(array, on(mpmd_mesh, 0, "tp")).jax_array is array.jax_array


def test_arguments_that_do_not_fit_are_refused_by_every_process(mpmd_mesh):
    far = NamedSharding(seen_from(0, [1, 1, 1], (1, 3)), P("fsdp"))
    divided = r"array axis 0 is partitioned . times, but the dimension size is 7"
    here = on(mpmd_mesh, 0)
    for x, sharding, error, message in (
        *(
            (x, to, ValueError, divided)
            for to in (on(mpmd_mesh, 1, "tp"), far)
            for x in (np.ones(7), jnp.ones(7), [0] * 7)
        ),
        (1.0, on(mpmd_mesh, 1, "fsdp", "tp"), ValueError, r"has shape \(\), but P\('fsdp', 'tp'\) is for 2 dims"),
        (NUMBERS, P("tp"), ValueError, r"must be a Sharding, got P\('tp',\)\. For a PartitionSpec use"),
        ("text", here, TypeError, "not a valid JAX array type"),
        (2**40, here, OverflowError, "out of bounds for int32"),
    ):
        with pytest.raises(error, match=message):
            mpmd.device_put(x, sharding)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"inside a trace.*with_sharding_constraint"):
        jax.jit(lambda x: mpmd.device_put(x, here))(1.0)


def busy(sharding):
    """A program that is still running long after its dispatch."""
    return jax.jit(
        lambda x: jax.lax.fori_loop(0, 6_000_000, lambda i, c: jnp.sin(c) + i * 1e-9, x), out_shardings=sharding
    )


@pytest.mark.sampled
@pytest.mark.parametrize("case", ["transposed", "same layout", "replicated", "one device", "two devices"])
def test_a_transfer_does_not_block(mpmd_mesh, case):
    """Also if the layout changes: jax.device_put alone would block until the array is computed."""
    source, target = on(mpmd_mesh, 0, "fsdp", "tp"), TARGETS[case](mpmd_mesh)
    small = mpmd.device_put(np.ones((2, 4), np.float32), source).jax_array
    work = busy(source)
    mpmd.device_put(work(small), target).block_until_ready()  # compiles everything
    array: Any = work(small)
    moved: Any = mpmd.device_put(array, target)
    assert not array.is_ready() and not moved.jax_array.is_ready()
    assert np.array_equal(moved.block_until_ready(), array)


def test_repeated_transfers_do_not_recompile(mpmd_mesh, compilations):
    array = mpmd.device_put(NUMBERS, on(mpmd_mesh, 0, "fsdp", "tp"))
    for _ in range(2):
        compilations.clear()
        for target in TARGETS.values():
            mpmd.device_put(array, target(mpmd_mesh))
    assert not compilations


def test_a_transfer_between_remote_groups_returns_a_remote_array():
    mpmd_mesh = MpmdMesh(seen_from(0, [1, 1, 2, 2, 0, 0], (3, 2)), "pp")
    source, target = (NamedSharding(mesh, P("fsdp")) for mesh in mpmd_mesh.unstack[:2])
    with mpmd_mesh:
        array = mpmd.device_put(np.zeros(4, np.int32), source)
    moved = mpmd.device_put(array, target)
    assert array.is_fully_remote and moved.is_fully_remote
    assert (moved.shape, moved.dtype, moved.sharding, moved.groups) == ((4,), jnp.int32, target, (1,))


SHAPES = st.sampled_from([(2, 2), (4, 1), (1, 4), (2, 1), (1, 1), (2, 3), (6, 1)])
SPECS = st.sampled_from([P(), P("fsdp"), P("tp"), P("fsdp", "tp"), P("tp", "fsdp"), P(None, ("fsdp", "tp"))])


@given(SHAPES, SPECS, SHAPES, SPECS, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_copying_shards_along_a_route_reproduces_every_array(
    source_shape, spec, target_shape, target_spec, per_process
):
    """Copies numpy shards along the route, over devices of several processes."""
    owners = [i // per_process for i in range(12)]
    devices = seen_from(0, owners, (12, 1)).devices.ravel()

    def mesh(shape, start):
        return Mesh(devices[start : start + math.prod(shape)].reshape(shape), ("fsdp", "tp"))

    source = NamedSharding(mesh(source_shape, 0), spec)
    target = NamedSharding(mesh(target_shape, 6), target_spec)
    x = np.arange(12 * 12).reshape(12, 12)
    route = find_route(source, target, x.shape)
    assert route.layout.device_set == source.device_set
    shards = {device: x[part] for device, part in route.layout.devices_indices_map(x.shape).items()}
    moved = {to: shards[device] if part is None else shards[device][part] for device, to, part in route.pairs}
    expected = target.devices_indices_map(x.shape)
    assert set(moved) == set(expected) and len(route.pairs) == len(expected)
    assert all(np.array_equal(moved[to], x[part]) for to, part in expected.items())
    if math.prod(source_shape) == math.prod(target_shape):
        assert not route.has_slices
        assert [device for device, _, _ in route.pairs] == list(devices[: math.prod(source_shape)])


def test_a_route_prefers_devices_of_the_same_process_and_gathers_no_replicated_array(mpmd_mesh):
    devices = seen_from(0, [0, 0, 1, 1], (4, 1)).devices.ravel()
    source = NamedSharding(Mesh(devices[[0, 2]], ("x",)), P("x"))
    target = NamedSharding(Mesh(devices, ("x",)), P("x"))
    route = find_route(source, target, (4,))
    assert [device.process_index == to.process_index for device, to, _ in route.pairs] == [True] * 4
    one = SingleDeviceSharding(jax.devices()[0])
    assert find_route(one, on(mpmd_mesh, 1, "tp"), (8,)).layout is one


# The transport of a process that sends to itself: the same server and protocol as between two processes.


@pytest.fixture(scope="module")
def transport():
    addresses: dict[int, str] = {}
    return Transport(jax.devices()[0].client, "127.0.0.1", addresses.__setitem__, addresses.__getitem__)


def specs(shape, dtype, devices):
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device)) for device in devices]


def test_arrays_of_every_dtype_arrive(transport):
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    arrays = [np.array(True), np.int8(3), np.zeros((0, 3), np.float32), jnp.arange(3, dtype=jnp.bfloat16), keys]
    arrays += [jnp.arange(5, dtype=jnp.float8_e4m3fn), np.arange(4, dtype=np.complex64)]
    here, there = jax.devices()[0], jax.devices()[5]
    every = [jax.device_put(x, here) for x in arrays]
    for label, sent in {"all": every, "only an empty one": every[2:3]}.items():
        wanted = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(there)) for x in sent]
        name = transport.calls.name([0], [5], label)
        transport.send(name, 0, sent)
        for x, got in zip(sent, transport.receive(name, 0, wanted), strict=True):
            assert (got.shape, got.dtype, got.devices()) == (x.shape, x.dtype, {there})
            if x.dtype == keys.dtype:
                x, got = jax.random.key_data(x), jax.random.key_data(got)
            assert np.array_equal(x, got)


def test_receives_may_come_first_and_in_any_order(transport):
    source, target = jax.devices()[0], jax.devices()[1]
    received = {}
    for key in ("a", "b", ("c", 1)):
        name = transport.calls.name([0], [1], key)
        received[key] = (name, transport.receive(name, 0, specs((4,), jnp.float32, [target]))[0])
    assert not any(array.is_ready() for _, array in received.values())
    for number, key in ((3, ("c", 1)), (1, "a"), (2, "b")):
        transport.send(received[key][0], 0, [jax.device_put(jnp.full(4, number, jnp.float32), source)])
    assert [int(received[key][1][0]) for key in ("a", "b", ("c", 1))] == [1, 2, 3]


def test_a_request_with_another_shape_or_dtype_never_arrives(transport):
    """The server alone would deliver wrong bytes without an error."""
    source, target = jax.devices()[:2]
    name = transport.calls.name([0], [1], "mismatch")
    transport.send(name, 0, [jax.device_put(jnp.ones(4), source)])
    asked = [specs((2, 2), jnp.float32, [target]), specs((4,), jnp.int32, [target])]
    wrong = [transport.receive(name, 0, shapes)[0] for shapes in asked]
    (right,) = transport.receive(name, 0, specs((4,), jnp.float32, [target]))
    assert np.array_equal(right, [1] * 4)
    assert not any(array.is_ready() for array in wrong)


def test_an_array_can_be_sent_while_it_is_computed(mpmd_mesh, transport):
    work = busy(on(mpmd_mesh, 0, ("fsdp", "tp")))
    small = mpmd.device_put(np.ones(4, np.float32), on(mpmd_mesh, 0, ("fsdp", "tp"))).jax_array
    work(small).block_until_ready()
    array: Any = work(small)
    name = transport.calls.name([0], [5], "busy")
    transport.send(name, 0, [array.addressable_shards[0].data])
    (got,) = transport.receive(name, 0, specs((1,), jnp.float32, [jax.devices()[5]]))
    assert not array.is_ready() and not got.is_ready()
    assert np.array_equal(got, array[:1])


def test_a_transport_requires_jax_distributed():
    with pytest.raises(ValueError, match=r"require jax\.distributed.*initialize\(\) before the first use of JAX"):
        transport_of(jax.devices()[0].client)


def test_the_address_is_on_the_network_of_the_coordinator():
    assert address_towards("127.0.0.1:1234") == "127.0.0.1"
    assert address_towards("localhost:1234") in ("127.0.0.1", "::1")


GROUPS = st.sampled_from([(0, 1), (2, 3), (4, 5)])
KEYS = st.sampled_from([None, 0, 1, "0", ("a", 1), ("a", "1"), True])


@given(st.lists(st.tuples(GROUPS, GROUPS, KEYS), max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_calls_are_matched_by_key_and_by_order_within_a_key(calls, random):
    """Two processes that make the same calls, interleaved differently, compute the same names."""
    shuffled = list(calls)
    random.shuffle(shuffled)
    one, other = CallNames(), CallNames()
    names = [one.name(*call) for call in calls]
    assert sorted(map(repr, names)) == sorted(map(repr, (other.name(*call) for call in shuffled)))
    assert len(set(map(repr, names))) == len(calls)


def test_keys_of_other_types_are_refused(mpmd_mesh):
    for key in (1.5, b"a", ("a", None, 2.0), [1], object(), {"a": 1}):
        with pytest.raises(ValueError, match=r"an integer, None or a tuple of these, got " + re.escape(repr(key)[:5])):
            check_key(key)
        with pytest.raises(ValueError, match="key must be a string"):
            mpmd.device_put(NUMBERS, on(mpmd_mesh, 0), key)
    for key in (None, "a", 3, ("a", 3, None), (), (("a", 1), 2)):
        check_key(key)
        mpmd.device_put(NUMBERS, on(mpmd_mesh, 0), key)


# --- between real processes, over jax.distributed on 127.0.0.1 ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "processes", "devices"), [("two_groups", 2, 2), ("shared_groups", 4, 1), ("late", 2, 1)]
)
def test_every_case_of_the_worker_ends(case, processes, devices):
    ended = run_workers(case, processes, devices, module="tests.mpmd.transport.worker")
    assert_all_done(ended, f"{case} is done")
