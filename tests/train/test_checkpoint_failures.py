"""Runs whose checkpoints cannot be written or read: their output, their exit code, and the files on disk afterwards.

A full disk is simulated by a limit on the file size, set on the running process. A read-only folder is set by its mode,
in a process without the capability of root to ignore it.
"""

import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.cli.common import DONE, FAILED, FINDINGS, STOPPED
from flax_mesh.errors import CheckpointCorruptedError, SaveError
from flax_mesh.train import TrainConfig, apply_overrides, train
from tests.train.bigram import recipe
from tests.train.support.processes import RECIPE, Run
from tests.train.support.runs import run

ENDLESS = (
    *("run.steps=1000000", "run.eval_every=0", "run.platform=cpu:1", "mesh.shape=dp:1"),
    *("model.hidden_size=1024", "checkpoint.every=20"),
)
FULL = 2**16  # file size limit in bytes: smaller than the state, larger than the rows of metrics


@pytest.fixture
def endless(start, tmp_path):
    """`endless(*settings)` starts an endless run that saves every 20 steps."""

    def endless(*settings: str, **kinds: Any) -> Run:
        given = dict(setting.split("=", 1) for setting in (*ENDLESS, *settings))
        return start(tmp_path / "run", *(f"{key}={value}" for key, value in given.items()), **kinds)

    return endless


def limit_files(run: Run, size: int = resource.RLIM_INFINITY) -> None:
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# Failure -> (how it is caused, how it is repaired, text in the error)
FAILURES: dict[str, tuple[Callable[[Run], object], Callable[[Run], object], str]] = {
    "disk full": (lambda run: limit_files(run, FULL), limit_files, "File too large"),
    "read-only": (lambda x: x.checkpoints.chmod(0o555), lambda x: x.checkpoints.chmod(0o755), "Permission denied"),
    "folder gone": (
        lambda run: run.checkpoints.rename(run.folder / "elsewhere"),
        lambda run: (run.folder / "elsewhere").rename(run.checkpoints),
        "folder is gone",
    ),
}
# Root may write everywhere, a process without these capabilities may not.
UNPRIVILEGED = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")


def prefix_of(failure: str) -> tuple[str, ...]:
    if failure != "read-only" or os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root can write to a read-only folder, and setpriv is not installed")
    return UNPRIVILEGED


def check_valid(folder: Path) -> list[int]:
    """The saved steps, after checking that all of them are valid."""
    with Checkpointer(folder) as checkpointer:
        assert all(checkpointer.verify(step) == [] for step in checkpointer.steps())
        return checkpointer.steps()


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_a_checkpoint_that_cannot_be_written_stops_the_run_in_one_line(failure, endless):
    cause, repair, reason = FAILURES[failure]
    run = endless(prefix=prefix_of(failure))
    run.wait_for(lambda: len(run.committed()) >= 2)
    cause(run)
    assert run.ended() == FAILED, run.text()
    if failure != "disk full":  # the limit ended with the process
        repair(run)
    steps = check_valid(run.checkpoints)
    assert len(steps) >= 2
    usual = re.compile(r"(forecast|mesh|data|model|optimizer|run|note|step)\b")
    printed = [line for line in run.text().splitlines() if not usual.match(line)]
    (line,) = printed
    assert re.match(r"flax-mesh: the checkpoint of step \d+ could not be saved in ", line) and reason in line, line
    if failure != "folder gone":
        assert line.endswith(f"the newest checkpoint is of step {steps[-1]}")
    last = steps[-1]
    again = endless("run.steps=" + str(last + 5))
    assert again.ended() == DONE and f"at step {last}; resuming, 5 steps to go" in again.text()
    assert not again.unfinished()


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_training_continues_after_a_failed_save_with_on_failure_continue(failure, endless):
    cause, repair, reason = FAILURES[failure]
    run = endless("checkpoint.on_failure=continue", prefix=prefix_of(failure))
    run.wait_for(lambda: len(run.committed()) >= 2)
    cause(run)
    run.wait_for(lambda: len(re.findall("^warning: the checkpoint of step", run.text(), re.M)) >= 2)
    before = check_valid(run.folder / "elsewhere" if failure == "folder gone" else run.checkpoints)
    repair(run)
    run.wait_for(lambda: run.committed() and run.committed()[-1] > before[-1])
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == STOPPED
    assert "Traceback" not in run.text() and "Event loop" not in run.text()
    for line in re.findall("^warning: .*", run.text(), re.M):
        assert reason in line and line.endswith("training continues (checkpoint.on_failure)"), line
    rows = [row["step"] for row in run.rows()]
    assert rows == list(range(1, rows[-1] + 1)) and check_valid(run.checkpoints)[-1] == rows[-1]
    assert not run.unfinished()


