"""eval_fns: their metrics in the rows, what they are called with, and mistakes in them, one line each."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from flax_mesh.cli.train import step_line
from flax_mesh.errors import ConfigError
from flax_mesh.models import next_token_loss
from flax_mesh.train import build_program, mean_metrics, train
from flax_mesh.train.data.batches import held_out_rows
from flax_mesh.train.data.data import load_corpus
from tests.train.bigram import write_text
from tests.train.data.own_recipe import MESHES, PLAIN, config_of, token_batches

pytestmark = pytest.mark.usefixtures("quick_compilation")
EVERY_2 = ("run.steps=3", "run.eval_every=2", "checkpoint.every=100")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def held_out(config: Any, evaluate: Any) -> dict[str, float]:
    """The built-in evaluation as a function of the recipe."""
    part = load_corpus(config.data).held_out
    return mean_metrics(evaluate, [held_out_rows(part, config.data, k) for k in range(2)])


def accuracy_loss(model: Any, batch: Any) -> Any:
    loss, weight = next_token_loss(model, batch)[:2]
    return loss, weight, {"ones": weight * 1.0}


def rows_of(config: Any) -> tuple[list[dict[str, Any]], list[str]]:
    rows, lines = [], []
    train(config, hooks=[rows.append], say=lines.append)
    return rows, lines


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["plain", pytest.param("pp", marks=pytest.mark.slow)])
def test_the_metrics_are_those_of_the_built_in_evaluation(mesh, tmp_path, text):
    functions = {"first": held_out, "second": lambda config, evaluate: {"half": held_out(config, evaluate)["loss"] / 2}}
    words = [*MESHES[mesh], *EVERY_2]
    built_in, _ = rows_of(config_of(tmp_path / "a", text, None, *words, eval_fns=functions))
    own, lines = rows_of(config_of(tmp_path / "b", text, token_batches, *words, eval_fns=functions))
    expected = [row["eval_loss"] for row in built_in[1:]]  # summed in float32
    assert [row["first/loss"] for row in built_in[1:]] == pytest.approx(expected, rel=1e-6)
    for row, other in zip(own, built_in, strict=True):
        assert ("first/loss" in row) == (row["step"] > 1) and "eval_loss" not in row
        if row["step"] > 1:
            assert row["first/loss"] == other["first/loss"] == 2 * row["second/half"]
    assert not [line for line in lines if line.startswith("note: run.eval_every")]
    written = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert written[1]["first/loss"] == own[1]["first/loss"]


@pytest.mark.slow
def test_the_rates_are_those_of_examples_unless_the_flops_of_tokens_are_known(tmp_path, text):
    rows, lines = rows_of(config_of(tmp_path / "a", text, token_batches, *PLAIN, "run.steps=1", "run.eval_every=5"))
    assert rows[0]["examples_per_s"] == pytest.approx(8 / rows[0]["seconds"])
    assert rows[0]["examples_per_s_per_device"] == rows[0]["examples_per_s"] / 2
    assert "tokens_per_s" not in rows[0] and rows[0]["mfu"] is None
    assert "examples/s" in step_line(rows[0]) and "tok/s" not in step_line(rows[0])
    (note,) = [line for line in lines if line.startswith("note: run.eval_every")]
    assert note == (
        "note: run.eval_every=5 evaluates nothing: make_batches has no held-out part, and the recipe has no eval_fns"
    )
    counted = config_of(
        tmp_path / "b", text, token_batches, *PLAIN, "run.steps=1", flops_per_token=lambda model, count, length: 6.0
    )
    rows, _ = rows_of(counted)
    assert rows[0]["tokens_per_s"] == pytest.approx(16 * rows[0]["examples_per_s"])


def test_the_line_of_a_step_has_the_metrics_of_eval_fns(tmp_path):
    row = {"step": 2, "loss": 1.0, "grad_norm": 1.0, "examples_per_s": 10.0, "test/accuracy": 0.5, "moe/balance": 1.0}
    assert step_line(row, ["test"]).endswith("10 examples/s  test/accuracy 0.5000")


@pytest.mark.slow
def test_a_checkpoint_is_kept_by_a_metric_of_eval_fns(tmp_path, text):
    values = iter([0.0, 3.0, 1.0, 2.0])  # the first one before the run

    def metric(config: Any, evaluate: Any) -> dict[str, float]:
        return {"value": next(values)}

    words = [
        *PLAIN,
        "run.steps=3",
        "run.eval_every=1",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "checkpoint.keep_best=1",
    ]
    config = config_of(
        tmp_path / "run", text, token_batches, *words, "checkpoint.best_metric=set/value", eval_fns={"set": metric}
    )
    train(config)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()) == [
        "2",
        "3",
    ]
    with pytest.raises(ConfigError, match=r"best_metric=set/other is in no row .* set/value"):
        build_program(
            config_of(
                tmp_path,
                text,
                token_batches,
                *words,
                "checkpoint.best_metric=set/other",
                eval_fns={"set": lambda *_: {"value": 1}},
            )
        )


def test_before_the_run_the_functions_are_called_once_with_ones_and_nothing_compiles(tmp_path, text, compilations):
    seen = []

    def first(config: Any, evaluate: Any) -> dict[str, float]:
        shape = config.data.batch_size, config.data.sequence_length
        seen.append(evaluate({"inputs": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32)}))
        return {"loss": seen[-1]["loss"]}

    for name, words in MESHES.items():
        before = len(compilations)
        build_program(
            config_of(tmp_path, text, token_batches, *words, *EVERY_2, loss_fn=accuracy_loss, eval_fns={"set": first})
        )
        assert seen == [{"loss": 1.0, "weight": 1.0, "ones": 1.0}], name
        assert len(compilations) - before <= 1, "only the check of the compiler's options may compile"
        seen.clear()


class Annotated(nnx.Module):
    """A model whose parameters need the mesh in context, by metadata of Flax or by JAX's `out_sharding`."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        init = nnx.initializers.normal()
        if config.remat == "none":
            self.embed = nnx.Param(nnx.with_partitioning(init, ("fsdp", None))(rngs(), (256, 8)))
        else:
            self.embed = nnx.Param(init(rngs(), (256, 8), out_sharding=PartitionSpec("fsdp", None)))

    def __call__(self, batch: Any) -> Any:
        rows = (
            PartitionSpec("fsdp") if AxisType.Explicit in jax.typeof(batch["inputs"]).sharding.mesh.axis_types else None
        )
        return self.embed.at[batch["inputs"]].get(out_sharding=rows)


