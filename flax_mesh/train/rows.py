"""Rows of metrics as a run makes them: read from the device late, written before the state of their step is saved."""

import time
from collections.abc import Callable
from typing import Any

import jax

from flax_mesh.errors import SaveError
from flax_mesh.train.metrics import MetricsFile, Row, step_row
from flax_mesh.train.run import Run, go_on_or_raise
from flax_mesh.train.run_folder import METRICS
from flax_mesh.train.together import is_first


class Rows:
    """Rows of metrics, read from the device one step late, so that the host never waits before it dispatches."""

    def __init__(self, run: Run, start: int):
        self.run = run
        self.file = MetricsFile(run.folder / METRICS) if is_first() else None
        self.last: Row = {}
        self._lost = 0  # rows in a row that could not be written
        self._pending: tuple[int, Any, float] | None = None
        self._extra: Row = {"resumed_from": start} if start else {}
        self._since = time.perf_counter()
        config = run.config
        self._tokens = config.data.batch_size * config.data.sequence_length
        count = config.flops_per_token
        self._flops = count and count(config.model, run.num_parameters, config.data.sequence_length)

    def begin(self, step: int, metrics: Any, waited: float) -> None:
        self._pending = (step, metrics, waited)

    def finish(self, more: Callable[[], Row] = dict) -> None:
        """Write the row begun last, with what `more()` gives; the time that takes counts for no row."""
        if self._pending is None:
            return
        step, metrics, waited = self._pending
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        row = step_row(
            step,
            values,
            tokens=self._tokens,
            seconds=now - self._since,
            data_wait=waited,
            devices=list(self.run.mesh.devices.flat),
            flops_per_token=self._flops,
        )
        self.last = row | self._extra | more()
        self._pending, self._extra, self._since = None, {}, time.perf_counter()
        self._write()
        for hook in self.run.hooks:
            hook(self.last)

    def _write(self) -> None:
        if self.file is None:
            return
        try:
            self.file.write(self.last)
        except SaveError as error:
            if not self._lost:
                go_on_or_raise(self.run, error)
            self._lost += 1
            return
        if self._lost:
            self.run.say(f"metrics are written again from step {self.last['step']} on; rows lost: {self._lost}")
            self._lost = 0

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
