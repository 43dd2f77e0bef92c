"""Unmodified models of many styles, split and pipelined, compared with the plain step on one device."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from flax_mesh.step.state import TrainState
from flax_mesh.tree import named_leaves
from tests.mpmd.zoo.base import (
    FAST,
    OPTIMIZER,
    Case,
    Run,
    differences,
    groups,
    language_loss,
    leaves_of,
    plain_run,
    run_steps,
    seed_of,
    text,
)
from tests.mpmd.zoo.models import BY_NAME, CASES
from tests.mpmd.zoo.params import Model
from tests.mpmd.zoo.text import DECODERS

ROWS = 2  # of a microbatch
# Models in which several layers share parameters, or layers are called again after all other layers.
SHARING = {"listed_twice", "listed_alternating", "looped", "borrowed_kernel"}
SHARING |= {"unread_variables"}  # a variable that no stage reads is stored where its value is computed
FROZEN_COPIES = {"teacher", "reference"}  # of the layers, beside them
# Models that send more than one activation: skips, conditions, losses and metrics of earlier layers.
SENDING_MORE = {"looped", "dicts", "scanned_in_jax", "sow_popped", "sow_captured", "encoder_decoder"}
SENDING_MORE |= {"dense_skips", "two_towers", "diffusion", "position_tables", "regularised"}
SENDING_MORE |= {"first_layer_bias", "statistics_of_the_first_layer", "clipped_kernel", *FROZEN_COPIES}
SENDING_MORE |= {"decoder_experts_scanned"}
# Models of which several stages read a variable that changes, so that each of them has a separate copy.
COPYING = {"counter", "statistics_of_the_first_layer", "clipped_kernel"}

ignore_shares = pytest.mark.filterwarnings("ignore:the stages have:UserWarning")  # of a looped model
ignore_sow = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
# Every model in two stages; models whose stages share parameters or have copies of a variable also in four, on four
# groups or two; models whose derivatives are a special case also with a split backward pass.
SPLIT_BACKWARD = {"changed_parameters", "changed_stack", "bfloat16_stream", "reference"}
SPLIT_BACKWARD |= {case.name for case in DECODERS}
RUNS = [(case.name, 2, "1f1b") for case in CASES]
RUNS += [(name, 4, "1f1b") for name in sorted(SHARING | COPYING | FROZEN_COPIES | {"bfloat16_stream"})]
RUNS += [(name, 2, "interleaved-1f1b") for name in sorted(COPYING | FROZEN_COPIES)]
RUNS += [(name, 2, "zb-h1") for name in sorted(SPLIT_BACKWARD)]


@functools.lru_cache(maxsize=2)  # compiled once for several tests
def pipeline_of(case: Case, mesh: MpmdMesh, name: str = "1f1b", count: int = 4, optimizer=OPTIMIZER) -> Pipeline:
    staged = split_stages(
        case.loss_fn,
        case.make,
        case.batch(ROWS * count),
        mesh=mesh,
        schedule=make_schedule(name, num_groups=mesh.mpmd_dim, num_microbatches=count),
        layers=case.layers,
        wrt=case.wrt,
    )
    return Pipeline(staged, optimizer, seed=seed_of(case), compiler_options=FAST)


def piped_run(case: Case, pipeline: Pipeline, **kinds: Any) -> Run:
    return run_steps(pipeline.step, pipeline.init_state(), case.batch(ROWS * 4), **kinds)


MOMENT = "optimizer/opt_state/0/mu/"


@pytest.mark.sampled
@ignore_sow
@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_the_plain_step_trains_every_used_parameter(case: Case):
    run = plain_run(case)
    assert all(np.isfinite(x).all() for row in run.metrics for x in row.values())
    assert run.metrics[0]["loss"] != run.metrics[1]["loss"]
    moments = {path.removeprefix(MOMENT): x for path, x in run.after.items() if path.startswith(MOMENT)}
    unchanged = {path for path, moment in moments.items() if not moment.any()}
    assert moments and unchanged == set(case.unused)
    for path in moments.keys() - unchanged:
        assert not np.array_equal(run.before[f"model/{path}"], run.after[f"model/{path}"]), path


@ignore_sow
def test_sown_values_that_remain_in_the_model_raise():
    with pytest.raises(ValueError, match=r"the step changed:\n(.*\n)*layers/.*/change.*: the call added"):
        split_stages(language_loss, BY_NAME["sow_popped"].make, text(ROWS), num_stages=2)


@pytest.mark.sampled
@ignore_sow
@ignore_shares
@pytest.mark.parametrize(("name", "num_groups", "schedule"), RUNS)
def test_a_pipeline_equals_the_plain_step(name: str, num_groups: int, schedule: str):
    case = BY_NAME[name]
    assert differences(plain_run(case), piped_run(case, pipeline_of(case, groups(pp=num_groups), schedule))) == []


@functools.cache
def of_depth(depth: int) -> Case:
    return BY_NAME["tied_embedding"]._replace(make=lambda: Model(depth))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCHEDULE_NAMES, "v-5"])
@pytest.mark.parametrize("num_groups", [2, 4])
def test_every_schedule_equals_the_plain_step_for_any_number_of_microbatches(num_groups: int, name: str):
    ran = 0
    for count in sorted({1, 2, num_groups, 2 * num_groups, 3 * num_groups + 1}):
        try:
            schedule = make_schedule(name, num_groups=num_groups, num_microbatches=count)
        except ValueError:
            continue  # the schedule is not defined for these sizes
        case = of_depth(max(4, schedule.num_stages))
        pipeline = pipeline_of(case, groups(pp=num_groups), name, count)
        have = run_steps(pipeline.step, pipeline.init_state(), case.batch(ROWS * count))
        assert differences(plain_run(case, microbatches=count), have) == [], count
        ran += 1
    assert ran or name == "v-5"  # for 3 groups or more


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}, {"dp": 2, "sp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_groups_of_several_devices_equal_one_device(sizes: dict[str, int]):
    case = BY_NAME["decoder"]
    pipeline = pipeline_of(case, groups(pp=2, **sizes))
    assert differences(plain_run(case), piped_run(case, pipeline)) == []
    kernels = [x for path, x in named_leaves(pipeline.init_state().to_nnx()) if path.endswith("up/kernel")]
    split = sizes.get("fsdp", 1) * sizes.get("tp", 1)
    assert kernels and all(x.size == split * x.addressable_shards[0].data.size for x in kernels)


OPTIMIZERS = {
    "clipped": (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)), 1e-6),
    "not clipped": (optax.chain(optax.clip_by_global_norm(1e3), optax.sgd(1.0)), 1e-6),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=4), 1e-4),
    "muon": (optax.contrib.muon(1e-2), 1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_whose_scalars_depend_on_all_groups_equals_the_plain_step(name: str):
    case, (optimizer, rtol) = BY_NAME["tied_embedding"], OPTIMIZERS[name]
    have = piped_run(case, pipeline_of(case, groups(pp=2), optimizer=optimizer))
    assert differences(plain_run(case, optimizer), have, rtol) == []


@pytest.mark.sampled
@ignore_sow
@ignore_shares
@pytest.mark.parametrize("num_stages", [4, 1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_every_layer_is_in_one_stage_and_a_chain_sends_one_value_per_boundary(case: Case, num_stages: int):
    kinds: dict[str, Any] = {"layers": case.layers, "wrt": case.wrt, "num_stages": num_stages}
    staged = split_stages(case.loss_fn, case.make, case.batch(ROWS), **kinds)
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


@pytest.mark.parametrize(("name", "is_full"), [("checkpointed_groups", True), ("residual", False)])
def test_a_stage_recomputes_everything_if_a_remat_spans_several_layers(name: str, is_full: bool):
    case = BY_NAME[name]
    assert split_stages(case.loss_fn, case.make, case.batch(ROWS), num_stages=2).needs_full_remat == is_full


# --- the comparison itself ---


def test_the_comparison_detects_stale_weights():
    case = BY_NAME["counter"]
    pipeline = pipeline_of(case, groups(pp=2), "1f1b")
    first = leaves_of(pipeline.init_state())

    def stale(state):  # as if a group always used its initial weights
        old = {"model/layers/3/linear/kernel", "model/layers/3/linear/bias"}
        named = named_leaves(state.to_nnx())
        leaves = [jax.device_put(first[path], x.sharding) if path in old else x for path, x in named]
        return TrainState(tuple(leaves), state.definition)

    found = differences(plain_run(case), piped_run(case, pipeline, change=stale))
    assert "step 1: loss" in found and "step 0: loss" not in found
