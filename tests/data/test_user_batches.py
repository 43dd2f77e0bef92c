"""Batches of a recipe: requirements for them, their placement, runs on them; and batches of arrays in memory."""

import json
import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from flax_mesh import PartitionAxis, create_mesh
from flax_mesh.data.iterators import IteratorBatches, decode, encode
from flax_mesh.data.user_batches import UserBatches, abstract_batch, is_state
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.plan import plan
from flax_mesh.plan.search import search_layouts
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.recipe.resolve import token_shapes
from flax_mesh.step.batch import put_batch
from flax_mesh.train import TrainConfig, apply_overrides, array_batches, build_program, place_batch, train
from flax_mesh.train.inputs import load_data
from flax_mesh.train.metadata import check_resume
from tests.data.user_recipe import Windows, recipe, token_batches
from tests.data.user_recipe import bigram_config as run_config
from tests.train.support.runs import checkpoints, run

ROWS = 8
IMAGES = {"images": np.zeros((ROWS, 4, 4, 1), np.float32), "labels": np.arange(ROWS)}


def batches_of(batch_fn: Any) -> UserBatches:
    return UserBatches(lambda: batch_fn, ROWS)


def test_shapes_follow_the_first_batch_with_the_dtypes_of_devices():
    found = batches_of(lambda step: IMAGES).shapes
    assert found["images"].shape == (ROWS, 4, 4, 1) and found["images"].dtype == np.float32
    assert found["labels"].shape == (ROWS,) and found["labels"].dtype == np.int32
    tokens = token_shapes(recipe().data)
    kinds = {name: (x.shape, x.dtype) for name, x in tokens.items()}
    assert kinds == dict.fromkeys(("inputs", "targets"), ((8, 16), np.int32))


def test_a_batch_is_any_tree_and_is_placed_as_rows_and_sequence():
    mesh, axes = create_mesh((2, 2, 2), ("dp", "sp", "tp")), PartitionAxis()
    batch = (
        {"text": np.arange(ROWS * 6).reshape(ROWS, 6), "odd": np.ones((ROWS, 3), bool)},
        [np.zeros((ROWS, 4, 2))],
        np.ones(ROWS),
    )
    own = batches_of(lambda step: batch)
    placed = place_batch(own(0), mesh, axes)
    assert jax.tree.structure(placed) == jax.tree.structure(batch)
    specs = [x.sharding.spec for x in jax.tree.leaves(placed)]
    rows = ("fsdp", "dp") if "fsdp" in mesh.axis_names else "dp"
    assert specs[1] == PartitionSpec(rows, "sp"), specs
    assert specs[0] in (PartitionSpec(rows), PartitionSpec(rows, None)), "an odd number of columns stays replicated"
    for x, y in zip(jax.tree.leaves(placed), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)
    shapes = abstract_batch(own.shapes, mesh, axes)
    assert [x.sharding for x in jax.tree.leaves(shapes)] == [x.sharding for x in jax.tree.leaves(placed)]


BAD_LATER = [
    ({"images": IMAGES["images"]}, "its tree must be that of batch 0, but 'labels' is missing"),
    ({**IMAGES, "more": np.zeros(ROWS)}, "its tree must be that of batch 0, but 'more' is new"),
    ({**IMAGES, "labels": np.zeros(ROWS, np.float32)}, r"'labels' must be i32\[8\] as in batch 0, got f32\[8\]"),
    ({**IMAGES, "images": np.zeros((ROWS, 4, 5, 1), np.float32)}, r"'images' must be f32\[8,4,4,1\] .* f32\[8,4,5,1\]"),
    ({name: x[:4] for name, x in IMAGES.items()}, r"'images' must be f32\[8,4,4,1\] as in batch 0, got f32\[4,4,4,1\]"),
    (None, "a batch must have at least one array, got NoneType"),
]


@pytest.mark.parametrize(("batch", "problem"), BAD_LATER, ids=range(len(BAD_LATER)))
def test_a_later_batch_of_another_kind_names_step_and_leaf(batch, problem):
    own = batches_of(lambda step: batch if step else IMAGES)
    own(0)
    with pytest.raises(ConfigError, match=rf"^make_batches: batch 3: .*{problem}"):
        own(3)


def test_the_hash_depends_on_paths_dtypes_and_values():
    arrays = [np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32), np.zeros(ROWS, "i4")]
    first, same, *others = (batches_of(lambda step, x=x: {"x": x}).content_hash for x in arrays)
    assert first == same
    assert len({first, *others, batches_of(lambda step: {"y": arrays[0]}).content_hash}) == 4


