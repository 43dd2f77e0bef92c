"""Runs in this process: their rows and output, a kill after a step, and the files in their folders."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flax_mesh.checkpoint.read import read_record, read_tree
from flax_mesh.train import TrainConfig, train
from flax_mesh.train.export import read_values


class Killed(Exception):
    pass


@dataclass
class Ran:
    """The rows, lines and result of a call of `train`; without `result` it was killed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    result: Any = None  # a TrainResult

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.rows)


def run(config: TrainConfig, *, kill_at: int | None = None, **kinds: Any) -> Ran:
    """Train; the run ends without another save after the row of step `kill_at`."""
    ran = Ran()

    def hook(row: dict[str, Any]) -> None:
        ran.rows.append(row)
        if row["step"] == kill_at:
            raise Killed

    try:
        ran.result = train(config, hooks=[hook], say=ran.lines.append, **kinds)
    except Killed:
        assert kill_at is not None
    return ran


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[int]:
    """The saved steps."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


def state_of(folder: Path, step: int) -> dict[str, bytes]:
    """Path -> bytes of every array of a checkpoint."""
    place = folder / "checkpoints" / str(step)
    return {path: np.asarray(x).tobytes() for path, x in read_values(place, read_tree(place, read_record(place)))}
