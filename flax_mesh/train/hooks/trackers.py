"""The hooks "wandb" and "trackio": the numbers of every row in one run of the tracker, also after kills and resumes."""

# pyright: reportMissingImports=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import cast

from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.train.hooks.load import Hook, Row, numbers

PROJECT = "flax-mesh"  # of trackio; wandb has a setting


class _Tracker:
    """Logs the rows from step `first` on: those before it the tracker has. Equal steps have equal rows in a run.

    Earlier rows, up to `start`, may have been lost in a kill, and are read from metrics.jsonl.
    """

    def __init__(self, folder: Path, start: int, first: int, log: Callable[..., object], close: Callable[[], object]):
        self._first, self._log, self.close = first, log, close
        if first <= start:
            rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
            for row in (row for row in rows if row["step"] <= start):
                self(row)

    def __call__(self, row: Row) -> None:
        if row["step"] >= self._first:
            self._log(numbers(row), step=row["step"])


def wandb_hook(folder: Path, config: object, start: int) -> Hook:
    import wandb

    run = wandb.init(
        id=_identity(folder / "wandb.id", start),
        name=folder.name,
        dir=str(folder),
        config=to_texts(cast(TrainConfig, config)),
        resume="allow",
        settings=wandb.Settings(console="off"),  # the output of the run stays as it is
    )
    return _Tracker(folder, start, run.step, run.log, run.finish)


def trackio_hook(folder: Path, config: object, start: int) -> Hook:
    import trackio

    name = f"{folder.name}-{_identity(folder / 'trackio.id', start)}"
    texts = to_texts(cast(TrainConfig, config))
    run = trackio.init(PROJECT, name, config=texts, resume="allow", embed=False)
    return _Tracker(folder, start, run._next_step, run.log, run.finish)  # which has no public name


def _identity(file: Path, start: int) -> str:
    """The text that a resumed run finds in `file`, and a new run writes there."""
    if not start or not file.is_file():
        file.write_text(secrets.token_hex(4))
    return file.read_text()
