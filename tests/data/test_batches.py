"""Batches: the windows of a step, equality on all meshes, and the background thread."""

import itertools
import math
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_mesh.data import batches as batches_module
from flax_mesh.data.batches import (
    batch_rows,
    held_out_rows,
    make_batch_fn,
    make_eval_fn,
    num_eval_batches,
    num_windows,
    permuted,
    prefetch,
)
from flax_mesh.data.config import DataConfig
from flax_mesh.data.corpus import TokenFiles
from flax_mesh.errors import ConfigError

B, S = 8, 4
CONFIG = DataConfig(batch_size=B, sequence_length=S)
PART = np.arange(101, dtype=np.uint16)  # 25 windows; the value of a token is its position


def starts(batch: dict[str, np.ndarray]) -> list[int]:
    return [int(row[0]) // S for row in batch["inputs"]]


# --- the permutation ---


@given(st.integers(1, 2000), st.integers(0, 2**40), st.integers(0, 2**20))
@settings(max_examples=150, deadline=None)
def test_permuted_is_a_permutation(size, seed, epoch):
    assert sorted(permuted(np.arange(size), size, seed, epoch)) == list(range(size))


@given(st.integers(2**31, 2**60), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_permuted_is_in_range_distinct_and_of_every_index_alone_for_very_large_sizes(size, seed):
    index = np.array([0, 1, 2, size // 2, size - 1])
    image = permuted(index, size, seed, 0)
    assert len(set(image.tolist())) == 5
    assert image.min() >= 0 and image.max() < size
    assert [int(permuted(index[i : i + 1], size, seed, 0)[0]) for i in range(5)] == image.tolist()


def test_orders_differ_between_epochs_and_seeds_and_from_the_files():
    index = np.arange(1000)
    orders = [index, *(permuted(index, 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2))]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 10  # one is expected by chance


@pytest.mark.parametrize("size", [2, 10, pytest.param(17, marks=pytest.mark.slow)])
def test_each_position_is_equally_likely(size):
    """Chi-square over 100 * size epochs: mean size - 1, deviation sqrt(2 (size - 1)); five deviations are allowed."""
    expected = 100
    for index in (0, size - 1):
        images = [int(permuted(np.array([index]), size, 5, epoch)[0]) for epoch in range(expected * size)]
        counts = np.bincount(images, minlength=size)
        assert ((counts - expected) ** 2 / expected).sum() < size - 1 + 5 * math.sqrt(2 * (size - 1))


# --- which tokens ---


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_window_is_visited_once_per_epoch(windows, batch_size, seed):
    part = np.arange(windows * S + 1, dtype=np.uint16)
    assert num_windows(part, S) == windows
    steps = math.ceil(3 * windows / batch_size)
    config = DataConfig(batch_size=batch_size, sequence_length=S)
    seen = [start for step in range(steps) for start in starts(batch_rows(part, seed, config, step))]
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_targets_are_inputs_shifted_by_one():
    part = np.random.default_rng(0).integers(0, 60000, 501).astype(np.uint16)
    batch, positions = batch_rows(part, 0, CONFIG, 3), batch_rows(np.arange(501), 0, CONFIG, 3)
    assert {(rows.shape, rows.dtype.name) for rows in batch.values()} == {((B, S), "int32")}
    for name, ahead in (("inputs", 0), ("targets", 1)):
        np.testing.assert_array_equal(part[positions["inputs"] + ahead], batch[name])


@pytest.mark.parametrize("columns", [slice(None), slice(0, 2), slice(2, 4), slice(1, 2)])
def test_rows_and_columns_are_slices_of_the_batch(columns):
    batches = [  # the second one is over the end of an epoch
        *(partial(batch_rows, PART, 1, CONFIG, step) for step in (0, 3)),
        partial(held_out_rows, PART, CONFIG, 2),
    ]
    for batch in batches:
        for rows in (slice(0, 8), slice(2, 4), slice(7, None), slice(3, 3), slice(None, None, 3)):
            for name, part in batch(rows, columns).items():
                np.testing.assert_array_equal(part, batch()[name][rows, columns])


def test_only_the_requested_rows_are_read():
    part = PART.astype(np.int64)
    other = starts(batch_rows(part, 1, CONFIG, 0))[6]
    part[other * S + 2] = 2**40  # reading this id raises an error
    batch_rows(part, 1, CONFIG, 0, rows=slice(0, 4))
    batch_rows(part, 1, CONFIG, 0, columns=slice(0, 1))
    with pytest.raises(ConfigError, match=f"token id {2**40} is outside the vocabulary of {2**31} ids"):
        batch_rows(part, 1, CONFIG, 0)


def test_a_batch_depends_on_seed_and_step_only_and_not_on_the_division_into_files():
    in_order = [starts(batch_rows(PART, 3, CONFIG, step)) for step in range(10)]
    files = TokenFiles((PART[:7], PART[7:50], PART[50:]))
    for step in (9, 4, 0):
        assert starts(batch_rows(PART, 3, CONFIG, step)) == starts(batch_rows(files, 3, CONFIG, step)) == in_order[step]
    assert in_order[0] != in_order[1]
    assert starts(batch_rows(PART, 4, CONFIG, 0)) != in_order[0]


def test_held_out_batches_are_in_order_and_do_not_wrap():
    assert [starts(held_out_rows(PART, CONFIG, k)) for k in range(3)] == np.arange(24).reshape(3, 8).tolist()
    for k in (-1, 3):
        with pytest.raises(IndexError, match=rf"held-out batch must be in range\(3\), .* got {k}"):
            held_out_rows(PART, CONFIG, k)


def test_evaluation_uses_fewer_batches_of_a_small_part_but_at_least_one():
    assert [num_eval_batches(PART[:n], CONFIG) for n in (101, 65, 64, 33)] == [3, 2, 1, 1]
    assert num_eval_batches(np.zeros(10000, np.uint8), CONFIG) == CONFIG.eval_batches


# --- on devices ---


def mesh_sharding(*spec: str | None) -> NamedSharding:
    mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize("spec", [("data", "seq"), ("seq", "data"), ("data",), (None, "seq"), ()])
def test_batches_are_the_same_on_every_mesh(spec):
    single, mesh = SingleDeviceSharding(jax.devices()[0]), mesh_sharding(*spec)
    makers = (
        lambda sharding: make_batch_fn(PART, seed=1, config=CONFIG, sharding=sharding),
        lambda sharding: make_eval_fn(PART, config=CONFIG, sharding=sharding),
    )
    expected = batch_rows(PART, 1, CONFIG, 2), held_out_rows(PART, CONFIG, 2)
    for make, rows in zip(makers, expected, strict=True):
        on_one, on_mesh = make(single)(2), make(mesh)(2)
        for name in ("inputs", "targets"):
            assert on_mesh[name].sharding == mesh and len(on_mesh[name].sharding.device_set) == 8
            assert on_mesh[name].dtype == np.int32
            np.testing.assert_array_equal(on_mesh[name], rows[name])
            np.testing.assert_array_equal(on_one[name], rows[name])


def on_one(make: Any, part: np.ndarray, **kinds: Any) -> Any:
    """A function of `batches` for one device and a vocabulary of 101 ids."""
    return make(part, config=CONFIG, sharding=SingleDeviceSharding(jax.devices()[0]), vocab_size=101, **kinds)


SIX = DataConfig(batch_size=6, sequence_length=S)
FEW = "held-out part has 7 windows of data.sequence_length 4, one batch requires data.batch_size 8. Raise data.held_out"
OUTSIDE = "token id {} is outside the vocabulary of 101 ids, 0 to 100"


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: num_eval_batches(PART[:32], CONFIG), FEW),
        (lambda: on_one(make_eval_fn, PART[:32]), FEW),
        (lambda: batch_rows(PART[:4], 0, CONFIG, 0), r"4 tokens are fewer than one window of data.seq.* \+ 1 = 5"),
        (
            lambda: make_batch_fn(PART, seed=0, config=SIX, sharding=mesh_sharding("data")),
            "data.batch_size = 6 by data.sequence_length = 4 is not evenly divisible .* 4 times",
        ),
        (lambda: on_one(make_batch_fn, np.full(101, 300, np.uint16), seed=0)(0), OUTSIDE.format(300)),
        (lambda: on_one(make_eval_fn, np.full(101, -1))(0), OUTSIDE.format(-1)),
    ],
)
def test_a_wrong_batch_is_a_one_line_error(call, problem):
    on_one(make_batch_fn, PART, seed=0)(0)
    with pytest.raises(ConfigError, match=problem):
        call()


# --- the background thread ---


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("flax_mesh_prefetch")]


