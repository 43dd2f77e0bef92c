"""The V schedules of Qi et al. (NeurIPS 2024, "Pipeline Parallelism with Controllable Memory"). Pure Python.

Every group has two stages, its chunks 0 and 1. The second half of the stages is placed in reverse order, so the last
stage shares group 0 with the first. In units in which F, B and W of a chunk take 1 each, every microbatch follows one
building block: the times of F of chunk 0, F of chunk 1, B of chunk 1 and B of chunk 0 on each group, all different
modulo 6. The next microbatch follows 6 units later. The shorter the block, the fewer activations a group stores.

A microbatch passes the groups four times. A hop from group to group takes 1 to 3 units, the same on all groups, except
that the first pass may have two sizes of hops. A block is repeated and squeezed: every group runs its actions in the
order of the blocks, each as early as its input and the memory limit permit. While the next one has to wait, the group
runs a W. If it has no W, it runs a later B or, before its first B of chunk 0, a later F that leaves some memory free.
Of the blocks that are about as long as the memory limit permits, the search chooses the one with the smallest period,
then the smallest makespan. For up to 12 groups, the idle time of a group then exceeds `idle_time` by at most 2 units.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

_PERIOD = 6
_WAYS = ("F0", "F1", "B1", "B0")  # kind and chunk, in the order in which a microbatch passes them
_FORWARD = (0, 1)
_EARLY = (2, 3, 1, 0)  # ways in which a microbatch may run before its turn, preferred ones first
_HOPS = (1, 2, 3)
_TURNS = (1, 2)  # units between two passes
_SPLITS = 8  # about how many splits of the first pass into hops of two sizes are tried
WORK = 800_000  # actions that are simulated to find a block: about half a second

Block = tuple[tuple[int, ...], ...]  # time of each way on every group


class _Squeezed(NamedTuple):
    period: int  # the longest time from the first to the last action of a group
    makespan: int
    rows: tuple[tuple[str, ...], ...]  # words: kind and chunk, such as F0


def least_memory(num_groups: int) -> int:
    """The memory limit of V-Min, in activations of one chunk."""
    return 2 * ((num_groups + 4) // 3)


@lru_cache(maxsize=16)
def v_rows(num_groups: int, num_microbatches: int, memory_limit: int) -> tuple[tuple[str, ...], ...]:
    """The actions of every group as words such as F0, forward of chunk 0. The microbatches of a word are in order.

    A group stores at most `memory_limit` activations of one chunk, from `least_memory` to 2 * num_groups.
    """
    block, reserve = _best_block(num_groups, min(num_microbatches, 2 * num_groups), memory_limit)
    squeezed = _squeeze(block, num_microbatches, memory_limit, reserve)
    assert squeezed is not None
    return squeezed.rows


@lru_cache(maxsize=64)
def _best_block(num_groups: int, num_microbatches: int, memory_limit: int) -> tuple[Block, int]:
    """(block, reserve). With 2 or more microbatches per group, the result does not depend on their number."""
    work_time = _PERIOD * num_microbatches
    least = (work_time + idle_time(num_groups, memory_limit), work_time + num_groups - 1)
    third = -(-num_groups // 3)
    best, chosen, work = (least[0] * 10, 0), None, WORK
    for block in _blocks(num_groups, memory_limit):
        for reserve in (third, third + 1, 1):
            squeezed = _squeeze(block, num_microbatches, memory_limit, reserve, best[0])
            work -= num_groups * work_time
            if squeezed is not None and squeezed[:2] < best:
                best, chosen = squeezed[:2], (block, reserve)
        if chosen is not None and (work < 0 or (best[0] <= least[0] and best[1] <= max(least))):
            break
    assert chosen is not None
    return chosen


def idle_time(num_groups: int, memory_limit: int) -> int:
    """The least idle time of a group that a V schedule is known to reach, for two or more microbatches per group."""
    return 3 if memory_limit == 2 * num_groups - 1 else max(0, _PERIOD * num_groups - 1 - 3 * memory_limit)


@lru_cache(maxsize=16)
def _all_blocks(num_groups: int) -> list[tuple[int, Block]]:
    """(length, block) of all blocks; the length is the sum of the times from F to B of both chunks, on the group where
    it is longest."""
    num_hops = num_groups - 1
    even = [(hop,) * num_hops for hop in _HOPS]
    splits = range(1, num_hops, -(-num_groups // _SPLITS))
    first = [(a,) * j + (b,) * (num_hops - j) for a, b in product(_HOPS, _HOPS) if abs(a - b) == 1 for j in splits]
    blocks = {
        _block(num_groups, ways, turns): None
        for ways in product(even + first, even, even, even)
        for turns in product(_TURNS, repeat=3)
    }
    return [(max(b0 - f0 + b1 - f1 for f0, f1, b1, b0 in zip(*block, strict=True)), block) for block in blocks]


def _blocks(num_groups: int, memory_limit: int) -> list[Block]:
    target = _PERIOD * memory_limit - 1
    candidates = [(abs(length - target), block) for length, block in _all_blocks(num_groups) if length <= target + 4]
    return [block for _, block in sorted(candidates, key=lambda item: item[0])]


def _block(num_groups: int, ways: Sequence[Sequence[int]], turns: Sequence[int]) -> Block:
    """The block with these hops and turns. An action is delayed while its time modulo 6 is taken on its group."""
    taken: list[set[int]] = [set() for _ in range(num_groups)]
    block: list[tuple[int, ...]] = []
    time = 0
    for way, hops in enumerate(ways):
        times = [0] * num_groups
        groups = range(num_groups) if way % 2 == 0 else range(num_groups - 1, -1, -1)
        for group, hop in zip(groups, (turns[way - 1] if way else 0, *hops), strict=True):
            time += hop
            while time % _PERIOD in taken[group]:
                time += 1
            taken[group].add(time % _PERIOD)
            times[group] = time
        block.append(tuple(times))
    return tuple(block)


def _squeeze(
    block: Block, num_microbatches: int, memory_limit: int, reserve: int, most: float = math.inf
) -> _Squeezed | None:
    """The rows of all groups if the block is repeated and squeezed.

    None if the memory limit stops all groups, or the period is longer than `most`.
    """
    groups = [_Group(block, number, num_microbatches) for number in range(len(block[0]))]
    time, left = 0, _PERIOD * num_microbatches * len(groups)
    while left:
        running = [group for group in groups if group.step(time, groups, memory_limit, reserve)]
        if not running or any(group.idle + _PERIOD * num_microbatches > most for group in groups):
            return None
        time += 1
        left -= len(running)
    period = max(group.end - group.start for group in groups)
    return _Squeezed(period, time, tuple(tuple(group.row) for group in groups))


class _Group:
    """A group while its blocks are squeezed. On every way the microbatches keep their order."""

    def __init__(self, block: Block, number: int, num_microbatches: int):
        order = [(block[way][number] + _PERIOD * m, way) for way in range(len(_WAYS)) for m in range(num_microbatches)]
        self.order = [way for _, way in sorted(order)]
        self.position = 0
        self.ran_early = [0] * len(_WAYS)  # number of actions that must be left out of the order
        self.ends: list[list[int]] = [[] for _ in _WAYS]  # of every way and microbatch
        self.num_microbatches, self.stored = num_microbatches, 0
        self.weights: list[str] = []  # W that can run
        self.row: list[str] = []
        self.start = self.end = self.idle = 0  # idle: units without an action, between the first and the last one
        last = len(block[0]) - 1
        self.inputs: list[tuple[int, int] | None] = []  # (way, group) that each way continues
        for way in range(len(_WAYS)):
            before = number + (1 if way % 2 else -1)
            inside = 0 <= before <= last
            self.inputs.append((way, before) if inside else (way - 1, number) if way else None)

    def step(self, time: int, groups: Sequence["_Group"], memory_limit: int, reserve: int) -> bool:
        """Run an action at this time if one can run."""
        way = self._choose(time, groups, memory_limit, reserve)
        if way is not None:
            word = _WAYS[way]
            self.ends[way].append(time + 1)
            if way in _FORWARD:
                self.stored += 1
            else:
                self.weights.append(f"W{word[1]}")
        elif self.weights:
            word = self.weights.pop(0)
            self.stored -= 1
        else:
            self.idle += 0 < len(self.row) < _PERIOD * self.num_microbatches
            return False
        self.start = self.start if self.row else time
        self.end = time + 1
        self.row.append(word)
        return True

    def _choose(self, time: int, groups: Sequence["_Group"], memory_limit: int, reserve: int) -> int | None:
        """The next way of the order if it can run; else one that can run early, unless a W is waiting."""
        order, early = self.order, self.ran_early
        while self.position < len(order) and early[order[self.position]]:
            early[order[self.position]] -= 1
            self.position += 1
        if self.position < len(order) and self._can_run(order[self.position], time, groups, memory_limit):
            self.position += 1
            return order[self.position - 1]
        if self.weights:
            return None
        for way in _EARLY:
            if way in _FORWARD and self.ends[-1]:
                continue  # the first B of chunk 0 ends the warmup
            if self._can_run(way, time, groups, memory_limit - (0 if way else reserve)):
                early[way] += 1
                return way
        return None

    def _can_run(self, way: int, time: int, groups: Sequence["_Group"], memory_limit: int) -> bool:
        microbatch = len(self.ends[way])
        if microbatch == self.num_microbatches or (way in _FORWARD and self.stored >= memory_limit):
            return False
        if (source := self.inputs[way]) is None:
            return True
        before, group = source
        ends = groups[group].ends[before]
        return len(ends) > microbatch and ends[microbatch] <= time
