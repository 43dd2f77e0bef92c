"""Meshes that are fitted to the devices, the layers of rule tables, and Explicit axes."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from flax_mesh import PartitionRules, abstract_state, create_mesh, named_leaves
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.config import MeshConfig
from flax_mesh.recipe.explain import explain
from flax_mesh.recipe.program import build_program
from flax_mesh.recipe.resolve import rules_of
from flax_mesh.recipe.target import AXIS_NAMES, Target, fit_sizes, local_target
from flax_mesh.train import apply_overrides, load_recipe
from tests.checkpoint import small_decoder
from tests.checkpoint.small_decoder import program_of
from tests.train.bigram import recipe
from tests.train.support import decoder

TINY = Path(__file__).parents[2] / "recipes" / "tiny.py"
sizes = st.integers(1, 12)


@given(st.dictionaries(st.sampled_from(AXIS_NAMES[1:]), sizes, min_size=1), st.integers(1, 70), st.data())
def test_a_fitted_mesh_fits_and_every_axis_divides_the_requested_one(shape, num_devices, data):
    free = data.draw(st.none() | st.sampled_from(sorted(shape)))
    requested = shape if free is None else shape | {free: -1}
    fitted = fit_sizes(requested, num_devices)
    used = math.prod(fitted.values())
    assert list(fitted) == list(requested)
    assert 1 <= used <= num_devices
    assert all(size >= 1 for size in fitted.values())
    assert all(requested[name] % size == 0 for name, size in fitted.items() if name != free)
    if free is not None:
        assert used + used // fitted[free] > num_devices, "-1 uses all remaining devices"
    if math.prod(size for size in requested.values() if size != -1) <= num_devices:
        kept = [fitted[name] == size for name, size in requested.items() if size != -1]
        assert all(kept), "a mesh that fits is not shrunk"


def test_a_mesh_shrinks_dp_before_the_axes_that_split_the_model():
    requested = {"dp": 2, "fsdp": 2, "tp": 2}
    assert [fit_sizes(requested, n) for n in (8, 7, 2, 1)] == [
        requested,
        {"dp": 1, "fsdp": 2, "tp": 2},
        {"dp": 1, "fsdp": 1, "tp": 2},
        {"dp": 1, "fsdp": 1, "tp": 1},
    ]
    assert fit_sizes({"dp": 12, "tp": 2}, 8) == {"dp": 3, "tp": 2}
    assert fit_sizes({"tp": 3, "fsdp": -1}, 8) == {"tp": 3, "fsdp": 2}


def test_auto_uses_the_available_devices_and_reports_changes():
    assert jax.device_count() == 8
    shrunk = "mesh: dp:4,fsdp:2,tp:2 needs more than the 8 devices here; shrunk to dp:2,fsdp:2,tp:2"
    for shape, sizes, printed in (
        ("dp:2,fsdp:2,tp:2", (2, 2, 2), []),
        ("dp:2,fsdp:-1", (2, 4), []),
        ("dp:4,fsdp:2,tp:2", (2, 2, 2), [shrunk]),
        ("dp:3", (3,), ["mesh: uses 3 of the 8 devices here"]),
    ):
        target = local_target(MeshConfig(shape), "auto")
        assert tuple(size for size in target.device_mesh("auto").shape.values() if size > 1) == sizes
        assert list(target.notes) == printed


def test_a_target_has_axes_of_a_recipe_and_numbers_of_devices():
    with pytest.raises(ConfigError) as error:
        Target({"fsdp": -1, "rows": 2, "tp": 0})  # without devices nothing can be derived
    assert [line.split()[1] for line in error.value.lines] == ["fsdp", "'rows'", "tp"]
    with pytest.raises(ConfigError, match="dp, fsdp have the size -1; only one"):
        Target({"dp": -1, "fsdp": -1}, jax.devices())


# --- rule tables ---

REPLICATED = [(".*", ())]


def test_a_table_of_the_recipe_uses_the_layers_of_the_model_by_default():
    tiny = load_recipe(str(TINY))
    own = rules_of(tiny).table
    for rules, layers in (
        (None, ("layers",)),
        (REPLICATED, ("layers",)),
        (PartitionRules(REPLICATED), ("layers",)),
        (PartitionRules(REPLICATED, layers="blocks"), ("blocks",)),
    ):
        found = rules_of(replace(tiny, rules=rules))
        assert found.layers == layers
        assert (found.table == own) == (rules is None)
    assert rules_of(replace(recipe(), rules=REPLICATED)).layers == (), "the model has no table"


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["dp:2,fsdp:4", "pp:2,fsdp:4"])
def test_mesh_rules_replace_the_table_and_do_not_change_the_losses(shape, tmp_path):
    said: list[str] = []
    losses = []
    for rules in ("", "fsdp"):
        config = decoder.config_of(tmp_path, tmp_path, f"mesh.shape={shape}", f"mesh.rules={rules}")
        config = apply_overrides(config, ["pipeline.num_microbatches=2"])
        program = build_program(config, said.append)
        state = program.init()
        specs = {path: leaf.sharding.spec for path, leaf in named_leaves(state.to_nnx()["model"])}
        for _ in range(2):
            state, metrics = program.step(state, decoder.batch_of(program))
        losses.append(float(metrics["loss"]))
    assert all("fsdp" in spec for spec in specs.values()), specs
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (line,) = [line for line in said if line.startswith("rules:")]
    assert line == f"rules: fsdp splits {len(specs)} of {len(specs)} arrays on their largest dim"


class Frequencies(nnx.Module):
    """A module with arrays outside of Variables, whose parameter needs a mesh in context."""

    def __init__(self, rngs: nnx.Rngs):
        self.scales = {"a": jnp.linspace(0.5, 1, 8)}
        self.kernel = nnx.Param(rngs.normal((8, 8)), out_sharding=PartitionSpec(None, None))


def test_rules_of_a_recipe_find_arrays_in_containers_with_the_mesh_in_context():
    config = replace(recipe(), make_model=lambda model, rngs: Frequencies(rngs))
    config = apply_overrides(config, ["mesh.shape=fsdp:8", "mesh.rules=fsdp"])
    mesh = local_target(config.mesh, "auto").device_mesh("auto")
    state = abstract_state(lambda: Frequencies(nnx.Rngs(0)), mesh, rules_of(config, mesh))
    specs = {path: leaf.sharding.spec for path, leaf in named_leaves(state)}
    assert specs == {"kernel": PartitionSpec(None, "fsdp"), "scales/a": PartitionSpec("fsdp")}


# --- Explicit axes against Auto axes ---


MESHES = {"dp": "dp:8", "fsdp": "fsdp:8", "tp": "fsdp:2,tp:2,sp:2", "ep": "dp:2,ep:2,tp:2", "pp": "pp:2,fsdp:2,tp:2"}
MODELS = {
    "plain": ["model.num_layers=2"],
    "scan": ["model.num_layers=2", "model.scan=true", "model.remat=full"],
    "chunked": ["model.num_layers=2", "model.loss_chunk=4", "model.tied=false"],
    "experts": ["model.num_layers=2", "model.num_experts=4"],
}
MATRIX = [*product(MESHES, ("plain", "experts")), *product(("tp", "pp"), ("scan", "chunked"))]
SAME = ["data.batch_size=16", "data.sequence_length=8", "pipeline.num_microbatches=2"]
SAME += ["optimizer.clip_norm=inf", "optimizer.b1=0"]


def two_steps(mesh: str, model: str, axis_types: str) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """(metrics of two steps, gradients of the first step by path)."""
    program = program_of(*MODELS[model], *SAME, f"mesh.shape={MESHES[mesh]}", f"mesh.axis_types={axis_types}")
    kinds = {AxisType.Explicit if axis_types == "explicit" else AxisType.Auto}
    assert set(program.mesh.axis_types) == kinds
    state, rows, gradients = program.init(), [], {}
    for _ in range(2):
        state, metrics = program.step(state, decoder.batch_of(program))
        rows.append({name: np.asarray(x) for name, x in metrics.items()})
        # With b1 = 0 and without clipping the first moment is the gradient.
        gradients = gradients or {path: np.asarray(x) for path, x in named_leaves(state.to_nnx()) if "/mu/" in path}
        assert [x.sharding for x in state.leaves] == [x.sharding for x in program.layout.leaves]
        assert {kind for x in state.leaves for kind in x.sharding.mesh.axis_types} == kinds
    assert gradients
    return rows, gradients


# With most optimizations, programs that differ in nothing but annotations may be fused, and then rounded, differently.
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "model"), MATRIX)
def test_a_recipe_trains_on_explicit_axes_as_on_auto_axes(mesh: str, model: str):
    (expected, expected_gradients), (found, gradients) = (two_steps(mesh, model, x) for x in ("auto", "explicit"))
    for one, other in ((gradients, expected_gradients), (found[0], expected[0])):
        assert one.keys() == other.keys() and not [path for path in one if not np.array_equal(one[path], other[path])]
    assert found[1]["loss"] == expected[1]["loss"]


def test_explain_reports_the_same_bytes_for_both_axis_types():
    config = load_recipe(small_decoder.RECIPE)
    auto, explicit = (explain(apply_overrides(config, [f"mesh.axis_types={x}"])) for x in ("auto", "explicit"))
    assert auto.report.leaves and not explicit.findings
    assert [x.device_bytes for x in auto.report.leaves] == [x.device_bytes for x in explicit.report.leaves]


def test_the_constructor_of_a_model_runs_once_for_all_traces_and_on_every_mesh_in_context():
    calls = []

    def make_model(config, rngs):
        calls.append(jax.sharding.get_abstract_mesh())
        return config_of.make_model(config, rngs)

    config_of = recipe()
    program = build_program(replace(config_of, make_model=make_model))
    assert calls == [program.mesh.abstract_mesh]
    abstract = abstract_state(
        program.recipe.make_model, mesh := create_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), rules="fsdp"
    )
    assert calls[1:] == [mesh.abstract_mesh]
    expected = abstract_state(lambda: config_of.make_model(config_of.model, nnx.Rngs(config_of.run.seed)), mesh, "fsdp")
    assert jax.tree.map(str, dict(named_leaves(abstract))) == jax.tree.map(str, dict(named_leaves(expected)))
