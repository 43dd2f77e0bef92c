"""Runs on batches of the recipe: what a resumed run refuses, iterators that end, and how often batches are made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.plan import plan
from flax_mesh.train import TrainConfig, apply_overrides, train
from tests.train import bigram
from tests.train.data.own_recipe import Windows, grain_batches, token_batches
from tests.train.support.runs import checkpoints, run

STEPS = 7


def config_of(folder: Path, text: Path, make: Any, *settings: str) -> TrainConfig:
    common = [f"run.folder={folder}", f"data.source={text}", f"run.steps={STEPS}", "run.eval_every=0"]
    config = apply_overrides(replace(bigram.recipe(), make_batches=make, sample=None), common)
    return apply_overrides(config, settings)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (token_batches, Windows, r"state of the iterator of make_batches: \(absent\) -> present"),
        (Windows, token_batches, r"state of the iterator of make_batches: present -> \(absent\)"),
        (None, token_batches, r"first batch of make_batches: \w+ -> \w+ "),
        (token_batches, None, r"content of data\.source: \w+ -> \w+ "),
    ],
)
def test_other_batches_require_allow_changes(first, second, problem, tmp_path, text):
    run(config_of(tmp_path / "run", text, first, "run.steps=2"))
    other = config_of(tmp_path / "run", text, second)
    with pytest.raises(ConfigError, match=problem):
        run(other)
    after = run(other, allow_changes=True)
    assert [row["step"] for row in after.rows] == [*range(3, STEPS + 1)]
    assert [line for line in after.lines if line.startswith("changed since the checkpoint: ")]


class Strict(Windows):
    """Refuses every state but its first one, until it has drawn a batch."""

    def __init__(self, config: TrainConfig):
        super().__init__(config)
        self.fresh = self.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        if state != self.get_state() and self.random.bit_generator.state["state"] == self.fresh["state"]:
            raise ValueError("not a state of this version")
        super().set_state(state)


def test_a_saved_state_that_no_run_writes_or_that_the_iterator_refuses_is_an_error(tmp_path, text):
    config = config_of(tmp_path / "run", text, Windows, "run.steps=2")
    run(config)
    with pytest.raises(ConfigError, match=r"^set_state of the iterator .*own_runs\.py, line \d+: ValueError: not a"):
        run(config_of(tmp_path / "run", text, Strict))
    path = tmp_path / "run" / "checkpoints" / "2" / "metadata" / "metadata"
    record = json.loads(path.read_text())
    assert record["data"]["state"].keys() == {"json"}
    for state in ([], {}, {"json": 1, "base64": ""}, {"base64": "%"}, {"base64": 3}, {"other": 1}, "text"):
        record["data"]["state"] = state
        path.write_text(json.dumps(record))
        with pytest.raises((CheckpointCorruptedError, ConfigError), match=r"its state|damaged|metadata"):
            run(config)


def test_make_batches_is_called_once_and_its_first_batch_is_not_consumed(tmp_path, text):
    calls, drawn = [], []

    def counted(config: TrainConfig) -> Any:
        calls.append(config.run.steps)
        batches = token_batches(config)
        return lambda step: (drawn.append(step), batches(step))[1]

    run(config_of(tmp_path / "run", text, counted, "run.steps=3"))
    assert calls == [3] and drawn == [0, 0, 1, 2]


@pytest.mark.slow
def test_one_iterator_that_make_batches_returns_every_time_is_not_advanced_by_plans(tmp_path, text):
    config = config_of(tmp_path / "run", text, None)
    only, fresh = Windows(config), Windows(config)
    plan(config_of(tmp_path / "run", text, lambda config: only), "v5e:1x2")
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
        train(config_of(tmp_path / "run", text, Short, "checkpoint.every=2"), say=printed.append)
    assert printed[-1] == "the state after step 3 is saved, since the next batch cannot be made"
    assert checkpoints(tmp_path / "run") == [2, 3]
    after, whole = (run(config_of(tmp_path / name, text, Windows)).losses for name in ("run", "whole"))
    assert after == {step: whole[step] for step in (4, 5, 6, 7)}


def test_grain_without_repeat_ends_in_one_line(tmp_path, text):
    grain = pytest.importorskip("grain", reason="the extra data is not installed")

    def short(config: TrainConfig) -> Any:
        rows = {"inputs": np.zeros((16, 16), np.int32), "targets": np.zeros((16, 16), np.int32)}
        pairs = [{name: x[i] for name, x in rows.items()} for i in range(16)]
        return iter(grain.MapDataset.source(pairs).to_iter_dataset().batch(8))

    with pytest.raises(ConfigError, match="the iterator ended before batch 2"):
        run(config_of(tmp_path / "run", text, short))
    assert grain_batches(config_of(tmp_path, text, None)).get_state() is not None