def annotated_loss(model: Any, batch: Any) -> Any:
    loss = (model(batch) ** 2).sum()
    return loss, 8.0, {"own": loss}


@pytest.mark.parametrize(
    "settings", [["model.remat=none"], ["model.remat=full", "mesh.rules=fsdp", "mesh.axis_types=explicit"]]
)
def test_models_that_need_the_mesh_in_context_are_evaluated(settings, tmp_path, text):
    seen = []

    def first(config: Any, evaluate: Any) -> dict[str, float]:
        seen.append(evaluate({"inputs": TOKENS, "targets": TOKENS}))
        return {"loss": seen[-1]["loss"]}

    config = config_of(
        tmp_path, text, token_batches, "mesh.shape=fsdp:2", *EVERY_2, "checkpoint.best_metric=own", *settings,
        make_model=Annotated, loss_fn=annotated_loss, eval_fns={"set": first},
    )  # fmt: skip
    build_program(config)
    assert seen == [{"loss": 1.0, "weight": 1.0, "own": 1.0}]


class Numbers:
    def __init__(self, value: Any):
        self.value = value

    def __call__(self, config: Any, evaluate: Any) -> Any:
        return self.value


TOKENS = np.zeros((8, 16), np.int32)
BAD = {
    "name": ({"a/b": Numbers({})}, "eval_fns: a name must be text without '/', got 'a/b'"),
    "empty name": ({"": Numbers({})}, "eval_fns: a name must be text without '/', got ''"),
    "no function": ({"a": 3}, r"eval_fns\['a'\] must be a function, got int"),
    "arguments": ({"a": lambda: {}}, r"eval_fns\['a'\]: .*it must be callable with the arguments \(config, evaluate\)"),
    "no dict": ({"a": Numbers(3.0)}, r"eval_fns\['a'\]: .*must return a dict of real numbers, got float"),
    "metric name": ({"a": Numbers({"b/c": 1})}, r"got the name 'b/c'; a name must be text without '/'"),
    "text": ({"a": Numbers({"b": "high"})}, r"got 'b' of type str; convert it by float"),
    "bool": ({"a": Numbers({"b": True})}, "got 'b' of type bool"),
    "complex": ({"a": Numbers({"b": 1j})}, "got 'b' of type complex"),
    "array": ({"a": Numbers({"b": np.zeros(3)})}, "got 'b' of type ndarray"),
    "exception": (
        {"a": lambda config, evaluate: {}["x"]},
        r"eval_fns\['a'\]: .*evaluation\.py, line \d+: KeyError: 'x'",
    ),
    "batch": ({"a": lambda config, evaluate: evaluate({"inputs": [1]})}, "'inputs/0' must be a numpy array"),
    "rows": (
        {"a": lambda config, evaluate: evaluate({"inputs": TOKENS[:3], "targets": TOKENS[:3]})},
        r"eval_fns\['a'\]: evaluate\(batch\) of an eval_fn: the batch of 3 rows is not divisible by 2 \(dp=2\)",
    ),
    "loss": (
        {"a": lambda config, evaluate: evaluate({"inputs": TOKENS})},
        r"next_token_loss takes a batch with .* got .*inputs.: .i32.8,16",
    ),
    "no batches": (
        {"a": lambda config, evaluate: mean_metrics(evaluate, [])},
        "mean_metrics needs .* there is no batch",
    ),
    "vector": (
        {"a": lambda config, evaluate: evaluate({"inputs": TOKENS[:4], "targets": TOKENS[:4]})},
        r"eval_fns\['a'\]: .*metrics of loss_fn must be real scalars, but 'ones' is f32\[8\]\. Return their sums",
    ),
    "clash": ({"of": Numbers({"loss": 1.0})}, "of/loss is a metric of loss_fn too"),
}


