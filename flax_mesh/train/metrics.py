"""Metrics of the training steps: one row of numbers per step, written to metrics.jsonl of the run folder.

`StepCheck` finds the rows whose numbers are not finite, or far above the numbers of earlier rows.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import numpy as np

from flax_mesh.checkpoint.retention import has_finite_numbers
from flax_mesh.errors import SaveError
from flax_mesh.hardware import peak_flops
from flax_mesh.recipe.config import RunConfig
from flax_mesh.recipe.program import TrainProgram
from flax_mesh.step.loss import Limits, Metrics
from flax_mesh.train.run_folder import MetricsFile, Row

WINDOW, LEAST = 64, 16  # values of the running median: at most, and before there is a limit
MOST_SKIPPED = 100  # consecutive updates; then the parameters themselves are probably not finite


def peak_memory(devices: Sequence[Any]) -> int | None:
    """The largest peak of bytes in use over the local devices, None if the backend does not report it."""
    here = jax.process_index()  # pyright: ignore[reportUnknownMemberType] (of JAX)
    stats = [d.memory_stats() for d in devices if d.process_index == here]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)


class StepCheck:
    """Compares the loss and the gradient norm of every step with its limits, and applies `run.on_nonfinite`.

    Without `run.spike_factor` only NaN and infinite values are refused. With it, the limits of step n are that factor
    times the medians of the last WINDOW finite values up to step n - 2: the row of step n - 1 is read only after step n
    is dispatched. `saved` is the metadata of the checkpoint that the run resumes from, which contains `record()`.
    """

    def __init__(self, config: RunConfig, saved: Mapping[str, Any]):
        self.stopped = ""  # why the run must stop
        self.limits_are_used = config.on_nonfinite == "skip" and config.spike_factor > 0
        self._policy, self._factor = config.on_nonfinite, config.spike_factor
        self._is_finite = has_finite_numbers(saved)
        self._was_refused = False
        self._recent = [tuple(values) for values in saved.get("recent", ())]  # (step, loss, gradient norm)
        self._skipped = int(saved.get("metrics", {}).get("skipped", 0))
        self._skipped_in_a_row = 0

    def record(self) -> dict[str, Any]:
        """The fields of the metadata of a checkpoint that is saved after the last row."""
        return {"finite": self._is_finite} | ({"recent": self._recent} if self._factor else {})

    def limits(self, step: int) -> Limits:
        """The largest loss and gradient norm that are accepted in a step."""
        values = [pair for at, *pair in self._recent if at <= step - 2][-WINDOW:]
        if not self._factor or len(values) < LEAST:
            return np.float32(math.inf), np.float32(math.inf)
        loss, grad_norm = (self._factor * median(column) for column in zip(*values, strict=True))
        # A factor of a median that is not positive limits nothing.
        return np.float32(loss if loss > 0 else math.inf), np.float32(grad_norm if grad_norm > 0 else math.inf)

    def read(self, row: Row) -> str:
        """Check a row, and replace its "skipped", 0 or 1, by their number so far. Returns a warning, "" for none."""
        names, step = ("loss", "grad_norm"), row["step"]
        limits = {
            name: (row[name], float(limit))
            for name, limit in zip(names, self.limits(step), strict=True)
            if not (math.isfinite(row[name]) and row[name] <= limit)
        }
        texts = [
            f"{name} {value:.4g}" + (f" (limit {limit:.4g}, run.spike_factor)" if math.isfinite(value) else "")
            for name, (value, limit) in limits.items()
        ]
        skipped, of_step = bool(row.get("skipped")), all(math.isfinite(row[name]) for name in names)
        if of_step and self._factor:
            self._recent = [*self._recent, (step, *(row[name] for name in names))][-WINDOW - 1 :]
        if "skipped" in row:
            row["skipped"] = self._skipped = self._skipped + skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._is_finite = self._is_finite if skipped else of_step
        if not math.isfinite(row.get("eval_loss", 0.0)):
            self._is_finite = False
            texts.append(f"eval_loss {row['eval_loss']}")
        before, self._was_refused = self._was_refused, bool(texts)
        text = f"step {step}: {', '.join(texts)}"
        if (texts and self._policy == "stop") or self._skipped_in_a_row >= MOST_SKIPPED:
            self.stopped = text + (f"; {MOST_SKIPPED} updates in a row were skipped" if self._policy == "skip" else "")
        elif skipped:
            return f"warning: {text}; the update was skipped ({self._skipped} so far)"
        elif texts and not before:
            return f"warning: {text}; training continues (run.on_nonfinite)"
        return ""


class Rows:
    """Rows of metrics, read from the device one step late, so that the host dispatches a step without waiting.

    `file` is None in processes that do not write. `warn_or_raise` is called with the error if a row cannot be written.
    """

    def __init__(
        self,
        file: MetricsFile | None,
        program: TrainProgram,
        start: int,
        check: StepCheck,
        *,
        hooks: Sequence[Callable[[Row], None]],
        say: Callable[[str], None],
        warn_or_raise: Callable[[SaveError], None],
    ):
        self.last: Row = {}
        self._file, self.check = file, check
        self._hooks, self._say, self._warn_or_raise = hooks, say, warn_or_raise
        self._lost = 0  # consecutive rows that could not be written
        self._pending: tuple[int, Metrics, float] | None = None
        self._extra: Row = {"resumed_from": start} if start else {}
        self._since = time.perf_counter()
        self._check_callbacks = program.check
        self._devices = list(program.mesh.devices.flat)
        recipe, kind = program.recipe, self._devices[0].device_kind
        rows = None if recipe.user_batches is None else recipe.data.batch_size
        counts = {"examples": rows, "tokens": recipe.tokens_per_step}
        self._counts = {name: count for name, count in counts.items() if count is not None}
        self._peak = recipe.chip.peak("bfloat16") if recipe.chip else peak_flops(kind)
        self._flops = recipe.flops_per_token and recipe.flops_per_token(program.num_parameters)

    def begin(self, step: int, metrics: Metrics, waited: float) -> None:
        self._pending = (step, metrics, waited)

    def finish(self, last_values: Callable[[], Row] = dict) -> None:
        """Write the pending row, merged with `more()`. The time spent here is excluded from `seconds` of all rows."""
        if self._pending is None:
            return
        row = self._row(*self._pending)
        self._check_callbacks()
        self.last = row | self._extra | last_values()
        self._pending, self._extra, self._since = None, {}, time.perf_counter()
        if warning := self.check.read(self.last):
            self._say(warning)
        self._write()
        for hook in self._hooks:
            hook(self.last)

    def _row(self, step: int, metrics: Metrics, waited: float) -> Row:
        """mfu = tokens/s * FLOPs per token / (devices * peak FLOP/s of a device), None where one is unknown."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}  # waits for the device
        seconds, num_devices = time.perf_counter() - self._since, len(self._devices)
        rates = {f"{name}_per_s": count / seconds for name, count in self._counts.items()}
        mfu = None
        if self._peak is not None and self._flops is not None:
            mfu = rates["tokens_per_s"] * self._flops / (num_devices * self._peak)
        return {
            "step": step,
            **values,
            **rates,
            **{f"{name}_per_device": rate / num_devices for name, rate in rates.items()},
            "mfu": mfu,
            "device_bytes": peak_memory(self._devices),
            "seconds": seconds,
            "data_wait_seconds": waited,
        }

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self.last)
        except SaveError as error:
            if not self._lost:
                self._warn_or_raise(error)
            self._lost += 1
            return
        if self._lost:
            self._say(f"metrics are written again from step {self.last['step']} on; rows lost: {self._lost}")
            self._lost = 0

    def close(self) -> None:
        if self._lost:
            self._say(f"warning: the last rows of metrics could not be written; rows lost: {self._lost}")
        if self._file is not None:
            self._file.close()
