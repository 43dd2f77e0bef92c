"""Fake devices of several processes from the view of one process, with the attributes that Mesh and mpmd read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh


@dataclass(frozen=True)
class FakeClient:
    process: int

    def process_index(self) -> int:
        return self.process


@dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    client: FakeClient
    platform: str = "cpu"
    device_kind: str = "cpu"

    def __repr__(self) -> str:
        return f"device {self.id}"


def seen_from(
    process: int, owners: Sequence[int], shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("pp", "fsdp")
) -> Any:
    """A mesh as seen from `process`, with one device per entry of `owners`, which is the process of the device."""
    devices = np.array([FakeDevice(100 + i, owner, FakeClient(process)) for i, owner in enumerate(owners)])
    return Mesh(devices.reshape(shape or (len(owners), 1)), names)
