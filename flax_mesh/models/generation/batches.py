"""Prompts in the rows of a batch: the host dispatches groups of tokens, and gives free rows to waiting prompts.

    prefill  group  group  insert  group  ...     in the order of the devices
                    prefill  group        group   read by the host

A group is dispatched before the host reads the one before it, so that the devices do not wait. While prompts wait, a
group ends with the first row that ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from flax_mesh.models.cache import bucket_slots
from flax_mesh.models.generation.programs import GROUP, Computed, Programs, State
from flax_mesh.models.generation.report import Meter, SpeedReport

_FIRST_GROUP = 4  # tokens, so that a text begins soon
_MOST_GROUPS = 2  # dispatched, and not read


class Generated(NamedTuple):
    """The continuation of one prompt.

    Attributes:
        tokens: Generated ids, int32; a stop token is the last one.
        log_probs: Their log-probabilities in nats, float32, as the model predicts them: without temperature, top_k and
            top_p.
        stopped: Whether a stop token ended it, not `max_tokens`.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: bool


class _Block(NamedTuple):
    """Tokens (G, B) that the devices compute, their log-probabilities, and the prompts of the rows; -1: none."""

    tokens: jax.Array
    log_probs: jax.Array
    prompts: list[int]
    size: int  # the most tokens of a row


class Batches:
    """The rows of a batch, the prompts that they compute or that wait for one, and what the host has read so far."""

    def __init__(
        self,
        programs: Programs,
        rows: Sequence[np.ndarray],
        num_rows: int,
        num_slots: int,
        max_tokens: int,
        stop_tokens: frozenset[int],
    ):
        self._programs, self._rows, self._max_tokens, self._stop_tokens = programs, rows, max_tokens, stop_tokens
        self._num_slots = num_slots
        most = (num_slots - max_tokens) // programs.slots * programs.slots
        self._start = min(bucket_slots(max(map(len, rows)), programs.slots), most)
        self._waiting = deque(range(len(rows)))
        self._prompts = [-1] * num_rows  # of the rows
        self._blocks: deque[_Block] = deque()
        self._next_group = _FIRST_GROUP
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._log_probs: list[list[np.float32]] = [[] for _ in rows]
        self._has_ended = [False] * len(rows)
        self._state: State
        self._meter = Meter()

    def run(
        self,
        on_token: Callable[[int, int], bool | None] | None,
        on_result: Callable[[int, Generated], None] | None,
        on_report: Callable[[SpeedReport], object] | None = None,
    ) -> list[Generated]:
        """The continuations of all prompts; the functions are as of `generate`."""
        results: list[Generated] = []
        self._begin()
        while True:
            if self._needs_group():
                tokens_B, ids_B, cache = self._state
                size, self._next_group = self._next_group, GROUP
                self._add(self._programs.decode(tokens_B, cache, ids_B, size, bool(self._waiting)), self._prompts, size)
            if not self._blocks:
                break
            self._read(self._blocks.popleft(), on_token)
            while len(results) < len(self._rows) and self._has_ended[n := len(results)]:
                results.append(self._result(n))
                if on_result is not None:
                    on_result(n, results[n])
            free = [b for b, n in enumerate(self._prompts) if n < 0 or self._has_ended[n]]
            while free and self._waiting:
                self._insert(free)
        if on_report is not None:
            on_report(self._meter.report(self._programs.model, self._programs.leaves, self._state[2]))
        return results

    def _needs_group(self) -> bool:
        """Whether a row has tokens left that no group computes."""
        groups = [block for block in self._blocks if block.size > 1]
        going = {n for n in self._prompts if n >= 0 and not self._has_ended[n]}
        dispatched = {n: sum(block.size for block in self._blocks if n in block.prompts) for n in going}
        return len(groups) < _MOST_GROUPS and any(
            len(self._tokens[n]) + dispatched[n] < self._max_tokens for n in going
        )

    def _begin(self) -> None:
        ids = self._next_prompts(len(self._prompts))
        self._prompts[: len(ids)] = ids
        arrays = self._arrays(ids, len(self._prompts))
        self._add(self._programs.prefill(*arrays, self._num_slots, self._start), self._prompts, 1)

    def _insert(self, free: list[int]) -> None:
        """Give some of the free rows to waiting prompts."""
        num_rows = self._programs.rows
        ids = self._next_prompts(min(num_rows, len(free)))
        taken = np.full(num_rows, len(self._prompts), np.int32)
        for r, n in enumerate(ids):
            taken[r] = free.pop(0)
            self._prompts[taken[r]] = n
        computed = self._programs.insert(*self._arrays(ids, num_rows), taken, self._state)
        self._add(computed, ids + [-1] * (num_rows - len(ids)), 1)

    def _next_prompts(self, most: int) -> list[int]:
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def _arrays(self, ids: Sequence[int], num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, lengths and numbers of prompts, with padding to `num_rows`."""
        slots = bucket_slots(max(len(self._rows[n]) for n in ids), self._programs.slots)
        tokens = np.zeros((num_rows, min(slots, self._start)), np.int32)
        lengths, numbers = np.ones(num_rows, np.int32), np.full(num_rows, -1, np.int32)
        for r, n in enumerate(ids):
            tokens[r, : len(self._rows[n])], lengths[r], numbers[r] = self._rows[n], len(self._rows[n]), n
        return tokens, lengths, numbers

    def _add(self, computed: Computed, prompts: Sequence[int], size: int) -> None:
        self._state = computed.state
        self._meter.dispatched(is_group=size > 1)
        self._blocks.append(_Block(computed.tokens_GB, computed.log_probs_GB, list(prompts), size))

    def _read(self, block: _Block, on_token: Callable[[int, int], bool | None] | None) -> None:
        tokens_GB, log_probs_GB = jax.device_get((block.tokens, block.log_probs))
        is_token_GB = np.asarray(tokens_GB) >= 0
        self._meter.read(int(is_token_GB.any(axis=1).sum()), int(is_token_GB.sum()), is_group=block.size > 1)
        for tokens_B, log_probs_B in zip(tokens_GB, log_probs_GB, strict=True):
            for n, token, log_prob in zip(block.prompts, tokens_B.tolist(), log_probs_B, strict=True):
                if n < 0 or token < 0 or self._has_ended[n]:
                    continue
                self._tokens[n].append(token)
                self._log_probs[n].append(log_prob)
                self._has_ended[n] = token in self._stop_tokens or len(self._tokens[n]) == self._max_tokens
                if on_token is not None and on_token(n, token) is True:
                    self._has_ended[n] = True

    def _result(self, n: int) -> Generated:
        tokens, log_probs = np.array(self._tokens[n], np.int32), np.array(self._log_probs[n], np.float32)
        return Generated(tokens, log_probs, self._tokens[n][-1] in self._stop_tokens)
