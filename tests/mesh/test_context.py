"""The current mesh: outside and inside traces, in threads, with both kinds of context."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from flax_mesh import (
    NoMeshError,
    create_mesh,
    current_mesh,
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
)

P = PartitionSpec


@pytest.fixture
def mesh():
    return create_mesh((2, 4), ("dp", "tp"))


@pytest.fixture
def legacy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:` is deprecated, but still supported
        with mesh:
            yield mesh


def current_mesh_inside_jit():
    seen = []
    jax.jit(lambda x: (seen.append(current_mesh()), x)[1])(1.0)
    return seen[0]


def test_without_a_mesh_there_is_none_or_an_error():
    assert current_mesh() is None
    assert not names_in_current_mesh("dp")
    assert names_in_current_mesh()
    with pytest.raises(AssertionError, match=r"with jax.set_mesh\(mesh\)"):
        get_incontext_mesh()
    with pytest.raises(NoMeshError):
        get_axes_size_in_mesh("dp")
    assert current_mesh_inside_jit() is None


def test_set_mesh_sets_the_current_mesh(mesh):
    with jax.set_mesh(mesh):
        assert current_mesh() is mesh
        assert get_incontext_mesh() is mesh
        inside = current_mesh_inside_jit()
    assert isinstance(inside, AbstractMesh) and inside == mesh.abstract_mesh
    assert current_mesh() is None


def test_the_legacy_context_sets_the_current_mesh(legacy):
    assert current_mesh() is legacy
    assert get_mesh_axis_names() == ["dp", "tp"]
    assert isinstance(current_mesh_inside_jit(), Mesh)


def test_set_mesh_takes_precedence_over_the_legacy_context_and_an_abstract_mesh_over_both(legacy):
    other = create_mesh((8,), ("fsdp",))
    abstract = AbstractMesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(other):
        assert current_mesh() is other
        with jax.sharding.use_abstract_mesh(abstract):
            assert current_mesh() == abstract and get_mesh_axis_size("fsdp") == 4
    assert current_mesh() is legacy


def test_transformations_see_the_mesh_and_mapped_axes_take_precedence(mesh):
    seen = []
    with jax.set_mesh(mesh):
        jax.eval_shape(lambda x: x * get_axes_size_in_mesh("tp"), jnp.ones(2))
        assert jax.grad(lambda x: x * get_axes_size_in_mesh(("dp", "tp")))(1.0) == 8
        sizes = jax.vmap(lambda x: x * get_mesh_axis_size("rows"), axis_name="rows")(jnp.ones(3))
        body = lambda x: (seen.append(current_mesh()), x)[1]  # noqa: E731
        jax.jit(jax.shard_map(body, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})).trace(jnp.zeros(4))
        with pytest.raises(ValueError, match=r"'tp' is not mapped here.*shard_map"):
            get_submesh_device_index("tp")
    assert sizes.tolist() == [3, 3, 3]
    assert seen[0].axis_types == (AxisType.Manual, AxisType.Auto)


def test_another_thread_starts_without_a_mesh(mesh):
    seen = []

    def work():
        seen.append(current_mesh())
        with jax.set_mesh(mesh):
            seen.append(current_mesh())

    with jax.set_mesh(mesh):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None, mesh]


def test_names_and_sizes_of_axes(mesh):
    assert get_mesh_axis_names(mesh) == ["dp", "tp"]
    assert get_axes_size_in_mesh("tp", mesh) == 4
    assert get_axes_size_in_mesh(["dp", "tp"], mesh) == 8
    assert get_axes_size_in_mesh((), mesh) == 1
    assert get_axes_size_in_mesh("tp", mesh.abstract_mesh) == 4
    with jax.set_mesh(mesh):
        assert names_in_current_mesh("dp", "tp") and not names_in_current_mesh("dp", "sp")
        assert get_mesh_axis_size(("dp", "tp")) == 8
    with pytest.raises(KeyError, match=r"No axis 'sp', 'ep' .*'dp': 2"):
        get_axes_size_in_mesh(("dp", "sp", "ep"), mesh)
    for function in (lambda names: get_axes_size_in_mesh(names, mesh), get_submesh_device_index):
        with pytest.raises(TypeError, match="string or a list or tuple of strings, got 3"):
            function(3)  # pyright: ignore[reportArgumentType]


def test_the_first_name_is_the_most_significant_of_a_device_index(mesh):
    expected = {
        "tp": [0, 1, 2, 3] * 2,
        ("dp", "tp"): list(range(8)),
        ("tp", "dp"): [0, 2, 4, 6, 1, 3, 5, 7],
        (): [0] * 8,
    }

    def body(x):
        return jnp.stack([x + get_submesh_device_index(names) for names in expected])

    indices = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P(None, ("dp", "tp"))))
    assert indices(np.zeros(8, int)).tolist() == [*expected.values()]
