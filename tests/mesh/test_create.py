"""create_mesh on 8 CPU devices and on fake slices."""

import warnings
from dataclasses import replace
from typing import Any

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
from tests.multiprocess.processes import assert_all_done, run_workers


def shape_of(mesh):
    return tuple(mesh.shape.values())


def test_the_default_puts_all_devices_on_fsdp():
    mesh = create_mesh()
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(device.id for device in mesh.devices.flat) == sorted(device.id for device in jax.devices())


def test_arrays_can_be_sharded_over_the_mesh_and_devices_selects_some():
    mesh = create_mesh((2, -1), ("dp", "tp"))
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, PartitionSpec("dp", "tp")))
    assert {shard.data.shape for shard in x.addressable_shards} == {(2, 1)}
    some = create_mesh((2, -1), ("dp", "tp"), devices=jax.devices()[5:1:-1])
    assert [device.id for device in some.devices.flat] == [2, 3, 4, 5]


def test_only_equal_arguments_return_the_same_object():
    dims, names = (2, -1), ("dp", "tp")
    mesh = create_mesh(dims, names)
    assert create_mesh([2, -1], ["dp", "tp"]) is create_mesh(tuple(np.array(dims)), names) is mesh
    assert create_mesh(dims, names, axis_types=["auto", AxisType.Auto]) is mesh
    assert create_mesh((2, 4), names, devices=jax.devices()) is create_mesh((2, 4), names) is mesh
    others: list[dict[str, Any]] = [{"axis_types": "explicit"}, {"axis_types": ("explicit", "auto")}]
    others += [{"devices": jax.devices()[:4]}, {"num_slices": 4, "dcn_mesh_dims": (1, 4)}]
    for other in others:
        assert create_mesh(dims, names, **other) is not mesh, other
        assert create_mesh(dims, names) is mesh
    devices = tpu_slices(2, "TPU v4", (2, 2, 1))[::-1]
    kept = create_mesh((2, 4), ("dp", "tp"), devices=devices, should_sort_granules_by_key=False)
    assert [row[0].slice_index for row in kept.devices] == [1, 0]
    assert [row[0].slice_index for row in create_mesh((2, 4), ("dp", "tp"), devices=devices).devices] == [0, 1]
    cube = tpu_slice("TPU v4", (4, 4, 4))
    assert create_mesh((8, 8), ("dp", "tp"), devices=cube).devices.shape == (8, 8)
    with pytest.raises(NotImplementedError, match="allow_split_physical_axes"):
        create_mesh((8, 8), ("dp", "tp"), devices=cube, allow_split_physical_axes=False)


def test_axis_types_are_auto_on_both_paths_and_use_jax_returns_the_mesh_of_make_mesh():
    for use_jax in (False, True):
        assert set(create_mesh(use_jax=use_jax).axis_types) == {AxisType.Auto}
        types = create_mesh((2, 4), ("dp", "tp"), axis_types=("explicit", "AUTO "), use_jax=use_jax).axis_types
        assert types == (AxisType.Explicit, AxisType.Auto)
    assert normalize_axis_types("manual", ("a", "b")) == (AxisType.Manual,) * 2
    auto = (AxisType.Auto,) * 2
    assert create_mesh((2, 4), ("dp", "tp"), use_jax=True) == jax.make_mesh((2, 4), ("dp", "tp"), axis_types=auto)
    several = create_mesh((2, 16), ("dp", "tp"), devices=tpu_slices(2, "TPU v5 lite", (4, 4)), use_jax=True)
    assert shape_of(several) == (2, 16)  # jax.make_mesh does not support several slices


PAIR, TWO_SLICES, SQUARE = ("dp", "tp"), tpu_slices(2, "TPU v5 lite", (4, 4)), tpu_slice("TPU v4", (2, 2))


