"""The moving average of the parameters: its values, evaluation and export."""

from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides
from flax_mesh.train.optimizers.average import with_average
from flax_mesh.tree import named_leaves
from tests.train.optimizers.plain import CLIP, MODEL, PLAIN, assert_close, config_of, parameters, plain, trained
from tests.train.support.runs import run

pytestmark = pytest.mark.usefixtures("quick_compilation")
DECAY = 0.7


def average_of(history):
    """The mean of the parameters after every step with the weights decay^0, decay^1 ... from the last one back."""
    state = optax.ema(DECAY, debias=True).init(history[0])
    for values in history:
        found, state = optax.ema(DECAY, debias=True).update(values, state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", "pp"])
def test_the_average_equals_that_of_optax_over_the_history(mesh):
    history, _ = plain(optax.chain(CLIP, PLAIN["adamw"][1]()))
    program, state, _ = trained(config_of(mesh, ema=DECAY))
    averaged = with_average(state, DECAY)
    assert_close(parameters(averaged), average_of(history))
    assert_close(parameters(state), history[-1])
    with pytest.raises(AssertionError):
        assert_close(parameters(averaged), history[-1])
    for (path, new), (_, old) in zip(named_leaves(averaged.to_nnx()), named_leaves(state.to_nnx()), strict=True):
        assert new.sharding == old.sharding and new.dtype == old.dtype, path
    first = program.init()  # before the first step, the average is the parameters
    assert with_average(first, DECAY) is first


@pytest.mark.slow
def test_the_average_of_half_precision_parameters_is_in_float32():
    model = replace(MODEL, param_dtype="bfloat16")
    _, state, _ = trained(config_of("mesh", model=model, ema=0.999), steps=1)
    leaves = {path: x.dtype for path, x in named_leaves(state.to_nnx()["optimizer"]) if "/average/" in path}
    assert leaves and set(leaves.values()) == {jnp.dtype("float32")}
    assert {x.dtype for x in parameters(with_average(state, 0.999)).values()} == {jnp.dtype("bfloat16")}


# --- runs ---


def run_config(folder, text, *settings, ema=DECAY, steps=4):
    config = replace(config_of("mesh", ema=ema), model=replace(MODEL, vocab_size=256))
    more = [f"data.source={text}", "data.held_out=0.3", "data.eval_batches=2", "checkpoint.every=2", "run.eval_every=4"]
    more += [f"run.steps={steps}", f"run.folder={folder / 'run'}", "run.sample_tokens=0"]
    return apply_overrides(config, [*more, *settings])


@pytest.mark.slow
def test_another_decay_is_refused_on_resume(tmp_path, text):
    """Also with --allow-changes, which accepts other changes: the stored average is divided by 1 - decay^steps."""
    run(run_config(tmp_path, text, steps=2))
    for allow_changes, changed in ((False, 2), (True, 1)):
        with pytest.raises(ConfigError, match=r"optimizer.ema: 0.7 -> 0.8 \(changes the result\)") as refused:
            run(run_config(tmp_path, text, "optimizer.b1=0.8", ema=0.8), allow_changes=allow_changes)
        _, *changes, repair = refused.value.problems
        assert len(changes) == changed and "start a new run" in repair and "needs one decay for all" in repair
