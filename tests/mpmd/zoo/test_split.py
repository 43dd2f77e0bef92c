"""Unmodified models of many styles, split and pipelined, compared with the plain step on one device."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.mpmd import MpmdMesh, Pipeline, StagedModel, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.step.state import TrainState
from flax_mesh.tree import named_leaves
from tests.mpmd.zoo.base import OPTIMIZER, Case, Run, leaves_of, plain_run, seed_of
from tests.mpmd.zoo.models import BY_NAME, CASES, PARAMETERS

ROWS, MICROBATCHES, STEPS = 8, 4, 2  # equal to the defaults of plain_run
# Models in which several layers share parameters, or layers are called again after all other layers.
SHARING = {"listed_twice", "listed_alternating", "looped", "borrowed_kernel", "shared_gate", "tied_variables"}
SHARING |= {"unread_variables"}  # a variable that no stage reads is stored where its value is computed
# Models that send more than one activation: skips, memories, conditions, losses and metrics of earlier layers.
SENDING_MORE = {"looped", "dicts", "scanned_in_jax", "sow_popped", "sow_captured", "first_layer_bias", "shared_gate"}
SENDING_MORE |= {"encoder_decoder", "experts", "u_net", "dense_skips", "two_towers", "diffusion", "autoencoder"}
SENDING_MORE |= {"position_tables", "regularised", "early_exits"}
SENDING_MORE |= {"statistics_of_the_first_layer", "clipped_kernel", "teacher"}
# Models of which several stages read a variable that changes, so that each of them has its own copy.
COPYING = {"counter", "statistics_of_the_first_layer", "clipped_kernel", "teacher"}

ignore_sow = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
# Every model in two stages; models whose stages share parameters or have copies of a variable also in four.
RUNS = [pytest.param(*p.values, 2, marks=p.marks, id=f"{p.id}-2") for p in PARAMETERS]
RUNS += [
    pytest.param(case, 4, marks=pytest.mark.slow, id=f"{case.name}-4")
    for case in CASES
    if case.name in SHARING | COPYING
]


def microbatch(case: Case):
    return case.batch(ROWS // MICROBATCHES)


def cut(case: Case, num_stages: int, **kinds) -> StagedModel:
    return split_stages(
        case.loss_fn, case.make, microbatch(case), layers=case.layers, num_stages=num_stages, wrt=case.wrt, **kinds
    )


def pipeline_of(case: Case, num_stages: int, schedule: Schedule | None = None, **kinds) -> Pipeline:
    devices = jax.devices()[:num_stages]
    mesh = MpmdMesh(create_mesh((num_stages, 1), ("pp", "fsdp"), devices=devices), "pp")
    schedule = schedule or make_schedule("1f1b", num_groups=num_stages, num_microbatches=MICROBATCHES)
    return Pipeline(cut(case, num_stages), OPTIMIZER, mesh=mesh, schedule=schedule, seed=seed_of(case), **kinds)


def merged_leaves(state: TrainState) -> dict[str, np.ndarray]:
    """Leaves by path, with the chunks of a stack ("from 2") concatenated."""
    found: dict[str, list[np.ndarray]] = {}
    for path, leaf in leaves_of(state).items():
        found.setdefault(re.sub(r"/from \d+$", "", path), []).append(leaf)
    return {path: parts[0] if len(parts) == 1 else np.concatenate(parts) for path, parts in found.items()}


def piped_run(pipeline: Pipeline, case: Case, change=lambda first, state: state) -> Run:
    """Like `plain_run`. `change(leaves of the first state, state)` may corrupt the state between two steps."""
    state = pipeline.init_state()
    before, first, metrics = merged_leaves(state), leaves_of(state), []
    for _ in range(STEPS):
        state, row = pipeline.step(state, case.batch(ROWS))
        metrics.append({name: np.asarray(x) for name, x in row.items()})
        state = change(first, state)
    return Run(before, merged_leaves(state), metrics)


def differences(want: Run, have: Run, rtol: float = 1e-5) -> list[str]:
    """Names of leaves and metrics that differ by more than rounding."""
    pairs = {f"after {path}": (x, have.after.get(path)) for path, x in want.after.items()}
    pairs |= {f"before {path}": (x, have.before.get(path)) for path, x in want.before.items()}
    for step, (a, b) in enumerate(zip(want.metrics, have.metrics, strict=True)):
        pairs |= {f"step {step}: {name}": (a.get(name), b.get(name)) for name in a.keys() | b.keys()}
    extra = [f"unexpected: {path}" for path in have.after.keys() - want.after.keys()]
    return extra + [name for name, (a, b) in pairs.items() if not _close(a, b, rtol)]


def _close(a: np.ndarray | None, b: np.ndarray | None, rtol: float) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not np.issubdtype(a.dtype, np.inexact):
        return np.array_equal(a, b)
    # Sums that cancel have an error relative to their terms, so compare relative to the largest value of the leaf.
    return np.allclose(a, b, rtol=0.0, atol=rtol * np.abs(a).max(initial=0.0))


@pytest.mark.sampled
@ignore_sow
@pytest.mark.parametrize(("case", "num_stages"), RUNS)
def test_a_pipeline_equals_the_plain_step(case: Case, num_stages: int):
    assert differences(plain_run(case), piped_run(pipeline_of(case, num_stages), case)) == []


@pytest.mark.sampled
@ignore_sow
@pytest.mark.parametrize("num_stages", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layer_is_in_one_stage_and_a_chain_sends_one_value_per_boundary(case: Case, num_stages: int):
    staged = cut(case, num_stages)
    stages = [staged.stage_of(layer) for layer in staged.ranks]
    assert stages == sorted(stages) and set(stages) == set(range(num_stages))  # in the order of the calls
    for leaf, users in zip(staged.leaves, staged.users, strict=True):
        layer = leaf.layer
        if layer is not None and layer in staged.ranks and case.name not in SHARING:
            assert users == (staged.stage_of(layer),), leaf.path
    every = {path for path, _ in named_leaves(nnx.state(nnx.eval_shape(case.make)))}
    assert {leaf.path for leaf in staged.leaves} == every
    received = [len(stage.received) for stage in staged.cut(staged.example).stages]
    if case.name in SENDING_MORE:
        assert num_stages < 4 or sum(received) > 3
    else:
        assert received == [0] + [1] * (num_stages - 1)


@pytest.mark.parametrize(
    "name", ["counter", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(COPYING - {"counter"}))]
)
def test_two_stages_of_one_group_have_their_own_copies_of_a_variable(name: str):
    case = BY_NAME[name]
    mesh = MpmdMesh(create_mesh((2, 1), ("pp", "fsdp"), devices=jax.devices()[:2]), "pp")
    schedule = make_schedule("interleaved-1f1b", num_groups=2, num_microbatches=MICROBATCHES)
    pipeline = Pipeline(cut(case, 4), OPTIMIZER, mesh=mesh, schedule=schedule, seed=seed_of(case))
    assert differences(plain_run(case), piped_run(pipeline, case)) == []


@pytest.mark.slow
def test_the_comparison_detects_a_dropped_microbatch():
    case = BY_NAME["residual"]
    full = make_schedule("1f1b", num_groups=2, num_microbatches=MICROBATCHES)
    rows = tuple(tuple(action for action in row if action.microbatch != 1) for row in full.rows)
    pipeline = pipeline_of(case, 2, full)
    pipeline.schedule = replace(full, rows=rows)  # bypasses the check of the pipeline, which would raise
    found = differences(plain_run(case), piped_run(pipeline, case))
    assert "step 0: loss" in found and "after model/layers/0/up/kernel" in found


@pytest.mark.slow
def test_the_comparison_detects_swapped_stages():
    case, swapped = BY_NAME["residual"], BY_NAME["reversed"]._replace(name="residual")
    found = differences(plain_run(case), piped_run(pipeline_of(swapped, 2), swapped))
    assert "step 0: loss" in found and "after model/layers/0/up/kernel" in found


def test_the_comparison_detects_stale_weights():
    case = BY_NAME["residual"]
    pipeline = pipeline_of(case, 2)

    def stale(first, state):  # as if a group always used its initial weights
        old = {"model/layers/3/up/kernel", "model/layers/3/down/kernel"}
        named = named_leaves(state.to_nnx())
        leaves = [jax.device_put(first[path], x.sharding) if path in old else x for path, x in named]
        return TrainState(tuple(leaves), state.definition)

    found = differences(plain_run(case), piped_run(pipeline, case, stale))
    assert "step 1: loss" in found and "step 0: loss" not in found
