"""Runs whose checkpoints cannot be written or read: what they say, how they end, and what is left on the disk.

The disk is full: a limit on the size of files, set on the running process; the folder is read-only: by its mode, in a
process without root's right to pass over it.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.cli.common import DONE, FAILED, FINDINGS, STOPPED
from flax_mesh.errors import CheckpointCorruptedError, SaveError
from flax_mesh.train import apply_overrides, train
from tests.train.bigram import recipe, write_text
from tests.train.test_resume import PATIENCE, RECIPE, Run

ENDLESS = (
    *("run.steps=1000000", "run.eval_every=0", "run.platform=cpu:1", "mesh.shape=dp:1"),
    *("model.hidden_size=1024", "checkpoint.every=20"),
)
FULL = 2**16  # bytes a file may have: less than the state, more than the rows of metrics until then


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def start(text, tmp_path):
    """`start(*settings)`: an endless run that saves every 20 steps, as a process; killed in the end if need be."""
    runs = []

    def start(*settings: str, prefix: tuple[str, ...] = ()) -> Run:
        folder, output = tmp_path / "run", tmp_path / f"output-{len(runs)}.txt"
        given = dict(setting.split("=", 1) for setting in (*ENDLESS, *settings))
        argv = [f"data.source={text}", f"run.folder={folder}", *(f"{key}={value}" for key, value in given.items())]
        with output.open("w") as file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "flax_mesh.cli", "train", str(RECIPE), *argv],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        runs.append(Run(process, folder, output))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait(PATIENCE)


def limit_files(run: Run, size: int) -> None:
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fill_disk(run: Run) -> None:
    limit_files(run, FULL)


def lock_folder(run: Run) -> None:
    run.checkpoints.chmod(0o555)


def remove_folder(run: Run) -> None:
    run.checkpoints.rename(run.folder / "elsewhere")


# What goes wrong -> (how, how it is mended, what is said of it)
FAILURES = {
    "disk full": (fill_disk, lambda run: limit_files(run, resource.RLIM_INFINITY), "File too large"),
    "read-only": (lock_folder, lambda run: run.checkpoints.chmod(0o755), "Permission denied"),
    "folder gone": (remove_folder, lambda run: (run.folder / "elsewhere").rename(run.checkpoints), "folder is gone"),
}
# Root may write everywhere; a process that has given up this right may not.
AS_EVERYBODY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")


def prefix_of(failure: str) -> tuple[str, ...]:
    if failure != "read-only" or os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root may write into a read-only folder, and there is no setpriv to give that up")
    return AS_EVERYBODY


def check_whole(folder: Path) -> list[int]:
    """The steps there; every one is whole."""
    with Checkpointer(folder) as checkpointer:
        assert all(checkpointer.verify(step) == [] for step in checkpointer.steps())
        return checkpointer.steps()


@pytest.mark.parametrize(
    "failure",
    ["disk full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("read-only", "folder gone"))],
)
def test_a_checkpoint_that_cannot_be_written_stops_the_run_in_one_line(failure, start, tmp_path):
    harm, mend, reason = FAILURES[failure]
    run = start(prefix=prefix_of(failure))
    run.wait_for(lambda: len(run.committed()) >= 2)
    harm(run)
    assert run.ended() == FAILED, run.text()
    if failure != "disk full":  # that limit ended with the process
        mend(run)
    steps = check_whole(run.checkpoints)
    assert len(steps) >= 2
    said = [line for line in run.text().splitlines() if not re.match(r"(mesh|data|model|run|note|step)\b", line)]
    (line,) = said
    assert re.match(r"flax-mesh: the checkpoint of step \d+ could not be saved in ", line) and reason in line, line
    if failure != "folder gone":
        assert line.endswith(f"the newest checkpoint is of step {steps[-1]}")
    last = steps[-1]
    again = start("run.steps=" + str(last + 5))
    assert again.ended() == DONE and f"at step {last}; resuming, 5 steps to go" in again.text()
    assert not again.unfinished()


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_training_goes_on_without_it_if_told_to(failure, start):
    harm, mend, reason = FAILURES[failure]
    run = start("checkpoint.on_failure=continue", prefix=prefix_of(failure))
    run.wait_for(lambda: len(run.committed()) >= 2)
    harm(run)
    run.wait_for(lambda: len(re.findall("^warning: the checkpoint of step", run.text(), re.M)) >= 2)
    before = check_whole(run.folder / "elsewhere" if failure == "folder gone" else run.checkpoints)
    mend(run)
    run.wait_for(lambda: run.committed() and run.committed()[-1] > before[-1])
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == STOPPED
    assert "Traceback" not in run.text() and "Event loop" not in run.text()
    for line in re.findall("^warning: .*", run.text(), re.M):
        assert reason in line and line.endswith("training goes on (checkpoint.on_failure)"), line
    rows = [row["step"] for row in run.rows()]
    assert rows == list(range(1, rows[-1] + 1)) and check_whole(run.checkpoints)[-1] == rows[-1]
    assert not run.unfinished()


# Of a save that fails early tensorstore tells once an array more than it should: `cli` leaves it out, pytest does not.
tells_too_much = pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
def test_rows_that_find_no_room_are_whole_or_not_there(start):
    run = start("checkpoint.on_failure=continue", "checkpoint.every=1000000")
    run.wait_for(lambda: len(run.rows()) >= 5)
    limit_files(run, (run.folder / "metrics.jsonl").stat().st_size + 100)
    run.wait_for(lambda: "warning: the row of step" in run.text())
    limit_files(run, resource.RLIM_INFINITY)
    run.wait_for(lambda: "metrics are written again" in run.text())
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == STOPPED
    (lost,) = re.findall(r"rows lost: (\d+)", run.text())
    steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == steps[-1] - int(lost) and steps == sorted(set(steps))
    assert len(re.findall("^warning: the row of step .*(File too large|No space left).*goes on", run.text(), re.M)) == 1


@pytest.mark.slow
def test_a_small_disk_that_runs_full(start, tmp_path):
    """A real one of 64 MiB, where it can be mounted."""
    (tmp_path / "run").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path / "run"], capture_output=True, check=False
    ) if os.geteuid() == 0 and shutil.which("mount") else None  # fmt: skip
    if mounted is None or mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        run = start("checkpoint.keep=1000000")
        assert run.ended() == FAILED
        assert re.search("^flax-mesh: .* could not be .*No space left on device", run.text(), re.M), run.text()[-2000:]
        assert "Traceback" not in run.text()
        assert len(check_whole(run.checkpoints)) >= 2
        assert all(json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines())
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


# --- in this process ---


@pytest.fixture(scope="module")
def in_process(text):
    """`in_process(folder, *settings)`: a config of 12 steps that saves every 4."""

    def config_of(folder: Path, *settings: str):
        own = (f"data.source={text}", f"run.folder={folder}", "run.eval_every=0", "checkpoint.every=4")
        return apply_overrides(recipe(), [*own, *settings])

    return config_of


def test_an_exception_in_the_loop_leaves_the_last_save_committed(in_process, tmp_path):
    config = in_process(tmp_path / "run")

    def interrupt(row):
        if row["step"] == 9:
            raise ZeroDivisionError("in step 9")

    with pytest.raises(ZeroDivisionError, match="in step 9"):
        train(config, hooks=[interrupt])
    assert check_whole(tmp_path / "run" / "checkpoints") == [4, 8]
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["4", "8"]


def test_a_damaged_checkpoint_is_passed_over_and_all_damaged_is_exit_code_3(in_process, text, tmp_path, capsys):
    folder = tmp_path / "run"
    rows, again = [], []
    train(in_process(folder), hooks=[rows.append])
    checkpoints = folder / "checkpoints"
    assert check_whole(checkpoints) == [4, 8, 12]
    damage(checkpoints / "12")
    said = []
    result = train(in_process(folder), say=said.append, hooks=[again.append])
    (warning,) = [line for line in said if line.startswith("warning")]
    assert re.match(
        r"warning: the checkpoint of step 12 is damaged and passed over "
        r"\(state/_METADATA: \d+ bytes, saved with \d+\); the next save keeps it as 12.damaged",
        warning,
    )
    assert result.status == "finished" and [row["step"] for row in again] == [9, 10, 11, 12]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows[8:]]
    assert sorted(os.listdir(checkpoints)) == ["12", "12.damaged", "4", "8"]
    for step in check_whole(checkpoints):
        damage(checkpoints / str(step))
    metrics = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointCorruptedError, match="contains 3 checkpoints, and none is valid"):
        train(in_process(folder))
    argv = ["train", str(RECIPE), f"data.source={text}", f"run.folder={folder}", "run.eval_every=0"]
    assert main(argv) == FINDINGS
    error = capsys.readouterr().err
    assert error.startswith("flax-mesh: ") and "none is valid" in error and "Traceback" not in error
    assert sorted(os.listdir(checkpoints)) == ["12", "12.damaged", "4", "8"]
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # nothing was started


def damage(step: Path) -> None:
    path = step / "state" / "_METADATA"
    path.write_bytes(path.read_bytes()[:-1])


@tells_too_much
def test_what_ended_a_run_is_not_hidden_by_a_save_that_fails_too(in_process, tmp_path):
    config = in_process(tmp_path / "run")

    def interrupt(row):
        if row["step"] == 5:  # the save of step 4 is on its way, or written
            (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
            raise ZeroDivisionError("in step 5")

    with pytest.raises(ZeroDivisionError, match="in step 5") as error:
        train(config, hooks=[interrupt])
    (note,) = error.value.__notes__
    assert note.startswith("the checkpoint of step 4 could not be saved") and note.endswith("no checkpoint exists")


@tells_too_much
def test_a_folder_that_is_gone_is_not_written_anew(in_process, tmp_path):
    config = in_process(tmp_path / "run", "checkpoint.on_failure=continue")
    said = []

    def remove(row):
        if row["step"] == 6:
            (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")

    with pytest.raises(SaveError, match=r"step 12 could not be saved in .*: the folder is gone; "):
        train(config, say=said.append, hooks=[remove])
    assert any("checkpoint of step 8 could not be saved" in line and "goes on" in line for line in said)
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        assert {8, 12}.isdisjoint(
            checkpointer.steps()
        )  # the save of step 4 may have made a folder, if it was on its way
