"""How fast tokens were generated, beside the least time in which the memory of the devices can be read for them."""

# NNX has no types for the state of a model.
# pyright: reportUnknownMemberType=false

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from flax import nnx

from flax_mesh.hardware import chip_of
from flax_mesh.models.cache import KVCache
from flax_mesh.models.decoder import Decoder
from flax_mesh.text import bytes_text, count_text
from flax_mesh.tree import named_leaves

_OF_EXPERTS = re.compile(r"\bmoe/(gate|up|down)/")


@dataclass(frozen=True)
class SpeedReport:
    """What `generate` measured. `str` of it is a text of three lines.

    A step computes one token of every row. It reads the parameters in the dtype of the computation, and the keys and
    values of all slots, at least once: bytes divided by the bandwidth are the floor of its time. Of a table of
    embeddings that is not tied only the rows of its tokens count, of experts at most those that so many tokens choose.
    The time is measured between groups of tokens that follow each other, without compilation and without prompts.

    Attributes:
        rows: Prompts that are computed together, with padding.
        slots: Tokens of each row that the cache can store.
        steps: All steps, and for each time that prompts were read the one of their first tokens.
        dispatches: Programs that were started for them.
        measured_steps: Steps of which the time was measured; 0 if no group of tokens follows another.
        measured_tokens: Tokens of prompts in these steps.
        seconds: Their time.
        devices: Number of devices.
        parameter_bytes: Bytes of the parameters that a step reads on one device.
        cache_bytes: Bytes of the keys and values that a step reads on one device.
        chip: Name of the kind of device; "" if the bandwidth of its memory is not known, as for a CPU.
        bandwidth: Bytes/s of the memory of one device, from its published figures; 0 if not known.
    """

    rows: int
    slots: int
    steps: int
    dispatches: int
    measured_steps: int
    measured_tokens: int
    seconds: float
    devices: int
    parameter_bytes: int
    cache_bytes: int
    chip: str
    bandwidth: float

    @property
    def step_seconds(self) -> float:
        """Measured seconds of one step; nan if none was measured."""
        return self.seconds / self.measured_steps if self.measured_steps else math.nan

    @property
    def floor_seconds(self) -> float:
        """The least seconds of one step; nan if the bandwidth is not known."""
        return (self.parameter_bytes + self.cache_bytes) / self.bandwidth if self.bandwidth else math.nan

    def __str__(self) -> str:
        total, device = self.parameter_bytes + self.cache_bytes, " per device" if self.devices > 1 else ""
        measured = "not measured: texts are too short, or prompts took rows between all groups"
        if self.measured_steps:
            measured = (
                f"{1e3 * self.step_seconds:,.3f} ms per step, {self.measured_tokens / self.seconds:,.1f} tokens/s, "
            )
            measured += f"{bytes_text(total / self.step_seconds)}/s{device}"
        floor = "the bandwidth of the memory is not known"
        if self.bandwidth:
            floor = f"{1e3 * self.floor_seconds:,.3f} ms per step on {self.chip}"
            floor += f", measured {self.step_seconds / self.floor_seconds:.2f} times" * bool(self.measured_steps)
        content = f"{bytes_text(self.parameter_bytes)} of parameters, {bytes_text(self.cache_bytes)} of keys and values"
        count = f"{count_text(self.steps, 'step')} of {count_text(self.rows, 'row')} with {self.slots:,} slots"
        each = f"{count_text(self.dispatches, 'dispatch')}, {self.dispatches / self.steps:.3f} per step"
        return f"steps: {count}, {each}\nmeasured: {measured}\nfloor: {floor}; {content}{device}"


class Meter:
    """Counts what is dispatched and read, and the time between groups that are read after each other."""

    def __init__(self) -> None:
        self.dispatches = self.steps = self.measured_steps = self.measured_tokens = 0
        self.seconds, self._last = 0.0, math.nan

    def dispatched(self, *, is_group: bool) -> None:
        self.dispatches += 1
        if not is_group:
            self._last = math.nan

    def read(self, steps: int, tokens: int, *, is_group: bool) -> None:
        """Tokens of so many steps have been read from the devices."""
        now, last = time.perf_counter(), self._last
        self.steps += steps
        self._last = now if is_group else math.nan
        if is_group and not math.isnan(last):
            self.seconds += now - last
            self.measured_steps += steps
            self.measured_tokens += tokens

    def report(self, model: nnx.Module, leaves: Sequence[jax.Array], cache: KVCache) -> SpeedReport:
        """The figures, with the floor; `leaves` of the model are in the dtypes of the computation."""
        keys_values = jax.tree.leaves((cache.keys, cache.values))
        rows, devices = len(cache.lengths_B), sorted(keys_values[0].devices(), key=lambda device: device.id)
        chip = chip_of(devices[0].device_kind)
        if chip is not None and chip.platform == "cpu":
            chip = None  # its figures are of no particular one
        return SpeedReport(
            rows=rows,
            slots=cache.num_slots,
            steps=self.steps,
            dispatches=self.dispatches,
            measured_steps=self.measured_steps,
            measured_tokens=self.measured_tokens,
            seconds=self.seconds,
            devices=len(devices),
            parameter_bytes=_parameter_bytes(model, leaves, rows),
            cache_bytes=sum(map(_device_bytes, keys_values)),
            chip=chip.name if chip else "",
            bandwidth=chip.memory_bandwidth if chip else 0.0,
        )


def _device_bytes(x: jax.Array) -> int:
    """Bytes on one device."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _parameter_bytes(model: nnx.Module, leaves: Sequence[jax.Array], rows: int) -> int:
    """Bytes that a step of so many rows reads on a device."""
    table = experts = 1.0
    if isinstance(model, Decoder):  # another model may have other paths
        config = model.config
        table = 1.0 if config.tied else min(1.0, rows / config.vocab_size)
        experts = min(1.0, rows * config.experts_per_token / config.num_experts) if config.num_experts else 1.0
    total = 0.0
    for (path, _), x in zip(named_leaves(nnx.state(model)), leaves, strict=True):
        part = table if path == "embed/embedding" else experts if _OF_EXPERTS.search(path) else 1.0
        total += part * _device_bytes(x)
    return round(total)
