"""create_mesh on 8 CPU devices and on fake slices."""

import socket
import subprocess
import sys
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh import (
    SlowNetworkWarning,
    cpu_context,
    create_cpu_mesh,
    create_mesh,
    current_mesh,
    force_cpu,
    parse_mesh_from_string,
)
from flax_mesh.mesh.create import calculate_host_mesh_shape, normalize_axis_types
from flax_mesh.mesh.device_mesh import create_device_mesh, create_hybrid_device_mesh
from tests.mesh.fakes import gpu_hosts, tpu_slice, tpu_slices


def shape_of(mesh):
    return tuple(mesh.shape.values())


def test_the_default_puts_all_devices_on_fsdp():
    mesh = create_mesh()
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(device.id for device in mesh.devices.flat) == sorted(device.id for device in jax.devices())


def test_arrays_can_be_sharded_over_the_mesh():
    mesh = create_mesh((2, -1), ("dp", "tp"))
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, PartitionSpec("dp", "tp")))
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 1)}
    assert np.array_equal(jax.jit(lambda x: x * 2)(x), np.arange(16.0).reshape(4, 4) * 2)


def test_equal_arguments_return_the_same_object():
    mesh = create_mesh((2, 4), ("dp", "tp"))
    assert create_mesh([2, 4], ["dp", "tp"]) is mesh
    assert create_mesh(tuple(np.array([2, 4])), ("dp", "tp")) is mesh
    assert create_mesh((2, -1), ("dp", "tp"), axis_types=["auto", AxisType.Auto]) is mesh
    assert create_mesh((2, 4), ("dp", "tp"), devices=jax.devices()) is mesh


@pytest.mark.parametrize(
    "other",
    [
        {"axis_types": "explicit"},
        {"axis_types": ("explicit", "auto")},
        {"devices": [0, 1, 2, 3]},
        {"num_slices": 4, "dcn_mesh_dims": (1, 4)},
    ],
)
def test_arguments_that_change_the_mesh_are_in_the_cache_key(other):
    dims = (2, -1)
    mesh = create_mesh(dims, ("dp", "tp"))
    if "devices" in other:
        other = {"devices": [jax.devices()[i] for i in other["devices"]]}
    different = create_mesh(dims, ("dp", "tp"), **other)
    assert different is not mesh
    assert create_mesh(dims, ("dp", "tp")) is mesh


def test_granule_order_and_splitting_are_in_the_cache_key():
    devices = tpu_slices(2, "TPU v4", (2, 2, 1))[::-1]
    kept = create_mesh((2, 4), ("dp", "tp"), devices=devices, should_sort_granules_by_key=False)
    assert [row[0].slice_index for row in kept.devices] == [1, 0]
    assert [row[0].slice_index for row in create_mesh((2, 4), ("dp", "tp"), devices=devices).devices] == [0, 1]
    cube = tpu_slice("TPU v4", (4, 4, 4))
    assert create_mesh((8, 8), ("dp", "tp"), devices=cube).devices.shape == (8, 8)
    with pytest.raises(NotImplementedError, match="allow_split_physical_axes"):
        create_mesh((8, 8), ("dp", "tp"), devices=cube, allow_split_physical_axes=False)


@pytest.mark.parametrize("use_jax", [False, True])
def test_axis_types_are_auto_on_both_paths(use_jax):
    assert set(create_mesh(use_jax=use_jax).axis_types) == {AxisType.Auto}
    types = create_mesh((2, 4), ("dp", "tp"), axis_types=("explicit", "AUTO "), use_jax=use_jax).axis_types
    assert types == (AxisType.Explicit, AxisType.Auto)


def test_use_jax_returns_the_mesh_of_make_mesh():
    auto = (AxisType.Auto,) * 2
    assert create_mesh((2, 4), ("dp", "tp"), use_jax=True) == jax.make_mesh((2, 4), ("dp", "tp"), axis_types=auto)
    several = create_mesh((2, 16), ("dp", "tp"), devices=tpu_slices(2, "TPU v5 lite", (4, 4)), use_jax=True)
    assert shape_of(several) == (2, 16)  # jax.make_mesh does not support several slices


