import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import flax_mesh as fm

P = PartitionSpec


@pytest.fixture
def mesh():
    return fm.create_mesh((2, 4), ("data", "model"))


@pytest.fixture
def tree(mesh):
    return {
        "placed": jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P("data", "model"))),
        "uncommitted": jnp.zeros(3),
        "committed": jax.device_put(np.zeros(3), jax.devices()[1]),
        "numpy": np.zeros(3),
        "number": 2.0,
    }


def test_sharding_structure_is_none_for_leaves_without_a_named_sharding(mesh, tree):
    found = fm.extract_sharding_structure(tree)
    assert found == dict.fromkeys(tree) | {"placed": NamedSharding(mesh, P("data", "model"))}
    assert fm.get_shardings_with_structure(tree) == found
    state = nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert fm.extract_sharding_structure(state)["kernel"].get_value() is None


def test_specs_become_shardings_on_the_mesh_passed_or_in_context(mesh):
    specs = {"a": P("data"), "b": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("model")))}
    expected = {"a": NamedSharding(mesh, P("data")), "b": NamedSharding(mesh, P("model"))}
    assert fm.extract_shardings(specs, mesh) == expected
    with jax.set_mesh(mesh):
        assert fm.extract_shardings(specs) == expected
    with pytest.raises(AssertionError, match="No mesh is in context"):
        fm.extract_shardings(specs)
    assert fm.extract_shardings({"b": specs["b"]}) == {"b": expected["b"]}  # nothing to resolve: no mesh needed
    with pytest.raises(fm.ShardingError, match="a: dim 0 names mesh axis 'x'") as error:
        fm.extract_shardings({"a": P("x"), "b": P("data", "data")}, mesh)
    assert "b: dim 1 uses mesh axis 'data'" in str(error.value)


def test_specs_of_arrays_numbers_and_numpy_and_an_error_for_other_leaves(tree):
    assert fm.get_partition_spec(tree) == {k: P() for k in tree} | {"placed": P("data", "model")}
    assert fm.create_pattern_based_partition_spec("w->model")("b") == P()  # by default
    tree = {"abstract": jax.ShapeDtypeStruct((2,), jnp.float32), "text": "x", "fine": np.zeros(2)}
    with pytest.raises(fm.ShardingError, match="abstract: an abstract leaf without a sharding") as error:
        fm.get_partition_spec(tree)
    assert "text: str is neither an array nor a number" in str(error.value) and "fine" not in str(error.value)


def test_names_are_unique_and_in_order_of_first_use():
    names = fm.get_names_from_partition_spec
    assert names(P(("dp", "fsdp"), None, "tp")) == ["dp", "fsdp", "tp"]
    tree = {"a": P("tp"), "b": {"c": P(("dp", "tp")), "d": P()}, "e": P(P.UNCONSTRAINED, "sp")}
    assert names(tree) == ["tp", "dp", "sp"]
    assert names([P("b"), P("a"), None]) == ["b", "a"]
    state = nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    specs = fm.match_partition_rules([("kernel", P("x", "y")), ("bias", P("y"))], state)
    assert names(specs) == ["y", "x"]  # bias comes first
    assert names(P()) == []
    with pytest.raises(TypeError, match="specs must be PartitionSpecs, mesh axis names or a tree of them, got 3"):
        names([3])


@pytest.mark.parametrize(
    ("pattern", "path", "spec"),
    [
        ("attention|mlp->data,hidden->model", "layers/0/attention/kernel", P("data")),
        ("attention|mlp->data,hidden->model", "mlp/kernel", P("data")),
        ("attention|mlp->data,hidden->model", "hidden/kernel", P("model")),
        ("attention|mlp->data,hidden->model", "other", P("default")),
        ("kernel->data+model._.tp", "kernel", P(("data", "model"), None, "tp")),
        ("kernel -> data . model", "kernel", P("data", "model")),
        ("kernel->", "kernel", P()),
        ("kernel->None.tp", "kernel", P(None, "tp")),
        (r"a{1\,2}b->tp", "aab", P("tp")),
        (r"(q\|k)/kernel->tp", "k/kernel", P("tp")),
        (r"(q\|k)/kernel->tp", "k", P("default")),
        (r"layers/\d+/w->tp", "layers/12/w", P("tp")),
        (r"a\.b->tp", "a.b", P("tp")),
        (r"a\.b->tp", "axb", P("default")),
        (r"x\->y->tp", "x->y", P("tp")),
        # An escaped backslash does not escape the next character.
        (r"a\\->tp,b->sp", "a\\", P("tp")),
        (r"a\\->tp,b->sp", "b", P("sp")),
        (r"a\\->tp,b->sp", "a", P("default")),
    ],
)
def test_dims_combined_axes_and_escapes(pattern, path, spec):
    of = fm.create_pattern_based_partition_spec(pattern, default_spec=P("default"))
    assert of(path, np.zeros(2)) == of(path) == spec


def test_all_invalid_entries_are_listed_in_one_error(mesh):
    with pytest.raises(fm.ShardingError, match=r"'attention': write PATTERN\|PATTERN->AXIS.AXIS") as error:
        fm.create_pattern_based_partition_spec("attention,(x->data,w->nowhere,v->data.data,|k->model", mesh)
    text = str(error.value)
    assert "'(x' is not a regular expression" in text
    assert "'w->nowhere': dim 0 names mesh axis 'nowhere', which the mesh" in text
    assert "'v->data.data': dim 1 uses mesh axis 'data'" in text
    assert "'|k->model': an empty pattern would match every path" in text


def test_shardings_are_read_inside_shard_map_and_jit(mesh):
    """Traced values have shardings on the abstract mesh of the trace, without devices."""
    seen = {}

    def local(x):
        seen["names"] = fm.names_in_current_mesh("data", "model"), fm.get_axes_size_in_mesh(("data", "model"))
        seen["specs"] = fm.extract_shardings({"x": P("data"), "y": P()})
        return x

    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")))(jnp.zeros(8))
    assert seen["names"] == (True, 8)
    assert seen["specs"]["x"].spec == P("data") and seen["specs"]["x"].mesh.axis_names == ("data", "model")
