"""Metrics of the training steps: one row of numbers per step, written to RUN_FOLDER/metrics.jsonl."""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from flax_mesh.errors import SaveError
from flax_mesh.hardware import peak_flops
from flax_mesh.train.build import TrainProgram

Row = dict[str, Any]


def peak_memory(devices: Sequence[Any]) -> int | None:
    """The largest peak of bytes in use over the local devices, None if the backend does not report it."""
    stats = [d.memory_stats() for d in devices if d.process_index == jax.process_index()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)


class MetricsFile:
    """Appends rows to a JSON Lines file, unbuffered. NaN and infinities are written as null."""

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, row: Row) -> None:
        """Append the row. If it cannot be written completely, the file is truncated to its old size: SaveError."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = (json.dumps(clean) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written < len(line):  # a short write reports no errno; in practice the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(end)
            raise SaveError(f"the row of step {row['step']} could not be written to {self._path}: {error}") from error

    def close(self) -> None:
        self._file.close()


class Rows:
    """Rows of metrics, read from the device one step late, so that the host dispatches a step without waiting.

    `path` is the file for the rows, None in processes that do not write. `warn_or_raise` is called with the error if a
    row cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        program: TrainProgram,
        start: int,
        *,
        hooks: Sequence[Callable[[Row], None]],
        say: Callable[[str], None],
        warn_or_raise: Callable[[SaveError], None],
    ):
        self.file = MetricsFile(path) if path is not None else None
        self.last: Row = {}
        self._hooks, self._say, self._warn_or_raise = hooks, say, warn_or_raise
        self._lost = 0  # consecutive rows that could not be written
        self._pending: tuple[int, Any, float] | None = None
        self._extra: Row = {"resumed_from": start} if start else {}
        self._since = time.perf_counter()
        self._devices = list(program.mesh.devices.flat)
        config = program.config
        self._tokens = config.data.batch_size * config.data.sequence_length
        count = config.flops_per_token
        self._flops = count and count(config.model, program.num_parameters, config.data.sequence_length)

    def begin(self, step: int, metrics: Any, waited: float) -> None:
        self._pending = (step, metrics, waited)

    def finish(self, more: Callable[[], Row] = dict) -> None:
        """Write the pending row, merged with `more()`. The time spent here is excluded from `seconds` of all rows."""
        if self._pending is None:
            return
        self.last = self._row(*self._pending) | self._extra | more()
        self._pending, self._extra, self._since = None, {}, time.perf_counter()
        self._write()
        for hook in self._hooks:
            hook(self.last)

    def _row(self, step: int, metrics: Any, waited: float) -> Row:
        """mfu = tokens/s * FLOPs per token / (devices * peak FLOP/s of a device), None where the peak is unknown."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}  # waits for the device
        seconds, num_devices = time.perf_counter() - self._since, len(self._devices)
        tokens_per_s, peak = self._tokens / seconds, peak_flops(self._devices[0].device_kind)
        mfu = None
        if peak is not None and self._flops is not None:
            mfu = tokens_per_s * self._flops / (num_devices * peak)
        return {
            "step": step,
            **values,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / num_devices,
            "mfu": mfu,
            "device_bytes": peak_memory(self._devices),
            "seconds": seconds,
            "data_wait_seconds": waited,
        }

    def _write(self) -> None:
        if self.file is None:
            return
        try:
            self.file.write(self.last)
        except SaveError as error:
            if not self._lost:
                self._warn_or_raise(error)
            self._lost += 1
            return
        if self._lost:
            self._say(f"metrics are written again from step {self.last['step']} on; rows lost: {self._lost}")
            self._lost = 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
