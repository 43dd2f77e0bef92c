"""Runs in separate processes that are killed or stopped, and what the same command does afterwards.

Every run is compared with an undisturbed run, bit for bit: losses are written with all their digits.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_mesh.checkpoint.checksums import find_damage
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, STOPPED
from flax_mesh.train.run_folder import run_folder
from tests.train.bigram import write_text

RECIPE = Path(__file__).with_name("bigram.py")
STEPS = 24
KILLS_IN_ALL = 20
PATIENCE = 120  # seconds, timeout of every wait for a process
SETTINGS = (
    f"run.steps={STEPS}",
    "run.eval_every=0",
    "run.platform=cpu:2",
    "checkpoint.every=2",
    "model.hidden_size=1024",  # 6 MB of state: a save takes long enough to be interrupted
)


@dataclass
class Run:
    """One process that trains in `folder`."""

    process: subprocess.Popen
    folder: Path
    output: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        lines = (
            path.read_text().split("\n")[:-1] if path.exists() else []
        )  # complete lines only: the run may be writing
        return [json.loads(line) for line in lines]

    def committed(self) -> list[int]:
        names = os.listdir(self.checkpoints) if self.checkpoints.exists() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def unfinished(self) -> list[str]:
        names = os.listdir(self.checkpoints) if self.checkpoints.exists() else []
        return [name for name in names if name.endswith(".orbax-checkpoint-tmp")]

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return as soon as the condition is true; fail if the process ends or the time is up before."""
        end = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll()  # polled before the condition, which may wait for the end of the process
            if condition():
                return
            assert ended is None, f"ended with {ended} too early:\n{self.text()}"
            assert time.monotonic() < end, f"timed out:\n{self.text()}"
            time.sleep(0.0005)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def start(text) -> Iterator[Start]:
    """`start(folder, *settings)` starts the command. Processes that still run at the end are killed."""
    runs: list[Run] = []

    def start(folder: Path, *settings: str, recipe: str = str(RECIPE), cached: bool = True) -> Run:
        output = folder.with_name(f"{folder.name}-output-{len(runs)}.txt")
        argv = [f"data.source={text}", f"run.folder={folder}", *settings]
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flax_mesh.cli", "train", recipe, *argv],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ if cached else os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
            )
        runs.append(Run(process, folder, output))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait(PATIENCE)


def losses(rows: list[dict]) -> dict[int, float]:
    """The loss of every step; every step must have one row, in order."""
    found = {row["step"]: row["loss"] for row in rows}
    assert [row["step"] for row in rows] == list(range(1, len(found) + 1))
    return found


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> dict[int, float]:
    """The losses of an uninterrupted run."""
    run = start(tmp_path_factory.mktemp("undisturbed") / "run", *SETTINGS)
    assert run.ended() == DONE, run.text()
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    expected = losses(run.rows())
    assert len(set(expected.values())) == STEPS, "the test requires distinct losses"
    return expected


def check_resumed(run: Run, committed: int, reached: int, expected: dict[int, float]) -> None:
    """Check that the run resumed after `committed`, repeated the steps up to `reached`, and has the expected rows."""
    assert run.ended() == DONE, run.text()
    rows = run.rows()
    assert f"run: found {run.folder} at step {committed}; resuming, {STEPS - committed} steps to go" in run.text()
    assert [(row["step"], row["resumed_from"]) for row in rows if "resumed_from" in row] == [(committed + 1, committed)]
    assert losses(rows) == expected
    cut = re.findall(r"cut back to the checkpoint of step (\d+): (\d+) rows before, \1 now", run.text())
    assert cut == ([(str(committed), str(reached))] if reached > committed else [])
    assert run.committed()[-1] == STEPS and not run.unfinished()


def killed_after_a_save(start: Start, folder: Path, at_least: int, **kinds: Any) -> tuple[int, int]:
    """Kill a run whose newest step is later than its newest checkpoint. Returns (newest checkpoint, newest step)."""
    run = start(folder, *SETTINGS, **kinds)
    run.wait_for(lambda: (done := run.committed()) and done[-1] >= at_least and run.rows()[-1]["step"] > done[-1])
    run.process.kill()
    assert run.ended() == -signal.SIGKILL
    return run.committed()[-1], run.rows()[-1]["step"]


