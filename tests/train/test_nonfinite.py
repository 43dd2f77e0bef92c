"""Runs in which the loss or the gradients of a step are not finite, or far above the values of the steps before it."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mesh.cli import main
from flax_mesh.train import TrainConfig, apply_overrides
from flax_mesh.train.metrics import LEAST, MOST_SKIPPED, WINDOW, StepCheck
from tests.train import bigram
from tests.train.bigram import write_text
from tests.train.support.runs import checkpoints, rows_of, run

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


def numbers(rows):
    names = ("step", "loss", "grad_norm", "learning_rate", "skipped")
    return [{name: row.get(name) for name in names} for row in rows]


@pytest.fixture(scope="module")
def skipping(text, tmp_path_factory):
    """A run that skips: its rows, its output, and the step of the bad batch."""
    ran = run(make_config(text, tmp_path_factory.mktemp("skipping") / "run", "run.on_nonfinite=skip"))
    rows = rows_of(ran.result.folder)
    (bad,) = [row["step"] for row in rows if row["loss"] is None]
    assert ran.result.status == "finished" and LEAST + 4 < bad < 38
    return rows, ran.lines, bad


@pytest.mark.slow
def test_by_default_a_run_stops_at_the_first_step_that_is_not_finite(config, skipping, tmp_path):
    rows, _, bad = skipping
    ran = run(config())
    assert (ran.result.status, ran.result.step) == ("diverged", bad)
    found = rows_of(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(1, bad + 1)) and "skipped" not in found[-1]
    newest = (bad - 1) // 8 * 8
    assert checkpoints(tmp_path / "run") == [8, 16, 24][: newest // 8]
    (line,) = [line for line in ran.lines if line.startswith("stopped")]
    assert re.match(rf"stopped: step {bad}: loss (inf|nan)", line)
    assert f"the newest checkpoint with finite ones is of step {newest}" in line
    # The same command stops again; with skip it goes on, as if it had skipped from the beginning.
    assert run(config()).result.status == "diverged"
    again = run(config("run.on_nonfinite=skip"))
    assert again.result.status == "finished" and again.losses.keys() == set(range(newest + 1, 41))
    assert all(again.losses[row["step"]] == row["loss"] for row in rows[newest:] if row["step"] != bad)


def test_the_command_ends_with_exit_code_6(text, tmp_path, capsys):
    settings = [f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.eval_every=0", "run.steps=40"]
    assert main(["train", f"{__file__}:recipe", *settings, "model.hidden_size=8"]) == 6
    output = capsys.readouterr().out
    for text in ("diverged at step", "stopped: step ", "run.steps=40 run.on_nonfinite=skip"):
        assert text in output


def test_a_skipped_step_is_counted_and_changes_nothing(skipping):
    rows, printed, bad = skipping
    assert [row["skipped"] for row in rows] == [int(row["step"] >= bad) for row in rows]
    (line,) = [line for line in printed if line.startswith(f"warning: step {bad}: ")]
    assert "the update was skipped (1 so far)" in line
    # The learning rate follows the optimizer's count, which is the number of updates.
    rates = [row["learning_rate"] for row in rows]
    assert rates[bad - 1] == rates[bad] and len({*rates}) == len(rates) - 1


def test_a_run_that_continues_keeps_the_newest_finite_checkpoint(config, skipping, tmp_path, capsys):
    good = (skipping[2] - 1) // 8 * 8
    ran = run(config("run.on_nonfinite=continue", "checkpoint.keep=2"))
    assert (ran.result.status, ran.result.step) == ("finished", 40)
    assert checkpoints(tmp_path / "run") == [good, 32, 40]
    assert sum("training continues (run.on_nonfinite)" in line for line in ran.lines) == 1
    assert main(["checkpoint", "list", "--json", str(tmp_path / "run")]) == 0
    found = {step["step"]: step["finite"] for step in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert found == {good: True, 32: False, 40: False}
    assert main(["checkpoint", "list", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("valid, not finite") == 2
    again = run(config("run.steps=48"))
    assert again.result.status == "diverged"
    assert any(f"not finite; the newest checkpoint with finite ones is of step {good}" in line for line in again.lines)


def test_a_spike_above_the_running_median_is_skipped_and_the_run_resumes_bit_for_bit(text, tmp_path, skipping):
    bad = skipping[2]
    spikes = partial(make_config, text, recipe=lambda: replace(bigram.recipe(), loss_fn=spiking_loss))
    settings = ("run.on_nonfinite=skip", "run.spike_factor=4", "checkpoint.every=100")
    run(spikes(tmp_path / "whole", *settings))
    rows = rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows if row["loss"] > 100] == [bad]
    assert [row["skipped"] for row in rows] == [int(row["step"] >= bad) for row in rows]
    for steps in (bad - 1, 40):
        run(spikes(tmp_path / "parts", *settings, f"run.steps={steps}"))
    assert numbers(rows_of(tmp_path / "parts")) == numbers(rows)


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


def test_a_run_stops_after_many_skipped_updates_a_spike_or_a_nonfinite_evaluation():
    check = check_of(on_nonfinite="skip")
    for step in range(1, MOST_SKIPPED + 1):
        assert not check.stopped
        check.read(row_of(step, loss=float("nan"), skipped=1.0))
    assert check.stopped.endswith(f"{MOST_SKIPPED} updates in a row were skipped")
    for factor, line in ((4.0, "step 20: loss 1000 (limit 4, run.spike_factor)"), (0.0, "")):
        check = check_of(spike_factor=factor)
        for step in range(1, 21):
            check.read(row_of(step, loss=1e3 if step == 20 else 1.0))
        assert check.stopped == line  # without a factor, a spike is a loss as any other
    check = check_of()
    check.read(row_of(1, eval_loss=float("nan")))
    assert check.stopped == "step 1: eval_loss nan" and check.record() == {"finite": False}
