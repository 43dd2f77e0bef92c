"""Pipeline: memory, transfers, compilation, and the input that it refuses."""

import math
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import partitioned
from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.mpmd import CutError, Pipeline, split_stages
from flax_mesh.mpmd.runtime.profile import with_split_backward
from flax_mesh.mpmd.schedules import Action, Schedule, make_schedule
from flax_mesh.mpmd.schedules.schedule import forward_schedule
from flax_mesh.mpmd.schedules.simulate import peak_activations
from flax_mesh.mpmd.split.update import SHARED
from tests.mpmd.runtime.test_pipeline import (
    FAST,
    PLAIN_SGD,
    Net,
    Stack,
    build,
    compare,
    groups,
    make_net,
    net_batch,
    net_case,
    net_loss,
)

pytestmark = pytest.mark.usefixtures("quick_unless_slow")
P = jax.sharding.PartitionSpec
FOUR_STAGES = make_schedule("zb-v", num_groups=2, num_microbatches=4)


def test_an_optimizer_over_arrays_of_several_groups_is_refused():
    joined = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (
            jax.tree.map(lambda u: u * jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)]).max(), updates),
            state,
        ),
    )
    pipeline = build(make_net, net_loss, net_batch(4), 2, joined)
    with pytest.raises(
        ConfigError, match=r"several pipeline groups: the gradient of embed/embedding, .*only through scalars"
    ):
        pipeline.step(pipeline.init_state(), net_batch(4))


@pytest.mark.slow
def test_parameters_and_moments_are_stored_only_on_their_group():
    mesh = groups(pp=2, dp=2)
    pipeline = build(make_net, net_loss, net_batch(4), 2, optax.adam(1e-2), mesh=mesh, rules=[(".*", ())])
    state = pipeline.init_state()
    state, _ = pipeline.step(state, net_batch(4))
    staged, meshes = pipeline.staged, pipeline.groups
    stored = {device: 0 for mesh in meshes for device in mesh.devices.flat}
    for owner, leaf in zip(pipeline.placement.owners, state.leaves, strict=True):
        where = {shard.device for shard in leaf.addressable_shards}
        expected = pipeline.mesh.jax_mesh if owner.group == SHARED else meshes[owner.group]
        assert where == set(expected.devices.flat), owner.path
        if owner.group != SHARED:
            for shard in leaf.addressable_shards:
                stored[shard.device] += shard.data.nbytes
    for group, mesh in enumerate(meshes):
        own = [leaf for leaf, users in zip(staged.leaves, staged.users, strict=True) if users[0] == group]
        size = 3 * sum(math.prod(leaf.shape) * 4 for leaf in own)  # the leaf and its two moments
        assert all(stored[device] == size for device in mesh.devices.flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("1f1b", lambda s, m: min(4 - s, m)),
        pytest.param("gpipe", lambda s, m: m, marks=pytest.mark.slow),
        pytest.param("zb-h1", lambda s, m: min(4, m), marks=pytest.mark.slow),
    ],
)
def test_live_residuals_match_the_peak_activations_of_the_schedule(name, most):
    count = 6
    pipeline = build(make_net, net_loss, net_batch(2 * count), count, PLAIN_SGD, name=name, mesh=groups(pp=4))
    alive = {stage: [] for stage in range(4)}
    peak = dict.fromkeys(alive, 0)

    def watch(action: Action, saved) -> None:
        if action.kind == "F":
            received, residuals, *_ = saved[action.stage, action.microbatch]
            buffers = [weakref.ref(x) for x in jax.tree.leaves((received, residuals))]
            assert buffers
            alive[action.stage].append((action.microbatch, buffers))
        for stage, entries in alive.items():
            live = {m for m, buffers in entries if any(ref() is not None for ref in buffers)}
            peak[stage] = max(peak[stage], len(live))

    pipeline.on_action = watch
    pipeline.step(pipeline.init_state(), net_batch(2 * count))
    assert tuple(peak.values()) == peak_activations(pipeline.schedule)
    assert all(peak[stage] <= most(stage, count) for stage in peak)
    assert name == "zb-h1" or peak == {stage: most(stage, count) for stage in peak}


@pytest.mark.slow
def test_one_transfer_each_way_per_stage_boundary_and_microbatch():
    pipeline, _ = net_case(4, 5, "1f1b")
    assert pipeline.num_transfers == 2 * (4 - 1) * 5


