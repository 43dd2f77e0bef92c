"""eval_fns: their metrics in the rows, their arguments, and the checks of them before the run."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from flax_mesh.cli.train import step_line
from flax_mesh.data.batches import held_out_rows
from flax_mesh.data.corpus import load_corpus
from flax_mesh.errors import ConfigError
from flax_mesh.models import next_token_loss
from flax_mesh.train import build_program, mean_metrics, train
from tests.data.user_recipe import MESHES, PLAIN, bigram_config, config_of, token_batches
from tests.train.support.runs import checkpoints, rows_of, run

pytestmark = pytest.mark.usefixtures("quick_compilation")
EVERY_2 = ("run.steps=3", "run.eval_every=2", "checkpoint.every=100")


def held_out(config: Any, evaluate: Any) -> dict[str, float]:
    """The built-in evaluation as a function of the recipe."""
    part = load_corpus(config.data).held_out
    return mean_metrics(evaluate, [held_out_rows(part, config.data, k) for k in range(2)])


def accuracy_loss(model: Any, batch: Any) -> Any:
    loss, weight = next_token_loss(model, batch)[:2]
    return loss, weight, {"ones": weight * 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_metrics_equal_the_built_in_batches_and_evaluation(mesh, tmp_path, text):
    functions = {"first": held_out, "second": lambda config, evaluate: {"half": held_out(config, evaluate)["loss"] / 2}}
    words = [*MESHES[mesh], *EVERY_2]
    built_in = run(config_of(tmp_path / "a", text, None, *words, eval_fns=functions)).rows
    ran = run(config_of(tmp_path / "b", text, token_batches, *words, eval_fns=functions))
    own = ran.rows
    expected = [row["eval_loss"] for row in built_in[1:]]  # summed in float32
    assert [row["first/loss"] for row in built_in[1:]] == pytest.approx(expected, rel=1e-6)
    for row, other in zip(own, built_in, strict=True):
        assert ("first/loss" in row) == (row["step"] > 1) and "eval_loss" not in row and row["loss"] == other["loss"]
        if row["step"] > 1:
            assert row["first/loss"] == other["first/loss"] == 2 * row["second/half"]
    assert not [line for line in ran.lines if line.startswith("note: run.eval_every")]
    assert any(line.startswith("data: make_batches of ") and "inputs i32[8,16]" in line for line in ran.lines)
    assert rows_of(tmp_path / "b")[1]["first/loss"] == own[1]["first/loss"]


@pytest.mark.slow
def test_rates_count_examples_unless_the_flops_of_tokens_are_known(tmp_path, text):
    ran = run(config_of(tmp_path / "a", text, token_batches, *PLAIN, "run.steps=1", "run.eval_every=5"))
    rows = ran.rows
    assert rows[0]["examples_per_s"] == pytest.approx(8 / rows[0]["seconds"])
    assert rows[0]["examples_per_s_per_device"] == rows[0]["examples_per_s"] / 2
    assert "tokens_per_s" not in rows[0] and rows[0]["mfu"] is None
    assert "examples/s" in step_line(rows[0]) and "tok/s" not in step_line(rows[0])
    note = "evaluates nothing: make_batches has no held-out part, and the recipe has no eval_fns"
    assert f"note: run.eval_every=5 {note}" in ran.lines
    config = config_of(tmp_path / "b", text, token_batches, *PLAIN, "run.steps=1", "model.param_dtype=bfloat16")
    ran = run(replace(config, flops_per_token=lambda model, count, length: 6.0))
    assert any(" parameters are stored in bfloat16: " in line for line in ran.lines)
    rows = ran.rows
    assert rows[0]["tokens_per_s"] == pytest.approx(16 * rows[0]["examples_per_s"])
    row = {"step": 2, "loss": 1.0, "grad_norm": 1.0, "examples_per_s": 10.0, "test/accuracy": 0.5, "moe/balance": 1.0}
    assert step_line(row, ["test"]).endswith("10 examples/s  test/accuracy 0.5000")


@pytest.mark.slow
def test_a_checkpoint_is_kept_by_a_metric_of_eval_fns(tmp_path, text):
    values = iter([0.0, 3.0, 1.0, 2.0])  # the first one before the run

    def metric(config: Any, evaluate: Any) -> dict[str, float]:
        return {"value": next(values)}

    words = [*PLAIN, "run.steps=3", "run.eval_every=1", "checkpoint.every=1", "checkpoint.keep=1"]
    words += ["checkpoint.keep_best=1", "checkpoint.best_metric=set/value"]
    config = config_of(tmp_path / "run", text, token_batches, *words, eval_fns={"set": metric})
    run(config)
    assert checkpoints(tmp_path / "run") == [2, 3]
    other = replace(config, eval_fns={"set": lambda *_: {"other": 1}})
    with pytest.raises(ConfigError, match=r"best_metric=set/value is in no row .* set/other"):
        build_program(other)


def evaluated(config: Any) -> list[dict[str, float]]:
    """The metrics that a function of the recipe receives from an evaluation of zeros when the program is built."""
    seen = []

    def first(config: Any, evaluate: Any) -> dict[str, float]:
        tokens = np.zeros((config.data.batch_size, config.data.sequence_length), np.int32)
        seen.append(evaluate({"inputs": tokens, "targets": tokens}))
        return {"loss": seen[-1]["loss"]}

    build_program(replace(config, eval_fns={"set": first}))
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_before_a_run_the_functions_are_called_once_with_ones_and_nothing_compiles(mesh, tmp_path, text, compilations):
    config = config_of(tmp_path, text, token_batches, *MESHES[mesh], *EVERY_2, loss_fn=accuracy_loss)
    assert evaluated(config) == [{"loss": 1.0, "weight": 1.0, "ones": 1.0}]
    assert len(compilations) <= 1, "only the check of the compiler's options may compile"


class Annotated(nnx.Module):
    """A model whose parameters need the mesh in context, by metadata of Flax or by JAX's `out_sharding`."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        init = nnx.initializers.normal()
        if config.remat == "none":
            self.embed = nnx.Param(nnx.with_partitioning(init, ("fsdp", None))(rngs(), (256, 8)))
        else:
            self.embed = nnx.Param(init(rngs(), (256, 8), out_sharding=PartitionSpec("fsdp", None)))

    def __call__(self, batch: Any) -> Any:
        is_explicit = AxisType.Explicit in jax.typeof(batch["inputs"]).sharding.mesh.axis_types
        rows = PartitionSpec("fsdp") if is_explicit else None
        return self.embed.at[batch["inputs"]].get(out_sharding=rows)


