"""Complete runs in this process: their rows and files, and how one resumes from another."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh.cli.text.start import Programs
from flax_mesh.data import run_data
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.overrides import to_lines
from flax_mesh.train import TrainConfig, apply_overrides, loop, train
from flax_mesh.train.steps import TrainResult
from tests.train.bigram import count_compilations, loss_with_slow_evaluation, recipe, snapshot
from tests.train.support.runs import Ran, checkpoints, losses, rows_of, run


@pytest.fixture(scope="module", autouse=True)
def on_eight_cpu_devices():
    if jax.default_backend() != "cpu":
        pytest.skip("the expected rows and meshes are those of CPU devices")


@pytest.fixture
def config(text, tmp_path):
    """`config("run.steps=6")` is the recipe with the text, in a folder of this test."""
    return partial(make_config, text, tmp_path / "run")


def make_config(text: Path, folder: Path, *overrides: str) -> TrainConfig:
    return apply_overrides(recipe(), [f"data.source={text}", f"run.folder={folder}", *overrides])


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> Ran:
    """A run of 12 steps."""
    return run(make_config(text, tmp_path_factory.mktemp("undisturbed") / "run", "run.sample_tokens=8"))


# --- one run ---


def test_every_step_has_a_complete_row_that_metrics_jsonl_contains(undisturbed):
    rows, result = undisturbed.rows, undisturbed.result
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["loss"] > 0 and row["grad_norm"] > 0 and row["weight"] == 8 * 32
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["seconds"])
        assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / 2
        assert row["data_wait_seconds"] >= 0
        assert row["mfu"] is None and row["device_bytes"] is None  # not available on a CPU
        assert "resumed_from" not in row
    assert result == TrainResult("finished", 12, result.folder, rows[-1], result.sample)
    assert rows_of(result.folder) == rows
    rates = [row["learning_rate"] for row in rows]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))
    bits = {row["step"]: row["bits_per_byte"] for row in rows if "bits_per_byte" in row}
    assert list(bits) == [4, 8, 12]
    assert bits[12] < bits[8] < bits[4] < 8.5  # 8 bits: no better than chance


def test_a_new_run_prints_its_description_writes_its_config_and_continues_the_held_out_text(undisturbed, text):
    printed, result = undisturbed.lines, undisturbed.result
    assert printed[:2] == ["mesh: uses 2 of the 8 devices here", "mesh: dp:2 on 2 x cpu"]
    assert printed[2].startswith("data: ") and "squares.txt" in printed[2]
    assert printed[3].startswith("model: 0.03M parameters in 2 arrays; with the optimizer 384 KiB")
    assert printed[4:] == ["optimizer: adamw, cosine schedule", f"run: new run in {result.folder}, 12 steps"]
    lines = (result.folder / "config.txt").read_text().splitlines()
    assert f"data.source={text}" in lines and f"run.folder={result.folder}" in lines
    *settings, data = lines
    assert to_lines(apply_overrides(recipe(), settings)) == settings
    assert re.fullmatch("# content of data.source: [0-9a-f]{64}", data)
    assert result.sample[:60] in text.read_text()[-text.stat().st_size // 5 :]
    assert len(result.sample) == 64 + 8


def test_a_step_is_queued_behind_the_one_whose_metrics_are_read_and_compiled_once(config, monkeypatch):
    order, made, counts = [], [], []
    build, make = loop.build_program, run_data.make_batch_fn

    def spied(*arguments, **options):
        program = build(*arguments, **options)

        def step(state, batch):
            order.append(("step", len([kind for kind, _ in order if kind == "step"]) + 1))
            return program.step(state, batch)

        return replace(program, step=step)

    def counted(*arguments, **kinds):
        batch_of = make(*arguments, **kinds)
        return lambda step: (made.append(step), batch_of(step))[1]

    monkeypatch.setattr(loop, "build_program", spied)
    monkeypatch.setattr(run_data, "make_batch_fn", counted)
    quiet = config("run.steps=4", "run.eval_every=0", "checkpoint.every=100")
    with count_compilations() as compiled:
        train(quiet, hooks=[lambda row: order.append(("row", row["step"])), lambda row: counts.append(len(compiled))])
    text = [f"{kind} {number}" for kind, number in order]
    # The next step is dispatched before the host waits for this one, and the host waits for nothing else.
    assert text == ["step 1", "step 2", "row 1", "step 3", "row 2", "step 4", "row 3", "row 4"]
    assert made == [0, 1, 2, 3]
    assert counts[0] > 0, "no compilation was counted"  # the compilation of the second step is included
    assert len({*counts}) == 1


@pytest.mark.slow
def test_evaluation_time_is_not_counted_in_the_steps(config):
    short = config("run.steps=3", "run.eval_every=2", "data.eval_batches=1", "mesh.shape=dp:1")
    rows = run(replace(short, loss_fn=loss_with_slow_evaluation)).rows
    assert ["eval_loss" in row for row in rows] == [False, True, True]
    assert max(row["seconds"] for row in rows[1:]) < 2, "an evaluation sleeps for 2 s"


def test_without_evaluation_no_held_out_batch_is_required(config):
    too_small = ["data.held_out=0.005", "run.steps=1"]  # 2 windows; a batch has 8
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        train(config(*too_small))
    result = train(config(*too_small, "run.eval_every=0"))
    assert result.status == "finished" and "eval_loss" not in result.last_row


# --- resuming ---


def test_a_finished_run_prints_that_and_does_nothing(undisturbed, text):
    folder, printed = undisturbed.result.folder, []
    before = snapshot(folder)
    with count_compilations() as compiled:
        result = train(make_config(text, folder, "run.sample_tokens=8", "run.eval_every=5"), say=printed.append)
    assert result == TrainResult("already finished", 12, folder)
    assert printed[-1] == f"run: {folder} is finished: step 12 of 12. Nothing to do."
    assert snapshot(folder) == before
    assert not compiled


def test_a_stopped_and_extended_run_has_the_losses_of_one_long_run(config, undisturbed):
    assert run(config("run.steps=3")).result.step == 3
    polls = itertools.count()
    stopped = run(config(), should_stop=lambda: next(polls) > 2)
    folder, step = stopped.result.folder, stopped.result.step
    assert f"run: found {folder} at step 3; resuming, 9 steps to go" in stopped.lines
    assert "changed since the checkpoint: run.steps: 3 -> 12" in stopped.lines
    assert stopped.result.status == "stopped" and stopped.result.sample == ""
    assert step == rows_of(folder)[-1]["step"] == checkpoints(folder)[-1] and 4 <= step < 12
    with Programs() as programs:
        third = run(config("checkpoint.every=3", "checkpoint.keep=2", "run.eval_every=0", "model.note=new"))
    assert programs.of("traced")["step"].times == programs.of("lowered")["step"].times == 1
    assert next(iter(programs.of("lowered"))) == "step", "nothing is initialized or evaluated"
    assert third.result.status == "finished"
    changes = ["model.note:  -> new", "checkpoint.every: 100 -> 3", "checkpoint.keep: 3 -> 2", "run.eval_every: 4 -> 0"]
    assert [line.partition(": ")[2] for line in third.lines if line.startswith("changed since the")] == changes
    assert checkpoints(folder) == [9, 12]
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [(row["step"], row["resumed_from"]) for row in rows if "resumed_from" in row] == [(4, 3), (step + 1, step)]
    assert losses(rows) == undisturbed.losses


@pytest.mark.slow
def test_changed_settings_are_listed_and_rejected_if_they_change_the_result(config, text, undisturbed):
    result = train(config("run.steps=4"))
    before = snapshot(result.folder)
    changed = ["optimizer.b1=0.8", "run.seed=3", "run.eval_every=3", "mesh.shape=fsdp:4", "pipeline.num_microbatches=2"]
    with count_compilations() as compiled, pytest.raises(ConfigError) as rejected:
        train(config(*changed))
    assert rejected.value.lines == [
        "the checkpoint of step 4 was saved with different settings:",
        "  pipeline.num_microbatches: 1 -> 2 (changes the result)",  # the model has dropout
        "  optimizer.b1: 0.9 -> 0.8 (changes the result)",
        "  run.seed: 0 -> 3 (changes the result)",
        "  Restore these settings, start a new run (--restart, or another run.folder), or resume with them by "
        "--allow-changes.",
    ]
    assert not compiled
    assert snapshot(result.folder) == before, "a rejected run changed the folder"
    ran = run(config(*changed), allow_changes=True)
    folder = ran.result.folder
    assert ran.result.step == 12
    assert "changed since the checkpoint: mesh.shape: dp:2 -> fsdp:4" in ran.lines
    assert "changed since the checkpoint: optimizer.b1: 0.9 -> 0.8 (changes the result)" in ran.lines
    assert "optimizer.b1=0.8" in (folder / "config.txt").read_text().splitlines()
    after, straight = losses(rows_of(folder)), undisturbed.losses
    assert [step for step in after if after[step] == straight[step]] == [1, 2, 3, 4]


def test_a_run_whose_data_are_rewritten_stops_without_saving_and_resumes_with_the_old_data_only(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(4000, dtype=np.uint16) % 256)
    config = make_config(path, tmp_path / "run", "run.steps=8", "checkpoint.every=2", "run.eval_every=0")

    def rewrite(row):
        if row["step"] == 3:
            with path.open("r+b") as file:  # in place, and never shorter than before
                np.save(file, np.arange(4000, dtype=np.uint16) % 255)

    with pytest.raises(ConfigError, match=f"{path} was rewritten while the run read it"):
        train(config, hooks=[rewrite])
    assert checkpoints(tmp_path / "run") == [2]
    with pytest.raises(ConfigError, match=r"content of data\.source: [0-9a-f]{12} -> [0-9a-f]{12} \(changes the resul"):
        train(config)
    np.save(path, np.arange(4000, dtype=np.uint16) % 256)
    assert train(config).status == "finished"
    assert checkpoints(tmp_path / "run") == [4, 6, 8]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, 9))


def test_a_checkpoint_of_another_model_is_rejected_with_every_array_that_differs(config):
    folder = train(config("run.steps=1", "run.eval_every=0")).folder
    before, problems = snapshot(folder), []
    other = config("run.steps=2", "run.eval_every=0", "model.hidden_size=32")
    for allow_changes in (False, True):
        with count_compilations() as compiled, pytest.raises(ConfigError) as rejected:
            train(other, allow_changes=allow_changes)
        problems.append(rejected.value.lines)
        assert snapshot(folder) == before
        assert not compiled
    assert problems[0] == [  # the settings that differ are listed before
        "the checkpoint of step 1 was saved with different settings:",
        "  model.hidden_size: 64 -> 32 (changes the result)",
        *problems[1],
    ]
    head, *lines, _ = problems[1]
    assert "does not match the model (7 of " in head and len(lines) == 7  # parameters, moments and the mean
    assert "  model/mean: checkpoint f32[64], model f32[32]" in lines


def test_a_sample_that_raises_is_only_a_warning(text, tmp_path, monkeypatch):
    def broken(model, prompt, num_tokens, key):
        raise KeyError("no token")

    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config(text, Path("~/local"), "run.steps=1", "run.eval_every=0", "run.sample_tokens=8")
    ran = run(replace(config, sample=broken))
    assert ran.result.folder == tmp_path / "local" and (tmp_path / "local" / "metrics.jsonl").exists()
    assert (ran.result.status, ran.result.sample) == ("finished", "")
    warning = r"warning: no text was sampled: sample: .*test_loop.py, line \d+: KeyError"
    assert any(re.match(warning, line) for line in ran.lines)
