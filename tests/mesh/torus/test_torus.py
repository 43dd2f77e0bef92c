"""The torus: a reference table, jax.experimental.mesh_utils as an oracle, and property tests."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils

from flax_mesh.mesh.device_mesh import create_device_mesh, create_hybrid_device_mesh
from flax_mesh.mesh.torus.torus import arrange, factorings, known_assignment, mean_hops, physical_mesh, wraps_around
from tests.hash_seed import printed_with_another_hash_seed
from tests.mesh.fakes import FakeDevice, factor_shapes, gpu_hosts, tpu_slice, tpu_slices


def ids(devices):
    return np.vectorize(lambda device: device.id, otypes=[int])(devices)


def test_a_cuboid_may_start_at_any_coordinates():
    devices = tpu_slice("TPU v4", (2, 2, 1), origin=(2, 2, 3))
    found = [device.coords for device in physical_mesh(devices)[0].flat]
    assert found == [(2, 2, 3), (2, 3, 3), (3, 2, 3), (3, 3, 3)]
    mesh = create_device_mesh((2, 2), devices)
    assert np.array_equal(ids(mesh), ids(mesh_utils.create_device_mesh((2, 2), devices)))
    blocks = [create((16, 4), CUBE, **BLOCKS) for create in (create_device_mesh, mesh_utils.create_device_mesh)]
    assert np.array_equal(*map(ids, blocks))


# (kind, slice, cores per chip)
FAMILY = [
    *((f"TPU v{version}", (2, 2), 2) for version in (2, 3)),
    *(("TPU v4", shape, 1) for shape in [(2, 2, 2), (4, 4, 4)]),
    *(("TPU v5 lite", shape, 1) for shape in [(2, 2), (2, 4), (4, 2), (4, 4), (2, 2, 2)]),
    *((kind, (2, 2, 1), 2) for kind in ("TPU v5p", "TPU7x")),
    *((kind, (2, 2, 2), cores) for kind, cores in [("TPU v5p", 1), ("TPU7x", 2)]),
    *((kind, (2, 2), 1) for kind in ("TPU v4 lite", "TPU8i")),
    *((kind, (4, 4), cores) for kind, cores in [("TPU v3", 2), ("TPU v6 lite", 1)]),
]


def compare_with_jax(devices: list, arranged) -> None:
    """Compare the arrays of devices of `arranged(mesh_shape, split)` with JAX's arrays, for up to three axes.

    Both may raise NotImplementedError instead.
    """
    compared = 0
    for num_axes, split in itertools.product((1, 2, 3), (False, True)):
        for mesh_shape in factor_shapes(len(devices), num_axes):
            try:
                theirs = mesh_utils.create_device_mesh(mesh_shape, devices, allow_split_physical_axes=split)
            except NotImplementedError:
                with pytest.raises(NotImplementedError):
                    arranged(mesh_shape, split)
                continue
            assert np.array_equal(ids(arranged(mesh_shape, split)), ids(theirs)), (mesh_shape, split)
            compared += 1
    assert compared


@pytest.mark.parametrize(("kind", "shape", "cores"), FAMILY)
def test_small_slices_agree_with_mesh_utils(kind, shape, cores):
    """No assignment is strictly better on these slices: the mesh is the same as JAX's, or both raise an error."""
    devices = tpu_slice(kind, shape, cores=cores)
    compare_with_jax(devices, lambda sizes, split: create_device_mesh(sizes, devices, allow_split_physical_axes=split))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 4), (2, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (4, 4, 12), (4, 4, 16)])
def test_known_assignments_agree_with_mesh_utils_on_large_slices(shape):
    """The search starts from `known_assignment`, which is JAX's assignment."""
    physical, _ = physical_mesh(devices := tpu_slice("TPU v4", shape))
    compare_with_jax(devices, lambda sizes, split: arrange(physical, known_assignment(shape, sizes, allow_split=split)))


CUBE, SQUARE, TWO = tpu_slice("TPU v4", (4, 4, 4)), tpu_slice("TPU v4", (2, 2, 1)), tpu_slices(2, "TPU v4", (2, 2, 1))
MIXED = SQUARE + tpu_slice("TPU v5", (2, 2, 1), origin=(0, 0, 1))
TWO_CORES = tpu_slice("TPU v4", (2, 2, 1), cores=2)
WITHOUT_COORDS = [FakeDevice(i, "tpu", "TPU v4", 0, (), 0, None) for i in range(2)]
BLOCKS = {"contiguous_submeshes": True}


@pytest.mark.parametrize(
    ("shape", "devices", "options", "message"),
    [
        ((8, 8), CUBE, {}, r"Logical axis 1 of size 8.*4x4x4.*\[4, 4, 4\].*allow_split"),
        ((8, 8), CUBE, BLOCKS, r"mesh_shape \(8, 8\).*\(4, 4, 4\).*\(16, 4\)"),
        ((16, 8), tpu_slice("TPU v4", (4, 4, 8)), BLOCKS, r"\(4, 4, 8\)"),
        ((4, 4), SQUARE, {}, r"number of devices 4 .*product 16 of mesh shape \(4, 4\)"),
        ((3,), SQUARE[:3], {}, r"hole at \(x, y, z\) = \(1, 1, 0\)"),
        ((8,), TWO_CORES, {}, r"one device per chip.*1, 3, 5, 7"),
        ((8,), TWO, {}, r"same coordinates \(x, y, z\).*different slices"),
        ((8,), MIXED, {}, r"one kind; got TPU v4, TPU v5"),
        ((2,), WITHOUT_COORDS, {}, r"need coords.*0, 1"),
    ],
)
def test_devices_that_have_no_such_mesh_are_reported(shape, devices, options, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        create_device_mesh(shape, devices, **options)


@pytest.mark.parametrize(
    ("inner", "outer", "devices", "message"),
    [
        ((1, 4), (4, 1), TWO, r"\(4, 1\) multiplies to 4.*2 granules"),
        ((1, 4), (2, 1), TWO[:7], r"requires 4 devices.*3 in granule 1"),
        ((1, 4), (2,), TWO, "one size for each mesh axis"),
        ((1, 8), (2, 1), gpu_hosts(2, 8), r"16 of 16 devices have no slice_index.*process_is_granule"),
    ],
)
def test_granules_that_have_no_such_mesh_are_reported(inner, outer, devices, message):
    with pytest.raises(ValueError, match=message):
        create_hybrid_device_mesh(inner, outer, devices)


def test_wraparound_depends_on_the_kind():
    assert wraps_around("TPU v4", (4, 4, 8)) == (True, True, True)
    assert wraps_around("TPU v4", (2, 4, 4)) == (False, False, False)
    assert wraps_around("TPU v5 lite", (8, 16, 1)) == (False, True, False)
    assert wraps_around("TPU7x", (4, 4, 4, 2)) == (True, True, True, False)
    assert wraps_around("an unknown kind", (16, 16, 16)) == (False, False, False)


def test_hybrid_meshes_agree_with_mesh_utils():
    devices = tpu_slices(4, "TPU v4", (2, 2, 4))
    for inner, outer in [((4, 4), (4, 1)), ((4, 4), (2, 2)), ((1, 16), (1, 4)), ((2, 8), (4, 1))]:
        ours = create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
        theirs = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
        assert np.array_equal(ids(ours), ids(theirs)), (inner, outer)
    by_process = create_hybrid_device_mesh((1, 8), (2, 1), gpu_hosts(2, 8), process_is_granule=True)
    assert ids(by_process).tolist() == [list(range(8)), list(range(8, 16))]


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