def test_a_batch_in_64_bits_is_that_in_32_bits():
    narrow = net_batch(4)
    wide = {"x": narrow["x"].astype(np.int64), "y": narrow["y"].astype(np.int64)}
    pipeline = build(make_net, net_loss, wide, 2, PLAIN_SGD)
    state = pipeline.init_state()
    losses = [pipeline.evaluate(state, batch)["loss"] for batch in (wide, narrow)]
    assert losses[0] == losses[1] and len(pipeline.compiled) == 1


@pytest.mark.slow
def test_nothing_compiles_after_the_second_step(compilations):
    pipeline = build(make_net, net_loss, net_batch(8), 4, optax.adamw(1e-3))
    state = pipeline.init_state()
    for _ in range(2):
        state, _ = pipeline.step(state, net_batch(8))
    before = len(compilations)
    for seed in range(3):
        state, _ = pipeline.step(state, net_batch(8, seed))
    assert len(compilations) == before
    for _ in range(2):
        state, metrics = pipeline.step(state, net_batch(16))  # a new microbatch shape compiles again
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.slow
def test_full_remat_stores_no_residuals():
    without = build(make_net, net_loss, net_batch(4), 2, PLAIN_SGD)
    full = build(make_net, net_loss, net_batch(4), 2, PLAIN_SGD, remat="full")
    counts = {}
    for name, pipeline in (("none", without), ("full", full)):
        sizes = counts[name] = []
        pipeline.on_action = lambda action, saved, sizes=sizes: sizes.extend(len(entry[1]) for entry in saved.values())
        pipeline.step(pipeline.init_state(), net_batch(4))
    assert max(counts["full"]) == 0 < max(counts["none"])
    compare(make_net, net_loss, [net_batch(4)], 2, PLAIN_SGD, remat="full")


def test_weights_are_not_residuals():
    pipeline = build(make_net, net_loss, net_batch(4), 2, PLAIN_SGD)
    shapes = []
    pipeline.on_action = lambda action, saved: shapes.extend(x.shape for entry in saved.values() for x in entry[1])
    pipeline.step(pipeline.init_state(), net_batch(4))
    assert shapes
    assert (8, 8) not in shapes and (16, 8) not in shapes