# --- iterators ---


class Count:
    """Batches of one number that counts up."""

    def __init__(self, state: Any = 0):
        self.state = state

    def __next__(self) -> dict[str, np.ndarray]:
        self.state += 1
        return {"x": np.full(ROWS, self.state)}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_the_state_of_an_iterator_does_not_include_the_next_batch():
    batches = IteratorBatches(Count(), "")
    assert batches.first()["x"][0] == 1, "not consumed"
    for step in range(4):
        assert batches(step)["x"][0] == step + 1
    assert batches.state(4) == {"json": 4} and batches.state(3) == {"json": 3}
    other = IteratorBatches(Count(), "")
    other.first()
    other.resume(3, batches.state(3))
    assert other(3)["x"][0] == 4
    with pytest.raises(RuntimeError, match=r"batch 6 .* its next one is 4"):
        other(6)


def test_a_state_is_the_same_after_it_was_saved_or_one_line():
    for state in (3, None, "text", b"", b"\xff\0", {"a": [1, 2.5, {"b": True}]}, 2**127):
        assert is_state(encode(state)) and decode(encode(state)) == state
    for state in ((1, 2), {1: 2}, float("nan"), np.int64(3), np.zeros(3), object(), {"a": {3}}):
        with pytest.raises(ConfigError, match=r"^get_state of the iterator of make_batches must return bytes or") as e:
            encode(state)
        assert len(e.value.problems) == 1
    for state in ([], {}, {"json": 1, "base64": ""}, {"base64": "%"}, {"base64": 3}, {"other": 1}, "text"):
        assert not is_state(state)


class Refills(Count):
    """Fills one array again and again. Its memory begins at a multiple of 64 bytes, so JAX may use it on CPUs."""

    def __init__(self):
        super().__init__()
        memory = np.zeros(4 * ROWS + 64, np.uint8)
        first = -memory.ctypes.data % 64
        self.array = memory[first : first + 4 * ROWS].view(np.float32)

    def __next__(self) -> dict[str, np.ndarray]:
        self.array[:] = super().__next__()["x"]
        return {"x": self.array}


def test_an_iterator_may_reuse_one_array_for_all_batches():
    mesh = create_mesh((1,), ("dp",), devices=jax.devices()[:1])
    own = UserBatches(Refills, ROWS)
    placed = [put_batch(own(step), mesh, PartitionAxis()) for step in range(3)]
    assert [float(x["x"][0]) for x in placed] == [1, 2, 3] and own.first["x"][0] == 1


class Resets(Count):
    """Every state leads back to the first batch."""

    def set_state(self, state: Any) -> None:
        self.state = 0


class Keeps(Refills):
    def set_state(self, state: Any) -> None:
        pass


def test_an_iterator_that_does_not_restore_its_state_is_found():
    with pytest.raises(ConfigError, match=r"after set_state\(get_state\(\)\) the iterator returns another batch"):
        UserBatches(Keeps, ROWS)  # the two batches that are compared are in the same memory
    source = iter(range(100))
    pure, impure = (lambda step: {"x": np.full(ROWS, step)}), (lambda step: {"x": np.full(ROWS, next(source))})
    problems = []
    for make in (Count, Resets, lambda: pure, lambda: impure):
        before, after = UserBatches(make, ROWS), UserBatches(make, ROWS)
        for step in range(4):
            batch = before(step)
        problems.append(after.resume(3, json.loads(json.dumps(before.record(3)))))
        assert problems[-1] or after(3)["x"][0] == batch["x"][0]
    assert [bool(problem) for problem in problems] == [False, True, False, True]
    assert "batch 2 differs from the one that the run used" in problems[1] and "set_state" in problems[1]
    assert "it depends on more than the step" in problems[3]
    of_function, iterator = UserBatches(lambda: pure, ROWS), UserBatches(Count, ROWS)
    of_function(2)
    assert iterator.resume(3, of_function.record(3)) == "" and iterator(3)["x"][0] == 1, "it starts at its beginning"


def generator(config: Any = None) -> Any:
    """Fills one array again and again."""
    array = np.zeros(ROWS, np.int32)
    for number in range(1, 100):
        array[:] = number
        yield {"x": array}


