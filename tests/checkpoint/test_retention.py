"""Retention of checkpoints: as a function of steps and metrics, and on disk."""

import math
import os
import shutil

import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.checkpoint import Checkpointer, RetentionPolicy
from tests.checkpoint.states import listing

STEPS = st.sets(st.integers(0, 60), max_size=15)
NUMBERS = st.one_of(st.floats(-3, 3), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
KEEPS = st.builds(
    RetentionPolicy,
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(0, 4),
    st.one_of(st.none(), st.integers(1, 10)),
)


@settings(max_examples=200, deadline=None)
@given(KEEPS, STEPS, st.dictionaries(st.integers(0, 60), NUMBERS))
def test_exactly_the_promised_checkpoints_are_retained(keep, steps, metrics):
    stay = keep.steps(steps, metrics)
    assert stay <= steps
    if keep.newest is None:
        assert stay == steps
        return
    for step in steps:
        newer = sum(other > step for other in steps)
        value = metrics.get(step, math.nan)
        better = [m for s, m in metrics.items() if s in steps and (m < value or (m == value and s > step))]
        retained = newer < keep.newest
        retained |= not math.isnan(value) and len(better) < keep.best
        retained |= keep.every is not None and step % keep.every == 0
        assert (step in stay) == retained, (step, keep)
    assert not steps or max(steps) in stay


def test_invalid_policies_are_refused():
    with pytest.raises(ValueError, match=r"^newest must be at least 1, got 0$"):
        RetentionPolicy(0)
    with pytest.raises(ValueError, match=r"^best must be at least 0, got -1; every must be at least 1, got 0$"):
        RetentionPolicy(best=-1, every=0)


def state_of(value: float = 0.0) -> nnx.State:
    return nnx.State({"w": jnp.full(4, float(value))})


def save(checkpointer: Checkpointer, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        checkpointer.save(step, state_of(step), {"metrics": {} if loss is None else {"eval_loss": loss}})
    checkpointer.wait()


def test_the_best_are_retained_over_a_restart(tmp_path):
    keep = RetentionPolicy(1, best=2, every=10)
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        save(checkpointer, {1: 0.5, 2: 0.9, 3: math.nan, 4: None})
        assert checkpointer.steps() == [1, 2, 4]
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        save(checkpointer, {5: 0.7, 6: 0.8})
        assert checkpointer.steps() == [1, 5, 6]
        save(checkpointer, {10: 0.95, 11: 3.0})
        assert checkpointer.steps() == [1, 5, 10, 11]
    assert sorted(os.listdir(tmp_path), key=int) == ["1", "5", "10", "11"]  # nothing partly deleted


@pytest.mark.sampled
@pytest.mark.parametrize(
    "bad", [{"metrics": {"loss": math.nan}}, {"metrics": {"grad_norm": math.inf}}, {"finite": False}]
)
def test_the_newest_checkpoint_with_finite_numbers_is_retained(tmp_path, bad):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state_of(step), bad if step > 3 else {"metrics": {"loss": 1.0}})
        checkpointer.wait()
        assert checkpointer.steps() == [3, 6, 7] and checkpointer.newest_finite_step() == 3
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(8, state_of(8), {"finite": True, "metrics": {"loss": math.nan}})  # the update was skipped
        checkpointer.wait()
        assert checkpointer.steps() == [7, 8] and checkpointer.newest_finite_step() == 8


def test_a_damaged_checkpoint_is_not_a_candidate_for_the_best(tmp_path):
    with Checkpointer(tmp_path, keep=RetentionPolicy(1, best=1)) as checkpointer:
        save(checkpointer, {1: 0.1, 2: 0.9})
        (tmp_path / "1" / "metadata" / "metadata").write_text("{")
        save(checkpointer, {3: 0.95})
        assert checkpointer.steps() == [2, 3]


def test_reading_does_not_change_the_folder(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        save(checkpointer, {1: 0.5, 2: 0.4})
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "0.deleted").mkdir()
    (tmp_path / "2" / "metadata" / "metadata").write_text("{")
    before = listing(tmp_path)
    with Checkpointer(tmp_path) as reader:
        assert reader.steps() == [1, 2] and reader.latest_step() == 1 and list(reader.damaged) == [2]
        assert reader.verify(2) and reader.metadata(1) and list(reader.arrays(1)) == ["w"]
        assert reader.restore(state_of(), 1)["w"][0] == 1
    assert listing(tmp_path) == before
    missing = tmp_path / "nothing"
    with Checkpointer(missing) as reader:
        assert reader.steps() == [] and reader.latest_step() is None
    assert not missing.exists()


def test_the_next_save_removes_what_a_kill_between_rename_and_deletion_left(tmp_path, monkeypatch):
    with monkeypatch.context() as killed, Checkpointer(tmp_path, keep=1) as checkpointer:
        killed.setattr(shutil, "rmtree", lambda path, **kinds: None)
        save(checkpointer, {1: 0.5, 2: 0.4})
    assert sorted(os.listdir(tmp_path)) == ["1.deleted", "2"]
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.latest_step() == 2 and (tmp_path / "1.deleted").exists()
        save(checkpointer, {3: 0.3})
    assert os.listdir(tmp_path) == ["3"]
