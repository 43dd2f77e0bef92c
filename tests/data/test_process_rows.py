"""Each process makes its own rows of a batch: which rows, their checksums and the states of iterators (threads)."""

from typing import Any

import numpy as np
import pytest

from flax_mesh import create_mesh
from flax_mesh.axes import PartitionAxis
from flax_mesh.data.streams.process_rows import process_rows, rows_of
from flax_mesh.data.user_batches import UserBatches, array_batches
from flax_mesh.errors import ConfigError
from flax_mesh.step.batch import ProcessRows, place_batch
from tests.multiprocess.cases import error_of
from tests.multiprocess.in_threads import in_threads

ROWS = 8
HALVES = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}, 2: {0, 1, 4, 5}, 3: {2, 3, 6, 7}}  # 2 and 3 repeat 0 and 1, as with tp


def batches_of(own: ProcessRows, wrong: bool = False) -> UserBatches:
    data = {"x": np.arange(40) * 3, "y": np.arange(80.0).reshape(40, 2)}
    function = array_batches(data, batch_size=ROWS, seed=0, rows=own)
    return UserBatches(lambda: lambda step: {"x": function(step)["x"] + wrong}, ROWS, own_rows=own)


class Draws:
    """Random numbers, other ones in every shard."""

    def __init__(self, own: ProcessRows):
        self.own, self.random = own, np.random.default_rng(own.shard)

    def __next__(self) -> dict[str, np.ndarray]:
        return {"x": self.random.integers(0, 100, len(self.own.index))}

    def get_state(self) -> Any:
        return self.random.bit_generator.state

    def set_state(self, state: Any) -> None:
        self.random.bit_generator.state = state


def test_processes_have_the_same_rows_or_none_in_common():
    own = [rows_of(process, HALVES) for process in HALVES]
    assert [x.index.tolist() for x in own[:2]] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [(x.shard, x.num_shards) for x in own] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    for owned in ({0: {0, 1}, 1: {1, 2}}, {0: {0, 1, 2}, 1: {3}}):
        with pytest.raises(ConfigError, match=r"some have more, or share a part of their rows; use data\.rows=all"):
            rows_of(0, owned)


def test_one_process_places_all_rows_and_refuses_others():
    mesh = create_mesh((2, 4), ("fsdp", "tp"))
    rows = process_rows(ROWS, mesh)
    x = np.arange(ROWS * 3).reshape(ROWS, 3)
    placed = place_batch({"x": x[rows.index]}, mesh, rows=rows)["x"]
    assert placed.sharding == place_batch({"x": x}, mesh)["x"].sharding
    np.testing.assert_array_equal(placed, x)
    with pytest.raises(ConfigError, match="'x' must be a NumPy array with the 8 rows of this process"):
        place_batch({"x": x[:4]}, mesh, rows=rows)
    with pytest.raises(ConfigError, match="the batch of 7 rows is not divisible by 2"):
        process_rows(7, mesh, PartitionAxis())
    with pytest.raises(ConfigError, match=r"must have the 8 rows of this process \(data\.rows=process\), got 4"):
        UserBatches(lambda: lambda step: {"x": x[:4]}, ROWS, own_rows=rows)


def test_records_of_functions_are_the_same_for_every_number_of_processes(monkeypatch):
    def save(process: int) -> Any:
        batches = batches_of(rows_of(process, HALVES))
        assert batches.shapes["x"].shape == (ROWS,)
        hash_of_first = batches.content_hash
        for step in range(3):
            batches(step)
        return hash_of_first, batches.record(3)

    whole = batches_of(ProcessRows(np.arange(ROWS)))
    hash_of_first = whole.content_hash
    for step in range(3):
        whole(step)
    record = whole.record(3)
    assert in_threads(monkeypatch, 4, save) == [(hash_of_first, record)] * 4
    assert batches_of(rows_of(1, HALVES)).resume(3, record) == ""
    changed = batches_of(rows_of(1, HALVES), wrong=True).resume(3, record)
    assert "batch 2 differs from the one that the run used" in changed


def test_processes_that_must_have_the_same_rows_are_named_if_they_have_not(monkeypatch):
    def start(process: int) -> str:
        return error_of(lambda: batches_of(rows_of(process, HALVES), wrong=process == 3).content_hash)

    errors = in_threads(monkeypatch, 4, start)
    assert all("processes 1 and 3 have different values in row 2" in error for error in errors), errors


def test_states_of_iterators_are_saved_for_every_shard(monkeypatch):
    def iterator(process: int) -> UserBatches:
        own = rows_of(process, HALVES)
        return UserBatches(lambda: Draws(own), ROWS, own_rows=own)

    def save(process: int) -> Any:
        batches = iterator(process)
        drawn = [batches.first, *(batches(step) for step in range(3))]
        return batches.record(2), drawn[3]["x"].tolist()

    saved = in_threads(monkeypatch, 4, save)
    assert saved[0] == saved[2] and saved[1] == saved[3] and saved[0][0] == saved[1][0] and saved[0][1] != saved[1][1]
    for process in range(4):
        batches = iterator(process)
        assert batches.resume(2, saved[0][0]) == "" and batches(2)["x"].tolist() == saved[process][1]
    with pytest.raises(ConfigError, match=r"has the states of iterators for 2 shards .* on this mesh make 1\. Resume"):
        UserBatches(lambda: Draws(ProcessRows(np.arange(ROWS))), ROWS).resume(2, saved[0][0])
