"""Complete runs in this process: their rows and files, and how one resumes from another."""

import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import TrainConfig, apply_overrides, loop, train
from flax_mesh.train.data import run_data
from flax_mesh.train.loop import TrainResult
from flax_mesh.train.overrides import to_lines
from tests.train.bigram import count_compilations, loss_with_slow_evaluation, recipe, snapshot, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


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
def undisturbed(text, tmp_path_factory) -> tuple[TrainResult, list[str], list[dict]]:
    """A run of 12 steps: its result, its output and its rows."""
    printed, rows = [], []
    config = make_config(text, tmp_path_factory.mktemp("undisturbed") / "run", "run.sample_tokens=8")
    return train(config, say=printed.append, hooks=[rows.append]), printed, rows


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows}


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


# --- one run ---


def test_every_step_has_a_complete_row(undisturbed):
    result, _, rows = undisturbed
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["loss"] > 0 and row["grad_norm"] > 0 and row["weight"] == 8 * 32
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["seconds"])
        assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / 2
        assert row["data_wait_seconds"] >= 0
        assert row["mfu"] is None and row["device_bytes"] is None  # not available on a CPU
        assert "resumed_from" not in row
    assert result == TrainResult("finished", 12, result.folder, rows[-1], result.sample)


def test_the_learning_rate_of_the_rows_warms_up_and_decays(undisturbed):
    rates = [row["learning_rate"] for row in undisturbed[2]]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))


def test_metrics_jsonl_contains_the_rows(undisturbed):
    result, _, rows = undisturbed
    assert rows_of(result.folder) == rows


def test_held_out_bits_per_byte_decrease(undisturbed):
    bits = {row["step"]: row["bits_per_byte"] for row in undisturbed[2] if "bits_per_byte" in row}
    assert list(bits) == [4, 8, 12]
    assert bits[12] < bits[8] < bits[4] < 8.5  # 8 bits: no better than chance


def test_the_sample_continues_the_held_out_text(undisturbed, text):
    result, _, _ = undisturbed
    held_out = text.read_text()[-text.stat().st_size // 5 :]
    assert result.sample[:60] in held_out
    assert len(result.sample) == 64 + 8


def test_a_new_run_prints_its_description(undisturbed):
    result, printed, _ = undisturbed
    assert printed[0] == "mesh: uses 2 of the 8 devices here"
    assert printed[1] == "mesh: dp:2 on 2 x cpu"
    assert printed[2].startswith("data: ") and "squares.txt" in printed[2]
    assert printed[3].startswith("model: 0.03M parameters in 2 arrays; with the optimizer 384 KiB")
    assert printed[4:] == ["optimizer: adamw, cosine schedule", f"run: new run in {result.folder}, 12 steps"]


def test_the_config_is_written_beside_the_metrics(undisturbed, text):
    folder = undisturbed[0].folder
    lines = (folder / "config.txt").read_text().splitlines()
    assert f"data.source={text}" in lines and f"run.folder={folder}" in lines
    assert to_lines(apply_overrides(recipe(), lines)) == lines


def test_nothing_is_compiled_after_the_second_step(config):
    counts = {}
    with count_compilations() as compiled:
        # The row of a step is written after the next step is dispatched, so counts[1] includes both.
        hook = lambda row: counts.update({row["step"]: len(compiled)})  # noqa: E731
        train(config("run.steps=8", "run.eval_every=0"), hooks=[hook])
    assert counts[1] > 0, "no compilation was counted"
    assert counts[8] - counts[1] == 0


def test_a_step_is_queued_behind_the_one_whose_metrics_are_read(config, monkeypatch):
    order, made = [], []
    build, make = loop.build_program, run_data.make_batch_fn

    def spied(*arguments):
        program = build(*arguments)

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
    train(quiet, hooks=[lambda row: order.append(("row", row["step"]))])
    text = [f"{kind} {number}" for kind, number in order]
    # The next step is dispatched before the host waits for this one, and the host waits for nothing else.
    assert text == ["step 1", "step 2", "row 1", "step 3", "row 2", "step 4", "row 3", "row 4"]
    assert made == [0, 1, 2, 3]


@pytest.mark.slow
def test_evaluation_time_is_not_counted_in_the_steps(config):
    short = config("run.steps=3", "run.eval_every=2", "data.eval_batches=1", "mesh.shape=dp:1")
    rows = []
    train(replace(short, loss_fn=loss_with_slow_evaluation), hooks=[rows.append])
    assert ["eval_loss" in row for row in rows] == [False, True, True]
    assert max(row["seconds"] for row in rows[1:]) < 2, "an evaluation sleeps for 2 s"


def test_without_evaluation_no_held_out_batch_is_required(config):
    too_small = ["data.held_out=0.005", "run.steps=1"]  # 2 windows; a batch has 8
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        train(config(*too_small))
    result = train(config(*too_small, "run.eval_every=0"))
    assert result.status == "finished" and "eval_loss" not in result.last_row


# --- bad settings ---


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (("run.steps=0", "data.batch_size=0"), r"data\.batch_size .*\nrun\.steps "),
        (("mesh.shape=dp:8", "data.batch_size=12"), r"^data\.batch_size=12 is not divisible by 8 \(dp=8\); use a mu"),
        (
            ("mesh.shape=dp:4", "pipeline.num_microbatches=4"),
            r"^data\.batch_size=8 / pipeline\.num_microbatches=4 is not divisible by 4 \(dp=4\)",
        ),
        (("mesh.shape=sp:8", "data.sequence_length=12"), r"^data\.sequence_length=12 is not divisible by 8 \(sp=8\)"),
        (("model.vocab_size=200",), r"^model\.vocab_size=200 is too small for data\.source=.*: text needs 256$"),
        (("data.held_out=0.005",), r"^data\.held_out: the held-out part has .* windows"),
        (("mesh.shape=tp:8", "model.vocab_size=257"), r"head/kernel: dim 1 has size 257, not divisible by 8"),
    ],
)
def test_bad_settings_stop_before_anything_is_compiled_or_written(config, tmp_path, wrong, problem):
    with count_compilations() as compiled, pytest.raises(ValueError, match=problem):
        train(config(*wrong))
    assert not compiled
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_auto_shrinks_the_mesh_of_a_run_and_prints_it(config):
    printed = []
    result = train(config("mesh.shape=dp:4,fsdp:4", "run.steps=1", "run.eval_every=0"), say=printed.append)
    assert result.status == "finished"
    assert printed[:2] == [
        "mesh: dp:4,fsdp:4 needs more than the 8 devices here; shrunk to dp:2,fsdp:4",
        "mesh: dp:2,fsdp:4 on 8 x cpu",
    ]


