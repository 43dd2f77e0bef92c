"""Audit of a rule table against a model and its optimizer: all findings in one list and in one error."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import flax_mesh as fm
from flax_mesh import explain_sharding
from flax_mesh.sharding import audit_rules
from flax_mesh.sharding.rules import apply_policy

P = PartitionSpec
MESH = AbstractMesh((2, 2, 2), ("dp", "fsdp", "tp"))
RULES = [("kernel", ("embed", "mlp")), ("layers/.*/kernel$", ("mlp", "embed")), ("kernal", ())]  # the last two: unused
RULES += [("odd", ("mlp", None)), ("long", ("mlp", None, None)), ("twice", ("mlp", "heads"))]  # which do not fit
RULES += [("large", ()), ("elsewhere", P("nowhere"))]


def arrays(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


TREE = {
    "layers": [arrays(kernel=(8, 8), unmatched=(3, 4), scalar=()) for _ in range(3)],
    **arrays(odd=(7, 8), long=(8, 8), twice=(8, 8), large=(64, 64), elsewhere=(8, 8)),
    "text": "no array",
}


def test_each_kind_of_mistake_is_a_finding_and_a_line_in_the_error():
    audit = audit_rules(RULES, TREE, MESH, large=64 * 64 * 4)
    lines = [str(finding) for finding in audit.findings]
    starts = [
        "layers/{0..2}/unmatched: no rule matches this array (3, 4); it is counted as replicated",
        "elsewhere: dim 0 of rule 'elsewhere' names mesh axis 'nowhere', which the mesh",
        f"long: spec {P('tp', None, None)} of rule 'long' has 3 dims, the array (8, 8) has 2",
        "odd: dim 0 has size 7, not divisible by 2 (axes ('tp',) of tp=2)",
        "twice: dim 1 ('heads') resolves to mesh axis 'tp', which an earlier dim uses",
        "large: 16.0 KiB are replicated on all 8 devices",
        "rule 2, 'layers/.*/kernel$': applies to no array: rule 1, 'kernel', matches first",
        "rule 3, 'kernal': matches no array of the model",
    ]
    assert len(lines) == len(starts) and all(map(str.startswith, lines, starts))
    with pytest.raises(fm.ShardingError) as error:
        apply_policy(audit.findings, "error")
    assert str(error.value).splitlines() == [f"{line}." for line in lines]
    specs = jax.tree.unflatten(jax.tree.structure(TREE), audit.specs)
    assert specs["layers"][2] == {"kernel": P("fsdp", "tp"), "unmatched": P(), "scalar": P()}
    assert specs["odd"] == P(None, None) and specs["text"] == P()
    assert [use.arrays for use in audit.uses] == [3, 0, 0, 1, 1, 1, 1, 1]


def test_unused_rules_and_large_layers_are_findings():
    complete = [("kernel", ("embed", "mlp")), (".*", ())]
    audit, specs = audit_rules(complete, TREE, MESH), fm.match_partition_rules(complete, TREE, mesh=MESH)
    assert not audit.findings and jax.tree.unflatten(jax.tree.structure(TREE), audit.specs) == specs
    rules = [("kernel", ("embed", "mlp")), ("nothing", ()), (".*", ())]
    assert [f.path for f in audit_rules(rules, TREE, MESH).findings] == ["rule 2, 'nothing'"]
    assert not audit_rules(rules, TREE, MESH, unused=False).findings
    rules, stack = fm.PartitionRules([("q", ("embed", None)), (".*", ())], layers="layers"), (4, 8, 8)
    (layer,) = audit_rules(rules, {"layers": arrays(o=stack, q=stack)}, MESH, large=8 * 8 * 4).findings
    assert layer.path == "layers/o" and layer.problem == "256 B are replicated on all 8 devices"


def test_mismatches_of_an_optimizer_are_findings():
    def table_of_losses():  # an array without a parameter
        init = lambda params: {"losses": jnp.zeros((64, 64))}  # noqa: E731
        return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))

    def make(rows: int = 6):
        model = nnx.Linear(rows, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.chain(table_of_losses(), optax.adam(1e-3)), wrt=nnx.Param)

    rules = [("kernel", (None, "mlp")), ("bias", ())]
    (replicated,) = explain_sharding(make, MESH, rules, large=64 * 64 * 4).findings
    assert replicated.path == "opt_state/0/losses" and replicated.problem == "16.0 KiB are replicated on all 8 devices"
    assert not explain_sharding(make, MESH, rules, large=64 * 64 * 4 + 1).findings
    # Moments of a parameter that does not fit are not separate findings.
    explanation = explain_sharding(lambda: make(7), MESH, [("kernel", ("embed", "mlp")), ("bias", ())])
    assert re.search(r"\nrule +pattern +dims +applies to\n +1 +kernel", explanation.to_text())
    (rows,) = explanation.findings
    assert rows.path == "kernel" and rows.problem.startswith("dim 0 has size 7, not divisible by 2")
    mesh = AbstractMesh((8, 2), ("dp", "tp"))
    copies = explain_sharding(lambda: make(7), mesh, rules, shard_optimizer_over="dp").findings
    assert [finding.path for finding in copies] == ["opt_state/1/0/mu/kernel", "opt_state/1/0/nu/kernel"]
    with pytest.raises(fm.ConfigError, match="pinned_host needs an optimizer, but make"):
        explain_sharding(lambda: make()[0], MESH, rules, optimizer_memory="pinned_host")
