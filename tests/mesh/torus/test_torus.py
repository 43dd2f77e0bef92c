"""The torus: a reference table, jax.experimental.mesh_utils as an oracle, and property tests."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils

from flax_mesh.mesh.device_mesh import create_device_mesh, create_hybrid_device_mesh
from flax_mesh.mesh.torus.torus import (
    arrange,
    factorings,
    known_assignment,
    mean_hops,
    physical_mesh,
    read_device,
    wraps_around,
)
from tests.hash_seed import printed_with_another_hash_seed
from tests.mesh.fakes import FakeDevice, factor_shapes, gpu_hosts, tpu_slice, tpu_slices


def ids(devices):
    return np.vectorize(lambda device: device.id, otypes=[int])(devices)


def coords(devices):
    return [device.coords for device in devices.flat]


# (slice, mesh shape, assignment [physical][logical]); the last two may split.
ASSIGNMENTS = [
    ((2, 2, 1), (1, 1, 4), [[1, 1, 2], [1, 1, 2], [1, 1, 1]]),
    ((2, 2, 4), (1, 4, 4), [[1, 1, 2], [1, 1, 2], [1, 4, 1]]),
    ((4, 4, 4), (1, 16, 4), [[1, 1, 4], [1, 4, 1], [1, 4, 1]]),
    ((4, 4, 8), (1, 16, 8), [[1, 4, 1], [1, 4, 1], [1, 1, 8]]),
    ((4, 4, 8), (1, 8, 16), [[1, 1, 4], [1, 1, 4], [1, 8, 1]]),
    ((4, 8, 8), (1, 32, 8), [[1, 4, 1], [1, 1, 8], [1, 8, 1]]),
    ((8, 8, 8), (1, 64, 8), [[1, 1, 8], [1, 8, 1], [1, 8, 1]]),
    ((4, 4, 16), (16, 16), [[1, 4], [1, 4], [16, 1]]),
    ((4, 4, 4), (8, 8), [[1, 4], [2, 2], [4, 1]]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "assignment"), ASSIGNMENTS)
def test_assignments_match_the_reference_table(shape, mesh_shape, assignment):
    devices = tpu_slice("TPU v4", shape)
    physical, _ = physical_mesh(devices)
    split = mesh_shape == (8, 8)
    assert np.array(known_assignment(shape, mesh_shape, allow_split=split)).tolist() == assignment
    expected = arrange(physical, assignment)
    for allow_split in {split, True}:  # allowing a split changes nothing if none is required
        mesh = create_device_mesh(mesh_shape, devices, allow_split_physical_axes=allow_split)
        assert np.array_equal(ids(mesh), ids(expected))


# (kind, slice, cores, mesh shape, ids); ids count x, then y, then z, cores within.
ORDERS = [
    ("TPU v3", (2, 2), 2, (8,), [0, 1, 2, 3, 6, 7, 4, 5]),
    ("TPU v3", (2, 2), 2, (2, 4), [[0, 1, 2, 3], [6, 7, 4, 5]]),
    ("TPU v5 lite", (2, 2), 1, (4,), [0, 1, 3, 2]),
    ("TPU v5p", (2, 2, 2), 1, (8,), [0, 1, 3, 2, 6, 7, 5, 4]),
]


@pytest.mark.parametrize(("kind", "shape", "cores", "mesh_shape", "order"), ORDERS)
def test_reference_ring_orders_hold(kind, shape, cores, mesh_shape, order):
    devices = tpu_slice(kind, shape, cores=cores)
    assert ids(create_device_mesh(mesh_shape, devices)).tolist() == order


def test_v3_rows_are_the_rings_of_their_trays():
    devices = tpu_slice("TPU v3", (4, 4), cores=2)
    mesh = create_device_mesh((4, 8), devices)
    for row, tray in zip(mesh, range(4), strict=True):
        local = [device for device in devices if device.process_index == tray]
        assert list(row) == [local[place] for place in (0, 1, 2, 3, 6, 7, 4, 5)]


def test_a_cuboid_may_start_at_any_coordinates():
    devices = tpu_slice("TPU v4", (2, 2, 1), origin=(2, 2, 3))
    assert coords(physical_mesh(devices)[0]) == [(2, 2, 3), (2, 3, 3), (3, 2, 3), (3, 3, 3)]
    mesh = create_device_mesh((2, 2), devices)
    assert np.array_equal(ids(mesh), ids(mesh_utils.create_device_mesh((2, 2), devices)))


def test_v5e_meshes_follow_rows_and_columns():
    mesh = create_device_mesh((4, 4), tpu_slice("TPU v5 lite", (4, 4)), allow_split_physical_axes=True)
    assert [[device.coords[:2] for device in row] for row in mesh] == [[(x, y) for x in range(4)] for y in range(4)]


def test_v5e_splits_an_axis():
    mesh = create_device_mesh((2, 8), tpu_slice("TPU v5 lite", (4, 4)), allow_split_physical_axes=True)
    assert [device.coords[:2] for device in mesh[0]] == [(x, y) for x in range(4) for y in range(2)]


def test_contiguous_submeshes_assign_a_block_to_each_process():
    mesh = create_device_mesh((16, 4), tpu_slice("TPU v4", (4, 4, 4)), contiguous_submeshes=True)
    for process in range(16):
        where = np.argwhere(np.vectorize(lambda device: device.process_index)(mesh) == process)
        assert np.prod(where.max(axis=0) - where.min(axis=0) + 1) == 4, process
    assert {device.process_index for device in mesh[:2, :2].flat} == {0}


def test_unknown_contiguous_submeshes_report_the_topology():
    with pytest.raises(ValueError, match="4x4x8"):
        create_device_mesh((16, 8), tpu_slice("TPU v4", (4, 4, 8)), contiguous_submeshes=True)
    with pytest.raises(ValueError, match=r"mesh shape \(8, 8\).*4x4x4.*\(16, 4\)"):
        create_device_mesh((8, 8), tpu_slice("TPU v4", (4, 4, 4)), contiguous_submeshes=True)


def test_contiguous_submeshes_agree_with_mesh_utils():
    for shape, mesh_shape in [((2, 2, 1), (2, 2)), ((2, 2, 4), (4, 1, 4)), ((4, 8, 8), (64, 4)), ((4, 8, 8), (4, 64))]:
        devices = tpu_slice("TPU v4", shape)
        ours = create_device_mesh(mesh_shape, devices, contiguous_submeshes=True)
        theirs = mesh_utils.create_device_mesh(mesh_shape, devices, contiguous_submeshes=True)
        assert np.array_equal(ids(ours), ids(theirs)), shape


FAMILY = [
    ("TPU v2", (2, 2), 2),
    ("TPU v3", (4, 4), 2),
    ("TPU v4 lite", (2, 2), 1),
    ("TPU v4", (2, 2, 2), 1),
    ("TPU v4", (4, 4, 4), 1),
    ("TPU v5 lite", (2, 4), 1),
    ("TPU v5 lite", (4, 2), 1),
    ("TPU v5 lite", (4, 4), 1),
    ("TPU v5 lite", (2, 2, 2), 1),
    ("TPU v5p", (2, 2, 1), 2),
    ("TPU v5p", (2, 2, 2), 1),
    ("TPU v6 lite", (4, 4), 1),
    ("TPU7x", (2, 2, 1), 2),
    ("TPU7x", (2, 2, 2), 2),
    ("TPU8i", (2, 2), 1),
]


@pytest.mark.parametrize(("kind", "shape", "cores"), FAMILY)
def test_small_slices_agree_with_mesh_utils(kind, shape, cores):
    """No assignment is strictly better on these slices: the mesh is the same as JAX's, or both raise an error."""
    devices = tpu_slice(kind, shape, cores=cores)
    compared = 0
    for num_axes in (1, 2, 3):
        for mesh_shape in factor_shapes(len(devices), num_axes):
            for split in (False, True):
                compared += _same_as_mesh_utils(mesh_shape, devices, split)
    assert compared


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 4), (2, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (4, 4, 12), (4, 4, 16)])
def test_known_assignments_agree_with_mesh_utils_on_large_slices(shape):
    """`known_assignment`, which the search starts from, equals JAX's for every mesh shape of up to three axes."""
    devices = tpu_slice("TPU v4", shape)
    physical, _ = physical_mesh(devices)
    for num_axes, split in itertools.product((1, 2, 3), (False, True)):
        for mesh_shape in factor_shapes(len(devices), num_axes):
            try:
                theirs = mesh_utils.create_device_mesh(mesh_shape, devices, allow_split_physical_axes=split)
            except NotImplementedError:
                with pytest.raises(NotImplementedError):
                    known_assignment(shape, mesh_shape, allow_split=split)
                continue
            ours = arrange(physical, known_assignment(shape, mesh_shape, allow_split=split))
            assert np.array_equal(ids(ours), ids(theirs)), (mesh_shape, split)


