"""MpmdMesh: groups, submeshes, and which process owns which group."""

import copy
import itertools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_mesh import create_mesh
from flax_mesh.mpmd import MpmdMesh
from flax_mesh.mpmd.mesh import current_mpmd_mesh
from tests.mpmd.fakes import seen_from

P = PartitionSpec


@pytest.fixture
def mpmd_mesh():
    return MpmdMesh(create_mesh((2, 2, 2), ("dp", "pp", "tp")), "pp")


def test_groups_are_the_slices_along_the_axis(mpmd_mesh):
    devices = mpmd_mesh.jax_mesh.devices
    assert (mpmd_mesh.mpmd_axis, mpmd_mesh.mpmd_dim) == (1, 2)
    for index, group in enumerate(mpmd_mesh.unstack):
        assert isinstance(group, Mesh)
        assert dict(group.shape) == {"dp": 2, "pp": 1, "tp": 2}
        assert np.array_equal(group.devices[:, 0], devices[:, index])
    assert isinstance(mpmd_mesh.unstack, list)
    mpmd_mesh.unstack.clear()
    assert len(mpmd_mesh.unstack) == 2  # the list is a copy
    assert copy.copy(mpmd_mesh) == mpmd_mesh
    assert repr(mpmd_mesh) == "MpmdMesh(dp:2,pp:2,tp:2, groups along pp)"


def test_devices_map_to_coordinates_and_groups(mpmd_mesh):
    devices = mpmd_mesh.jax_mesh.devices
    assert len(mpmd_mesh.device_coords) == 8
    for coords in itertools.product(range(2), repeat=3):
        assert mpmd_mesh.device_coords[devices[coords]] == coords
        assert mpmd_mesh.device_mpmd_idx[devices[coords]] == coords[1]
    with pytest.raises(TypeError):
        mpmd_mesh.device_mpmd_idx[devices[0, 0, 0]] = 1


def test_axis_types_are_kept():
    types = (AxisType.Auto, AxisType.Explicit)
    mpmd_mesh = MpmdMesh(create_mesh((4, 2), ("pp", "tp"), axis_types=types), "pp")
    assert all(group.axis_types == types for group in mpmd_mesh.unstack)
    assert mpmd_mesh.mpmd_submesh([0]).jax_mesh.axis_types == types
    one = jax.device_put(jnp.arange(4.0), NamedSharding(mpmd_mesh.unstack[1], P("tp")))
    assert jax.typeof(one).sharding.spec == P("tp")  # Explicit axes are part of the array's type


def test_equal_mpmd_meshes_have_identical_group_meshes(mpmd_mesh):
    again = MpmdMesh(mpmd_mesh.jax_mesh, "pp")
    assert again == mpmd_mesh and hash(again) == hash(mpmd_mesh)
    assert [id(group) for group in again.unstack] == [id(group) for group in mpmd_mesh.unstack]
    assert mpmd_mesh != MpmdMesh(mpmd_mesh.jax_mesh, "dp")
    assert len({mpmd_mesh, again, MpmdMesh(mpmd_mesh.jax_mesh, "dp")}) == 2


def test_an_unknown_axis_raises_on_construction(mpmd_mesh):
    with pytest.raises(ValueError, match=r"'stage' is not an axis of the mesh dp:2,pp:2,tp:2\. Use one"):
        MpmdMesh(mpmd_mesh.jax_mesh, "stage")
    with pytest.raises(ValueError, match=r"must be a jax.sharding.Mesh, which has devices; got AbstractMesh"):
        MpmdMesh(mpmd_mesh.jax_mesh.abstract_mesh, "pp")


