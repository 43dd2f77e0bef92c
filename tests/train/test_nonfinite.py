"""Runs in which the loss or the gradients of a step are not finite, or far above those of the steps before it."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.errors import ConfigError
from flax_mesh.models import next_token_loss
from flax_mesh.train import TrainConfig, apply_overrides, train
from flax_mesh.train.metrics import LEAST, MOST_SKIPPED, WINDOW, StepCheck
from tests.train import bigram
from tests.train.bigram import count_compilations, write_text
from tests.train.test_pipelined_run import config_of as decoder_run

BAD = "Z"  # a letter that occurs in no other line of the text


def loss_fn(model, batch):
    """Infinite where the inputs contain BAD: the gradients are NaN."""
    total, weight = bigram.loss_fn(model, batch)
    return total + jnp.where(jnp.any(batch["inputs"] == ord(BAD)), jnp.inf, 0.0) * total, weight


def spiking_loss(model, batch):
    total, weight = bigram.loss_fn(model, batch)
    return total * jnp.where(jnp.any(batch["inputs"] == ord(BAD)), 1e3, 1.0), weight


def recipe() -> TrainConfig:
    return replace(bigram.recipe(), loss_fn=loss_fn)


def spiking_recipe() -> TrainConfig:
    return replace(bigram.recipe(), loss_fn=spiking_loss)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """The text of the other tests with one bad letter, which every pass over the data meets once."""
    path = write_text(tmp_path_factory.mktemp("text"))
    lines = path.read_text()
    path.write_text(lines[:9000] + BAD + lines[9001:])
    return path


@pytest.fixture
def config(text, tmp_path):
    return partial(make_config, text, tmp_path / "run")


def make_config(text: Path, folder: Path, *overrides: str, recipe=recipe) -> TrainConfig:
    common = [f"data.source={text}", f"run.folder={folder}", "run.eval_every=0", "model.hidden_size=8"]
    common += ["run.steps=40", "checkpoint.every=8", "run.compiler_options=xla_backend_optimization_level=0"]
    return apply_overrides(apply_overrides(recipe(), common), overrides)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[int]:
    return Checkpointer(folder / "checkpoints").steps()


@pytest.fixture(scope="module")
def skipping(text, tmp_path_factory):
    """A run that skips: its rows and its output."""
    folder, printed = tmp_path_factory.mktemp("skipping") / "run", []
    result = train(
        make_config(text, folder, "run.on_nonfinite=skip"),
        say=printed.append,
    )
    assert result.status == "finished"
    return rows_of(folder), printed


def bad_step(rows) -> int:
    steps = [row["step"] for row in rows if row["loss"] is None]
    assert len(steps) == 1 and LEAST + 4 < steps[0] < 38, "the tests require one bad batch"
    return steps[0]


@pytest.mark.slow
def test_by_default_a_run_stops_at_the_first_step_that_is_not_finite(config, skipping, tmp_path):
    printed, bad = [], bad_step(skipping[0])
    result = train(config(), say=printed.append)
    assert (result.status, result.step) == ("diverged", bad)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, bad + 1)) and "skipped" not in rows[-1]
    newest = (bad - 1) // 8 * 8
    assert steps_of(tmp_path / "run") == [8, 16, 24][: newest // 8]
    line = next(line for line in printed if line.startswith("stopped"))
    assert line.startswith(f"stopped: step {bad}: loss inf") or line.startswith(f"stopped: step {bad}: loss nan")
    assert f"the newest checkpoint with finite ones is of step {newest}" in line
    # The same command stops again; with skip it goes on, as if it had skipped from the beginning.
    assert train(config()).status == "diverged"
    again = []
    assert train(config("run.on_nonfinite=skip"), hooks=[again.append]).status == "finished"
    assert {row["step"]: row["loss"] for row in again if row["step"] != bad} == {
        row["step"]: row["loss"] for row in skipping[0] if row["step"] > newest and row["step"] != bad
    }


def test_the_command_ends_with_exit_code_6(text, tmp_path, capsys):
    settings = [f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.eval_every=0", "run.steps=40"]
    assert main(["train", f"{__file__}:recipe", *settings, "model.hidden_size=8"]) == 6
    output = capsys.readouterr().out
    assert "diverged at step" in output and "run.steps=40 run.on_nonfinite=skip" in output


def test_a_skipped_step_is_counted_and_changes_nothing(skipping):
    rows, printed = skipping
    bad = bad_step(rows)
    assert [row["skipped"] for row in rows] == [int(row["step"] >= bad) for row in rows]
    assert any(
        line.startswith(f"warning: step {bad}: ") and "the update was skipped (1 so far)" in line for line in printed
    )
    # The learning rate is that of the optimizer's count, which is the number of updates.
    rates = [row["learning_rate"] for row in rows]
    assert rates[bad - 1] == rates[bad] and len({*rates}) == len(rates) - 1


@pytest.mark.slow
def test_a_run_that_skips_resumes_bit_for_bit_before_at_and_after_the_skipped_step(config, skipping, tmp_path, capsys):
    rows, checkpoints = skipping[0], tmp_path / "run" / "checkpoints"
    bad = bad_step(rows)
    for stop in (bad - 1, bad, bad + 1, 40):
        train(config("run.on_nonfinite=skip", f"run.steps={stop}", "checkpoint.keep=10"))
    resumed = rows_of(tmp_path / "run")
    assert [row["resumed_from"] for row in resumed if "resumed_from" in row] == [bad - 1, bad, bad + 1]
    assert numbers(resumed) == numbers(rows)
    saved = Checkpointer(checkpoints).metadata(bad)
    assert saved["finite"] and saved["data"]["position"] == bad and np.isinf(saved["metrics"]["loss"])
    differing = []
    for a, b in itertools.pairwise(str(checkpoints / str(step)) for step in (bad - 1, bad, bad + 1)):
        main(["checkpoint", "diff", "--values", "--json", a, b])
        differing.append(json.loads(capsys.readouterr().out)["values"]["differing"])
    assert differing[0] == {} and {"optimizer/step", "model/embed/embedding", "model/mean"} <= differing[1].keys()


def numbers(rows):
    names = ("step", "loss", "grad_norm", "learning_rate", "skipped")
    return [{name: row.get(name) for name in names} for row in rows]


@pytest.mark.slow
def test_skipping_compiles_nothing_more(config):
    counts = []
    for folder, choice in (("stop", "stop"), ("skip", "skip"), ("spikes", "skip")):
        more = ["run.spike_factor=3"] * (folder == "spikes")
        path = f"run.folder={config().run.folder}-{folder}"
        settings = [f"run.on_nonfinite={choice}", "run.steps=6", "checkpoint.every=100", *more]
        with count_compilations() as compiled:
            train(apply_overrides(config(), [path, *settings]))
        counts.append(len(compiled))
    assert counts[0] == counts[1] == counts[2]


def test_a_run_that_continues_keeps_the_newest_finite_checkpoint(config, skipping, tmp_path, capsys):
    bad = bad_step(skipping[0])
    printed = []
    result = train(config("run.on_nonfinite=continue", "checkpoint.keep=2"), say=printed.append)
    assert (result.status, result.step) == ("finished", 40)
    good = (bad - 1) // 8 * 8
    assert steps_of(tmp_path / "run") == [good, 32, 40]
    assert sum("training continues (run.on_nonfinite)" in line for line in printed) == 1
    assert main(["checkpoint", "list", "--json", str(tmp_path / "run")]) == 0
    found = {step["step"]: step["finite"] for step in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert found == {good: True, 32: False, 40: False}
    assert main(["checkpoint", "list", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("valid, not finite") == 2
    printed.clear()
    assert train(config("run.steps=48"), say=printed.append).status == "diverged"
    assert any(f"not finite; the newest checkpoint with finite ones is of step {good}" in line for line in printed)


def test_a_spike_above_the_running_median_is_skipped_and_the_run_resumes_bit_for_bit(text, tmp_path, skipping):
    bad = bad_step(skipping[0])
    spikes = partial(make_config, text, recipe=spiking_recipe)
    settings = ("run.on_nonfinite=skip", "run.spike_factor=4", "checkpoint.every=100")
    train(spikes(tmp_path / "whole", *settings))
    rows = rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows if row["loss"] > 100] == [bad]
    assert [row["skipped"] for row in rows] == [int(row["step"] >= bad) for row in rows]
    train(spikes(tmp_path / "parts", *settings, f"run.steps={bad - 1}"))
    train(spikes(tmp_path / "parts", *settings, f"run.steps={bad + 2}"))
    train(spikes(tmp_path / "parts", *settings))
    assert numbers(rows_of(tmp_path / "parts")) == numbers(rows)
    printed = []
    assert train(spikes(tmp_path / "stop", "run.spike_factor=4"), say=printed.append).step == bad
    assert any("limit" in line and "run.spike_factor" in line for line in printed if line.startswith("stopped"))
    assert train(spikes(tmp_path / "without")).status == "finished"


@pytest.mark.slow
def test_a_pipelined_run_skips_the_steps_of_a_plain_run_and_resumes_bit_for_bit(tmp_path):
    text = write_text(tmp_path)
    text.write_text(text.read_text().replace("5", BAD, 8))

    def rows(folder: str, *settings: str) -> list[dict]:
        config = replace(decoder_run(tmp_path / folder, text), loss_fn=decoder_loss)
        fixed = ["run.eval_every=0", "run.platform=auto", "run.on_nonfinite=skip", "run.spike_factor=9"]
        train(apply_overrides(config, ["run.compiler_options=xla_backend_optimization_level=0", *fixed, *settings]))
        return rows_of(tmp_path / folder)

    plain = rows("plain", "mesh.shape=fsdp:2", "run.steps=20")
    whole = rows("whole", "mesh.shape=pp:2", "run.steps=20")
    skips = [row["step"] for row, before in zip(whole[1:], whole, strict=False) if row["skipped"] > before["skipped"]]
    assert skips and [row["skipped"] for row in whole] == [row["skipped"] for row in plain]
    finite = [[row["loss"] for row in found if row["loss"] is not None] for found in (whole, plain)]
    np.testing.assert_allclose(*finite, rtol=1e-5)
    rows("parts", "mesh.shape=pp:2", f"run.steps={skips[0]}")
    assert numbers(rows("parts", "mesh.shape=pp:2", "run.steps=20")) == numbers(whole)


def decoder_loss(model, batch):
    total, weight = next_token_loss(model, batch)[:2]
    return total * jnp.where(jnp.any(batch["inputs"] == ord(BAD)), jnp.nan, 1.0), weight


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("run.on_nonfinite=ignore", "run.on_nonfinite must be one of stop, skip, continue, got 'ignore'"),
        ("run.spike_factor=1", "run.spike_factor must be above 1, or 0 for no limit, got 1.0"),
        ("run.spike_factor=nan", "run.spike_factor must be above 1 and finite, or 0 for no limit, got nan"),
    ],
)
def test_invalid_settings_are_refused(config, wrong, problem):
    with pytest.raises(ConfigError, match=problem):
        train(config(wrong))


def check_of(saved=None, **settings) -> StepCheck:
    return StepCheck(replace(bigram.recipe().run, **settings), saved or {})


def row_of(step, loss=1.0, grad_norm=1.0, **more):
    return {"step": step, "loss": loss, "grad_norm": grad_norm, **more}


def test_limits_depend_on_the_rows_up_to_the_last_but_one():
    check = check_of(on_nonfinite="skip", spike_factor=3.0)
    for step in range(1, 3 * WINDOW):
        early = check.limits(step)
        values = [float(s) for s in range(1, step - 1)][-WINDOW:]
        expected = 3 * np.median(values) if len(values) >= LEAST else np.inf
        assert early == (np.float32(expected), np.float32(2 * expected))
        check.read(row_of(step - 1, float(step - 1), 2.0 * (step - 1), skipped=0.0)) if step > 1 else None
        assert check.limits(step) == early  # whether the row before it was read or not
        if step % 7 == 0:
            check = check_of(check.record() | {"metrics": {}}, on_nonfinite="skip", spike_factor=3.0)


def test_a_run_that_skips_every_update_stops():
    check = check_of(on_nonfinite="skip")
    for step in range(1, MOST_SKIPPED + 1):
        assert not check.stopped
        check.read(row_of(step, loss=float("nan"), skipped=1.0))
    assert check.stopped.endswith(f"{MOST_SKIPPED} updates in a row were skipped")


def test_a_held_out_loss_that_is_not_finite_stops_the_run():
    check = check_of()
    check.read(row_of(1, eval_loss=float("nan")))
    assert check.stopped == "step 1: eval_loss nan" and check.record() == {"finite": False}