def clashing_loss(model: Any, batch: Any) -> Any:
    loss, weight = next_token_loss(model, batch)[:2]
    return loss, weight, {"of": {"loss": loss}}


def vector_loss(model: Any, batch: Any) -> Any:
    """A scalar for batches of 8 rows only."""
    loss, weight, metrics = accuracy_loss(model, batch)
    return loss, weight, metrics if len(batch["inputs"]) == 8 else {"ones": jnp.ones(8)}


LOSSES = {"clash": clashing_loss, "vector": vector_loss}


@pytest.mark.sampled
@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_before_the_run_folder_is_made(case, tmp_path, text):
    functions, problem = BAD[case]
    loss = LOSSES.get(case, accuracy_loss)
    config = config_of(tmp_path / "run", text, token_batches, *PLAIN, *EVERY_2, eval_fns=functions, loss_fn=loss)
    with pytest.raises(ConfigError) as caught:
        train(config)
    assert len(caught.value.problems) == 1 and re.search(problem, str(caught.value)), caught.value
    assert ": : " not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_rows_that_the_microbatches_of_a_pipeline_do_not_divide_are_one_line(tmp_path, text):
    tokens = np.zeros((6, 16), np.int32)
    function = lambda config, evaluate: evaluate({"inputs": tokens, "targets": tokens})  # noqa: E731
    config = config_of(tmp_path, text, token_batches, *MESHES["pp"], *EVERY_2, eval_fns={"a": function})
    with pytest.raises(ConfigError, match=r"6 rows is not divisible by 4 \(dp=2 \* pipeline\.num_microbatches=2\)"):
        build_program(config)


def test_text_is_not_sampled_with_own_batches(tmp_path, text):
    config = config_of(tmp_path, text, token_batches, *PLAIN, sample=lambda module, prompt, count, key: prompt)
    with pytest.raises(ConfigError, match=r"^sample continues text .* with make_batches, set sample=None$"):
        build_program(config)


def test_mean_metrics_weights_batches_by_their_weight():
    sums = [{"loss": 2.0, "weight": 1.0, "hits": 1.0}, {"loss": 1.0, "weight": 3.0, "hits": 1.0}]
    assert mean_metrics(sums.__getitem__, [0, 1]) == {"loss": 0.75, "hits": 0.5}
    with pytest.raises(ConfigError, match="add up to 0"):
        mean_metrics(lambda batch: {"loss": 1.0, "weight": 0.0}, [0])
