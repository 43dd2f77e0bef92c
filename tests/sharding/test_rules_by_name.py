"""rules="fsdp" for models without a table or annotations, and meshes that lack axes which only the defaults name."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import flax_mesh as fm
from flax_mesh.axes import LargestDim
from flax_mesh.models import make_decoder
from flax_mesh.sharding.rules import PartitionRules
from flax_mesh.tree import named_leaves
from tests.models.reference import SMALL

P = jax.sharding.PartitionSpec
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 64]), min_size=1, max_size=4).map(tuple)


def mesh_of(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def match(rules, shape, mesh, **kinds):
    return fm.match_partition_rules(rules, {"a": jax.ShapeDtypeStruct(shape, np.float32)}, mesh=mesh, **kinds)["a"]


def split_dims(spec):
    return [dim for dim, entry in enumerate(spec) if entry]


@given(SHAPES, st.sampled_from([1, 2, 4, 8]))
def test_the_last_of_the_largest_divisible_dims_is_split(shape, ways):
    dropped = []
    spec = match("fsdp", shape, mesh_of(dp=2, fsdp=ways), dropped=dropped)
    fitting = [size for size in shape if size % ways == 0]
    if math.prod(shape) == 1:
        assert spec == P() and not dropped
    elif not fitting:
        assert not split_dims(spec)
        assert [(one.path, one.repair) for one in dropped] == [("a", "It stays replicated")]
    else:
        (dim,) = split_dims(spec)
        assert spec[dim] == "fsdp" and not dropped
        assert dim == max(i for i, size in enumerate(shape) if size == max(fitting))


def test_several_axes_split_one_dim_and_the_last_ones_are_left_out_if_no_dim_is_divisible():
    mesh, dropped = mesh_of(dp=3, fsdp=4), []
    assert match("fsdp+dp", (5, 24), mesh) == P(None, ("fsdp", "dp"))
    assert match("fsdp + dp", (8, 5), mesh, dropped=dropped) == P("fsdp", None)
    assert str(dropped[0]) == "a: no dim of (8, 5) is divisible by 12 (axes fsdp+dp). It is split over fsdp alone"
    assert match("fsdp", (8, 64), mesh, min_size=513) == P()
    assert match("fsdp", (8, 64), mesh, min_size=512) == P(None, "fsdp")


def test_layer_dims_of_stacks_are_not_split():
    rules = PartitionRules("fsdp", layers="layers")
    tree = {"layers": {"kernel": np.zeros((64, 8, 4)), "scale": np.zeros((64, 3))}, "64": np.zeros((64, 8, 4))}
    specs = fm.match_partition_rules(rules, tree, mesh=mesh_of(fsdp=4))
    assert specs == {"layers": {"kernel": P(None, "fsdp", None), "scale": P()}, "64": P("fsdp", None, None)}


def test_a_table_may_end_with_the_largest_dim():
    rules = [("bias", ()), (".*", LargestDim(("fsdp",)))]
    specs = fm.match_partition_rules(rules, {"bias": np.zeros(8), "k": np.zeros((8, 8))}, mesh=mesh_of(fsdp=4))
    assert specs == {"bias": P(), "k": P(None, "fsdp")}
    assert PartitionRules(rules).explain("k") == "k: rule 2 of 2, '.*' -> the largest dim over fsdp that divides"


@pytest.mark.parametrize(
    ("rules", "mesh", "message"),
    [
        ("fdsp", mesh_of(fsdp=4), r"must name axes of the mesh {'fsdp': 4}, which lacks \['fdsp'\]. Use 'fsdp'"),
        ("fsdp", None, r"rules='fsdp' depend on the sizes of the mesh: pass mesh="),
        ("fsdp+fsdp", mesh_of(fsdp=4), r"rules='fsdp\+fsdp' must name mesh axes joined by '\+', each once"),
        ("", mesh_of(fsdp=4), r"rules='' must name mesh axes joined by '\+'"),
        ("embed,fsdp", mesh_of(fsdp=4), r"rules='embed,fsdp' must name mesh axes"),
    ],
)  # fmt: skip
def test_names_that_are_not_axes_of_the_mesh_are_errors(rules, mesh, message):
    with pytest.raises(fm.ShardingError, match=message):
        match(rules, (8, 8), mesh)


class Plain(nnx.Module):
    """A model without a table, annotations or constraints."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 24, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(24, 24, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(24, 10, rngs=rngs)


def make():
    model = Plain(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def test_any_model_is_sharded():
    dropped = []
    mesh = mesh_of(dp=2, fsdp=4)
    state = fm.abstract_state(make, mesh, rules="fsdp", dropped=dropped, shard_optimizer_over="dp")
    specs = {path: leaf.sharding.spec for path, leaf in named_leaves(state)}
    assert specs["model/embed/embedding"] == P("fsdp", None)
    assert specs["model/layers/1/kernel"] == P(None, "fsdp")
    assert specs["optimizer/opt_state/0/mu/layers/1/kernel"] == P("dp", "fsdp")  # ZeRO-1 in addition
    assert specs["model/head/bias"] == P()
    assert str(dropped[0]) == "head/bias: no dim of (10,) is divisible by 4 (axes fsdp). It stays replicated"


def test_explain_reports_replicated_arrays_without_a_finding():
    explanation = fm.explain_sharding(lambda: Plain(nnx.Rngs(0)), mesh_of(fsdp=4), "fsdp")
    assert not explanation.findings
    text = explanation.to_text()
    assert "largest dim over fsdp" in text
    assert "- head/bias: no dim of (10,) is divisible by 4 (axes fsdp). It stays replicated" in text
    assert explanation.to_dict()["replicated"][0]["path"] == "head/bias"


def test_missing_axes_that_are_passed_are_an_error_with_one_line_for_equal_layers():
    renamed = fm.PartitionAxis(tensor_parallel_axis="model")
    make = lambda: make_decoder(dataclasses.replace(SMALL, num_layers=4), nnx.Rngs(0))  # noqa: E731
    line = r"(?m)^layers/{0\.\.3}/attention/q/kernel: dim 1 of rule .*names mesh axis 'model'"
    with pytest.raises(fm.ShardingError, match=line) as error:
        fm.abstract_state(make, mesh_of(pp=2, fsdp=4), axes=renamed)
    assert "layers/0/" not in str(error.value)
    with pytest.raises(fm.ShardingError, match="names mesh axis 'tp', which the mesh"):
        fm.abstract_state(make, mesh_of(fsdp=4), [(".*", P("tp"))])


def test_axes_that_only_the_defaults_name():
    assert fm.PartitionAxis().default_names == {"dp", "fsdp", "tp", "sp", "ep"}
    assert fm.PartitionAxis(tensor_parallel_axis="model").default_names == {"dp", "fsdp", "sp", "ep"}
    assert fm.PartitionAxis(head_axis="fsdp").default_names == {"dp", "tp", "sp", "ep"}
    assert fm.PartitionAxis(batch_axis=None).default_names == {"dp", "fsdp", "tp", "sp", "ep"}
    assert fm.PartitionAxis(extra={"channels": "tp"}).default_names == {"dp", "fsdp", "sp", "ep"}