# --- resuming ---


def test_a_finished_run_prints_that_and_does_nothing(undisturbed, text):
    folder, printed = undisturbed[0].folder, []
    before = snapshot(folder)
    with count_compilations() as compiled:
        result = train(make_config(text, folder, "run.sample_tokens=8", "run.eval_every=5"), say=printed.append)
    assert result == TrainResult("already finished", 12, folder)
    assert printed[-1] == f"run: {folder} is finished: step 12 of 12. Nothing to do."
    assert snapshot(folder) == before
    assert not compiled


def test_an_extended_run_has_the_losses_of_a_longer_one(config, undisturbed):
    printed = []
    first = train(config("run.steps=5"))
    assert first.step == 5
    second = train(config("run.steps=12"), say=printed.append)
    rows = rows_of(second.folder)
    assert second.status == "finished"
    assert f"run: found {second.folder} at step 5; resuming, 7 steps to go" in printed
    assert "changed since the checkpoint: run.steps: 5 -> 12" in printed
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row.get("resumed_from") for row in rows] == [None] * 5 + [5] + [None] * 6
    assert losses(rows) == losses(undisturbed[2])


def test_a_stopped_run_saves_its_step_and_resumes_from_it(config, undisturbed):
    seen = []
    stopped = train(config(), hooks=[seen.append], should_stop=lambda: len(seen) >= 6)
    assert stopped.status == "stopped" and stopped.sample == ""
    assert stopped.step == rows_of(stopped.folder)[-1]["step"] == checkpoints(stopped.folder)[-1]
    assert 6 <= stopped.step < 12
    resumed = train(config())
    assert resumed.status == "finished"
    assert [row["step"] for row in rows_of(resumed.folder) if "resumed_from" in row] == [stopped.step + 1]
    assert losses(rows_of(resumed.folder)) == losses(undisturbed[2])


def test_checkpoints_are_saved_at_their_interval_and_the_newest_are_kept(config):
    result = train(config("checkpoint.every=2", "checkpoint.keep=2", "run.steps=7", "run.eval_every=0"))
    assert checkpoints(result.folder) == [6, 7]


@pytest.mark.slow
def test_changed_settings_are_listed_and_rejected_if_they_change_the_result(config, text, undisturbed):
    result = train(config("run.steps=4"))
    before = snapshot(result.folder)
    changed = ["optimizer.b1=0.8", "run.seed=3", "run.eval_every=3", "mesh.shape=fsdp:4"]
    with count_compilations() as compiled, pytest.raises(ConfigError) as rejected:
        train(config(*changed))
    assert rejected.value.problems == [
        "the checkpoint of step 4 was saved with different settings:",
        "  optimizer.b1: 0.9 -> 0.8 (changes the result)",
        "  run.seed: 0 -> 3 (changes the result)",
        "  Restore these settings, start a new run (--restart, or another run.folder), or resume with them by "
        "--allow-changes.",
    ]
    assert not compiled
    assert snapshot(result.folder) == before, "a rejected run changed the folder"
    printed = []
    accepted = train(config(*changed), allow_changes=True, say=printed.append)
    assert accepted.status == "finished" and accepted.step == 12
    assert [line for line in printed if line.startswith("changed")] == [
        "changed since the checkpoint: mesh.shape: dp:2 -> fsdp:4",
        "changed since the checkpoint: optimizer.b1: 0.9 -> 0.8 (changes the result)",
        "changed since the checkpoint: run.steps: 4 -> 12",
        "changed since the checkpoint: run.seed: 0 -> 3 (changes the result)",
        "changed since the checkpoint: run.eval_every: 4 -> 3",
    ]
    assert "optimizer.b1=0.8" in (accepted.folder / "config.txt").read_text().splitlines()
    after, straight = losses(rows_of(accepted.folder)), losses(undisturbed[2])
    assert [step for step in after if after[step] == straight[step]] == [1, 2, 3, 4]