def test_a_generator_gives_each_batch_once_if_the_run_is_not_resumed():
    with pytest.raises(ConfigError, match=r"got generator, which has no get_state .*Set data\.resumable=false"):
        UserBatches(generator, ROWS)
    own = UserBatches(generator, ROWS, resumable=False)
    assert own.first["x"][0] == 1 and own.description.startswith("iterator of make_batches")
    assert [own(step)["x"][0] for step in range(4)] == [1, 2, 3, 4]
    assert own.record(4).keys() == {"last_batch"}
    for needless in (Count, lambda: lambda step: IMAGES):
        with pytest.raises(ConfigError, match=r"its batches need no data\.resumable=false; remove that"):
            UserBatches(needless, ROWS, resumable=False)


# --- arrays in memory ---


def test_every_epoch_visits_each_row_once_in_a_new_order():
    arrays = {"x": np.arange(10), "y": (np.arange(10) * 2, np.arange(20).reshape(10, 2))}
    batch = array_batches(arrays, batch_size=4, seed=3)
    seen = np.concatenate([batch(step)["x"] for step in range(5)])
    epochs = [seen[:10].tolist(), seen[10:].tolist()]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2 and epochs[0] != epochs[1]
    for step in (4, 0, 2):
        found = batch(step)
        np.testing.assert_array_equal(found["y"][0], found["x"] * 2)
        np.testing.assert_array_equal(found["y"][1][:, 0], found["x"] * 2)
    other = array_batches(arrays, batch_size=4, seed=4)
    assert (other(0)["x"] != batch(0)["x"]).any()
    assert (array_batches(arrays, batch_size=5, seed=3)(1)["x"] == seen[5:10]).all()


def test_arrays_of_which_no_batch_can_be_formed_are_one_error():
    for arrays, size, problem in (
        ({"x": np.zeros(4), "y": np.zeros(5)}, 2, "equal numbers of rows, got 'x' 4, 'y' 5"),
        ({"x": np.zeros(4)}, 5, "they have 4 rows, but one batch has 5"),
        ({}, 5, "at least one array"),
        ({"x": [0, 1]}, 1, "'x/0' must be a numpy array"),
        ({"x": np.zeros(4)}, 0, "batch_size must be at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=f"^array_batches: .*{problem}"):
            array_batches(arrays, batch_size=size, seed=0)


# --- plans ---


@pytest.mark.slow
def test_a_plan_and_a_search_count_examples_unless_the_recipe_counts_the_flops_of_tokens():
    calls = []

    def make(config: Any) -> Any:
        calls.append(config.data.batch_size)
        shape = config.data.batch_size, 16
        return lambda step: {"inputs": np.zeros(shape, np.int32), "targets": np.zeros(shape, np.int32)}

    config = replace(recipe(), make_batches=make)
    found, built_in = plan(config, "v5e:1x4"), plan(recipe(), "v5e:1x4")
    assert found.time.tokens_per_s is None and found.time.seconds == built_in.time.seconds
    assert found.memory.peak == built_in.memory.peak
    counted = plan(replace(config, flops_per_token=lambda model, count, length: 6.0 * count), "v5e:1x4")
    assert counted.time.tokens_per_s == built_in.time.tokens_per_s and counted.time.mfu is not None
    calls.clear()
    searched = search_layouts(config, "v5e:4", plans=4)
    assert calls == [8] and {one.unit for one in searched.planned} == {"examples"}
    assert len({one.tokens for one in searched.planned}) > 1, "other batch sizes were planned too"


# --- runs ---


class Restarts(Windows):
    """Every state leads back to the first batch."""

    def set_state(self, state: dict[str, Any]) -> None:
        self.random = np.random.default_rng(0)  # run.seed


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (token_batches, Windows, r"state of the iterator of make_batches: \(absent\) -> present"),
        (Windows, token_batches, r"state of the iterator of make_batches: present -> \(absent\)"),
        (None, token_batches, r"first batch of make_batches: \w+ -> \w+ "),
        (token_batches, None, r"content of data\.source: \w+ -> \w+ "),
    ],
)
def test_other_batches_are_changes_of_the_result(first, second, problem, tmp_path, text):
    configs = [run_config(tmp_path, text, make) for make in (first, second)]
    records = [load_data(build_program(config)).record(0) for config in configs]
    saved, now = ({"step": 0, "config": to_texts(configs[0]), "data": record} for record in records)
    with pytest.raises(ConfigError, match=problem):
        check_resume(saved, now, configs[1], allow_changes=False)
    assert re.search(problem, "\n".join(map(str, check_resume(saved, now, configs[1], allow_changes=True))))