@pytest.mark.parametrize(
    ("dims", "names", "options", "message"),
    [
        ((2, 4), PAIR, {"axis_types": "automatic"}, r"must be one of auto, explicit, manual, got 'automatic'"),
        ((1, 8, 1), ("a", "b", "c"), {"axis_types": ("auto", "auto")}, r"2 entries .* for 3 axes"),
        ((2, 4), PAIR, {"axis_types": ("auto", 3)}, r"must contain AxisType values or strings, got 3"),
        ((2, 4), PAIR, {"axis_types": 3}, r"AxisType, a string or a sequence of them, got 3"),
        ((2, 4), PAIR, {"devices": [0, 1, 2, 3]}, r"multiply to 8, not to 4, the number of devices"),
        ((2, 2), PAIR, {}, r"multiply to 4, not to 8, the number of devices.*devices= to use some"),
        ((2, 4), PAIR, {"devices": []}, "devices is empty"),
        ((2, 4), PAIR, {"devices": [0] * 8}, "more than once"),
        ((2, 4), PAIR, {"devices": [0, *SQUARE]}, "platform cpu, tpu"),
        ((2, 2), PAIR, {"devices": SQUARE, "backend": "cpu"}, "platform tpu, but backend='cpu'"),
        ((2, 4), PAIR, {"backend": "nothing"}, "backend='nothing' has no devices here"),
        ((8,), "fsdp", {}, r"Write \('fsdp',\)"),
        ((2, 4), PAIR, {"num_slices": 3}, r"num_slices=3 must be a positive divisor of the number of devices, 8"),
        ((2, 4), PAIR, {"num_slices": "2"}, r"num_slices must be an integer or none, got '2'"),
        ((16, 1), PAIR, {"devices": gpu_hosts(4, 4), "num_slices": 8}, "num_slices=8 .* slices of 2 .* splits process"),
        ((32, 1), PAIR, {"dcn_mesh_dims": (1, 2), "devices": TWO_SLICES},
         r"dp:1,tp:2.*tp has size 1, not divisible by 2.*valid choice is dp:2,tp:1"),
        ((4, 8), PAIR, {"dcn_mesh_dims": (4, 1), "devices": TWO_SLICES},
         r"dcn_mesh_dims dp:4,tp:1: .* multiply to 4, not to 2, the number of slices"),
        ((4, 8), PAIR, {"dcn_mesh_dims": (-1, -1), "devices": TWO_SLICES}, r"dp:-1,tp:-1: only one size"),
        ((2, 4), PAIR, {"dcn_mesh_dims": (2, 1)}, r"dp:2,tp:1: .* multiply to 2, not to 1, the number of processes"),
        ((2, 4), PAIR, {"dcn_mesh_dims": ("a", 1)}, r"dcn_mesh_dims must contain integers, got 'a'"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected(dims, names, options, message):
    """A number among the devices stands for a device that is here."""
    if "devices" in options:
        devices = [jax.devices()[x] if isinstance(x, int) else x for x in options["devices"]]
        options = options | {"devices": devices}
    with pytest.raises((ValueError, TypeError), match=message):
        create_mesh(dims, names, **options)


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
    # dp is split over DCN
    assert [[device.id for device in row] for row in mesh.devices] == [[0, 2, 4, 6], [1, 3, 5, 7]]
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


def test_names_with_sizes_are_a_shape():
    for shape in ("dp:2,tp:4", "tp = 4, dp: 2", {"dp": 2, "tp": -1}):
        assert dict(create_mesh(shape).shape) == {"dp": 2, "tp": 4}
    assert create_mesh("2,4", ("dp", "tp")) is create_mesh({"dp": 2, "tp": 4})
    for text, problem in (("dp:2,tp", "'tp' is malformed"), ("dp:2,dp:4", "duplicate axis 'dp'"), ("", "must contain")):
        with pytest.raises(ValueError, match=problem):
            create_mesh(text)


def test_strings_and_the_cpu_helpers_create_meshes():
    assert list(parse_mesh_from_string("tp:4,dp:-1", ("dp", "tp")).shape.items()) == [("tp", 4), ("dp", 2)]
    assert dict(parse_mesh_from_string("2,4", ("dp", "tp")).shape) == {"dp": 2, "tp": 4}
    assert create_cpu_mesh((8,), ("fsdp",)).devices.size == 8
    with force_cpu() as device:
        assert jnp.zeros(3).devices() == {device}
    with cpu_context() as mesh:
        assert current_mesh() is mesh
        assert mesh is create_cpu_mesh()
    assert current_mesh() is None


@pytest.mark.slow
def test_two_processes_have_the_requested_shape_and_split_dp():
    ended = run_workers("mesh", 2, 4, module="tests.sharding.process_worker")
    assert_all_done(ended, "mesh is done")


# --- sizes ---

BAD_SIZES = {
    ((4,), 4): r"must contain integers, got \(4,\) in \(\(4,\), 4\)",
    8: "must be a sequence of integers, got 8",
    (2, None): "must contain integers, got None",
    (2.5, 4): "must contain integers, got 2.5",
    "24": "must contain integers, got '2', '4'",
    (True, 8): "must contain integers, got True",
    (-2, -4): "must contain integers of at least 1, got -2, -4",
    (0, 8): "must contain integers of at least 1, got 0",
}
SHAPES = {
    "mesh_shape": create_device_mesh,
    "mesh_shape ": lambda sizes: create_hybrid_device_mesh(sizes, (1, 1), process_is_granule=True),
    "dcn_mesh_shape": lambda sizes: create_hybrid_device_mesh((2, 4), sizes, process_is_granule=True),
    "global_mesh_shape": lambda sizes: calculate_host_mesh_shape(sizes, 8, 1),
}


@pytest.mark.parametrize(("sizes", "message"), BAD_SIZES.items(), ids=str)
def test_shapes_must_be_sequences_of_positive_integers(sizes, message):
    for name, function in SHAPES.items():
        with pytest.raises(ValueError, match=f"^{name.strip()} {message}"):
            function(sizes)
