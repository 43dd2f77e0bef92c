"""Evaluation functions of a recipe (`eval_fns`): the functions they call, and the metrics they must return."""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from flax_mesh.axes import PartitionAxis
from flax_mesh.data.user_batches import abstract_batch, batch_problems, split_problems
from flax_mesh.errors import ConfigError
from flax_mesh.step.batch import on_device_dtypes, put_batch
from flax_mesh.tree import PyTree
from flax_mesh.user_code import joined, place_of, user_code

Sums = dict[str, float]
Evaluate = Callable[[PyTree], Sums]
EvalFns = Mapping[str, Callable[[Evaluate], Mapping[str, float]]]


def mean_metrics(evaluate: Evaluate, batches: Iterable[PyTree]) -> dict[str, float]:
    """Loss and metrics of `loss_fn` over held-out batches, for an `eval_fn`: sums divided by the total weight.

    Args:
        evaluate: The function that an `eval_fn` is called with.
        batches: Batches on the host, at least one.

    Returns:
        "loss" and the metrics of `loss_fn`, means over all batches.

    Raises:
        ConfigError: `batches` is empty, or their weights add up to 0.

    Example:
        >>> from flax_mesh.train import mean_metrics
        >>> evaluate = lambda batch: {"loss": batch.sum(), "weight": batch.size}  # a stand-in for the function of a run
        >>> float(mean_metrics(evaluate, [np.ones(2), np.full(6, 5.0)])["loss"])
        4.0
    """
    totals: Sums = {}
    for batch in batches:
        for name, value in evaluate(batch).items():
            totals[name] = totals.get(name, 0.0) + value
    weight = totals.pop("weight", 0.0)
    if not weight:
        reason = "the weights that loss_fn returned add up to 0" if totals else "there is no batch"
        raise ConfigError(f"mean_metrics needs batches with a weight, but {reason}")
    return {name: total / weight for name, total in totals.items()}


def eval_fn_problems(eval_fns: EvalFns) -> list[str]:
    """One line for every entry that is not a function under a valid name."""
    problems = []
    for name, function in eval_fns.items():
        if not isinstance(name, str) or not name or "/" in name:
            problems.append(f"eval_fns: a name must be text without '/', got {name!r}")
        elif not callable(function):
            problems.append(f"eval_fns[{name!r}] must be a function, got {type(function).__name__}")
    return problems


def run_eval_fns(eval_fns: EvalFns, evaluate: Evaluate) -> dict[str, float]:
    """The metrics of all functions, as "NAME/METRIC". ConfigError for a result that is not a dict of real numbers."""
    results: dict[str, float] = {}
    for name, function in eval_fns.items():
        what, place = f"eval_fns[{name!r}]", place_of(function)
        try:
            with user_code(what, place):
                metrics = function(evaluate)
        except ConfigError as error:
            raise ConfigError([p if p.setting == what else p.within(what) for p in error.problems]) from error
        if problem := _problem(metrics):
            raise ConfigError(joined(what, place, f"it must return a dict of real numbers, got {problem}"))
        results |= {f"{name}/{metric}": float(value) for metric, value in metrics.items()}
    return results


def _problem(metrics: object) -> str:
    if not isinstance(metrics, Mapping):
        return type(metrics).__name__
    for name, value in metrics.items():
        if not isinstance(name, str) or not name or "/" in name:
            return f"the name {name!r}; a name must be text without '/'"
        if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
            return f"{name!r} of type {type(value).__name__}; convert it by float(...)"
    return ""


def host_evaluate(sums: Callable[[PyTree], PyTree], mesh: Mesh, axes: PartitionAxis, parts: int) -> Evaluate:
    """`evaluate(batch)` for batches on the host: `sums` of the batch on the devices, as floats.

    The rows are divided into `parts` microbatches of a pipeline; 1 without one.
    """

    def evaluate(batch: PyTree) -> Sums:
        batch = _checked(batch, mesh, axes, parts)
        return {name: float(value) for name, value in jax.device_get(sums(put_batch(batch, mesh, axes))).items()}

    return evaluate


@dataclass(frozen=True)
class TracedEvaluate:
    """`evaluate(batch)` that returns 1.0 for every sum: `trace` is called with the abstract batch for their names."""

    trace: Callable[[PyTree], Iterable[str]]
    mesh: Mesh
    axes: PartitionAxis
    parts: int

    def __call__(self, batch: PyTree) -> Sums:
        batch = _checked(batch, self.mesh, self.axes, self.parts)
        return dict.fromkeys(self.trace(abstract_batch(batch, self.mesh, self.axes)), 1.0)


def _checked(batch: PyTree, mesh: Mesh, axes: PartitionAxis, parts: int) -> PyTree:
    if problems := batch_problems(batch) or split_problems(batch, mesh, axes, parts):
        raise ConfigError([f"evaluate(batch) of an eval_fn: {problem}" for problem in problems])
    return on_device_dtypes(batch, "evaluate(batch) of an eval_fn")


def token_metrics(sums: Iterable[Mapping[str, np.ndarray]], bytes_per_token: float | None) -> dict[str, float | None]:
    """`eval_loss` and, for text, `bits_per_byte` of the held-out tokens."""
    rows = list(sums)
    # The training loss of a mixture of experts includes the router's losses; bits per byte must not.
    loss = float(sum(s.get("cross_entropy", s["loss"]) for s in rows) / sum(s["weight"] for s in rows))
    return {"eval_loss": loss, "bits_per_byte": loss / math.log(2) / bytes_per_token if bytes_per_token else None}
