"""Audit of a rule table against a model and its optimizer: all findings in one list and in one error."""

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
from flax_mesh.tree import named_leaves

P = PartitionSpec
MESH = AbstractMesh((2, 2, 2), ("dp", "fsdp", "tp"))
RULES = [
    ("kernel", ("embed", "mlp")),
    ("layers/.*/kernel$", ("mlp", "embed")),
    ("kernal", ()),
    ("odd", ("mlp", None)),
    ("long", ("mlp", None, None)),
    ("twice", ("mlp", "heads")),
    ("large", ()),
    ("elsewhere", P("nowhere")),
]


def arrays(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


TREE = {
    "layers": [arrays(kernel=(8, 8), unmatched=(3, 4), scalar=()) for _ in range(3)],
    **arrays(odd=(7, 8), long=(8, 8), twice=(8, 8), large=(64, 64), elsewhere=(8, 8)),
    "text": "no array",
}


def test_every_kind_of_mistake_is_a_finding_and_a_line_of_one_error():
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


def test_specs_of_an_audit_without_findings_are_those_of_match_partition_rules():
    rules = [("kernel", ("embed", "mlp")), (".*", ())]
    audit = audit_rules(rules, TREE, MESH)
    assert not audit.findings
    assert jax.tree.unflatten(jax.tree.structure(TREE), audit.specs) == fm.match_partition_rules(rules, TREE, mesh=MESH)


def test_unused_rules_and_large_layers_are_findings():
    rules = [("kernel", ("embed", "mlp")), ("nothing", ()), (".*", ())]
    assert [f.path for f in audit_rules(rules, TREE, MESH).findings] == ["rule 2, 'nothing'"]
    assert not audit_rules(rules, TREE, MESH, unused=False).findings
    (layer,) = audit_rules(
        fm.PartitionRules([("q", ("embed", None)), (".*", ())], layers="layers"),
        {"layers": arrays(o=(4, 8, 8), q=(4, 8, 8))},
        MESH,
        large=8 * 8 * 4,  # bytes of one layer of the stack
    ).findings
    assert layer.path == "layers/o" and layer.problem == "256 B are replicated on all 8 devices"


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-3),
    "chained": optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(-1e-3)),
    "masked": optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 4),
    "partition": optax.partition(
        {"matrix": optax.adam(1e-3), "rest": optax.sgd(1e-3, momentum=0.9)},
        lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", params),
    ),
}


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_explained_specs_of_an_optimizer_are_those_of_its_abstract_state(name):
    def make():
        model = MLP(nnx.Rngs(0))
        transform: optax.GradientTransformation = OPTIMIZERS[name]  # pyright: ignore[reportAssignmentType]
        return model, nnx.Optimizer(model, transform, wrt=nnx.Param)

    rules = [("up/kernel", ("embed", "mlp")), ("down/kernel", ("mlp", "embed")), ("bias", ())]
    explanation = explain_sharding(make, MESH, rules)
    assert not explanation.findings
    placed = dict(named_leaves(fm.abstract_state(make, MESH, rules)["optimizer"]))
    explained = {x.path.removeprefix("optimizer/"): x.spec for x in explanation.report.leaves if x.kind == "optimizer"}
    assert explained == {path: leaf.sharding.spec for path, leaf in placed.items()}
    assert any(spec and any(spec) for spec in explained.values())


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
    # Moments of a parameter that does not fit are not findings of their own.
    (rows,) = explain_sharding(lambda: make(7), MESH, [("kernel", ("embed", "mlp")), ("bias", ())]).findings
    assert rows.path == "kernel" and rows.problem.startswith("dim 0 has size 7, not divisible by 2")
    mesh = AbstractMesh((8, 2), ("dp", "tp"))
    copies = explain_sharding(lambda: make(7), mesh, rules, shard_optimizer_over="dp").findings
    assert [finding.path for finding in copies] == ["opt_state/1/0/mu/kernel", "opt_state/1/0/nu/kernel"]