def annotated_loss(model: Any, batch: Any) -> Any:
    loss = (model(batch) ** 2).sum()
    return loss, 8.0, {"own": loss}


@pytest.mark.parametrize(
    "settings", [["model.remat=none"], ["model.remat=full", "mesh.rules=fsdp", "mesh.axis_types=explicit"]]
)
def test_models_that_need_the_mesh_in_context_are_evaluated(settings, tmp_path, text):
    settings = ["mesh.shape=fsdp:2", *EVERY_2, "checkpoint.best_metric=own", *settings]
    functions = {"make_model": Annotated, "loss_fn": annotated_loss}
    config = config_of(tmp_path, text, token_batches, *settings, **functions)
    assert evaluated(config) == [{"loss": 1.0, "weight": 1.0, "own": 1.0}]


def test_the_completed_steps_are_saved_before_an_evaluation_that_fails(tmp_path, text):
    calls = []

    def fails(config: Any, evaluate: Any) -> dict[str, float]:
        calls.append(0)
        return {"a": 1.0 / (len(calls) < 3)}  # the first call is before the run

    printed: list[str] = []
    config = bigram_config(tmp_path / "run", text, None, "run.steps=5", *EVERY_2[1:], eval_fns={"f": fails})
    with pytest.raises(ConfigError, match=r"eval_fns\['f'\]: .*ZeroDivisionError"):
        train(config, say=printed.append)
    assert printed[-1] == "the state after step 4 is saved, since its evaluation failed"
    assert checkpoints(tmp_path / "run") == [4]
    assert [(row["step"], row.get("f/a")) for row in rows_of(tmp_path / "run")][1:] == [(2, 1.0), (3, None), (4, None)]


def test_mean_metrics_weights_batches_by_their_weight():
    sums = [{"loss": 2.0, "weight": 1.0, "hits": 1.0}, {"loss": 1.0, "weight": 3.0, "hits": 1.0}]
    assert mean_metrics(sums.__getitem__, [0, 1]) == {"loss": 0.75, "hits": 0.5}
    with pytest.raises(ConfigError, match="add up to 0"):
        mean_metrics(lambda batch: {"loss": 1.0, "weight": 0.0}, [0])
