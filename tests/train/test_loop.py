"""Whole runs in this process: their rows, their files, and how one goes on from another."""

import itertools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import TrainConfig, apply_overrides, loop, to_lines, train
from flax_mesh.train.loop import TrainResult
from tests.train.bigram import count_compilations, loss_with_slow_evaluation, recipe, snapshot, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", autouse=True)
def on_eight_cpu_devices():
    if jax.default_backend() != "cpu":
        pytest.skip("the rows and meshes expected here are those of CPU devices")


@pytest.fixture
def config(text, tmp_path):
    """`config("run.steps=6")`: the recipe on the text, in a folder of the test."""
    return partial(make_config, text, tmp_path / "run")


def make_config(text: Path, folder: Path, *overrides: str) -> TrainConfig:
    return apply_overrides(recipe(), [f"data.source={text}", f"run.folder={folder}", *overrides])


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> tuple[TrainResult, list[str], list[dict]]:
    """A run of 12 steps: its result, what it said, and its rows."""
    said, rows = [], []
    config = make_config(text, tmp_path_factory.mktemp("undisturbed") / "run", "run.sample_tokens=8")
    return train(config, say=said.append, hooks=[rows.append]), said, rows


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[dict]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows}


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


# --- one run ---


def test_every_step_has_a_row_with_what_it_promises(undisturbed):
    result, _, rows = undisturbed
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["loss"] > 0 and row["grad_norm"] > 0 and row["weight"] == 8 * 32
        assert row["tokens_per_s"] == pytest.approx(8 * 32 / row["seconds"])
        assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / 2
        assert row["data_wait_seconds"] >= 0
        assert row["mfu"] is None and row["device_bytes"] is None  # a CPU tells neither its peak nor its memory
        assert "resumed_from" not in row
    assert result == TrainResult("finished", 12, result.folder, rows[-1], result.sample)


def test_the_learning_rate_of_the_rows_warms_up_and_falls(undisturbed):
    rates = [row["learning_rate"] for row in undisturbed[2]]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))


def test_metrics_jsonl_holds_the_rows(undisturbed):
    result, _, rows = undisturbed
    assert rows_of(result.folder) == rows


def test_held_out_bits_per_byte_fall(undisturbed):
    bits = {row["step"]: row["bits_per_byte"] for row in undisturbed[2] if "bits_per_byte" in row}
    assert list(bits) == [4, 8, 12]
    assert bits[12] < bits[8] < bits[4] < 8.5  # 8 bits: no better than chance


