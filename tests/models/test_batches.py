"""Prompts in the rows of a batch: groups of tokens, stops inside of groups, and prompts that take free rows."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from flax import nnx

from flax_mesh import hardware
from flax_mesh.models import Sampling, generate
from flax_mesh.models.cache import bucket_slots
from flax_mesh.models.generation import report
from flax_mesh.models.generation.batches import Batches
from flax_mesh.models.generation.programs import GROUP, Computed, Programs
from flax_mesh.tree import named_leaves
from tests.models.reference import SMALL, small

pytestmark = pytest.mark.usefixtures("quick_compilation")
STOP, MOST = 1, 128
CHIPS = {chip.name: chip for chip in hardware.CHIPS}
COMPUTED: Any = Computed
RANDOM = Sampling(temperature=1.2, top_k=20, top_p=0.95)


class Simulated:
    """Programs of a model whose prompt n ends with its token `ends[n]`, and the numbers of their rows and steps."""

    rows = slots = 1

    def __init__(self, ends: list[int]):
        self.ends, self.padded, self.prefilled, self.steps, self.dispatches = ends, 0, 0, 0, 0

    def prefill(self, tokens, lengths, ids, num_slots, start) -> Any:
        state = np.zeros(len(ids), int), ids.copy(), np.zeros(len(ids), int)
        return self._first(tokens, state, np.arange(len(ids)))

    def insert(self, tokens, lengths, ids, rows, state) -> Any:
        for part, new in zip(state, (0, ids, 0), strict=True):
            part[rows] = new
        return self._first(tokens, state, rows)

    def _first(self, tokens, state, rows) -> Any:
        self.prefilled += tokens.size
        self.dispatches += 1
        return COMPUTED(*self._next(state, rows), *state)

    def decode(self, last, cache, ids, size, is_waiting) -> Any:
        self.dispatches += 1
        tokens = np.full((GROUP, len(ids)), -1)
        for i in range(size):
            if (ids < 0).all() or (is_waiting and (ids < 0).any()):
                break
            self.steps += 1
            self.padded += int((ids < 0).sum())
            tokens[i] = self._next((last, ids, cache), np.arange(len(ids)))[0][0]
        return COMPUTED(tokens, np.zeros(tokens.shape), last, ids, cache)

    def _next(self, state, rows) -> tuple[np.ndarray, np.ndarray]:
        _, ids, count = state
        count[rows] += 1
        tokens = np.array(
            [STOP if n >= 0 and count[b] == self.ends[n] else 0 for b, n in zip(rows, ids[rows], strict=True)]
        )
        ids[rows[(tokens == STOP) | (count[rows] == MOST)]] = -1
        return tokens[None], np.zeros((1, len(rows)))


def test_free_rows_take_waiting_prompts():
    """200 prompts of 1 to 500 tokens, against batches in which all rows wait for the longest continuation."""
    draw = np.random.default_rng(0)
    lengths, ends = draw.integers(1, 501, 200).tolist(), np.minimum(draw.geometric(1 / 60, 200), MOST + 1).tolist()
    programs: Any = Simulated(ends)
    batches = Batches(programs, [np.zeros(n, int) for n in lengths], 8, 512 + MOST, MOST, frozenset([STOP]))
    seen: list[tuple[int, int]] = []
    results = batches.run(lambda *each: seen.append(each), None)
    wanted = [min(end, MOST) for end in ends]
    assert [len(one.tokens) for one in results] == wanted
    assert [sum(n == each for each, _ in seen) for n in range(200)] == wanted
    one_by_one = [max(wanted[first : first + 8]) for first in range(0, 200, 8)]
    in_batches = sum(8 * bucket_slots(max(lengths[first : first + 8]), 1) for first in range(0, 200, 8))
    total = sum(wanted)
    assert programs.padded < total / 16 < 8 * sum(one_by_one) - total  # rows that compute no token of a prompt
    assert programs.prefilled < 0.8 * in_batches
    assert programs.dispatches < sum(one_by_one) / 3


@pytest.mark.parametrize(("rows", "end"), [(1, MOST), (8, MOST), (8, 37)])
def test_a_dispatch_computes_at_least_eight_tokens_of_a_row(rows, end):
    programs: Any = Simulated([end] * rows)
    batches = Batches(programs, [np.zeros(3, int)] * rows, rows, 16 + MOST, MOST, frozenset([STOP]))
    assert [len(one.tokens) for one in batches.run(None, None)] == [end] * rows
    assert programs.steps == end - 1 and programs.padded == 0  # nothing is computed after the last token
    assert programs.dispatches <= math.ceil(end / 8)


def token_by_token(model, prompt: list[int], n: int, slots: int, stops: set[int]) -> list[tuple[int, float]]:
    """The continuation by up to 40 tokens, with one token in a dispatch; the other row of the batch has no prompt."""
    programs, found, ids = Programs(model, 3, RANDOM), [], np.array([n, -1], np.int32)
    tokens, lengths = np.array([prompt + [0] * (16 - len(prompt))] * 2, np.int32), np.full(2, len(prompt), np.int32)
    *chosen, last, _, cache = programs.prefill(tokens, lengths, ids, slots)
    while True:
        token, log_prob = (np.asarray(x)[0, 0].item() for x in chosen)
        found.append((token, log_prob))
        if token in stops or len(found) == 40:
            return found
        *chosen, last, _, cache = programs.decode(last, cache, ids, 1)


def test_groups_and_free_rows_have_the_tokens_of_single_prompts():
    model = small(SMALL, num_layers=1)
    prompts, stops = [[1, 2, 3], [4], [*range(5, 18)], [3, 3], [40, 30, 0], [1], [9]], set(range(0, 64, 8))
    found = generate(model, prompts, max_tokens=40, sampling=RANDOM, seed=3, stop_tokens=stops, batch_size=2)
    assert len({len(one.tokens) for one in found}) > 3 and any(len(one.tokens) % 16 for one in found)
    for n, (prompt, one) in enumerate(zip(prompts, found, strict=True)):
        tokens, log_probs = zip(*token_by_token(model, prompt, n, 16 + 40, stops), strict=True)
        assert one.tokens.tolist() == list(tokens) and one.stopped == (tokens[-1] in stops)
        np.testing.assert_allclose(one.log_probs, log_probs, atol=1e-5)


def test_the_report_has_the_bytes_of_a_step_and_the_time_of_groups_after_groups(monkeypatch):
    config = {"dtype": "bfloat16", "num_layers": 1, "num_experts": 4, "experts_per_token": 1, "tied": False}
    model, reports = small(SMALL, **config), []
    monkeypatch.setattr(report, "chip_of", lambda kind: CHIPS["H100"])
    generate(model, [[1, 2], [3]], max_tokens=22, on_report=reports.append)
    (one,) = reports
    # q and o, k and v, two of four experts, two rows of the table, the head, three norms; the router is float32
    numbers = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 3 * 32 * 48 + 2 * 32 + 32 * 64 + 3 * 32
    assert one.parameter_bytes == 2 * numbers + 4 * 32 * 4
    assert one.cache_bytes == 2 * 2 * 2 * 8 * (16 + 22) * 2  # keys and values, rows, heads, their dim, slots
    assert (one.rows, one.slots, one.steps, one.dispatches) == (2, 38, 22, 4)  # 1, 4, 16 and 1 tokens
    assert (one.measured_steps, one.measured_tokens) == (17, 34) and one.seconds > 0
    assert one.floor_seconds == (one.parameter_bytes + one.cache_bytes) / 2.9e12
    assert f"on H100, measured {one.step_seconds / one.floor_seconds:.2f} times; " in str(one)
    short = str(dataclasses.replace(one, measured_steps=0))
    assert "measured: not measured" in short and "times" not in short


def test_parameters_are_cast_once_if_every_use_casts_them():
    config = {"dtype": "bfloat16", "num_layers": 1, "num_experts": 4, "experts_per_token": 2, "attention_sinks": True}
    model = small(SMALL, **config)
    leaves = Programs(model, 0, RANDOM).leaves
    dtypes = {path: str(x.dtype) for (path, _), x in zip(named_leaves(nnx.state(model)), leaves, strict=True)}
    kept = {path for path, dtype in dtypes.items() if dtype == "float32"}
    assert kept == {"layers/0/moe/router/kernel", "layers/0/attention/sinks"} and len(dtypes) > 8
    assert set(dtypes.values()) == {"float32", "bfloat16"}
    assert all(x.dtype == "float32" for _, x in named_leaves(nnx.state(model)))  # the model of the user is as before
