"""What a step reports: a row of numbers, kept in RUN_FOLDER/metrics.jsonl."""

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from flax_mesh.errors import SaveError
from flax_mesh.hardware import peak_flops

Row = dict[str, Any]


def step_row(
    step: int,
    metrics: dict[str, float],
    *,
    tokens: int,
    seconds: float,
    data_wait: float,
    devices: Sequence[Any],
    flops_per_token: float | None,
) -> Row:
    """One row: the metrics of the step, its speed, and what the devices hold.

    mfu = tokens/s * flops_per_token / (devices * peak FLOP/s of a device), null where the peak is unknown.
    device_bytes is the largest peak over the local devices, null where the backend does not tell.
    """
    peak = peak_flops(devices[0].device_kind)
    mfu = None
    if peak is not None and flops_per_token is not None:
        mfu = tokens / seconds * flops_per_token / (len(devices) * peak)
    return {
        "step": step,
        **metrics,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_device": tokens / seconds / len(devices),
        "mfu": mfu,
        "device_bytes": peak_memory(devices),
        "seconds": seconds,
        "data_wait_seconds": data_wait,
    }


def peak_memory(devices: Sequence[Any]) -> int | None:
    """Largest peak of bytes in use over the devices of this process, None where the backend does not tell."""
    stats = [d.memory_stats() for d in devices if d.process_index == jax.process_index()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks, default=None)


class MetricsFile:
    """Appends rows to a jsonl file; a row is on disk when `write` returns. Not a number becomes null."""

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, row: Row) -> None:
        """Append the whole row, or nothing and raise SaveError."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = (json.dumps(clean) + "\n").encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(line)
            if written < len(line):  # the next attempt would say why; on a full disk it is this
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(end)
            raise SaveError(f"the row of step {row['step']} could not be written to {self._path}: {error}") from error

    def close(self) -> None:
        self._file.close()