def _same_as_mesh_utils(mesh_shape, devices, split):
    try:
        theirs = mesh_utils.create_device_mesh(mesh_shape, devices, allow_split_physical_axes=split)
    except NotImplementedError:
        with pytest.raises(NotImplementedError):
            create_device_mesh(mesh_shape, devices, allow_split_physical_axes=split)
        return 0
    ours = create_device_mesh(mesh_shape, devices, allow_split_physical_axes=split)
    assert np.array_equal(ids(ours), ids(theirs)), (mesh_shape, split)
    return 1


def test_a_required_split_reports_the_axis_its_size_and_the_remaining_axes():
    devices = tpu_slice("TPU v4", (4, 4, 4))
    with pytest.raises(NotImplementedError, match=r"Logical axis 1 of size 8.*4x4x4.*\[4, 4, 4\].*allow_split"):
        create_device_mesh((8, 8), devices)


def test_invalid_devices_are_reported():
    with pytest.raises(ValueError, match=r"number of devices 4 .*product 16 of mesh shape \(4, 4\)"):
        create_device_mesh((4, 4), tpu_slice("TPU v4", (2, 2, 1)))
    with pytest.raises(ValueError, match=r"hole at \(x, y, z\) = \(1, 1, 0\)"):
        create_device_mesh((3,), tpu_slice("TPU v4", (2, 2, 1))[:3])
    with pytest.raises(ValueError, match=r"one device per chip.*1, 3, 5, 7"):
        create_device_mesh((8,), tpu_slice("TPU v4", (2, 2, 1), cores=2))
    with pytest.raises(ValueError, match=r"same coordinates \(x, y, z\).*different slices"):
        create_device_mesh((8,), tpu_slices(2, "TPU v4", (2, 2, 1)))
    with pytest.raises(ValueError, match=r"one kind; got TPU v4, TPU v5"):
        devices = tpu_slice("TPU v4", (2, 2, 1)) + tpu_slice("TPU v5", (2, 2, 1), origin=(0, 0, 1))
        create_device_mesh((8,), devices)
    with pytest.raises(ValueError, match=r"need coords.*0, 1"):
        create_device_mesh((2,), [FakeDevice(i, "tpu", "TPU v4", 0, (), 0, None) for i in range(2)])


