"""Batches, schedules and arguments that Pipeline and split_stages refuse, and the layers that they find."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.core import Tracer

from flax_mesh import partitioned
from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.mpmd import CutError, Pipeline, chain_stages, split_stages
from flax_mesh.mpmd.runtime.profile import with_split_backward
from flax_mesh.mpmd.schedules import Action, Schedule, make_schedule
from flax_mesh.mpmd.schedules.schedule import forward_schedule
from tests.mpmd.runtime.pipelines import PLAIN_SGD, Net, Stack, build_net, groups, make_net, net_batch, net_loss

P = jax.sharding.PartitionSpec
FOUR_STAGES = make_schedule("zb-v", num_groups=2, num_microbatches=4)


@pytest.fixture(scope="module")
def pipeline():
    return build_net()


@pytest.fixture(scope="module")
def state(pipeline):
    return pipeline.init_state()


def again(pipeline, **kinds):
    """The same stages in another Pipeline."""
    return Pipeline(pipeline.staged, PLAIN_SGD, **{"mesh": pipeline.mesh, "schedule": pipeline.schedule, **kinds})


RAGGED = net_batch(4) | {"y": net_batch(2)["y"]}
BAD = {
    "rows": (lambda p, state: p.step(state, net_batch(3)), r"batch of 3 rows is not divisible by 2 \(num"),
    "ragged": (lambda p, state: p.step(state, RAGGED), r"different numbers of rows, \[2, 4\]"),
    "count": (lambda p, state: p.evaluate(state, net_batch(4), -1), "at least 1, got -1"),
    "no count": (lambda p, state: p.evaluate(state, net_batch(4), 0), "at least 1, got 0"),
    "groups": (lambda p, _: again(p, mesh=groups(pp=4)), "has 2 groups, the mesh has 4 along 'pp'"),
    "stages": (lambda p, _: again(p, schedule=FOUR_STAGES), "has 4 stages, but the model is split into 2; pass this"),
    "remat": (lambda p, _: again(p, remat="keep"), "remat must be one of 'none', 'cheap', 'full', got 'keep'"),
    "pp in a spec": (lambda p, _: again(p, rules=[(".*", P("pp"))]), r"kernel: .*'pp'.*\n[^$]*must not contain 'pp'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name, pipeline, state):
    call, message = BAD[name]
    with pytest.raises(ShardingError if name == "pp in a spec" else ConfigError, match=message):
        call(pipeline, state)


GOOD = make_schedule("1f1b", num_groups=2, num_microbatches=2)
TWO = {"num_stages": 2}


def with_row(group: int, text: str) -> Schedule:
    """1F1B with one row replaced."""
    row = tuple(Action.parse(word) for word in text.split())
    return replace(GOOD, rows=tuple(row if at == group else old for at, old in enumerate(GOOD.rows)))


# tests/mpmd/schedules/test_validate.py has all mistakes that `check_schedule` finds.
WRONG = {
    "a missing backward": (with_row(0, "0F0 0F1 0B1"), "0B0 is missing from the row of group 0"),
    "no backward": (forward_schedule(2, 2, (0, 1)), "forward has no backward actions, so it cannot train"),
    "nothing": (replace(GOOD, rows=((), ())), "1f1b has no backward actions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_refused_before_anything_is_placed(name, pipeline, monkeypatch):
    schedule, message = WRONG[name]
    monkeypatch.setattr("flax_mesh.mpmd.runtime.pipeline.place", None)
    with pytest.raises(ConfigError, match=message) as caught:
        again(pipeline, schedule=schedule, remat="keep")
    assert "remat must be one of 'none', 'cheap', 'full', got 'keep'" in caught.value.problems  # with the others


def test_a_schedule_that_can_run_is_accepted(pipeline):
    for schedule in (GOOD, with_split_backward(GOOD), with_row(1, "1F0 1F1 1B0 1B1")):
        assert again(pipeline, schedule=schedule).schedule == schedule


def test_a_pipeline_needs_a_mesh_and_a_schedule():
    staged = split_stages(net_loss, make_net, net_batch(2), num_stages=2)
    with pytest.raises(ConfigError, match=r"the pipeline needs mesh and schedule: pass mesh=MpmdMesh"):
        Pipeline(staged, PLAIN_SGD)
    with pytest.raises(ConfigError, match=r"the pipeline needs schedule: pass mesh="):
        Pipeline(staged, PLAIN_SGD, mesh=groups(pp=2))


# --- split_stages ---


def test_a_batch_is_divided_into_microbatches_without_a_schedule_too():
    whole = split_stages(net_loss, make_net, net_batch(8), num_stages=2, num_microbatches=4)
    part = split_stages(net_loss, make_net, net_batch(2), num_stages=2)
    assert whole.example == part.example


def ordered_loss(model, batch):
    jax.debug.print("{}", batch["x"].sum(), ordered=True)
    return net_loss(model, batch)


INVALID = {
    "no number of stages": ({}, "the number of stages is unknown: pass schedule= with mesh=, or num_stages="),
    "no mesh": ({"schedule": "1f1b", "num_microbatches": 2}, "schedule='1f1b' needs the number of groups and of micr"),
    "no microbatches": ({"schedule": "1f1b", "mesh": 2}, "schedule='1f1b' needs the number of groups and of microb"),
    "groups": ({"schedule": GOOD, "mesh": 4}, "has 2 groups, the mesh has 4 along 'pp'; make both the same"),
    "microbatches": ({"schedule": GOOD, "num_microbatches": 8}, "num_microbatches=8 differs from the 2 of schedule"),
    "stages": ({"schedule": GOOD, "num_stages": 3}, "num_stages=3 differs from the 2 of schedule 1f1b"),
    "rows": ({"num_stages": 2, "num_microbatches": 3}, r"8 rows is not divisible by 3 \(num_microbatches=3\)"),
    "unknown": ({"schedule": "1f1c", "mesh": 2, "num_microbatches": 2}, "unknown schedule '1f1c'"),
    "nothing there": (TWO | {"layers": "blocks"}, r"layers='blocks': Net has nothing there. It has lists at 'layers'."),
    "too many": ({"num_stages": 5}, r"has 4 layers, of which the loss calls 4: too few for 5 stages"),
    "no stage": ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
    "cuts": ({"num_stages": 3, "cuts": [3, 2]}, r"cuts=\[3, 2\] .* must be 2 increasing numbers between 1 and 3"),
    "no layers": (TWO | {"layers": ()}, "layers is empty; name the list or the stack to cut"),
    "nothing trained": (TWO | {"wrt": nnx.LoRAParam}, "wrt=LoRAParam must match a variable of the model; it matches"),
    "no list": (TWO | {"layers": "embed"}, "calls 1: too few for 2 stages. Name another list of layers. It has lists"),
    "balance": (TWO | {"balance": "bytes"}, "balance must be 'flops' or 'count', got 'bytes'"),
    "ordered effects": (TWO | {"loss_fn": ordered_loss}, r"ordered effects .* Use ordered=False"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_splits_are_refused(name):
    kinds, message = INVALID[name]
    kinds = {"loss_fn": net_loss} | kinds
    if "mesh" in kinds:
        kinds["mesh"] = groups(pp=kinds["mesh"])
    with pytest.raises(ValueError, match=message):
        split_stages(kinds.pop("loss_fn"), make_net, net_batch(8), **kinds)


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


def test_the_layers_argument_overrides_the_layers_of_the_table():
    carried = partitioned([(".*", ())], layers="blocks")(type("Carried", (Renamed,), {}))
    assert split_one(carried).layers == split_one(Renamed, layers="blocks").layers == ("blocks",)
    wrong = partitioned([(".*", ())], layers="layers")(type("Wrong", (Renamed,), {}))
    assert split_one(wrong, layers="blocks").layers == ("blocks",)
    with pytest.raises(CutError, match=r"layers='layers': Wrong has nothing there\. It has lists at 'blocks'\."):
        split_one(wrong)
    assert split_one(Net).layers == ("layers",)  # a list of that name needs no table
    for cls, message in (
        (Stack, r"layers of Stack must be named: .* its `layers` is not a list\. .* modules at 'embed', 'layers'\."),
        (Renamed, r"layers of Renamed must be named: .* it has no list `layers`\. .* It has lists at 'blocks'\."),
    ):
        with pytest.raises(CutError, match=message):
            split_one(cls)


class OwnOptimizer(nnx.Optimizer):
    pass


def kernels(path, variable):
    return "kernel" in path


def make_trained(wrt: Any = nnx.Param, kind=nnx.Optimizer):
    model = make_net()
    return model, kind(model, PLAIN_SGD, wrt=wrt)


def split_two(make, **kinds):
    return split_stages(net_loss, make, net_batch(4), mesh=groups(pp=2), schedule=GOOD, **kinds)


def test_split_stages_or_the_pipeline_takes_the_optimizer():
    abstract = []
    for wrt in (nnx.Param, kernels):
        staged = split_two(make_net, wrt=wrt)
        expected, of_object = (Pipeline(staged, x).abstract for x in (PLAIN_SGD, make_trained(wrt)[1]))
        of_make = Pipeline(split_two(lambda: make_trained(wrt))).abstract  # noqa: B023 (called in the loop)
        assert of_make == of_object == expected and expected.merge()[1].wrt is wrt
        abstract.append(expected)
    assert abstract[0] != abstract[1]
    own = Pipeline(split_two(lambda: make_trained(kind=OwnOptimizer))).abstract
    assert type(own.merge()[1]) is OwnOptimizer


def test_chained_stages_are_only_traced_and_may_have_an_optimizer():
    def stages():
        modules = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))]
        assert isinstance(modules[0].kernel[...], Tracer)
        return modules

    def make():
        return (modules := stages()), nnx.Optimizer(nnx.List(modules), PLAIN_SGD, wrt=kernels)

    def chain(make, **kinds):
        loss = lambda out, batch: ((out**2).sum(), out.size)  # noqa: E731
        return chain_stages(loss, make, jnp.ones((4, 8)), mesh=groups(pp=2), schedule=GOOD, **kinds)

    have, want = Pipeline(chain(make)).abstract, Pipeline(chain(stages, wrt=kernels), PLAIN_SGD).abstract
    assert have.merge()[1].wrt is kernels and [*map(str, have.leaves)] == [*map(str, want.leaves)]


WRONG_OPTIMIZERS = {
    "none": (lambda: Pipeline(split_two(make_net)), r"must be given once, .* or as Pipeline\(staged, opt.*; got none"),
    "two": (lambda: Pipeline(split_two(make_trained), PLAIN_SGD), "must be given once, .*; got one in each"),
    "two filters": (lambda: split_two(make_trained, wrt=kernels), "=kernels must be that of the optimizer, wrt=Param;"),
    "filter": (lambda: Pipeline(split_two(make_net), make_trained(kernels)[1]), "of the optimizer must equal"),
    "class": (lambda: Pipeline(split_two(make_net), make_trained(kind=OwnOptimizer)[1]), "subclass OwnOptimizer;"),
}


@pytest.mark.parametrize("name", WRONG_OPTIMIZERS)
def test_an_optimizer_that_is_missing_given_twice_or_of_other_variables_is_refused(name):
    call, message = WRONG_OPTIMIZERS[name]
    with pytest.raises(ConfigError, match=message):
        call()