def killed_during_a_save(start: Start, folder: Path, at_least: int, **kinds: Any) -> tuple[int, int]:
    """Kill a run during a save. Returns (newest checkpoint, newest step)."""
    run = start(folder, *SETTINGS, **kinds)
    run.wait_for(lambda: (done := run.committed()) and done[-1] >= at_least)
    run.wait_for(run.unfinished)
    run.process.kill()
    assert run.ended() == -signal.SIGKILL
    assert run.unfinished(), "the kill came too late to interrupt a save"
    return run.committed()[-1], run.rows()[-1]["step"]


KILLS = {"after a save": killed_after_a_save, "during a save": killed_during_a_save}


@pytest.mark.sampled
@pytest.mark.parametrize("moment", [pytest.param("after a save", marks=pytest.mark.slow), "during a save"])
def test_a_killed_run_resumes_bit_for_bit(start, undisturbed, tmp_path, moment):
    committed, reached = KILLS[moment](start, tmp_path / "run", at_least=4)
    assert 4 <= committed < reached < STEPS
    check_resumed(start(tmp_path / "run", *SETTINGS), committed, reached, undisturbed)


@pytest.mark.slow
def test_a_killed_run_on_an_iterator_resumes_bit_for_bit(start, tmp_path):
    """The thread that draws batches is one batch ahead of the step that is saved."""
    recipe = f"{Path(__file__).with_name('data') / 'own_recipe.py'}:iterator_recipe"
    whole = start(tmp_path / "whole", *SETTINGS, recipe=recipe)
    assert whole.ended() == DONE, whole.text()
    committed, reached = killed_after_a_save(start, tmp_path / "run", at_least=4, recipe=recipe)
    assert 4 <= committed < reached < STEPS
    check_resumed(start(tmp_path / "run", *SETTINGS, recipe=recipe), committed, reached, losses(whole.rows()))


@pytest.mark.slow
@pytest.mark.parametrize("at_least", [2, 10, 16])
@pytest.mark.parametrize("moment", KILLS)
def test_a_run_killed_anywhere_resumes_bit_for_bit_after_recompilation(start, undisturbed, tmp_path, moment, at_least):
    committed, reached = KILLS[moment](start, tmp_path / "run", at_least, cached=False)
    check_resumed(start(tmp_path / "run", *SETTINGS, cached=False), committed, reached, undisturbed)


@pytest.mark.slow
def test_a_run_killed_several_times_has_the_losses_of_an_undisturbed_run(start, undisturbed, tmp_path):
    for at_least in (2, 8, 14):
        killed_after_a_save(start, tmp_path / "run", at_least)
    run = start(tmp_path / "run", *SETTINGS)
    assert run.ended() == DONE, run.text()
    assert len([row for row in run.rows() if "resumed_from" in row]) >= 1  # others may have been cut off again
    assert losses(run.rows()) == undisturbed


