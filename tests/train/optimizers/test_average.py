"""The moving average of the parameters: its values, evaluation, checkpoints, export; runs with every kind of optimizer
resume bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import apply_overrides, train
from flax_mesh.train.build import build_program
from flax_mesh.train.data.batches import held_out_rows
from flax_mesh.train.data.data import load_corpus
from flax_mesh.train.export import export
from flax_mesh.train.optimizers.average import with_average
from flax_mesh.tree import named_leaves
from tests.train.optimizers.plain import MODEL, assert_close, config_of, parameters, plain, trained
from tests.train.optimizers.test_make import CLIP, PLAIN

pytestmark = pytest.mark.usefixtures("quick_compilation")
DECAY = 0.7


def average_of(history):
    """The mean of the parameters after every step with the weights decay^0, decay^1 ... from the last one back."""
    state = optax.ema(DECAY, debias=True).init(history[0])
    for values in history:
        found, state = optax.ema(DECAY, debias=True).update(values, state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh", pytest.param("pp", marks=pytest.mark.slow)])
def test_the_average_equals_that_of_optax_over_the_history(mesh):
    history, _ = plain(optax.chain(CLIP, PLAIN["adamw"][1]()))
    _, state, _ = trained(config_of(mesh, ema=DECAY))
    averaged = with_average(state, DECAY)
    assert_close(parameters(averaged), average_of(history))
    assert_close(parameters(state), history[-1])
    with pytest.raises(AssertionError):
        assert_close(parameters(averaged), history[-1])
    for (path, new), (_, old) in zip(named_leaves(averaged.to_nnx()), named_leaves(state.to_nnx()), strict=True):
        assert new.sharding == old.sharding and new.dtype == old.dtype, path


def test_before_the_first_step_the_average_is_the_parameters():
    _, state, _ = trained(config_of("mesh", ema=DECAY), steps=0)
    assert with_average(state, DECAY) is state


@pytest.mark.slow
def test_the_average_of_half_precision_parameters_is_in_float32():
    model = replace(MODEL, param_dtype="bfloat16")
    _, state, _ = trained(config_of("mesh", model=model, ema=0.999))
    leaves = {path: x.dtype for path, x in named_leaves(state.to_nnx()["optimizer"]) if "/average/" in path}
    assert leaves and set(leaves.values()) == {jnp.dtype("float32")}
    assert {x.dtype for x in parameters(with_average(state, 0.999)).values()} == {jnp.dtype("bfloat16")}


# --- runs ---


def run_config(folder, *settings, ema=DECAY, steps=4):
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{i} squared is {i * i}, and its neighbour {i + 1}.\n" for i in range(400)))
    config = replace(config_of("mesh", ema=ema), model=DecoderConfig(**{**vars(MODEL), "vocab_size": 256}))
    more = [f"data.source={text}", "data.held_out=0.3", "data.eval_batches=2", "checkpoint.every=2", "run.eval_every=4"]
    return apply_overrides(
        config, [*more, f"run.steps={steps}", f"run.folder={folder / 'run'}", "run.sample_tokens=0", *settings]
    )


def newest(config):
    """The parameters and the averages of the newest checkpoint of a run, by path."""
    program = build_program(config)
    with Checkpointer(config.run.folder + "/checkpoints", layers=program.rules.layers or None) as checkpointer:
        state = checkpointer.restore(program.layout)
    optimizer = {path.split("/average/")[1]: np.asarray(x) for path, x in named_leaves(state.to_nnx()["optimizer"]) if "/average/" in path}  # noqa: E501  # fmt: skip
    return parameters(state), {path: x / (1 - DECAY**4) for path, x in optimizer.items()}


@pytest.mark.slow
def test_evaluation_and_exports_use_the_average(tmp_path):
    config, rows = run_config(tmp_path), []
    train(config, hooks=[rows.append])
    values, averages = newest(config)

    model = make_decoder(config.model, nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    sums = []
    for named in (averages, values):
        leaves = [named[path] for path, _ in named_leaves(state)]
        plain_model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))
        held_out = load_corpus(config.data).held_out
        parts = [
            next_token_loss(plain_model, jax.tree.map(jnp.asarray, held_out_rows(held_out, config.data, k)))
            for k in range(2)
        ]
        sums.append(float(sum(p[0] for p in parts) / sum(p[1] for p in parts)))
    assert rows[-1]["eval_loss"] == pytest.approx(sums[0], abs=1e-6)
    assert abs(sums[0] - sums[1]) > 1e-4

    for average, expected in ((True, averages), (False, values)):
        out = tmp_path / f"out{average}"
        data = export(config.run.folder, str(out), "orbax", None, None, average=average)
        assert data["averaged"] == (len(averages) if average else 0)
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as reader:
            tree = reader.restore(out)
        assert_close(dict(named_leaves(tree)), expected, 1e-7)


@pytest.mark.slow
def test_another_decay_is_refused_on_resume(tmp_path):
    """Also with --allow-changes, which accepts other changes: the stored average is divided by 1 - decay^steps."""
    train(run_config(tmp_path, steps=2))
    for allow_changes, changed in ((False, 2), (True, 1)):
        with pytest.raises(ConfigError, match=r"optimizer.ema: 0.7 -> 0.8 \(changes the result\)") as refused:
            train(run_config(tmp_path, "optimizer.b1=0.8", ema=0.8), allow_changes=allow_changes)
        _, *changes, repair = refused.value.problems
        assert len(changes) == changed and "start a new run" in repair and "needs one decay for all" in repair
