"""Bytes on one device over the time of a program: the order of its kernels, and how long each value is stored.

An elementwise kernel reuses the memory of an operand that dies there and has the size of its result. A loop reuses the
memory of the initial values that it changes. Donated arguments are updated in place.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flax_mesh.plan.program.kernels import Buffer, Kernel


class Step(NamedTuple):
    """One kernel: buffers that are freed before it runs, buffers that it writes, and the kernels of its body."""

    kernel: Kernel
    freed: tuple[Buffer, ...]
    written: tuple[Buffer, ...]
    body: "Profile | None"


@dataclass(frozen=True)
class Profile:
    """The temporary bytes of a list of kernels, in the order in which they run."""

    peak: int
    alive: tuple[Buffer, ...]  # at the peak, those inside of a loop included
    steps: tuple[Step, ...]


def profile(kernels: Sequence[Kernel], results: Sequence[Buffer], platform: str) -> Profile:
    """Orders the kernels as XLA does on a platform, and measures the bytes that are alive while each of them runs.

    CPUs run them breadth first. Accelerators run the one first that frees most memory, as XLA's list scheduler does.
    """
    ordered = _breadth_first(kernels) if platform == "cpu" else _least_memory(kernels)
    last: dict[int, int] = {}
    for i, kernel in enumerate(ordered):
        for buffer in _touched(kernel):
            last[id(buffer)] = i
    last |= {id(buffer): len(ordered) for buffer in results}
    alive: dict[int, Buffer] = {}
    total, peak, at_peak, freed, steps = 0, 0, (), list[Buffer](), []
    for i, kernel in enumerate(ordered):
        dying = [r.buffer for r in kernel.reads.values() if last[id(r.buffer)] == i and id(r.buffer) in alive]
        written = [buffer for buffer in kernel.writes if not buffer.fixed]
        for buffer in written:
            if kernel.elementwise and (match := next((b for b in dying if b.bytes == buffer.bytes), None)):
                dying.remove(match)
                freed.append(alive.pop(id(match)))
            alive[id(buffer)] = buffer
        total += sum(x.bytes for x in written) - sum(x.bytes for x in freed)
        inside = profile(kernel.body, kernel.results, platform) if kernel.body else None
        steps.append(Step(kernel, tuple(freed), tuple(written), inside))
        now = total + (inside.peak if inside else 0)
        if now > peak:
            peak, at_peak = now, (*alive.values(), *(inside.alive if inside else ()))
        freed = [alive.pop(id(x)) for x in _touched(kernel) if last[id(x)] == i and id(x) in alive]
    return Profile(peak, at_peak, tuple(steps))


def _touched(kernel: Kernel) -> list[Buffer]:
    buffers = [read.buffer for read in kernel.reads.values()] + kernel.writes
    return [*buffers, kernel.updates] if kernel.updates is not None else buffers


def _dependencies(kernels: Sequence[Kernel]) -> tuple[list[list[int]], list[int]]:
    """(kernels that wait for each kernel, number of kernels that each waits for)."""
    writer = {id(buffer): i for i, kernel in enumerate(kernels) for buffer in kernel.writes}
    users: list[list[int]] = [[] for _ in kernels]
    missing = [0] * len(kernels)
    for i, kernel in enumerate(kernels):
        before = {writer[id(b)] for b in _touched(kernel) if id(b) in writer} - {i}
        for j in before:
            users[j].append(i)
        missing[i] = len(before)
        if kernel.updates is not None:
            writer[id(kernel.updates)] = i
    return users, missing


def _breadth_first(kernels: Sequence[Kernel]) -> list[Kernel]:
    users, missing = _dependencies(kernels)
    queue = [i for i, count in enumerate(missing) if not count]
    for i in queue:
        for j in users[i]:
            missing[j] -= 1
            if not missing[j]:
                queue.append(j)
    assert len(queue) == len(kernels), "kernels wait for each other"
    return [kernels[i] for i in queue]


def _least_memory(kernels: Sequence[Kernel]) -> list[Kernel]:
    """List scheduling: the next kernel is the ready one with the largest difference of bytes freed and written.

    Copies from the memory of the host are ready from the start, and made when nothing else is.
    """
    users, missing = _dependencies(kernels)
    reading: dict[int, list[int]] = {}
    for i, kernel in enumerate(kernels):
        for key in kernel.reads:
            reading.setdefault(key, []).append(i)
    readers = {key: len(indices) for key, indices in reading.items()}

    def gain(i: int) -> float:
        if any(operation.kind == "to_device" for operation in kernels[i].computes):
            return -math.inf
        reads, writes = kernels[i].reads.values(), kernels[i].writes
        freed = sum(r.buffer.bytes for r in reads if readers[id(r.buffer)] == 1 and not r.buffer.fixed)
        return freed - sum(b.bytes for b in writes if not b.fixed)

    heap = [(-gain(i), i) for i, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    done: set[int] = set()
    result = []
    while heap:
        _, i = heapq.heappop(heap)
        if i in done:
            continue
        done.add(i)
        result.append(kernels[i])
        changed = set()
        for j in users[i]:
            missing[j] -= 1
            if not missing[j]:
                changed.add(j)
        for key in kernels[i].reads:
            readers[key] -= 1
            if readers[key] == 1:  # its last reader frees it
                changed |= {j for j in reading[key] if j not in done and not missing[j]}
        for j in changed:
            heapq.heappush(heap, (-gain(j), j))
    assert len(result) == len(kernels), "kernels wait for each other"
    return result