def test_submeshes_keep_the_requested_order_of_groups():
    mpmd_mesh = MpmdMesh(create_mesh((4, 2), ("pp", "tp")), "pp")
    for indices in ([2, 0], (2, 0), (np.int64(2), 0)):
        part = mpmd_mesh.mpmd_submesh(indices)
        assert (part.mpmd_axis_name, part.mpmd_dim) == ("pp", 2)
        assert part.unstack == [mpmd_mesh.unstack[2], mpmd_mesh.unstack[0]]
    assert mpmd_mesh.mpmd_submesh((3,)).jax_mesh is mpmd_mesh.unstack[3]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ((), r"indices is empty.*0\.\.1"),
        ((0, 0), "found 0 more than once"),
        ((0, 2, -1), r"found -1, 2 not in 0\.\.1"),
        ((0, 0, 2), r"found 2 not in 0\.\.1 and 0 more than once"),
        (0, "list or tuple of integers, got 0"),
        ({0, 1}, "list or tuple of integers"),
        (("0",), "list or tuple of integers"),
    ],
)
def test_invalid_submesh_indices_raise(mpmd_mesh, indices, message):
    with pytest.raises(ValueError, match=message):
        mpmd_mesh.mpmd_submesh(indices)


def test_one_process_owns_all_groups(mpmd_mesh):
    assert mpmd_mesh.my_mpmd_axis_indices == (0, 1)
    message = r"requires several processes, but this process owns all groups .* Use unstack\[i\]"
    with pytest.raises(ValueError, match=message):
        mpmd_mesh.my_mpmd_axis_index  # noqa: B018


def test_the_context_is_a_stack(mpmd_mesh):
    other = MpmdMesh(mpmd_mesh.jax_mesh, "dp")
    assert current_mpmd_mesh() is None
    with mpmd_mesh as entered:
        assert entered is mpmd_mesh
        with other, other:
            assert current_mpmd_mesh() is other
        assert current_mpmd_mesh() is mpmd_mesh
        with pytest.raises(ZeroDivisionError), other:
            raise ZeroDivisionError
        assert current_mpmd_mesh() is mpmd_mesh
    assert current_mpmd_mesh() is None


def test_the_context_is_local_to_a_thread(mpmd_mesh):
    other, seen = MpmdMesh(mpmd_mesh.jax_mesh, "dp"), []

    def work():
        seen.append(current_mpmd_mesh())
        with other:
            seen.append(current_mpmd_mesh())
            both_inside.wait(timeout=30)

    both_inside = threading.Barrier(2)
    thread = threading.Thread(target=work)
    with mpmd_mesh:
        thread.start()
        both_inside.wait(timeout=30)
        assert current_mpmd_mesh() is mpmd_mesh
        thread.join()
    assert seen == [None, other]


@pytest.mark.parametrize(
    ("process", "owners", "group"),
    [(1, [0, 0, 1, 1], 1), (0, [0, 1, 2, 2], 0), (1, [0, 1, 2, 2], 0), (2, [0, 1, 2, 2], 1)],
)
def test_a_process_with_one_group_that_it_may_share(process, owners, group):
    mpmd_mesh = MpmdMesh(seen_from(process, owners, (2, 2)), "pp")
    assert (mpmd_mesh.my_mpmd_axis_indices, mpmd_mesh.my_mpmd_axis_index) == ((group,), group)


def test_a_process_with_several_groups():
    mpmd_mesh = MpmdMesh(seen_from(1, [0, 0, 1, 1]), "pp")
    assert mpmd_mesh.my_mpmd_axis_indices == (2, 3)
    with pytest.raises(ValueError, match=r"has the groups 2, 3 of .*my_mpmd_axis_indices, here \(2, 3\)"):
        mpmd_mesh.my_mpmd_axis_index  # noqa: B018


def test_a_process_with_no_group():
    mpmd_mesh = MpmdMesh(seen_from(7, [0, 1]), "pp")
    assert mpmd_mesh.my_mpmd_axis_indices == ()
    with pytest.raises(ValueError, match="has no device of"):
        mpmd_mesh.my_mpmd_axis_index  # noqa: B018


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, 1, 1, 2], "which processes 0, 1 share, device 102 of group 1, which processes 1, 2 share. Choose"),
        ([0, 1, 0, 1], "share; process 1 has device 101 of group 0"),
        ([0, 1, 1, 1], "process 1 has device 101 of group 0, which processes 0, 1 share, device 102,"),
    ],
)
def test_a_process_with_parts_of_several_groups_raises(owners, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MpmdMesh(seen_from(0, owners, (2, 2)), "pp")
