"""Runs whose checkpoints cannot be written or read: their output, their exit code, and the files on disk afterwards.

A full disk is simulated by a limit on the size of files. tests/checkpoint/test_checkpointer.py has the saves alone.
"""

import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.cli.common import DONE, FAILED, FINDINGS
from flax_mesh.errors import CheckpointCorruptedError
from flax_mesh.train import TrainConfig, apply_overrides, train
from tests.train import bigram
from tests.train.support.runs import run


@pytest.fixture
def settings(text, tmp_path) -> tuple[str, ...]:
    """A run of 16 steps that saves every 4."""
    common = ("run.steps=16", "run.eval_every=0", "checkpoint.every=4", "checkpoint.keep=9", "model.hidden_size=256")
    return f"data.source={text}", f"run.folder={tmp_path / 'run'}", *common


@pytest.fixture
def config(settings) -> TrainConfig:
    return apply_overrides(bigram.recipe(), settings)


def check_valid(folder: Path) -> list[int]:
    """The saved steps, after checking that all of them are valid."""
    with Checkpointer(folder) as checkpointer:
        assert all(checkpointer.verify(step) == [] for step in checkpointer.steps())
        return checkpointer.steps()


# --- checkpoints that cannot be written ---

LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)
FULL = 2**16  # bytes: smaller than the state, larger than the rows of metrics
# Failure -> (how it is caused, how it is repaired, text in the error)
FAILURES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "disk full": (
        lambda folder: resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, LIMITS[1])),
        lambda folder: resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS),
        "File too large",
    ),
    "folder gone": (
        lambda folder: folder.rename(folder.with_name("elsewhere")),
        lambda folder: folder.with_name("elsewhere").rename(folder),
        "the folder is gone",
    ),
}
HOOKS: list[Callable[[dict[str, Any]], None]] = []


def make_hook(folder: Path, config: TrainConfig, start: int) -> Callable[[dict[str, Any]], None]:
    """The hook that a test has planned, for `run.hooks`."""
    return HOOKS[-1]


@pytest.fixture
def failure(request, tmp_path) -> Iterator[str]:
    """Plans a failure from step 6 to step 13, in which the save of step 8 fails. Its value is the text in the error.

    The save of step 4 may still be finished, and the save of step 12 may end, during the failure or outside of it.
    """
    cause, repair, reason = FAILURES[request.param]
    folder = tmp_path / "run" / "checkpoints"

    def hook(row: dict[str, Any]) -> None:
        if row["step"] == 6:
            while not (folder / "4").exists():
                time.sleep(0.01)
            cause(folder)
        if row["step"] == 13:
            repair(folder)

    HOOKS.append(hook)
    yield reason
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS)


# After a save that fails early, tensorstore raises a second exception per array: `cli` suppresses it, pytest does not.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sampled
@pytest.mark.parametrize("failure", FAILURES, indirect=True)
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line_or_is_a_warning(
    failure, on_failure, settings, tmp_path, capsys
):
    more = (f"run.hooks={__name__}.make_hook", f"checkpoint.on_failure={on_failure}")
    code, printed = main(["train", bigram.__file__, *settings, *more]), capsys.readouterr()
    problem = rf"the checkpoint of step (4|8|12) could not be saved in .*{failure}.*"
    folder = tmp_path / "run" / "checkpoints"
    if on_failure == "stop":
        assert code == FAILED and re.fullmatch(f"flax-mesh: {problem}\n", printed.err)
        assert not {"8", "12", "16"} & {*os.listdir(folder if folder.exists() else folder.with_name("elsewhere"))}
        return
    assert code == DONE and {16} <= {*check_valid(folder)} <= {4, 12, 16}
    warnings = [line for line in printed.out.splitlines() if line.startswith("warning")]
    assert any("step 8" in line for line in warnings)
    assert all(re.fullmatch(rf"warning: {problem}; training continues \(checkpoint.on_failure\)", w) for w in warnings)


# --- checkpoints that cannot be read ---


def damage(step: Path) -> None:
    path = step / "state" / "_METADATA"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_skipped_and_exit_code_3_if_all_are_damaged(config, settings, tmp_path, capsys):
    folder = tmp_path / "run"
    rows = run(config).rows
    checkpoints = folder / "checkpoints"
    assert check_valid(checkpoints) == [4, 8, 12, 16]
    damage(checkpoints / "16")
    again = run(config)
    (warning,) = [line for line in again.lines if line.startswith("warning")]
    assert re.match(
        r"warning: the checkpoint of step 16 is damaged and was skipped "
        r"\(state/_METADATA: \d+ bytes, saved with \d+\); the next save renames it to 16.damaged",
        warning,
    )
    assert again.losses == {row["step"]: row["loss"] for row in rows[12:]}
    found = ["12", "16", "16.damaged", "4", "8"]
    assert sorted(os.listdir(checkpoints)) == found
    for step in check_valid(checkpoints):
        damage(checkpoints / str(step))
    metrics = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointCorruptedError, match="contains 4 checkpoints, and none is valid"):
        train(config)
    assert main(["train", bigram.__file__, *settings]) == FINDINGS
    error = capsys.readouterr().err
    assert error.startswith("flax-mesh: ") and "none is valid" in error and "Traceback" not in error
    assert sorted(os.listdir(checkpoints)) == found
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # nothing was started
