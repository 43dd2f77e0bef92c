"""`check`: the stages are compared with the model before the split, and a planted mistake is found and named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from flax_mesh.mpmd import CutError, StagedModel, chain_stages, split_stages
from flax_mesh.mpmd.split import check
from flax_mesh.mpmd.split.assign import StageProgram
from flax_mesh.mpmd.split.jaxpr import trace
from tests.mpmd.zoo.base import Case
from tests.mpmd.zoo.models import CASES

SAMPLE = ("scanned_noisy", "listed_twice")
WIDTH = 8


class Average(nnx.Variable):
    pass


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.average = nnx.Linear(WIDTH, WIDTH, rngs=rngs), Average(jnp.zeros((WIDTH,)))

    def __call__(self, x):
        self.average[...] = 0.9 * self.average[...] + 0.1 * x.mean(0)
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def loss_fn(model, x):
    return (model(x) ** 2).sum(), x.shape[0]


X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)


def split(**kinds) -> StagedModel:
    return split_stages(loss_fn, lambda: Net(nnx.Rngs(0)), X, num_stages=2, **kinds)


def plant(staged: StagedModel, stage: int, change) -> StagedModel:
    """Replace one stage of the split that `staged` keeps, as a mistake in split_stages would."""
    ((key, forward),) = staged._cuts.items()
    stages = list(forward.stages)
    stages[stage] = change(stages[stage], forward)
    staged._cuts[key] = forward._replace(stages=tuple(stages))
    return staged


def with_forward(stage: StageProgram, fn) -> StageProgram:
    """The stage with `fn(inputs, received)` as its forward pass."""
    count = len(stage.inputs)
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in stage.forward.inputs]
    program, _ = trace(lambda *args: fn(args[:count], args[count:]), *shapes)
    return stage._replace(forward=program, arguments=(program.inputs[:count], program.inputs[count:]))


def without_gradient(stage, forward):
    """No gradient is sent back through the stage boundary: the loss is right, gradients of stage 0 are not."""
    return with_forward(
        stage, lambda inputs, received: stage.forward.call(*inputs, *map(jax.lax.stop_gradient, received))
    )


def without_update(stage, forward):
    """The stage does not return the new values of its variables."""
    kept = [at for at in stage.outputs if at not in forward.updates]
    sent = len(stage.sent)
    results = [*stage.forward.outputs[:sent], *(stage.forward.outputs[sent + stage.outputs.index(at)] for at in kept)]
    return stage._replace(outputs=tuple(kept), forward=stage.forward._replace(outputs=tuple(results)))


def with_doubled_loss(stage, forward):
    at = len(stage.sent) + stage.outputs.index(0)

    def doubled(inputs, received):
        return [x * 2 if i == at else x for i, x in enumerate(stage.forward.call(*inputs, *received))]

    return with_forward(stage, doubled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(  # a third of them; zoo/test_split.py compares all models with the plain step
    "case",
    [
        pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else pytest.mark.slow)
        for n, c in enumerate(CASES)
        if c.name in SAMPLE or n % 3 == 0
    ],
)
def test_the_stages_of_unmodified_models_pass(case: Case):
    staged = split_stages(case.loss_fn, case.make, case.batch(2), layers=case.layers, num_stages=2, wrt=case.wrt)
    staged.check(case.batch(2), seed=3, split_backward=case.name in SAMPLE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (1, without_gradient, "the gradient of layers/0/linear/bias differs by"),
        (0, without_update, "the new value of layers/0/average differs by"),
        (1, with_doubled_loss, "the sum 'loss' differs by"),
    ],
)
def test_a_mistake_in_the_split_is_found_and_named(stage, change, message):
    staged = split()
    staged.check(X)
    with pytest.raises(CutError, match=rf"on one microbatch {message} [\d.]+.*please report it"):
        plant(staged, stage, change).check(X)


def test_the_backward_pass_is_checked_in_two_parts_too():
    with pytest.raises(CutError, match="the gradient of layers/0/linear/bias differs"):
        plant(split(), 1, without_gradient).check(X, split_backward=True)


def test_split_stages_checks_only_on_request(monkeypatch):
    calls = []
    monkeypatch.setattr(StagedModel, "check", lambda staged, batch: calls.append(batch))
    split()
    split(num_microbatches=2)
    assert calls == []
    split(check=True)
    stages = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))]
    chain_stages(lambda out, x: ((out**2).sum(), len(x)), stages, X, check=True)
    assert len(calls) == 2 and all(batch is X for batch in calls)


def test_a_batch_of_several_microbatches_and_shapes_alone_can_be_checked():
    split(num_microbatches=2, check=True)
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    staged = split_stages(loss_fn, Net(nnx.Rngs(0)), shape, num_stages=2, check=True)
    with pytest.raises(CutError, match="the gradient of layers/0/linear/bias differs"):
        plant(staged, 1, without_gradient).check()


def test_the_mesh_of_a_group_is_replaced_by_one_device():
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2)

    def constrained(model, x):
        return loss_fn(model, jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("fsdp", "tp")))

    split_stages(constrained, lambda: Net(nnx.Rngs(0)), X, num_stages=2, mesh=mesh, check=True)


def test_a_difference_is_accepted_where_rounding_the_parameters_explains_it():
    """The gradient of a bias before a softmax is 0 up to rounding: its values are nothing but rounding errors."""
    forward = split().cut(X)
    at = next(at for at, leaf in enumerate(forward.leaves) if leaf.trained)

    def results(gradient: float, loss: float = 1.0) -> check.Results:
        return check.Results([np.float32(loss), np.float32(4)], {}, {at: np.array([gradient, 0.0], np.float32)})

    want, have = results(1e-9), results(-1e-9)
    (found,) = check._differences(forward, want, have, 1e-5)
    assert found.startswith(f"the gradient of {forward.leaves[at].path} differs by 2e-09")
    assert check._differences(forward, want, have, 1e-5, rounded=results(5e-10)) == []
    assert check._differences(forward, want, results(0.1), 1e-5, rounded=results(5e-10)) != []
    assert check._differences(forward, want, results(1e-9, loss=1.00002), 1e-5) != []
    assert check._differences(forward, want, results(1e-9, loss=1.000005), 1e-5) == []


def test_values_that_are_not_finite_must_be_so_in_both():
    distance = check._distance
    nan = np.array([1.0, np.nan, np.inf])
    assert distance(nan, nan) == 0.0
    assert distance(nan, np.array([1.0, 0.0, np.inf])) == distance(nan, np.array([1.0, np.nan, 0.0])) == np.inf
    assert distance(np.zeros(2), np.zeros(3)) == np.inf


def test_only_small_programs_are_cheap(monkeypatch):
    staged = split()
    assert staged.is_cheap_to_check
    for limit in ("CHEAP_FLOPS", "CHEAP_BYTES"):
        with monkeypatch.context() as changed:
            changed.setattr(check, limit, 1)
            assert not staged.is_cheap_to_check


def test_the_error_names_the_repair():
    with pytest.raises(CutError) as error:
        plant(split(), 1, with_doubled_loss).check(X)
    assert re.search(r"\(and \d+ more of its results\)", str(error.value))
    assert "cuts=" in str(error.value) and "pipeline.check=never" in str(error.value)