def test_a_run_goes_on_with_other_batches_only_if_changes_are_allowed(tmp_path, text):
    run(run_config(tmp_path / "run", text, Windows, "run.steps=2"))
    other = run_config(tmp_path / "run", text, Restarts, "run.steps=3")
    problem = "batch 1 differs from the one that the run used, so the data changed, or set_state"
    with pytest.raises(ConfigError, match=problem):
        run(other)
    after = run(other, allow_changes=True)
    assert [row["step"] for row in after.rows] == [3]
    assert [line for line in after.lines if line.startswith("changed since the checkpoint: ")]


@pytest.mark.slow
def test_a_run_of_a_generator_cannot_be_resumed_but_can_be_started_from(tmp_path, text):
    def make(config: TrainConfig) -> Any:
        batches = token_batches(config)
        return (batches(step) for step in range(100))

    config = run_config(tmp_path / "run", text, make, "run.steps=2", "data.resumable=false")
    first = run(config)
    note = "note: this run cannot be resumed (data.resumable=false)"
    assert [line for line in first.lines if "resum" in line] == [note]
    assert first.losses == run(run_config(tmp_path / "same", text, token_batches, "run.steps=2")).losses
    assert train(config).status == "already finished"
    with pytest.raises(ConfigError, match=r"step 2, from which a run with data\.resumable=false cannot resume"):
        run(apply_overrides(config, ["run.steps=4"]), allow_changes=True)
    new = [f"run.folder={tmp_path / 'new'}", f"checkpoint.start_from={tmp_path / 'run'}"]
    assert train(apply_overrides(config, new)).status == "finished"


class Strict(Windows):
    """Takes its first state, which is checked before a run, and refuses another."""

    is_checked = False

    def set_state(self, state: dict[str, Any]) -> None:
        if self.is_checked:
            raise ValueError("not a state of this version")
        self.is_checked = True
        super().set_state(state)


def test_a_saved_state_that_no_run_writes_or_that_the_iterator_refuses_is_an_error(tmp_path, text):
    config = run_config(tmp_path / "run", text, Windows, "run.steps=2")
    run(config)
    refused = r"^set_state of the iterator .*test_user_batches\.py, line \d+: ValueError: not a"
    with pytest.raises(ConfigError, match=refused):
        run(run_config(tmp_path / "run", text, Strict))
    path = tmp_path / "run" / "checkpoints" / "2" / "metadata" / "metadata"
    record = json.loads(path.read_text())
    assert record["data"]["state"].keys() == {"json"}
    record["data"]["state"] = {"base64": "%"}
    path.write_text(json.dumps(record))
    with pytest.raises((CheckpointCorruptedError, ConfigError), match=r"its state|damaged|metadata"):
        run(config)


def test_make_batches_is_called_once_and_its_first_batch_is_not_consumed(tmp_path, text):
    calls, drawn = [], []

    def counted(config: TrainConfig) -> Any:
        calls.append(config.run.steps)
        batches = token_batches(config)
        return lambda step: (drawn.append(step), batches(step))[1]

    run(run_config(tmp_path / "run", text, counted, "run.steps=3"))
    assert calls == [3] and drawn == [0, 0, 1, 2]


@pytest.mark.slow
def test_one_iterator_that_make_batches_returns_every_time_is_not_advanced_by_plans(tmp_path, text):
    config = run_config(tmp_path / "run", text, None)
    only, fresh = Windows(config), Windows(config)
    plan(run_config(tmp_path / "run", text, lambda config: only), "v5e:1x2")
    assert only.get_state() == fresh.get_state()


def test_an_iterator_that_ends_is_one_line_and_the_completed_steps_are_saved(tmp_path, text):
    class Short(Windows):
        drawn = 0

        def __next__(self) -> Any:
            self.drawn += 1
            if self.drawn > 5:  # the first batch is drawn twice before the run
                raise StopIteration
            return super().__next__()

    printed: list[str] = []
    with pytest.raises(ConfigError, match=r"^make_batches: .*the iterator ended before batch 3; it must"):
        train(run_config(tmp_path / "run", text, Short, "checkpoint.every=2"), say=printed.append)
    assert printed[-1] == "the state after step 3 is saved, since the next batch cannot be made"
    assert checkpoints(tmp_path / "run") == [2, 3]
    after, whole = (run(run_config(tmp_path / name, text, Windows)).losses for name in ("run", "whole"))
    assert after == {step: whole[step] for step in (4, 5, 6, 7)}