def test_invalid_axis_types_are_rejected():
    with pytest.raises(ValueError, match=r"must be one of auto, explicit, manual, got 'automatic'"):
        create_mesh(axis_types="automatic")
    with pytest.raises(ValueError, match=r"2 entries .* for 5 axes"):
        create_mesh(axis_types=("auto", "auto"))
    with pytest.raises(TypeError, match=r"must contain AxisType values or strings, got 3"):
        create_mesh((2, 4), ("dp", "tp"), axis_types=("auto", 3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"AxisType, a string or a sequence of them, got 3"):
        create_mesh(axis_types=3)  # pyright: ignore[reportArgumentType]
    assert normalize_axis_types("manual", ("a", "b")) == (AxisType.Manual,) * 2


def test_devices_selects_a_subset():
    mesh = create_mesh((2, -1), ("dp", "tp"), devices=jax.devices()[5:1:-1])
    assert [device.id for device in mesh.devices.flat] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"multiply to 8, not to 4, the number of devices"):
        create_mesh((2, 4), ("dp", "tp"), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"multiply to 4, not to 8, the number of devices.*devices= to use some"):
        create_mesh((2, 2), ("dp", "tp"))


def test_invalid_devices_are_rejected():
    with pytest.raises(ValueError, match="devices is empty"):
        create_mesh(devices=[])
    with pytest.raises(ValueError, match="more than once"):
        create_mesh(devices=[jax.devices()[0]] * 8)
    with pytest.raises(ValueError, match="platform cpu, tpu"):
        create_mesh(devices=[jax.devices()[0], *tpu_slice("TPU v4", (2, 2))])
    with pytest.raises(ValueError, match="platform tpu, but backend='cpu'"):
        create_mesh((4,), ("tp",), devices=tpu_slice("TPU v4", (2, 2)), backend="cpu")
    with pytest.raises(ValueError, match="backend='nothing' has no devices here"):
        create_mesh(backend="nothing")


def test_invalid_sizes_and_names_are_rejected():
    with pytest.raises(ValueError, match="only one size can be -1"):
        create_mesh((-1, -1), ("dp", "tp"))
    with pytest.raises(ValueError, match="contains dp more than once"):
        create_mesh((2, 4), ("dp", "dp"))
    with pytest.raises(ValueError, match=r"Write \('fsdp',\)"):
        create_mesh((8,), "fsdp")
    with pytest.raises(ValueError, match="sequence of integers, got 8"):
        create_mesh(8, ("dp",))  # pyright: ignore[reportArgumentType]


# (axis_dims, names, dcn_mesh_dims or None, slices per axis) over 2 slices of v5e 4x4.
SLICES = [
    ((2, 4, 4), ("dp", "fsdp", "tp"), None, (2, 1, 1)),
    ((2, 2, 8), ("pp", "dp", "tp"), None, (2, 1, 1)),
    ((1, 8, 4), ("dp", "fsdp", "tp"), None, (1, 2, 1)),
    ((4, 8), ("data", "tp"), None, (2, 1)),
    ((4, 8), ("dp", "tp"), (1, 2), (1, 2)),
    ((4, 8), ("dp", "tp"), (-1, 1), (2, 1)),
    ((8, 4), ("dp", "tp"), (2, 1), (2, 1)),
]


@pytest.mark.parametrize(("dims", "names", "dcn", "splits"), SLICES)
def test_several_slices_have_the_requested_shape(dims, names, dcn, splits):
    mesh = create_mesh(dims, names, dcn, devices=tpu_slices(2, "TPU v5 lite", (4, 4)))
    assert mesh.devices.shape == dims
    inner = tuple(size // split for size, split in zip(dims, splits, strict=True))
    for index in np.ndindex(*splits):
        part = mesh.devices[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, inner, strict=True))]
        assert len({device.slice_index for device in part.flat}) == 1


def test_splitting_tp_over_dcn_warns_with_the_cost():
    devices = tpu_slices(2, "TPU v5 lite", (4, 4))
    with pytest.warns(SlowNetworkWarning, match=r"split as ep:1,tp:2: tp comm.*3.125 GB/s.*45 GB/s.*14 times") as seen:
        mesh = create_mesh((1, 32), ("ep", "tp"), devices=devices)
    assert mesh.devices.shape == (1, 32)
    assert seen[0].filename == __file__
    create_mesh((1, 32), ("ep", "tp"), (1, 2), devices=devices)  # explicit: no warning


