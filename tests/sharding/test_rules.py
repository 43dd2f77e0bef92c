"""Rule tables, rules="fsdp" for models without one, and meshes that lack axes which only the defaults name."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import flax_mesh as fm
from flax_mesh import PartitionAxis, PartitionRules, ShardingError, match_partition_rules
from flax_mesh.axes import LargestDim, as_tuple
from flax_mesh.models import make_decoder
from flax_mesh.sharding.rules import fit_spec
from flax_mesh.tree import named_leaves
from tests.models.reference import SMALL

P = PartitionSpec
MESH = AbstractMesh((1, 2, 1, 2, 2), ("dp", "fsdp", "ep", "tp", "sp"))


def tree(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_the_first_rule_found_anywhere_in_the_path_applies():
    rules = [("q/kernel", ("embed", "heads")), ("kernel$", P(None, "sp")), (".*", ())]
    params = {"layers": [{"q": {"kernel": jnp.ones((4, 4))}, "o": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}]}
    specs = match_partition_rules(rules, params)
    assert specs == {"layers": [{"q": {"kernel": P("fsdp", "tp")}, "o": {"kernel": P(None, "sp"), "bias": P()}}]}
    # Without a mesh, sizes and names of axes are not checked.
    assert match_partition_rules([("w", P("model", "x"))], tree(w=(3, 7))) == {"w": P("model", "x")}
    table = PartitionRules([("w", ["embed", "heads"])], layers=["layers"])
    axes = PartitionAxis(tensor_parallel_axis="model")  # it overrides the axes of the table
    assert match_partition_rules(table, tree(w=(4, 4)), axes=axes) == {"w": P("fsdp", "model")}
    assert {table: 1}[PartitionRules([("w", ("embed", "heads"))], layers="layers")] == 1


def test_nnx_paths_have_no_value_suffix_and_the_result_has_the_same_structure():
    state = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    specs = match_partition_rules([("kernel$", ("embed", "mlp")), ("bias$", ("mlp",))], state, mesh=MESH)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert (specs["kernel"].get_value(), specs["bias"].get_value()) == (P("fsdp", "tp"), P("tp"))


def test_scalars_small_leaves_and_non_arrays_are_replicated_without_a_rule():
    leaves = {"scalar": jnp.ones(()), "one": jnp.ones((1, 1)), "text": "no array", "number": 3, "w": jnp.ones((4, 4))}
    specs = match_partition_rules([("w", ("embed", None))], leaves)
    assert specs == {"scalar": P(), "one": P(), "text": P(), "number": P(), "w": P("fsdp", None)}
    assert match_partition_rules([("w", ("embed", None))], {"w": jnp.ones((4, 4))}, min_size=17) == {"w": P()}


def test_all_unmatched_leaves_and_all_mismatches_are_listed_in_one_error():
    with pytest.raises(ShardingError, match="Partition rule not found for param: a ") as error:
        match_partition_rules([("kernel", ())], tree(a=(2, 2), kernel=(2, 2), b=(3, 3)))
    assert "Partition rule not found for param: b (3, 3)" in str(error.value)
    assert "kernel" not in str(error.value) and isinstance(error.value, ValueError)
    rules = [("long", ("embed", "heads", None)), ("unknown", P("model")), ("uneven", ("embed", "heads"))]
    rules += [("twice", P("tp", "tp")), ("lost", ("heads", "mlp"))]
    arrays = tree(long=(4, 4), unknown=(4,), uneven=(4, 7), twice=(4, 4), lost=(4, 4))
    with pytest.raises(ShardingError) as error:
        match_partition_rules(rules, arrays, mesh=MESH)
    text = str(error.value)
    assert f"long: spec {P('fsdp', 'tp', None)} of rule 'long' has 3 dims, the array (4, 4) has 2" in text
    assert "unknown: dim 0 of rule 'unknown' names mesh axis 'model', which the mesh" in text
    assert "uneven: dim 1 has size 7, not divisible by 2 (axes ('tp',) of tp=2)" in text
    assert "Use a mesh where tp divides 7, or map dim 1 of rule 'uneven' to None" in text
    assert "twice: dim 1 of rule 'twice' uses mesh axis 'tp' that an earlier dim uses already" in text
    assert "lost: dim 1 ('mlp') resolves to mesh axis 'tp', which an earlier dim uses" in text


def test_leaves_without_a_rule_and_mismatches_are_listed_in_one_error():
    with pytest.raises(ValueError, match="on_mismatch must be 'error', 'warn' or 'drop', got 'trim'"):
        match_partition_rules([("w", ())], tree(w=(4, 4)), on_mismatch="trim")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardingError, match=r"rule not found for param: a \(2, 2\)\n.*\nw: dim 1 has size 7"):
        match_partition_rules([("w", ("embed", "heads"))], tree(a=(2, 2), w=(4, 7)), mesh=MESH, on_mismatch="drop")


def test_dims_of_a_stack_are_counted_without_the_layer_dim():
    table = [("long", (None, "mlp", None)), ("twice", P("tp", "tp")), ("odd", ("embed", "heads"))]
    rules = PartitionRules([*table, ("s", ("layers", "mlp"))], layers="layers")
    stack = tree(long=(3, 4, 4), twice=(3, 4, 4), odd=(3, 4, 7), s=(3, 7))
    with pytest.raises(ShardingError) as error:
        match_partition_rules(rules, {"layers": stack}, mesh=MESH)
    long, odd, s, twice = str(error.value).splitlines()
    assert f"spec {P(None, 'tp', None)} of rule 'long' has 3 dims, one layer of the array (3, 4, 4) has 2" in long
    assert "dim 2 (dim 1 of a layer) has size 7, not divisible by 2" in odd
    assert odd.endswith("or map dim 1 of rule 'odd' to None, or 'heads' by PartitionAxis(extra={'heads': None}).")
    # The rule "s" names the layer dim itself.
    assert "layers/s: dim 1 has size 7" in s and "dim 1 of rule 's' to None, or 'mlp' by PartitionAxis(" in s
    assert "dim 1 of rule 'twice' uses mesh axis 'tp' that an earlier dim uses already" in twice


def test_the_layer_dim_of_a_scanned_stack_comes_before_the_rule():
    rules = PartitionRules([("q", ("embed", "heads")), ("/s$", ()), ("/t$", ("layers", "mlp"))], layers="layers")
    arrays = {"layers": tree(q=(3, 4, 4), s=(3,), t=(3, 4)), "q": jnp.ones((4, 4))}
    specs = match_partition_rules(rules, arrays, mesh=MESH)
    assert specs["layers"] == {"q": P(None, "fsdp", "tp"), "s": P(), "t": P(None, "tp")}
    assert specs["q"] == P("fsdp", "tp")
    moments = match_partition_rules(rules, {"mu": {"layers": tree(q=(3, 4, 4))}})
    assert moments["mu"]["layers"]["q"] == P(None, "fsdp", "tp")


def test_all_malformed_rules_are_listed_in_one_error():
    with pytest.raises(ShardingError, match=r"rule 1: '\(q' is not a regular expression") as error:
        PartitionRules([("(q", ()), ("k", ("embd",))])
    assert "rule 2, 'k' -> ('embd',): unknown logical axis 'embd'" in str(error.value)
    with pytest.raises(ShardingError) as error:
        PartitionRules([("a", "embed"), ("b",), (P(), "b"), ("c", ("embed", ("fsdp", "tp"))), ("d", None), ("e", 3)])  # pyright: ignore
    assert str(error.value).splitlines() == [
        "rule 1, 'a': dims must be a tuple or a PartitionSpec, got 'embed'.",
        "rule 2 is ('b',): write (pattern, dims).",
        f"rule 3 is {(P(), 'b')}: write (pattern, dims).",
        "rule 4, 'c' -> ('embed', ('fsdp', 'tp')): each dim must be one logical axis or None. "
        "For mesh axes, of which several may split one dim, write a PartitionSpec.",
        "rule 6, 'e': dims must be a tuple or a PartitionSpec, got 3.",
    ]
    with pytest.raises(ShardingError, match=r"^rules must be axis names .* or a list of \(pattern, dims\), got 5\.$"):
        PartitionRules(5)  # pyright: ignore


def test_explain_reports_the_rule_the_spec_and_later_matches():
    rules = PartitionRules([("q/kernel", ("embed", "heads")), ("kernel", ())], layers="layers")
    text = rules.explain("layers/q/kernel")
    assert f"rule 1 of 2, 'q/kernel' -> ('embed', 'heads') -> {P(None, 'fsdp', 'tp')}" in text
    assert "the leading dim counts the layers of the stack 'layers'" in text
    assert "later rules that match too: 'kernel'" in text
    assert "no rule matches" in rules.explain("bias")


entries = st.sampled_from([None, "dp", "fsdp", "tp", "sp", ("fsdp", "tp"), ("dp", "sp"), ("tp", "tp"), "nowhere"])


@given(st.lists(entries, max_size=4), st.lists(st.integers(1, 12), max_size=4))
def test_fitted_specs_fit_and_dropped_axes_are_reported(spec, shape):
    kept, findings = fit_spec("w", shape, P(*spec), MESH)
    again, none = fit_spec("w", shape, kept, MESH)
    assert again == kept and not none
    used = [a for e in kept for a in as_tuple(e)]
    assert len(used) == len(set(used)) and len(kept) <= len(shape)
    for size, entry in zip(shape, kept, strict=False):
        assert size % np.prod([MESH.shape[a] for a in as_tuple(entry)], dtype=int) == 0
    requested = [a for e in spec for a in as_tuple(e)]
    assert bool(findings) == (used != requested or len(spec) > len(shape))


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


def test_several_axes_split_one_dim_without_the_last_axes_that_fit_no_dim():
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


def plain():
    """A model without a table, annotations or constraints."""
    layers = nnx.List([nnx.Linear(24, 24, rngs=nnx.Rngs(0)) for _ in range(2)])
    return nnx.Dict(embed=nnx.Embed(64, 24, rngs=nnx.Rngs(0)), layers=layers, head=nnx.Linear(24, 10, rngs=nnx.Rngs(0)))


def make():
    model = plain()
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
    explanation = fm.explain_sharding(plain, mesh_of(fsdp=4), "fsdp")
    assert not explanation.findings
    text = explanation.to_text()
    assert "largest dim over fsdp" in text
    assert "- head/bias: no dim of (10,) is divisible by 4 (axes fsdp). It stays replicated" in text
    assert explanation.to_dict()["replicated"][0]["path"] == "head/bias"


def test_unknown_mesh_axes_are_reported_once_for_equal_layers():
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
