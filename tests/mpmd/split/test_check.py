"""`check`: the stages are compared with the model before the split, and a planted mistake is found and named."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from flax_mesh.mpmd import CutError, StagedModel, chain_stages, split_stages
from flax_mesh.mpmd.split import check
from flax_mesh.mpmd.split.assign import StageProgram
from flax_mesh.program.program import trace
from tests.mpmd.zoo.base import WIDTH, squared_loss, vectors
from tests.mpmd.zoo.models import BY_NAME
from tests.mpmd.zoo.params import Averages

SAMPLE = ("scanned_noisy", "listed_twice")
X = vectors(4)


def split(loss_fn=squared_loss, batch=X, **kinds) -> StagedModel:
    return split_stages(loss_fn, lambda: Averages(2), batch, num_stages=2, **kinds)


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


def with_doubled_loss(stage, forward):
    at = len(stage.sent) + stage.outputs.index(0)

    def doubled(inputs, received):
        return [x * 2 if i == at else x for i, x in enumerate(stage.forward.call(*inputs, *received))]

    return with_forward(stage, doubled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("name", sorted({*SAMPLE, *list(BY_NAME)[::3]}))  # a third; test_split.py runs all models
def test_the_stages_of_unmodified_models_pass(name):
    case = BY_NAME[name]
    staged = split_stages(case.loss_fn, case.make, case.batch(2), layers=case.layers, num_stages=2, wrt=case.wrt)
    staged.check(case.batch(2), seed=3, split_backward=name in SAMPLE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (1, without_gradient, "the gradient of layers/0/linear/bias differs by"),
        (1, with_doubled_loss, "the sum 'loss' differs by"),
    ],
)
def test_a_mistake_in_the_split_is_found_and_named(stage, change, message):
    message = rf"on microbatch 0 {message} [\d.]+(?s:.*)\(and \d+ more of its results\)(?s:.*)please report it"
    with pytest.raises(CutError, match=message) as error:
        plant(split(), stage, change).check(X)
    assert "cuts=" in str(error.value) and "pipeline.check=never" in str(error.value)


def test_split_stages_checks_only_on_request(monkeypatch):
    calls = []
    monkeypatch.setattr(StagedModel, "check", lambda staged, batch: calls.append(batch))
    split()
    split(num_microbatches=2)
    assert calls == []
    split(check=True)
    x, stages = X["x"], [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    chain_stages(lambda out, x: ((out**2).sum(), len(x)), stages, x, check=True)
    assert len(calls) == 2 and calls[0] is X and calls[1] is x


def test_a_batch_of_several_microbatches_and_shapes_alone_can_be_checked():
    split(num_microbatches=2, check=True)
    staged = split(batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), X))
    with pytest.raises(CutError, match="the gradient of layers/0/linear/bias differs"):
        plant(staged, 1, without_gradient).check()
    with pytest.raises(CutError, match="the gradient of layers/0/linear/bias differs"):
        staged.check(split_backward=True)  # of the same damaged cut


def test_the_mesh_of_a_group_is_replaced_by_one_device():
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2)

    def constrained(model, batch):
        return squared_loss(model, jax.lax.with_sharding_constraint(batch, jax.sharding.PartitionSpec("fsdp", "tp")))

    split(constrained, mesh=mesh, check=True)


def test_a_difference_is_accepted_where_rounding_the_parameters_explains_it():
    """The gradient of a bias before a softmax is 0 up to rounding: its values are nothing but rounding errors."""

    def results(gradient: float, loss: float = 1.0) -> check.Named:
        return {(0, "the loss"): np.array(loss), (1, "the gradient"): np.array([gradient, 0.0])}

    want, have = results(1e-9), results(-1e-9)
    (found,) = check._differences(want, have, 1e-5)
    assert found.startswith("1 the gradient differs by 2e-09")
    assert check._differences(want, have, 1e-5, rounded=results(5e-10)) == []
    assert check._differences(want, results(0.1), 1e-5, rounded=results(5e-10)) != []
    assert check._differences(want, results(1e-9, loss=1.00002), 1e-5) != []
    assert check._differences(want, results(1e-9, loss=1.000005), 1e-5) == []


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
