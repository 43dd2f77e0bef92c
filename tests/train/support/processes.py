"""Processes that train in a folder, and are observed through its files while they run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 120  # seconds, timeout of every wait for a process
RECIPE = Path(__file__).parents[1] / "bigram.py"


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


def start_run(folder: Path, text: Path, *settings: str, recipe: str = str(RECIPE), prefix: tuple[str, ...] = ()) -> Run:
    """Start the command `flax-mesh train`, after the words of `prefix`."""
    output = folder.with_name(f"{folder.name}-output-{time.monotonic_ns()}.txt")
    argv = [f"data.source={text}", f"run.folder={folder}", *settings]
    command = [*prefix, sys.executable, "-m", "flax_mesh.cli", "train", recipe, *argv]
    with output.open("w") as file:
        return Run(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT), folder, output)