def test_changed_data_is_rejected(tmp_path):
    text = write_text(tmp_path)
    make = partial(make_config, text, tmp_path / "run", "run.eval_every=0")
    train(make("run.steps=1"))
    text.write_text(text.read_text().replace("squared", "SQUARED"))
    with pytest.raises(ConfigError, match=r"content of data\.source: [0-9a-f]{12} -> [0-9a-f]{12} \(changes the resul"):
        train(make("run.steps=2"))


def test_a_run_whose_data_are_rewritten_stops_without_saving(tmp_path):
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
    np.save(path, np.arange(4000, dtype=np.uint16) % 256)
    result = train(config)
    assert (result.status, checkpoints(tmp_path / "run")) == ("finished", [4, 6, 8])
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, 9))


def test_neutral_changes_are_accepted_and_keep_the_losses(config, undisturbed):
    train(config("run.steps=6"))
    printed = []
    train(config("checkpoint.every=3", "run.eval_every=0", "model.note=new"), say=printed.append)
    assert [re.sub(r".*checkpoint: ", "", line) for line in printed if line.startswith("changed")] == [
        "model.note:  -> new",
        "checkpoint.every: 100 -> 3",
        "run.steps: 6 -> 12",
        "run.eval_every: 4 -> 0",
    ]
    assert losses(rows_of(Path(config().run.folder))) == losses(undisturbed[2])


@pytest.mark.sampled
@pytest.mark.parametrize("allow_changes", [False, True])
def test_a_checkpoint_of_another_model_is_rejected_with_every_array_that_differs(config, allow_changes):
    folder = train(config("run.steps=1", "run.eval_every=0")).folder
    before = snapshot(folder)
    with count_compilations() as compiled, pytest.raises(ConfigError) as rejected:
        train(config("run.steps=2", "run.eval_every=0", "model.hidden_size=32"), allow_changes=allow_changes)
    problems = list(rejected.value.problems)
    if not allow_changes:  # the settings that differ are listed before
        assert problems[0] == "the checkpoint of step 1 was saved with different settings:"
        assert problems[1] == "  model.hidden_size: 64 -> 32 (changes the result)"
        problems = problems[2:]
    head, *lines, tail = problems
    assert re.fullmatch(
        rf"checkpoint {folder}/checkpoints/1 does not match the model \(7 of \d+ leaves differ\):", head
    )
    assert tail.startswith("  Restore it into the model it was saved from, or start another run")
    assert lines == sorted(lines) and len(lines) == 7
    for path, saved, now in [
        ("embed/embedding", "f32[256,64]", "f32[256,32]"),
        ("head/kernel", "f32[64,256]", "f32[32,256]"),
    ]:
        assert f"  model/{path}: checkpoint {saved}, model {now}" in lines
        assert len([line for line in lines if line.endswith(f"/{path}: checkpoint {saved}, model {now}")]) == 3
    assert "  model/mean: checkpoint f32[64], model f32[32]" in lines
    assert snapshot(folder) == before
    assert not compiled


@pytest.mark.slow
def test_a_restart_uses_a_new_folder_and_does_not_change_the_old_one(config):
    short = ["run.steps=2", "run.eval_every=0"]
    old = train(config(*short)).folder
    before = snapshot(old)
    assert before
    folders = [train(config(*short, "optimizer.b1=0.8"), restart=True).folder for _ in range(2)]
    assert folders == [old.with_name("run-2"), old.with_name("run-3")]
    assert snapshot(old) == before
    for folder in folders:
        assert [row["step"] for row in rows_of(folder)] == [1, 2]
        assert not [row for row in rows_of(folder) if "resumed_from" in row]
        assert checkpoints(folder) == [2]


def test_a_restart_without_an_old_run_uses_the_folder_itself(config, tmp_path):
    assert train(config("run.steps=1", "run.eval_every=0"), restart=True).folder == tmp_path / "run"


def test_a_folder_in_the_home_directory_is_found(text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    result = train(make_config(text, Path("~/local"), "run.steps=1", "run.eval_every=0"))
    assert result.folder == tmp_path / "local" and (tmp_path / "local" / "metrics.jsonl").exists()


def test_a_sample_that_raises_is_a_warning_at_the_end_of_the_run(config, text, tmp_path):
    said: list[str] = []

    def broken(model, prompt, num_tokens, key):
        raise KeyError("no token")

    result = train(replace(config("run.steps=1", "run.sample_tokens=8"), sample=broken), say=said.append)
    assert (result.status, result.sample) == ("finished", "")
    assert any(re.match(r"warning: no text was sampled: sample: .*test_loop.py, line \d+: KeyError", x) for x in said)