def test_invalid_dcn_mesh_dims_are_rejected():
    devices = tpu_slices(2, "TPU v5 lite", (4, 4))
    with pytest.raises(ValueError, match=r"dp:1,tp:2.*tp has size 1, not divisible by 2.*valid choice is dp:2,tp:1"):
        create_mesh((32, 1), ("dp", "tp"), (1, 2), devices=devices)
    with pytest.raises(ValueError, match=r"dcn_mesh_dims dp:4,tp:1: .* multiply to 4, not to 2, the number of slices"):
        create_mesh((4, 8), ("dp", "tp"), (4, 1), devices=devices)
    with pytest.raises(ValueError, match=r"dcn_mesh_dims dp:-1,tp:-1: only one size"):
        create_mesh((4, 8), ("dp", "tp"), (-1, -1), devices=devices)
    with pytest.raises(
        ValueError, match=r"dcn_mesh_dims dp:2,tp:1: .* multiply to 2, not to 1, the number of processes"
    ):
        create_mesh((2, 4), ("dp", "tp"), (2, 1))  # one process
    with pytest.raises(ValueError, match=r"dcn_mesh_dims must contain integers, got 'a'"):
        create_mesh((2, 4), ("dp", "tp"), ("a", 1))  # pyright: ignore[reportArgumentType]
    assert shape_of(create_mesh((2, 4), ("dp", "tp"), (1, -1))) == (2, 4)


def test_hosts_without_slices_are_granules():
    mesh = create_mesh((2, 8), ("dp", "tp"), devices=gpu_hosts(2, 8))
    assert [{device.process_index for device in row} for row in mesh.devices] == [{0}, {1}]
    mesh = create_mesh((4, 8), ("fsdp", "tp"), devices=gpu_hosts(4, 8, slice_index=True))
    assert [{device.slice_index for device in row} for row in mesh.devices] == [{0}, {1}, {2}, {3}]


def test_the_hosts_of_one_torus_are_not_granules():
    devices = tpu_slice("TPU v4", (4, 4, 4))
    assert len({device.process_index for device in devices}) == 16
    mesh = create_mesh((16, 4), ("fsdp", "tp"), devices=devices)
    x, _, _ = np.array([device.coords for device in mesh.devices.flat]).reshape(16, 4, 3).transpose(2, 0, 1)
    assert (x == np.arange(4)).all()  # tp is the entire ring along x, across hosts


def test_num_slices_groups_devices_without_a_slice_index():
    mesh = create_mesh((2, 4), ("tp", "dp"), num_slices=4)
    assert [[device.id for device in row] for row in mesh.devices] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]  # dp is split over DCN
    with pytest.raises(ValueError, match=r"num_slices=3 must be a positive divisor of the number of devices, 8"):
        create_mesh(num_slices=3)
    with pytest.raises(ValueError, match=r"num_slices must be an integer, got '2'"):
        create_mesh(num_slices="2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"num_slices=8 makes slices of 2 devices, which splits process"):
        create_mesh((16,), ("dp",), devices=gpu_hosts(4, 4), num_slices=8)
    grouped = create_mesh((2, 8), ("dp", "tp"), devices=gpu_hosts(4, 4, slice_index=True), num_slices=2)
    assert [{device.slice_index for device in row} for row in grouped.devices] == [{0, 1}, {2, 3}]


def test_the_slice_variable_is_read_only_for_tpus_without_a_slice_index(monkeypatch):
    known = tpu_slices(2, "TPU v5 lite", (4, 2))
    unknown = [replace(device, id=i, process_index=i // 8, slice_index=None) for i, device in enumerate(known)]
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
    mesh = create_mesh((2, 8), ("dp", "tp"), devices=unknown)
    assert [{device.process_index for device in row} for row in mesh.devices] == [{0}, {1}]
    assert shape_of(create_mesh((2, 4), ("tp", "sp"))) == (2, 4)  # CPU: no slices, no warning
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "two")
    with pytest.raises(ValueError, match="MEGASCALE_NUM_SLICES must be a positive integer, got 'two'"):
        create_mesh((2, 8), ("dp", "tp"), devices=unknown)
    monkeypatch.delenv("MEGASCALE_NUM_SLICES")
    with pytest.raises(ValueError, match="different slices"):  # the value is part of the cache key
        create_mesh((2, 8), ("dp", "tp"), devices=unknown)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 4]), st.permutations(["pp", "dp", "fsdp", "tp", "data"]), st.data())
