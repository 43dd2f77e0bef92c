"""Recipes on meshes with Explicit axes against the same recipes on Auto axes."""

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mesh import named_leaves
from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train.build import batch_sharding
from flax_mesh.train.explain import explain
from tests.checkpoint import small_decoder
from tests.checkpoint.small_decoder import program_of

# Programs that differ in nothing but annotations may be fused, and then rounded, differently.
pytestmark = pytest.mark.usefixtures("quick_compilation")
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


def batch_of(program) -> Any:
    rng = np.random.default_rng(0)
    rows = program.config.data.batch_size
    shape = rows, program.config.data.sequence_length
    batch = {name: rng.integers(0, 32, shape).astype(np.int32) for name in ("inputs", "targets")}
    return batch if program.pipeline else jax.device_put(batch, batch_sharding(program.mesh, program.rules.axes))


def two_steps(mesh: str, model: str, axis_types: str) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """(metrics of two steps, gradients of the first step by path)."""
    program = program_of(*MODELS[model], *SAME, f"mesh.shape={MESHES[mesh]}", f"mesh.axis_types={axis_types}")
    kinds = {AxisType.Explicit if axis_types == "explicit" else AxisType.Auto}
    assert set(program.mesh.axis_types) == kinds
    state, rows, gradients = program.init(), [], {}
    for _ in range(2):
        state, metrics = program.step(state, batch_of(program))
        rows.append({name: np.asarray(x) for name, x in metrics.items()})
        # With b1 = 0 and without clipping the first moment is the gradient.
        gradients = gradients or {path: np.asarray(x) for path, x in named_leaves(state.to_nnx()) if "/mu/" in path}
        assert [x.sharding for x in state.leaves] == [x.sharding for x in program.layout.leaves]
        assert {kind for x in state.leaves for kind in x.sharding.mesh.axis_types} == kinds
    assert gradients
    return rows, gradients


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "model"), MATRIX)
def test_a_recipe_trains_on_explicit_axes_as_on_auto_axes(mesh: str, model: str):
    (expected, expected_gradients), (found, gradients) = (two_steps(mesh, model, x) for x in ("auto", "explicit"))
    for one, other in ((gradients, expected_gradients), (found[0], expected[0])):
        assert one.keys() == other.keys() and not [path for path in one if not np.array_equal(one[path], other[path])]
    assert found[1]["loss"] == expected[1]["loss"]


@pytest.mark.slow
def test_a_step_on_explicit_axes_compiles_once(compilations: list[str]):
    program = program_of("model.num_layers=1", "mesh.shape=fsdp:2", "mesh.axis_types=explicit", "run.platform=auto")
    state = program.init()
    state, _ = program.step(state, batch_of(program))
    before = len(compilations)
    for _ in range(2):
        state, _ = program.step(state, batch_of(program))
    assert len(compilations) == before


def test_explain_reports_the_same_bytes_for_both_axis_types():
    config = load_recipe(small_decoder.RECIPE)
    auto, explicit = (explain(apply_overrides(config, [f"mesh.axis_types={x}"])) for x in ("auto", "explicit"))
    assert auto.report.leaves and not explicit.findings
    assert [x.device_bytes for x in auto.report.leaves] == [x.device_bytes for x in explicit.report.leaves]