BAD = {
    "rows": (lambda p: p.step(p.init_state(), net_batch(3)), ConfigError, "'x' has 3 rows, not divisible into 2"),
    "ragged": (
        lambda p: p.step(p.init_state(), net_batch(4) | {"y": net_batch(2)["y"]}),
        ConfigError,
        r"different numbers of rows, \[2, 4\]",
    ),
    "count": (lambda p: p.evaluate(p.init_state(), net_batch(4), -1), ConfigError, "at least 1, got -1"),
    "groups": (
        lambda p: Pipeline(p.staged, PLAIN_SGD, mesh=groups(pp=4), schedule=p.schedule),
        ConfigError,
        "has 2 groups, the mesh has 4 along 'pp'",
    ),
    "stages": (
        lambda p: Pipeline(p.staged, PLAIN_SGD, mesh=p.mesh, schedule=FOUR_STAGES),
        ConfigError,
        r"has 4 stages, but the model is split into 2; pass this schedule to split_stages",
    ),
    "remat": (
        lambda p: Pipeline(p.staged, PLAIN_SGD, mesh=p.mesh, schedule=p.schedule, remat="keep"),  # pyright: ignore[reportArgumentType]
        ConfigError,
        "remat must be one of 'none', 'cheap', 'full', got 'keep'",
    ),
    "pp in a spec": (
        lambda p: Pipeline(p.staged, PLAIN_SGD, mesh=p.mesh, schedule=p.schedule, rules=[(".*", P("pp"))]),
        ShardingError,
        r"model/layers/.0..3./kernel: .*'pp'.*\n[^$]*must not contain 'pp'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    call, error, message = BAD[name]
    pipeline = build(make_net, net_loss, net_batch(4), 2, PLAIN_SGD)
    with pytest.raises(error, match=message):
        call(pipeline)


GOOD = make_schedule("1f1b", num_groups=2, num_microbatches=2)


def with_row(group: int, text: str) -> Schedule:
    """1F1B with one row replaced."""
    row = tuple(Action.parse(word) for word in text.split())
    return replace(GOOD, rows=tuple(row if at == group else old for at, old in enumerate(GOOD.rows)))


WRONG = {
    "a missing backward": (with_row(0, "0F0 0F1 0B1"), "0B0 is missing from the row of group 0"),
    "a missing forward": (with_row(1, "1F0 1B0 1B1"), "1F1 is missing from the row of group 1"),
    "a doubled forward": (with_row(0, "0F0 0F1 0F1 0B0 0B1"), "0F1 appears 2 times"),
    "a row of another group": (
        replace(GOOD, rows=GOOD.rows[::-1]),
        "1F1 appears in the row of group 0, but its stage is on group 1",
    ),
    "an unexpected weight action": (
        with_row(0, "0F0 0F1 0B0 0W0 0B1"),
        "0W0 appears in the table, but the schedule has",
    ),
    "a backward before its forward": (with_row(0, "0F0 0B1 0F1 0B0"), "0B1 comes before 0F1, which it depends on"),
    "no backward": (forward_schedule(2, 2, (0, 1)), "forward has no backward actions, so it cannot train"),
    "slices of sequences": (
        make_schedule("seq1f1b-2", num_groups=2, num_microbatches=2),
        "schedule seq1f1b-2 runs slices of sequences, but a Pipeline runs whole sequences; use 1f1b",
    ),
    "nothing": (replace(GOOD, rows=((), ())), "1f1b has no backward actions"),
}


@pytest.fixture(scope="module")
def two_stages():
    return split_stages(net_loss, make_net, net_batch(2), num_stages=2)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_refused_before_anything_is_placed(name, two_stages, monkeypatch):
    schedule, message = WRONG[name]
    monkeypatch.setattr("flax_mesh.mpmd.runtime.pipeline.place", None)
    with pytest.raises(ConfigError, match=message) as caught:
        Pipeline(two_stages, PLAIN_SGD, mesh=groups(pp=2), schedule=schedule, remat="keep")  # pyright: ignore[reportArgumentType]
    assert "remat must be one of 'none', 'cheap', 'full', got 'keep'" in caught.value.problems  # with the others


@pytest.mark.parametrize("schedule", [GOOD, with_split_backward(GOOD), with_row(1, "1F0 1F1 1B0 1B1")])
def test_a_schedule_that_can_run_is_accepted(schedule, two_stages):
    Pipeline(two_stages, PLAIN_SGD, mesh=groups(pp=2), schedule=schedule)


@pytest.mark.slow
def test_groups_stages_and_microbatches_follow_from_mesh_schedule_and_batch():
    mesh, batch = groups(pp=2), net_batch(8)
    staged = split_stages(net_loss, make_net, batch, mesh=mesh, schedule="interleaved-1f1b", num_microbatches=4)
    schedule = make_schedule("interleaved-1f1b", num_groups=2, num_microbatches=4)
    assert staged.schedule == schedule and staged.groups is mesh
    explicit = split_stages(net_loss, make_net, net_batch(2), num_stages=schedule.num_stages, mesh=mesh.unstack[0])
    assert str(staged) == str(explicit) and staged.num_stages == 4
    results = []
    for pipeline in (
        Pipeline(staged, PLAIN_SGD, compiler_options=FAST),
        Pipeline(explicit, PLAIN_SGD, mesh=mesh, schedule=schedule, compiler_options=FAST),
    ):
        results.append(pipeline.step(pipeline.init_state(), batch)[1])
    assert results[0] == results[1]
    assert Pipeline(staged, PLAIN_SGD, schedule=with_split_backward(schedule)).schedule != schedule  # an override


def test_a_batch_is_divided_into_microbatches_without_a_schedule_too():
    whole = split_stages(net_loss, make_net, net_batch(8), num_stages=2, num_microbatches=4)
    part = split_stages(net_loss, make_net, net_batch(2), num_stages=2)
    assert whole.example == part.example


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({}, "the number of stages is unknown: pass schedule= with mesh=, or num_stages="),
        (
            {"schedule": "1f1b", "num_microbatches": 2},
            r"schedule='1f1b' needs the number of groups and of microbatches",
        ),
        ({"schedule": "1f1b", "mesh": 2}, r"schedule='1f1b' needs the number of groups and of microbatches"),
        ({"schedule": GOOD, "mesh": 4}, "has 2 groups, the mesh has 4 along 'pp'; make both the same"),
        ({"schedule": GOOD, "num_microbatches": 8}, "num_microbatches=8 differs from the 2 of schedule 1f1b"),
        ({"schedule": GOOD, "num_stages": 3}, "num_stages=3 differs from the 2 of schedule 1f1b"),
        ({"num_stages": 2, "num_microbatches": 3}, "has 8 rows, not divisible into 3 microbatches"),
        ({"schedule": "1f1c", "mesh": 2, "num_microbatches": 2}, "unknown schedule '1f1c'"),
    ],
)
def test_mesh_schedule_and_batch_that_do_not_fit_each_other(kinds, message):
    if "mesh" in kinds:
        kinds = {**kinds, "mesh": groups(pp=kinds["mesh"])}
    with pytest.raises(ValueError, match=message):
        split_stages(net_loss, make_net, net_batch(8), **kinds)


