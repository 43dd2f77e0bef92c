import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mesh import PartitionAxis, PartitionRules, ShardingError, match_partition_rules
from flax_mesh.axes import as_tuple
from flax_mesh.sharding.rules import fit_spec

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
    axes = PartitionAxis(tensor_parallel_axis="model")  # it overrides that of the table
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
    assert odd.endswith("or map dim 1 of rule 'odd' to None.")
    # The rule "s" names the layer dim itself.
    assert "layers/s: dim 1 has size 7" in s and s.endswith("or map dim 1 of rule 's' to None.")
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
    with pytest.raises(ShardingError, match=r"rule 1: '\(q' is no regular expression") as error:
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