def test_prefetch_yields_in_order_and_ends_its_thread():
    makers = set()

    def make(step: int) -> int:
        makers.add(threading.current_thread().name)
        return step * step

    found = list(prefetch(make, 3, 8))
    assert [(step, batch) for step, batch, _ in found] == [(step, step * step) for step in range(3, 8)]
    assert all(wait >= 0 for _, _, wait in found)
    assert len(makers) == 1 and threading.main_thread().name not in makers
    assert not prefetch_threads()
    assert list(prefetch(make, 8, 8)) == []
    batches = prefetch(make, 0, 1000)
    assert next(batches)[0] == 0 and prefetch_threads()
    batches.close()
    assert not prefetch_threads()


def test_the_next_batch_is_made_while_the_consumer_works_and_waiting_is_measured(monkeypatch):
    made = [threading.Event() for _ in range(3)]
    for step, _, _ in prefetch(lambda step: made[step].set(), 0, 3):
        if step < 2:
            assert made[step + 1].wait(timeout=10)
            assert step == 1 or not made[2].is_set()  # one batch ahead, not more
    monkeypatch.setattr(batches_module, "time", SimpleNamespace(perf_counter=iter([3.0, 8.0]).__next__))
    assert list(prefetch(lambda step: "batch", 0, 1)) == [(0, "batch", 5.0)]


def test_an_exception_reaches_the_consumer_after_the_batches_before_it():
    def make(step: int) -> int:
        if step == 2:
            raise ConfigError("token id 300 at step 2")
        return step

    found = []
    with pytest.raises(ConfigError, match="token id 300 at step 2"):
        for step, _, _ in prefetch(make, 0, 5):
            found.append(step)
    assert found == [0, 1]
    assert not prefetch_threads()
