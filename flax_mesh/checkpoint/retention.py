"""Which checkpoints are retained."""

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flax_mesh.checkpoint.checksums import read_metadata
from flax_mesh.checkpoint.find import committed_steps
from flax_mesh.errors import ConfigError, UnreadableError
from flax_mesh.fields import type_problems, value_problems

MOST = sys.float_info.max
_UNREADABLE = " unreadable"  # key of the metadata of a step that the system refused to read
_JUDGED = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class RetentionPolicy:
    """Retains the `newest` checkpoints, the `best` by a metric (lower is better), and every step divisible by `every`.

    A checkpoint is retained if any of the three selects it. The newest always is. `newest=None` retains all.
    """

    newest: int | None = field(default=3, metadata={"at_least": 1})
    best: int = field(default=0, metadata={"at_least": 0})
    every: int | None = field(default=None, metadata={"at_least": 1})

    def __post_init__(self) -> None:
        if problems := [*type_problems(self), *value_problems(self)]:
            raise ValueError("; ".join(problems))

    def steps(self, steps: Collection[int], metrics: Mapping[int, float]) -> set[int]:
        """The retained ones of `steps`; steps without a metric, or with NaN, are not candidates for the best."""
        if self.newest is None or not steps:
            return set(steps)
        order = sorted(steps)
        ranked = [step for step in order if not math.isnan(metrics.get(step, math.nan))]
        # Of equally good ones the later, which was trained for longer.
        ranked.sort(key=lambda step: (metrics[step], -step))
        stay = {*order[-self.newest :], *ranked[: self.best]}
        return stay | {step for step in order if self.every and step % self.every == 0}


def metric_of(metadata: Mapping[str, object], name: str) -> float | None:
    """The number `name` in the "metrics" of a checkpoint, None if there is none."""
    metrics = metadata.get("metrics")
    value = metrics.get(name) if isinstance(metrics, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) <= MOST else None


def has_finite_numbers(metadata: Mapping[str, object]) -> bool:
    """Whether a checkpoint contains finite numbers, according to its metadata: no array is read.

    The training loop saves this as "finite". Without it, the loss and the gradient norm in "metrics" decide.
    """
    flag, metrics = metadata.get("finite"), metadata.get("metrics")
    if isinstance(flag, bool):
        return flag
    values = [metrics[name] for name in _JUDGED if name in metrics] if isinstance(metrics, Mapping) else []
    return all(isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) for value in values)


def retained_steps(folder: Path, policy: RetentionPolicy, best_metric: str) -> set[int]:
    """The steps of `folder` to retain by `policy`, and always the newest one with finite numbers."""
    steps = committed_steps(folder)
    records = {step: _readable_metadata(folder / str(step)) for step in steps if policy.best}
    metrics = {step: value for step, x in records.items() if (value := metric_of(x, best_metric)) is not None}
    unknown = {step for step, x in records.items() if x.get(_UNREADABLE)}  # one of them may be the best
    finite = newest_finite_step(folder)
    return policy.steps(steps, metrics) | unknown | (set() if finite is None else {finite})


def newest_finite_step(folder: Path) -> int | None:
    """The newest step of `folder` with finite numbers according to its metadata."""
    steps = reversed(committed_steps(folder))
    return next((step for step in steps if has_finite_numbers(_readable_metadata(folder / str(step)))), None)


def _readable_metadata(step: Path) -> Mapping[str, object]:
    """The metadata of a step; of one without, which is not a candidate for the best, {"finite": False}."""
    try:
        return read_metadata(step)
    except UnreadableError:
        return {"finite": False, _UNREADABLE: True}
    except ConfigError:  # damaged, or deleted meanwhile
        return {"finite": False}