# --- in this process ---

# After a save that fails early, tensorstore raises a second exception per array: `cli` suppresses it, pytest does not.
ignores_unraisable = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def config(text, tmp_path) -> TrainConfig:
    """A run of 12 steps that saves every 4."""
    settings = (f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.eval_every=0", "checkpoint.every=4")
    return apply_overrides(recipe(), settings)


def test_a_damaged_checkpoint_is_skipped_and_exit_code_3_if_all_are_damaged(config, text, tmp_path, capsys):
    folder = tmp_path / "run"
    rows = run(config).rows
    checkpoints = folder / "checkpoints"
    assert check_valid(checkpoints) == [4, 8, 12]
    damage(checkpoints / "12")
    again = run(config)
    (warning,) = [line for line in again.lines if line.startswith("warning")]
    assert re.match(
        r"warning: the checkpoint of step 12 is damaged and was skipped "
        r"\(state/_METADATA: \d+ bytes, saved with \d+\); the next save renames it to 12.damaged",
        warning,
    )
    assert again.losses == {row["step"]: row["loss"] for row in rows[8:]}
    assert sorted(os.listdir(checkpoints)) == ["12", "12.damaged", "4", "8"]
    for step in check_valid(checkpoints):
        damage(checkpoints / str(step))
    metrics = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointCorruptedError, match="contains 3 checkpoints, and none is valid"):
        train(config)
    argv = ["train", str(RECIPE), f"data.source={text}", f"run.folder={folder}", "run.eval_every=0"]
    assert main(argv) == FINDINGS
    error = capsys.readouterr().err
    assert error.startswith("flax-mesh: ") and "none is valid" in error and "Traceback" not in error
    assert sorted(os.listdir(checkpoints)) == ["12", "12.damaged", "4", "8"]
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # nothing was started


def damage(step: Path) -> None:
    path = step / "state" / "_METADATA"
    path.write_bytes(path.read_bytes()[:-1])


@ignores_unraisable
def test_an_exception_in_the_loop_is_not_hidden_by_a_failed_save(config, tmp_path):
    def interrupt(row):
        if row["step"] == 5:  # the save of step 4 is in progress or finished
            (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
            raise ZeroDivisionError("in step 5")

    with pytest.raises(ZeroDivisionError, match="in step 5") as error:
        train(config, hooks=[interrupt])
    (note,) = error.value.__notes__
    assert note.startswith("the checkpoint of step 4 could not be saved") and note.endswith("no checkpoint exists")


@ignores_unraisable
def test_a_removed_checkpoint_folder_is_not_recreated(config, tmp_path):
    config = apply_overrides(config, ["checkpoint.on_failure=continue"])
    printed = []

    def remove(row):
        if row["step"] == 6:
            (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")

    with pytest.raises(SaveError, match=r"step 12 could not be saved in .*: the folder is gone; "):
        train(config, say=printed.append, hooks=[remove])
    assert any("checkpoint of step 8 could not be saved" in line and "continues" in line for line in printed)
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        # The save of step 4, if it was in progress, may have created a folder.
        assert {8, 12}.isdisjoint(checkpointer.steps())