def test_the_sample_continues_the_held_out_text(undisturbed, text):
    result, _, _ = undisturbed
    held_out = text.read_text()[-text.stat().st_size // 5 :]
    assert result.sample[:60] in held_out
    assert len(result.sample) == 64 + 8


def test_a_new_run_says_what_it_is(undisturbed):
    result, said, _ = undisturbed
    assert said[0] == "mesh: uses 2 of the 8 devices here"
    assert said[1] == "mesh: dp:2 on 2 x cpu"
    assert said[2].startswith("data: ") and "squares.txt" in said[2]
    assert said[3].startswith("model: 0.03M parameters in 2 arrays; with the optimizer 384 KiB")
    assert said[4:] == [f"run: {result.folder} is new, 12 steps"]


def test_the_config_stands_beside_the_metrics(undisturbed, text):
    folder = undisturbed[0].folder
    lines = (folder / "config.txt").read_text().splitlines()
    assert f"data.source={text}" in lines and f"run.folder={folder}" in lines
    assert to_lines(apply_overrides(recipe(), lines)) == lines


def test_nothing_is_compiled_after_the_second_step(config):
    counts = {}
    with count_compilations() as compiled:
        # The row of a step is written once the next step is dispatched, so counts[1] has both of them.
        hook = lambda row: counts.update({row["step"]: len(compiled)})  # noqa: E731
        train(config("run.steps=8", "run.eval_every=0"), hooks=[hook])
    assert counts[1] > 0, "the counter counts nothing"
    assert counts[8] - counts[1] == 0


def test_a_step_is_queued_behind_the_one_whose_metrics_are_read(config, monkeypatch):
    order, made = [], []
    build, make = loop.build_program, loop.make_batch_fn

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
    monkeypatch.setattr(loop, "make_batch_fn", counted)
    quiet = config("run.steps=4", "run.eval_every=0", "checkpoint.every=100")
    train(quiet, hooks=[lambda row: order.append(("row", row["step"]))])
    text = [f"{kind} {number}" for kind, number in order]
    # The device has the next step before the host waits for this one, and the host waits for nothing else.
    assert text == ["step 1", "step 2", "row 1", "step 3", "row 2", "step 4", "row 3", "row 4"]
    assert made == [0, 1, 2, 3]


def test_evaluation_does_not_slow_the_steps_on_paper(config):
    short = config("run.steps=3", "run.eval_every=2", "data.eval_batches=1", "mesh.shape=dp:1")
    rows = []
    train(replace(short, loss_fn=loss_with_slow_evaluation), hooks=[rows.append])
    assert ["eval_loss" in row for row in rows] == [False, True, True]
    assert max(row["seconds"] for row in rows[1:]) < 2, "an evaluation sleeps for 2 s"


def test_without_evaluation_no_held_out_batch_is_needed(config):
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


def test_auto_shrinks_the_mesh_of_a_run_and_says_so(config):
    said = []
    result = train(config("mesh.shape=dp:4,fsdp:4", "run.steps=1", "run.eval_every=0"), say=said.append)
    assert result.status == "finished"
    assert said[:2] == [
        "mesh: dp:4,fsdp:4 needs more than the 8 devices here; shrunk to dp:2,fsdp:4",
        "mesh: dp:2,fsdp:4 on 8 x cpu",
    ]


# --- going on ---


def test_a_finished_run_says_so_and_does_nothing(undisturbed, text):
    folder, said = undisturbed[0].folder, []
    before = snapshot(folder)
    with count_compilations() as compiled:
        result = train(make_config(text, folder, "run.sample_tokens=8", "run.eval_every=5"), say=said.append)
    assert result == TrainResult("already finished", 12, folder)
    assert said[-1] == f"run: {folder} is finished: step 12 of 12. Nothing to do."
    assert snapshot(folder) == before
    assert not compiled


def test_an_extended_run_takes_the_steps_of_a_longer_one(config, undisturbed):
    said = []
    first = train(config("run.steps=5"))
    assert first.step == 5
    second = train(config("run.steps=12"), say=said.append)
    rows = rows_of(second.folder)
    assert second.status == "finished"
    assert f"run: found {second.folder} at step 5; resuming, 7 steps to go" in said
    assert "changed since the checkpoint: run.steps: 5 -> 12" in said
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row.get("resumed_from") for row in rows] == [None] * 5 + [5] + [None] * 6
    assert losses(rows) == losses(undisturbed[2])


def test_a_run_told_to_stop_saves_that_step_and_goes_on_from_it(config, undisturbed):
    seen = []
    stopped = train(config(), hooks=[seen.append], should_stop=lambda: len(seen) >= 6)
    assert stopped.status == "stopped" and stopped.sample == ""
    assert stopped.step == rows_of(stopped.folder)[-1]["step"] == checkpoints(stopped.folder)[-1]
    assert 6 <= stopped.step < 12
    resumed = train(config())
    assert resumed.status == "finished"
    assert [row["step"] for row in rows_of(resumed.folder) if "resumed_from" in row] == [stopped.step + 1]
    assert losses(rows_of(resumed.folder)) == losses(undisturbed[2])


def test_checkpoints_come_at_their_interval_and_the_newest_stay(config):
    result = train(config("checkpoint.every=2", "checkpoint.keep=2", "run.steps=7", "run.eval_every=0"))
    assert checkpoints(result.folder) == [6, 7]


