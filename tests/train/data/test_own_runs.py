"""Runs on batches of the recipe: those of the built-in tokens, bit for bit, and resumed runs, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.train import TrainConfig, train
from flax_mesh.train.data.iterators import IteratorBatches, decode, encode
from tests.train.bigram import write_text
from tests.train.data.own_recipe import MAKERS, MESHES, PLAIN, Windows, config_of, grain_batches, token_batches

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS = 7


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


class Killed(Exception):
    pass


def run(config: TrainConfig, kill_at: int | None = None, **kinds: Any) -> tuple[dict[int, float], list[str]]:
    """The loss of every step that this call ran, and what it printed. The run ends without a save after `kill_at`."""
    losses, lines = {}, []

    def hook(row: dict[str, Any]) -> None:
        losses[row["step"]] = row["loss"]
        if row["step"] == kill_at:
            raise Killed

    try:
        train(config, hooks=[hook], say=lines.append, **kinds)
    except Killed:
        assert kill_at is not None
    return losses, lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_own_batches_of_the_tokens_have_the_losses_of_the_built_in_ones(mesh, tmp_path, text):
    built_in, _ = run(config_of(tmp_path / "tokens", text, None, *MESHES[mesh]))
    own, lines = run(config_of(tmp_path / "own", text, token_batches, *MESHES[mesh]))
    assert own == built_in and len(own) == STEPS
    assert any(line.startswith("data: make_batches of ") and "inputs i32[8,16]" in line for line in lines)


CASES = [
    (maker, mesh) if mesh == "plain" else pytest.param(maker, mesh, marks=pytest.mark.slow)
    for maker in MAKERS
    for mesh in MESHES
]


@pytest.mark.slow
@pytest.mark.parametrize(("maker", "mesh"), CASES)
def test_a_killed_run_resumes_bit_for_bit(maker, mesh, tmp_path, text):
    if maker == "grain":
        pytest.importorskip("grain", reason="the extra data is not installed")
    whole, _ = run(config_of(tmp_path / "whole", text, MAKERS[maker], *MESHES[mesh]))
    killed = config_of(tmp_path / "killed", text, MAKERS[maker], *MESHES[mesh])
    before, _ = run(killed, kill_at=5)
    after, lines = run(killed)
    assert max(before) == 5 and min(after) == 5, "the newest checkpoint is that of step 4"
    assert before | after == whole and len({*whole.values()}) == STEPS
    assert any("resuming, 3 steps to go" in line for line in lines)


@pytest.mark.slow
def test_a_state_that_is_saved_one_batch_too_late_is_found(tmp_path, text, monkeypatch):
    whole, _ = run(config_of(tmp_path / "whole", text, Windows, *PLAIN))
    killed = config_of(tmp_path / "killed", text, Windows, *PLAIN)
    state_after = IteratorBatches.state

    def one_batch_later(self: IteratorBatches, step: int) -> dict[str, Any]:
        """The state if the thread that prefetches batches has drawn the next one already."""
        copy = Windows(killed)
        copy.set_state(decode(state_after(self, step)))
        next(copy)
        return encode(copy.get_state())

    monkeypatch.setattr(IteratorBatches, "state", one_batch_later)
    before, _ = run(killed, kill_at=5)
    after, _ = run(killed)
    assert before | after != whole


@pytest.mark.slow
def test_a_resumed_run_may_change_the_mesh(tmp_path, text):
    whole, _ = run(config_of(tmp_path / "whole", text, Windows, "mesh.shape=dp:4"))
    run(config_of(tmp_path / "run", text, Windows, "mesh.shape=dp:2", "run.steps=4"))
    after, _ = run(config_of(tmp_path / "run", text, Windows, "mesh.shape=pp:2,dp:2"))
    assert after == pytest.approx({step: whole[step] for step in (5, 6, 7)}, rel=1e-4)


@pytest.mark.sampled
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
    run(config_of(tmp_path / "run", text, first, *PLAIN, "run.steps=2"))
    other = config_of(tmp_path / "run", text, second, *PLAIN)
    with pytest.raises(ConfigError, match=problem):
        train(other)
    after, lines = run(other, allow_changes=True)
    assert min(after) == 3 and max(after) == STEPS
    assert [line for line in lines if line.startswith("changed since the checkpoint: ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "state", [[], {}, {"json": 1, "base64": ""}, {"base64": "%"}, {"base64": 3}, {"other": 1}, "text"]
)
def test_a_state_in_a_checkpoint_that_no_run_writes_is_found(state, tmp_path, text):
    config = config_of(tmp_path / "run", text, Windows, *PLAIN, "run.steps=2")
    run(config)
    path = tmp_path / "run" / "checkpoints" / "2" / "metadata" / "metadata"
    record = json.loads(path.read_text())
    assert record["data"]["state"].keys() == {"json"}
    record["data"]["state"] = state
    path.write_text(json.dumps(record))
    with pytest.raises((CheckpointCorruptedError, ConfigError), match=r"its state|damaged|metadata"):
        train(config)


@pytest.mark.slow
def test_a_state_that_the_iterator_refuses_is_one_line(tmp_path, text):
    class Strict(Windows):
        def set_state(self, state: dict[str, Any]) -> None:
            if state != self.get_state() and self.random.bit_generator.state["state"] == self.fresh["state"]:
                raise ValueError("not a state of this version")
            super().set_state(state)

        def __init__(self, config: TrainConfig):
            super().__init__(config)
            self.fresh = self.get_state()

    run(config_of(tmp_path / "run", text, Strict, *PLAIN, "run.steps=2"))
    with pytest.raises(ConfigError, match=r"^set_state of the iterator .*own_runs\.py, line \d+: ValueError: not a"):
        train(config_of(tmp_path / "run", text, Strict, *PLAIN))


@pytest.mark.slow
def test_make_batches_is_called_once_and_its_first_batch_is_not_consumed(tmp_path, text):
    calls, drawn = [], []

    def counted(config: TrainConfig) -> Any:
        calls.append(config.run.steps)
        batches = token_batches(config)
        return lambda step: (drawn.append(step), batches(step))[1]

    run(config_of(tmp_path / "run", text, counted, *PLAIN, "run.steps=3"))
    assert calls == [3] and drawn == [0, 0, 1, 2]


@pytest.mark.slow
def test_one_iterator_that_make_batches_returns_every_time_is_not_advanced_by_plans(tmp_path, text):
    config = config_of(tmp_path / "run", text, None, *PLAIN)
    only, fresh = Windows(config), Windows(config)
    from flax_mesh.plan import plan

    plan(config_of(tmp_path / "run", text, lambda config: only, *PLAIN), "v5e:1x2")
    assert only.get_state() == fresh.get_state()


@pytest.mark.slow
def test_an_iterator_that_ends_is_one_line_and_the_completed_steps_are_saved(tmp_path, text):
    class Short(Windows):
        drawn = 0

        def __next__(self) -> Any:
            self.drawn += 1
            if self.drawn > 5:  # the first batch is drawn twice before the run
                raise StopIteration
            return super().__next__()

    printed: list[str] = []
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"^make_batches: .*the iterator ended before batch 3; it must"):
        train(config_of(folder, text, Short, *PLAIN, "checkpoint.every=2"), say=printed.append)
    assert printed[-1] == "the state after step 3 is saved, since the next batch cannot be made"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "3"]
    after, _ = run(config_of(folder, text, Windows, *PLAIN))
    whole, _ = run(config_of(tmp_path / "whole", text, Windows, *PLAIN))
    assert after == {step: whole[step] for step in (4, 5, 6, 7)}


def test_grain_without_repeat_ends_in_one_line(tmp_path, text):
    grain = pytest.importorskip("grain", reason="the extra data is not installed")

    def short(config: TrainConfig) -> Any:
        rows = {"inputs": np.zeros((16, 16), np.int32), "targets": np.zeros((16, 16), np.int32)}
        pairs = [{name: x[i] for name, x in rows.items()} for i in range(16)]
        return iter(grain.MapDataset.source(pairs).to_iter_dataset().batch(8))

    with pytest.raises(ConfigError, match="the iterator ended before batch 2"):
        train(config_of(tmp_path / "run", text, short, *PLAIN))
    assert grain_batches(config_of(tmp_path, text, None)).get_state() is not None
