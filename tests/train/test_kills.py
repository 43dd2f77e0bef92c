"""Runs in separate processes that are killed or stopped, and the effects of the same command afterwards.

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

import numpy as np
import pytest

from flax_mesh.checkpoint.checksums import find_damage
from flax_mesh.cli.common import DONE
from flax_mesh.train import apply_overrides
from tests.train import bigram
from tests.train.support import runs as support

STEPS = 24
KILLS_IN_ALL = 20
WITHOUT_SAVES = (
    *(f"run.steps={STEPS}", "run.eval_every=0"),
    "model.hidden_size=1024",  # 6 MB of state: a save takes long enough to be interrupted
)
SETTINGS = (*WITHOUT_SAVES, "run.platform=cpu:2", "checkpoint.every=2")
PATIENCE = 120  # seconds, timeout of every wait for a process
RECIPE = bigram.__file__


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
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # complete lines: the run may be writing
        return [json.loads(line) for line in lines]

    def committed(self) -> list[int]:
        names = os.listdir(self.checkpoints) if self.checkpoints.exists() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def unfinished(self) -> list[str]:
        names = os.listdir(self.checkpoints) if self.checkpoints.exists() else []
        return [name for name in names if name.endswith(".orbax-checkpoint-tmp")]

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, condition: Callable[[], object], pause: float = 0.02) -> None:
        """Return soon after the condition is true; fail if the process ends or the time is up before."""
        end = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll()  # polled before the condition, which may wait for the end of the process
            if condition():
                return
            assert ended is None, f"ended with {ended} too early:\n{self.text()}"
            assert time.monotonic() < end, f"timed out:\n{self.text()}"
            time.sleep(pause)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def start(text) -> Iterator[Callable[..., Run]]:
    """`start(folder, *settings)` starts `flax-mesh train` in a process. Those that still run at the end are killed."""
    runs: list[Run] = []

    def start(folder: Path, *settings: str, recipe: str = RECIPE) -> Run:
        output = folder.with_name(f"{folder.name}-output-{time.monotonic_ns()}.txt")
        argv = ["train", recipe, f"data.source={text}", f"run.folder={folder}", *settings]
        with output.open("w") as file:
            process = subprocess.Popen([sys.executable, "-m", "flax_mesh.cli", *argv], stdout=file, stderr=file)
        runs.append(Run(process, folder, output))
        return runs[-1]

    yield start
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
def undisturbed(text, tmp_path_factory) -> dict[int, float]:
    """The losses of an uninterrupted run, in this process."""
    places = [f"data.source={text}", f"run.folder={tmp_path_factory.mktemp('undisturbed') / 'run'}"]
    expected = losses(support.run(apply_overrides(bigram.recipe(), [*places, *WITHOUT_SAVES])).rows)
    assert len(expected) == STEPS
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


def killed(run: Run, *, in_a_save: bool) -> tuple[int, int]:
    """Kill a run after step 4, during a save or after a step that is not saved. Returns (newest checkpoint, step)."""
    if in_a_save:
        run.wait_for(lambda: (done := run.committed()) and done[-1] >= 4)
        run.wait_for(run.unfinished, pause=0.0005)  # a save takes some milliseconds
    else:
        run.wait_for(lambda: (done := run.committed()) and done[-1] >= 4 and run.rows()[-1]["step"] > done[-1])
    run.process.kill()
    assert run.ended() == -signal.SIGKILL
    assert not in_a_save or run.unfinished(), "the kill came too late to interrupt a save"
    return run.committed()[-1], run.rows()[-1]["step"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("in_a_save", "cached"),
    [(True, True), (False, False)],  # without a cache, the process that resumes compiles again
)
def test_a_killed_run_resumes_bit_for_bit(start, undisturbed, tmp_path, monkeypatch, in_a_save, cached):
    if not cached:
        monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    committed, reached = killed(start(tmp_path / "run", *SETTINGS), in_a_save=in_a_save)
    assert 4 <= committed < reached < STEPS
    check_resumed(start(tmp_path / "run", *SETTINGS), committed, reached, undisturbed)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_has_the_losses_of_an_undisturbed_run(start, undisturbed, tmp_path):
    """Kill runs at seeded moments, and resume them until they end or all kills are done.

    Most kills come after a new row, so that the runs end; some come earlier, while the folder is prepared.
    """
    rng, kills = np.random.default_rng(0), 0
    for attempt in itertools.count():
        folder = tmp_path / f"run-{attempt}"
        while True:  # until the run finishes
            run = start(folder, *SETTINGS)
            if kills == KILLS_IN_ALL:
                assert run.ended() == DONE
                break
            rows = len(run.rows())
            if kills % 5 == 3:
                run.wait_for(lambda run=run: "\nrun: " in run.text())
            else:
                run.wait_for(lambda run=run, rows=rows: run.process.poll() == DONE or len(run.rows()) > rows)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(float(rng.uniform(0, 0.6)))
            run.process.kill()
            if run.ended() == DONE:
                break
            assert run.ended() == -signal.SIGKILL
            kills += 1
            assert all(find_damage(run.checkpoints / str(step)) == [] for step in run.committed())
        assert losses(run.rows()) == undisturbed
        assert run.committed()[-1] == STEPS
        leftovers = [name for name in os.listdir(run.checkpoints) if not name.isdecimal()]
        assert not leftovers or "Nothing to do" in run.text()  # a finished run saves nothing and clears nothing
        if kills == KILLS_IN_ALL:
            break


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_at_once(start, tmp_path):
    run = start(tmp_path / "run", "run.platform=cpu:1", recipe=f"{RECIPE}:slow_recipe")  # 1.5 s a step
    run.wait_for(run.rows)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "SIGINT: saving after this step" in run.text())
    run.process.send_signal(signal.SIGINT)
    assert run.ended() == -signal.SIGINT
    assert "stopped at step" not in run.text() and "Traceback" not in run.text()