def test_a_pipeline_needs_a_mesh_and_a_schedule(two_stages):
    with pytest.raises(ConfigError, match=r"the pipeline needs mesh and schedule: pass mesh=MpmdMesh"):
        Pipeline(two_stages, PLAIN_SGD)
    with pytest.raises(ConfigError, match=r"the pipeline needs schedule: pass mesh="):
        Pipeline(two_stages, PLAIN_SGD, mesh=groups(pp=2))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="unknown schedule '1f1c'; did you mean 1f1b"):
        make_schedule("1f1c", num_groups=2, num_microbatches=2)


CUTS = {
    "nothing there": ({"layers": "blocks"}, r"layers='blocks': Net has nothing there. It has lists at 'layers'."),
    "too many": ({"num_stages": 5}, r"has 4 layers, of which the loss calls 4: too few for 5 stages"),
    "no stage": ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
    "cuts": ({"num_stages": 3, "cuts": [3, 2]}, r"cuts=\[3, 2\] .* must be 2 increasing numbers between 1 and 3"),
    "no layers": ({"layers": ()}, "layers is empty; name the list or the stack to cut"),
    "nothing trained": ({"wrt": nnx.LoRAParam}, "wrt=LoRAParam must match a variable of the model; it matches none"),
    "no list": (
        {"layers": "embed"},
        "embed has 1 layer, of which the loss calls 1: too few for 2 stages. Name another list of layers. It has lists",
    ),
    "balance": ({"num_stages": 2, "balance": "bytes"}, "balance must be 'flops' or 'count', got 'bytes'"),
}


@pytest.mark.parametrize("name", CUTS)
def test_invalid_splits_are_refused(name):
    kinds, message = CUTS[name]
    with pytest.raises(CutError, match=message):
        split_stages(net_loss, make_net, net_batch(2), **({"num_stages": 2} | kinds))


class Renamed(nnx.Module):
    """Net with its layers under another name."""

    def __init__(self, rngs: nnx.Rngs):
        net = Net(rngs)
        self.embed, self.blocks = net.embed, net.layers

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.embed.attend(x)


def split_one(cls, **kinds):
    return split_stages(net_loss, lambda: cls(nnx.Rngs(0)), net_batch(2), num_stages=2, **kinds)


def test_layers_are_those_of_the_table_and_the_argument_overrides_them():
    carried = partitioned([(".*", ())], layers="blocks")(type("Carried", (Renamed,), {}))
    assert split_one(carried).layers == split_one(Renamed, layers="blocks").layers == ("blocks",)
    wrong = partitioned([(".*", ())], layers="layers")(type("Wrong", (Renamed,), {}))
    assert split_one(wrong, layers="blocks").layers == ("blocks",)
    with pytest.raises(CutError, match=r"layers='layers': Wrong has nothing there\. It has lists at 'blocks'\."):
        split_one(wrong)
    assert split_one(Net).layers == ("layers",)  # a list of that name needs no table


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Stack, r"layers of Stack must be named: .* its `layers` is not a list\. .* modules at 'embed', 'layers'\."),
        (Renamed, r"layers of Renamed must be named: .* it has no list `layers`\. .* It has lists at 'blocks'\."),
    ],
)
def test_layers_must_be_named_if_they_are_not_obvious(cls, message):
    with pytest.raises(CutError, match=message):
        split_one(cls)


def test_ordered_effects_are_refused():
    def loss_of(model, batch):
        jax.debug.print("{}", batch["x"].sum(), ordered=True)
        return net_loss(model, batch)

    with pytest.raises(CutError, match=r"ordered effects .* Use ordered=False"):
        split_stages(loss_of, make_net, net_batch(2), num_stages=2)


def test_staged_models_print_their_stages():
    staged = split_stages(net_loss, make_net, net_batch(2), num_stages=2, cuts=[3])
    assert [line.split(";")[0] for line in str(staged).splitlines()] == [
        "stage 0: layers/0 .. layers/2",
        "stage 1: layers/3",
        "  receives f32[2,3,8], 192 B",
        "layers: a list of 4",
    ]
