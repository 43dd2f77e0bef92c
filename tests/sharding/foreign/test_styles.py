"""Models as other projects write them: specs, training on meshes, pipelines and checkpoints equal one device's."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.mpmd import CutError, MpmdMesh, Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.train import TrainState, abstract_train_state, init_train_state, make_train_step
from tests.mpmd.zoo.base import FAST, OPTIMIZER, Run, differences, merged_leaves, run_steps, seed_of, start
from tests.sharding.foreign import llm_explicit, maxtext
from tests.sharding.foreign.styles import BY_NAME, STYLES, Style, context_of, make_both, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
NAMES = [style.case.name for style in STYLES]
ROWS, MICROBATCHES = 32, 4
ONE_LAYER_EACH = make_schedule("1f1b", num_groups=2, num_microbatches=MICROBATCHES)  # of two layers


def with_layers(name: str, depth: int | None) -> Style:
    style = BY_NAME[name]
    if depth is None:
        return style
    make: Any = style.case.make
    return style._replace(case=style.case._replace(make=functools.partial(make, depth)))


def abstract_of(style: Style, mesh: Mesh):
    return fm.abstract_state(make_both(style, OPTIMIZER), mesh, style.rules)


def axes_of(style: Style) -> fm.PartitionAxis:
    return fm.PartitionAxis(batch_axis=style.batch)


def train(style: Style, state: TrainState, mesh: Mesh) -> Run:
    case = style.case
    kinds: dict[str, Any] = {"layers": case.layers, "axes": axes_of(style), "compiler_options": FAST}
    step = make_train_step(case.loss_fn, state, seed=seed_of(case), num_microbatches=MICROBATCHES, **kinds)
    return run_steps(step, state, fm.shard(case.batch(ROWS), PartitionSpec(style.batch), mesh))


@functools.cache
def plain(name: str, depth: int | None = None) -> Run:
    """The steps on one device, from values that are computed operation by operation."""
    style = with_layers(name, depth)
    with jax.set_mesh(mesh := mesh_of(style, (1, 1, 1))):
        state = start(style.case)
    leaves = jax.device_put(state.leaves, NamedSharding(mesh, PartitionSpec()))
    return train(style, dataclasses.replace(state, leaves=leaves), mesh)


def pipeline_of(style: Style, schedule: Schedule = ONE_LAYER_EACH) -> Pipeline:
    case = style.case
    mesh = mesh_of(style._replace(mesh_axes=("pp", *style.mesh_axes)), (schedule.num_groups, *style.group))
    kinds: dict[str, Any] = {"schedule": schedule, "layers": case.layers, "wrt": case.wrt}
    staged = split_stages(case.loss_fn, case.make, case.batch(ROWS), mesh=MpmdMesh(mesh, "pp"), **kinds)
    return Pipeline(staged, OPTIMIZER, axes=axes_of(style), seed=seed_of(case), compiler_options=FAST)


def as_list(state: TrainState, style: Style) -> dict[str, np.ndarray]:
    """Leaves by path, on the host, with one array for each layer of a stack."""
    leaves = merged_leaves(state)
    for path in [path for path in leaves if style.case.name == "maxtext_scanned" and "layers/" in path]:
        leaves |= {path.replace("layers/", f"layers/{i}/"): row for i, row in enumerate(leaves.pop(path))}
    return leaves


@pytest.mark.parametrize("style", BY_NAME.values(), ids=BY_NAME)
def test_specs_follow_from_annotations_or_rules(style: Style):
    with context_of(style):
        found = {path: x.sharding.spec for path, x in fm.named_leaves(abstract_of(style, mesh_of(style)))}
    assert {path: found[f"model/{path}"] for path in style.specs} == style.specs
    for path, spec in style.specs.items():  # moments follow their parameters
        assert found.get(f"optimizer/opt_state/0/mu/{path}", spec) == spec


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1)])
def test_training_on_a_mesh_equals_training_on_one_device(name: str, shape: tuple[int, ...]):
    style = BY_NAME[name]
    with context_of(style):
        expected, mesh = plain(name), mesh_of(style, shape)
        layout = abstract_train_state(make_both(style, OPTIMIZER), abstract_of(style, mesh))
        state = layout.with_state(start(style.case).to_nnx())
        placed = fm.shard(state.leaves, tuple(leaf.sharding for leaf in layout.leaves))
        found = train(style, dataclasses.replace(state, leaves=placed), mesh)
    assert differences(expected, found) == []
    changed = {path for path, x in found.after.items() if not np.array_equal(found.before[path], x)}
    moments = {path.removeprefix("optimizer/opt_state/0/mu/") for path in found.after if "/mu/" in path}
    assert {path.removeprefix("model/") for path in changed if path.startswith("model/")} == moments


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_pipeline_equals_the_plain_step(name: str, schedule: str):
    """The zoo compares all schedules; here, one with stages in order, and a folded one with split backward passes."""
    plan = make_schedule(schedule, num_groups=2, num_microbatches=MICROBATCHES)
    style = with_layers(name, plan.num_stages)
    with context_of(style):
        pipeline = pipeline_of(style, plan)
        found = run_steps(pipeline.step, pipeline.init_state(), style.case.batch(ROWS))
        assert differences(plain(name, plan.num_stages), found) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_restored_on_another_mesh_in_a_pipeline_and_as_a_list(name: str, tmp_path: Path):
    style = BY_NAME[name]

    def abstract(style: Style, shape: tuple[int, ...]) -> TrainState:
        return abstract_train_state(make_both(style, OPTIMIZER), abstract_of(style, mesh_of(style, shape)))

    with context_of(style):
        state = init_train_state(make_both(style, OPTIMIZER), abstract_of(style, mesh_of(style)))
        others = [(style, abstract(style, (1, 8, 1))), (style, pipeline_of(style).abstract)]
        if name.startswith("maxtext"):
            other = BY_NAME["maxtext_listed" if name == "maxtext_scanned" else "maxtext_scanned"]
            others.append((other, abstract(other, (2, 2, 2))))
        with Checkpointer(tmp_path, layers=style.case.layers) as checkpointer:
            checkpointer.save(1, state)
            saved = as_list(state, style)
            for layout, target in others:
                restored = as_list(checkpointer.restore(target), layout)
                assert restored.keys() == saved.keys()
                for path, x in saved.items():
                    np.testing.assert_array_equal(restored[path], x, err_msg=path)


@pytest.mark.slow
def test_a_model_that_keeps_a_mesh_takes_the_one_in_context():
    style, config = BY_NAME["maxtext_listed"], maxtext.Config(scan_layers=False)

    def pipeline_on(mesh: Callable[[], Any]) -> Pipeline:
        make = lambda: maxtext.Decoder(config, mesh(), rngs=nnx.Rngs(0, dropout=1))  # noqa: E731
        return pipeline_of(style._replace(case=style.case._replace(make=make)))

    with context_of(style):
        pipeline = pipeline_on(fm.current_mesh)
        found = run_steps(pipeline.step, pipeline.init_state(), style.case.batch(ROWS))
        assert differences(plain("maxtext_listed"), found) == []
        message = r"constrains arrays to a mesh of devices, .*\n.*maxtext.py:\d+ .* on 8 devices"
        with pytest.raises(CutError, match=message):
            pipeline_on(lambda: mesh_of(style))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        (
            "llm_explicit",
            lambda mesh: llm_explicit.make(mesh=mesh),
            r"llm_examples.py:\d+ \(Weights.init\): .* on 8 devices\n.*pass flax_mesh.current_mesh\(\)",
        ),
        (
            "maxtext_scanned",
            lambda mesh: maxtext.make(param_scan_axis=1),
            "layers is one layer, since it is neither a list nor a stack, whose arrays have the layers as dim 0",
        ),
    ],
)
def test_a_pipeline_refuses_a_fixed_mesh_and_a_stack_along_a_later_dim(name, make, message):
    style = BY_NAME[name]
    make = functools.partial(make, mesh_of(style))
    with context_of(style), pytest.raises(CutError, match=message):
        pipeline_of(style._replace(case=style.case._replace(make=make)))