def test_wraparound_depends_on_the_kind():
    assert wraps_around("TPU v4", (4, 4, 8)) == (True, True, True)
    assert wraps_around("TPU v4", (2, 4, 4)) == (False, False, False)
    assert wraps_around("TPU v5 lite", (8, 16, 1)) == (False, True, False)
    assert wraps_around("TPU7x", (4, 4, 4, 2)) == (True, True, True, False)
    assert wraps_around("an unknown kind", (16, 16, 16)) == (False, False, False)


def test_hybrid_meshes_have_equal_coordinates_at_equal_positions_of_all_slices():
    devices = tpu_slices(2, "TPU v4", (4, 4, 4))
    mesh = create_hybrid_device_mesh((1, 16, 4), (2, 1, 1), devices)
    assert mesh.shape == (2, 16, 4)
    assert [{device.slice_index for device in part.flat} for part in mesh] == [{0}, {1}]
    mesh = create_hybrid_device_mesh((1, 4, 16), (1, 2, 1), devices[::-1])
    assert [device.slice_index for device in mesh[0, :, 0]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert coords(mesh[:, :4]) == coords(mesh[:, 4:])


def test_hybrid_meshes_of_gpu_hosts():
    mesh = create_hybrid_device_mesh((1, 8), (2, 1), gpu_hosts(2, 8), process_is_granule=True)
    assert ids(mesh).tolist() == [list(range(8)), list(range(8, 16))]
    with pytest.raises(ValueError, match=r"16 of 16 devices have no slice_index.*process_is_granule"):
        create_hybrid_device_mesh((1, 8), (2, 1), gpu_hosts(2, 8))


def test_hybrid_meshes_agree_with_mesh_utils():
    devices = tpu_slices(4, "TPU v4", (2, 2, 4))
    for inner, outer in [((4, 4), (4, 1)), ((4, 4), (2, 2)), ((1, 16), (1, 4)), ((2, 8), (4, 1))]:
        ours = create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
        theirs = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
        assert np.array_equal(ids(ours), ids(theirs)), (inner, outer)


def test_hybrid_errors_report_the_numbers_of_granules_and_devices():
    devices = tpu_slices(2, "TPU v4", (2, 2, 1))
    with pytest.raises(ValueError, match=r"\(4, 1\) multiplies to 4.*2 granules"):
        create_hybrid_device_mesh((1, 4), (4, 1), devices)
    with pytest.raises(ValueError, match=r"requires 4 devices.*3 in granule 1"):
        create_hybrid_device_mesh((1, 4), (2, 1), devices[:7])
    with pytest.raises(ValueError, match="one size for each mesh axis"):
        create_hybrid_device_mesh((1, 4), (2,), devices)


def test_granules_can_keep_the_order_of_the_devices():
    devices = tpu_slices(2, "TPU v4", (2, 2, 1))[::-1]
    mesh = create_hybrid_device_mesh((1, 4), (2, 1), devices, should_sort_granules_by_key=False)
    assert [row[0].slice_index for row in mesh] == [1, 0]
    mesh = create_hybrid_device_mesh((1, 4), (2, 1), devices)
    assert [row[0].slice_index for row in mesh] == [0, 1]


sides = st.sampled_from([1, 2, 3, 4, 6, 8])
kinds = st.sampled_from(["TPU v4", "TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU v5p"])


@st.composite
def slice_and_mesh(draw):
    shape = draw(st.tuples(sides, sides, sides).filter(lambda shape: math.prod(shape) <= 128))
    mesh_shape, left = [], math.prod(shape)
    for _ in range(draw(st.integers(0, 3))):
        mesh_shape.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= mesh_shape[-1]
    return draw(kinds), shape, tuple(draw(st.permutations([*mesh_shape, left])))


@settings(max_examples=60, deadline=None)
@given(slice_and_mesh(), st.randoms(use_true_random=False))
def test_meshes_contain_every_device_once_whatever_the_input_order(case, shuffler):
    kind, shape, mesh_shape = case
    devices = tpu_slice(kind, shape)
    mesh = create_device_mesh(mesh_shape, devices, allow_split_physical_axes=True)
    assert mesh.shape == mesh_shape
    assert sorted(ids(mesh).flat) == sorted(device.id for device in devices)
    shuffled = devices.copy()
    shuffler.shuffle(shuffled)
    assert np.array_equal(ids(mesh), ids(create_device_mesh(mesh_shape, shuffled, allow_split_physical_axes=True)))


@settings(max_examples=60, deadline=None)
@given(slice_and_mesh())
def test_assignments_multiply_to_both_shapes(case):
    _, shape, mesh_shape = case
    matrix = np.array(known_assignment(shape, mesh_shape, allow_split=True))
    assert tuple(matrix.prod(axis=1)) == shape
    assert tuple(matrix.prod(axis=0)) == mesh_shape


@given(st.integers(1, 64), st.lists(st.integers(1, 16), max_size=3))
def test_factorings_match_a_brute_force_search(size, limits):
    brute = [
        factors
        for factors in itertools.product(*(range(1, limit + 1) for limit in limits))
        if math.prod(factors) == size and all(limit % f == 0 for f, limit in zip(factors, limits, strict=True))
    ]
    assert sorted(factorings(size, limits)) == brute


def test_mean_hops_of_lines_and_rings():
    torus = physical_mesh(tpu_slice("TPU v5 lite", (16, 2)))[1]
    grid = np.stack(np.meshgrid(range(16), range(2), range(1), indexing="ij"), axis=-1)
    assert mean_hops(grid, torus) == (1.0, 1.0, 0.0)  # x wraps at 16
    small = physical_mesh(tpu_slice("TPU v5 lite", (4, 2)))[1]
    assert mean_hops(grid[:4], small)[0] == (1 + 1 + 1 + 3) / 4


def test_the_order_does_not_depend_on_the_hash_seed():
    code = (
        "from flax_mesh.mesh.device_mesh import create_device_mesh\n"
        "from tests.mesh.fakes import tpu_slice\n"
        "mesh = create_device_mesh((2, 4, 8), tpu_slice('TPU v4', (4, 4, 4)), allow_split_physical_axes=True)\n"
        "print([device.id for device in mesh.flat])\n"
    )
    mesh = create_device_mesh((2, 4, 8), tpu_slice("TPU v4", (4, 4, 4)), allow_split_physical_axes=True)
    assert printed_with_another_hash_seed(code) == str([device.id for device in mesh.flat])


def test_device_records_have_the_attributes_of_the_device():
    record = read_device(tpu_slice("TPU v4", (2, 2, 1), slice_index=3)[1])
    assert (record.kind, record.coords, record.core, record.slice) == ("TPU v4", (1, 0, 0), 0, 3)