def test_changed_settings_are_listed_and_refused_where_they_change_the_result(config, text, undisturbed):
    result = train(config("run.steps=4"))
    before = snapshot(result.folder)
    changed = ["optimizer.b1=0.8", "run.seed=3", "run.eval_every=3", "mesh.shape=fsdp:4"]
    with count_compilations() as compiled, pytest.raises(ConfigError) as refused:
        train(config(*changed))
    assert refused.value.problems == [
        "the checkpoint of step 4 was made with other settings:",
        "  optimizer.b1: 0.9 -> 0.8 (changes the result)",
        "  run.seed: 0 -> 3 (changes the result)",
        "  Undo them, start another run (--restart, or another run.folder), or go on all the same with "
        "--allow-changes.",
    ]
    assert not compiled
    assert snapshot(result.folder) == before, "a refused run left its traces"
    said = []
    accepted = train(config(*changed), allow_changes=True, say=said.append)
    assert accepted.status == "finished" and accepted.step == 12
    assert [line for line in said if line.startswith("changed")] == [
        "changed since the checkpoint: mesh.shape: dp:2 -> fsdp:4",
        "changed since the checkpoint: optimizer.b1: 0.9 -> 0.8 (changes the result)",
        "changed since the checkpoint: run.steps: 4 -> 12",
        "changed since the checkpoint: run.seed: 0 -> 3 (changes the result)",
        "changed since the checkpoint: run.eval_every: 4 -> 3",
    ]
    assert "optimizer.b1=0.8" in (accepted.folder / "config.txt").read_text().splitlines()
    after, straight = losses(rows_of(accepted.folder)), losses(undisturbed[2])
    assert [step for step in after if after[step] == straight[step]] == [1, 2, 3, 4]


def test_changed_data_is_refused(tmp_path):
    text = write_text(tmp_path)
    make = partial(make_config, text, tmp_path / "run", "run.eval_every=0")
    train(make("run.steps=1"))
    text.write_text(text.read_text().replace("squared", "SQUARED"))
    with pytest.raises(ConfigError, match=r"content of data\.source: [0-9a-f]{12} -> [0-9a-f]{12} \(changes the resul"):
        train(make("run.steps=2"))


def test_neutral_changes_go_on_and_keep_the_losses(config, undisturbed):
    train(config("run.steps=6"))
    said = []
    train(config("checkpoint.every=3", "run.eval_every=0", "model.note=new"), say=said.append)
    assert [re.sub(r".*checkpoint: ", "", line) for line in said if line.startswith("changed")] == [
        "model.note:  -> new",
        "checkpoint.every: 100 -> 3",
        "run.steps: 6 -> 12",
        "run.eval_every: 4 -> 0",
    ]
    assert losses(rows_of(Path(config().run.folder))) == losses(undisturbed[2])


@pytest.mark.parametrize("allow_changes", [False, True])
def test_a_checkpoint_of_another_model_is_refused_with_every_array_that_differs(config, allow_changes):
    folder = train(config("run.steps=1", "run.eval_every=0")).folder
    before = snapshot(folder)
    with count_compilations() as compiled, pytest.raises(ConfigError) as refused:
        train(config("run.steps=2", "run.eval_every=0", "model.hidden_size=32"), allow_changes=allow_changes)
    head, *lines, tail = refused.value.problems
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


def test_a_restart_takes_a_new_folder_and_leaves_the_old_one_as_it_was(config):
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


def test_a_restart_without_an_old_run_takes_the_folder_itself(config, tmp_path):
    assert train(config("run.steps=1", "run.eval_every=0"), restart=True).folder == tmp_path / "run"


def test_a_folder_in_the_home_directory_is_found(text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    result = train(make_config(text, Path("~/mine"), "run.steps=1", "run.eval_every=0"))
    assert result.folder == tmp_path / "mine" and (tmp_path / "mine" / "metrics.jsonl").exists()