def saving_since(run: Run, began: float) -> bool:
    """Whether there is an unfinished save that was not left over by an earlier process."""
    times = []
    for name in run.unfinished():
        with contextlib.suppress(FileNotFoundError):  # it has finished
            times.append((run.checkpoints / name).stat().st_mtime)
    return any(time > began for time in times)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_has_the_losses_of_an_undisturbed_run(start, undisturbed, tmp_path):
    """Kill runs at seeded moments, and resume them until they end or all kills are done.

    Most kills come after a new row, so that the runs end; some come earlier, while the folder is prepared.
    """
    rng = np.random.default_rng(0)
    kills = in_a_save = run_again = 0
    for attempt in itertools.count():
        folder = tmp_path / f"run-{attempt}"
        while kills < KILLS_IN_ALL:  # until the run finishes
            run = start(folder, *SETTINGS)
            rows, began = len(run.rows()), time.time()
            if kills % 5 == 3:
                run.wait_for(lambda run=run: "\nrun: " in run.text())
            else:
                run.wait_for(lambda run=run, rows=rows: run.process.poll() == DONE or len(run.rows()) > rows)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(float(rng.uniform(0, 0.6)))
            if kills % 5 == 4:  # saves take at most a fifth of the time: some kills wait for one
                run.wait_for(lambda run=run, began=began: run.process.poll() == DONE or saving_since(run, began))
            run.process.kill()
            if run.ended() == DONE:
                break
            assert run.ended() == -signal.SIGKILL
            kills += 1
            in_a_save += saving_since(run, began)
            run_again += max((row["step"] for row in run.rows()), default=0) > max(run.committed(), default=0)
            assert all(find_damage(run.checkpoints / str(step)) == [] for step in run.committed())
        else:
            run = start(folder, *SETTINGS)
            assert run.ended() == DONE
        assert losses(run.rows()) == undisturbed
        assert run.committed()[-1] == STEPS
        leftovers = [name for name in os.listdir(run.checkpoints) if not name.isdecimal()]
        assert not leftovers or "Nothing to do" in run.text()  # a finished run saves nothing and clears nothing
        if kills == KILLS_IN_ALL:
            break
    print(f"{kills} kills, {in_a_save} in a save, {run_again} with steps to run again, {attempt + 1} runs")
    assert in_a_save >= 1 and run_again >= 1


@pytest.mark.slow
def test_a_second_interrupt_during_a_save_leaves_committed_checkpoints_valid(start, undisturbed, tmp_path):
    run = start(tmp_path / "run", *SETTINGS)
    run.wait_for(lambda: run.committed() and run.unfinished())
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "SIGINT: saving after this step" in run.text())
    run.process.send_signal(signal.SIGINT)
    assert run.ended() in (-signal.SIGINT, STOPPED)  # the save may have finished first
    assert run.committed() and all(find_damage(run.checkpoints / str(step)) == [] for step in run.committed())
    again = start(tmp_path / "run", *SETTINGS)
    assert again.ended() == DONE and losses(again.rows()) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_the_current_step_and_the_same_command_resumes(start, undisturbed, tmp_path, number):
    run = start(tmp_path / "run", *SETTINGS)
    run.wait_for(run.rows)
    run.process.send_signal(number)
    assert run.ended() == STOPPED
    last = run.rows()[-1]["step"]
    assert last < STEPS and run.committed()[-1] == last
    assert f"{number.name}: saving after this step" in run.text()
    assert re.search(rf"^stopped at step {last}; metrics and checkpoints: {run.folder}$", run.text(), re.M)
    assert re.search(rf"^resume: flax-mesh train .* run\.folder={run.folder} run\.steps={STEPS}$", run.text(), re.M)
    assert "Traceback" not in run.text()
    check_resumed(start(tmp_path / "run", *SETTINGS), last, last, undisturbed)


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_at_once(start, tmp_path):
    run = start(tmp_path / "run", "run.platform=cpu:1", recipe=f"{RECIPE}:slow_recipe")  # 1.5 s a step
    run.wait_for(run.rows)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "SIGINT: saving after this step" in run.text())
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.ended() == -signal.SIGINT
    assert time.monotonic() - began < 1
    assert "stopped at step" not in run.text() and "Traceback" not in run.text()


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_rejected(start, text, tmp_path, capsys):
    folder = tmp_path / "run"
    first = start(folder, *SETTINGS[1:], "run.steps=1000000")  # it must not end before the second one starts
    first.wait_for((folder / "config.txt").exists)
    command = ["train", str(RECIPE), f"data.source={text}", f"run.folder={folder}"]
    before = (folder / "config.txt").read_bytes()
    assert main(command) == BAD_INPUT
    assert capsys.readouterr().err == (
        f"flax-mesh: run.folder={folder} is in use by another run; stop that run, or use another folder\n"
    )
    assert (folder / "config.txt").read_bytes() == before
    first.process.kill()
    first.ended()
    with run_folder(folder):  # the lock ended with the process
        pass