def test_any_shape_over_any_slices_contains_every_device_once(count, names, data):
    devices = tpu_slices(count, "TPU v4", (2, 2, 2))
    dims, left = [], len(devices)
    for _ in names[1:]:
        dims.append(data.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= dims[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowNetworkWarning)
        mesh = create_mesh((*dims, left), names, devices=data.draw(st.permutations(devices)))
    assert mesh.devices.shape == (*dims, left)
    assert sorted(device.id for device in mesh.devices.flat) == sorted(device.id for device in devices)


def test_meshes_are_created_from_strings():
    assert dict(parse_mesh_from_string("tp:4,dp:-1", ("dp", "tp")).shape) == {"tp": 4, "dp": 2}
    assert dict(parse_mesh_from_string("2,4", ("dp", "tp")).shape) == {"dp": 2, "tp": 4}
    with pytest.raises(ValueError, match="missing axis 'tp'"):
        parse_mesh_from_string("dp:8", ("dp", "tp"))


def test_cpu_helpers_use_the_cpu_devices():
    assert create_cpu_mesh((8,), ("fsdp",)).devices.size == 8
    with force_cpu() as device:
        assert jnp.zeros(3).devices() == {device}
    with cpu_context() as mesh:
        assert current_mesh() is mesh
        assert mesh is create_cpu_mesh()
    assert current_mesh() is None


WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np
from flax_mesh import calculate_host_mesh_shape, create_mesh
from flax_mesh.mesh import describe_mesh
mesh = create_mesh((2, 2, 2), ("tp", "fsdp", "dp"))
hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
assert mesh.devices.shape == (2, 2, 2)
assert (hosts == np.array([0, 1])).all(), hosts  # dp, here the last axis, is split over the processes
rows = create_mesh((4, 2), ("fsdp", "tp")).devices
assert [{device.process_index for device in row} for row in rows] == [{0}, {0}, {1}, {1}]
assert calculate_host_mesh_shape((2, 4)) == (1, 4)
assert "2 processes over DCN" in describe_mesh(mesh)
print("done", flush=True)
"""


@pytest.mark.slow
def test_two_processes_have_the_requested_shape_and_split_dp():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", WORKER, port]
    workers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert all("done" in output for output in outputs), outputs


# --- sizes ---

BAD_SIZES = {
    ((4,), 4): r"must contain integers, got \(4,\) in \(\(4,\), 4\)",
    8: "must be a sequence of integers, got 8",
    None: "must be a sequence of integers, got None",
    (2, None): "must contain integers, got None",
    (2.5, 4): "must contain integers, got 2.5",
    "24": "must contain integers, got '2', '4'",
    (True, 8): "must contain integers, got True",
    (-2, -4): "must contain integers of at least 1, got -2, -4",
    (0, 8): "must contain integers of at least 1, got 0",
}


@pytest.mark.parametrize(("sizes", "message"), BAD_SIZES.items(), ids=str)
def test_a_shape_that_is_no_sequence_of_positive_integers_is_named(sizes, message):
    with pytest.raises(ValueError, match=f"^mesh_shape {message}"):
        create_device_mesh(sizes)
    with pytest.raises(ValueError, match=f"^mesh_shape {message}"):
        create_hybrid_device_mesh(sizes, (1, 1), process_is_granule=True)
    with pytest.raises(ValueError, match=f"^dcn_mesh_shape {message}"):
        create_hybrid_device_mesh((2, 4), sizes, process_is_granule=True)
    with pytest.raises(ValueError, match=f"^global_mesh_shape {message}"):
        calculate_host_mesh_shape(sizes, 8, 1)
