"""A Checkpointer whose saves fail: its error, the files it leaves, and that the next save succeeds."""

import os
import resource

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import SaveError
from tests.checkpoint.states import check_leaves

STATE = nnx.State({"w": np.arange(8, dtype=np.float32)})


# tensorstore reports one failure once per array, also where nothing awaits it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("host_bytes", [None, 2**20])
def test_a_save_succeeds_after_a_failed_one(host_bytes, tmp_path):
    """A limit on the size of files simulates a full disk."""
    draw, limits = np.random.default_rng(0), resource.getrlimit(resource.RLIMIT_FSIZE)
    state = nnx.State({f"w{i}": jnp.asarray(draw.standard_normal((128, 1024), np.float32)) for i in range(8)})
    with Checkpointer(tmp_path / "c", host_bytes=host_bytes) as checkpointer:
        checkpointer.save(1, state, {"step": 1})
        checkpointer.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            for step in (2, 3):
                with pytest.raises(SaveError) as error:
                    checkpointer.save(step, state, {"step": step})
                    checkpointer.wait()
                problem = f"of step {step} could not be saved in {tmp_path / 'c'}: File too large"
                assert str(error.value) == f"the checkpoint {problem}; the newest checkpoint is of step 1"
            assert checkpointer.steps() == [1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        checkpointer.save(4, state, {"step": 4})
        if host_bytes is None:  # a write of step 3 that ends only now; otherwise `save` has waited for the end
            (tmp_path / "c" / "3.orbax-checkpoint-tmp").mkdir(exist_ok=True)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 4] and sorted(os.listdir(tmp_path / "c")) == ["1", "4"]
        check_leaves(state, checkpointer.restore(state, 4))


def test_saves_fail_while_the_folder_is_gone_and_succeed_when_it_is_back(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, STATE, {})
        checkpointer.wait()
        (tmp_path / "c").rename(tmp_path / "elsewhere")
        for step in (2, 3):
            problem = rf"step {step} could not be saved in .*: the folder is gone; no checkpoint exists"
            with pytest.raises(SaveError, match=problem):
                checkpointer.save(step, STATE, {})
        (tmp_path / "c").mkdir()  # a new folder of the same name is not used in its place
        with pytest.raises(SaveError, match="the folder is gone"):
            checkpointer.save(4, STATE, {})
        assert os.listdir(tmp_path / "c") == []
        (tmp_path / "c").rmdir()
        (tmp_path / "elsewhere").rename(tmp_path / "c")
        checkpointer.save(5, STATE, {})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 5] and checkpointer.latest_step() == 5


def test_metadata_that_is_not_json_fails_the_save(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(SaveError, match="step 1 could not be saved"):
            checkpointer.save(1, STATE, {"loss": jnp.ones(())})
            checkpointer.wait()
        assert checkpointer.steps() == []
        checkpointer.save(2, STATE, {})
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 2
        checkpointer.save(3, STATE, {})  # removes the files of step 1 that were being written when its save failed
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


def test_an_exception_in_the_block_is_raised_even_if_the_save_fails_too(tmp_path):
    with pytest.raises(ZeroDivisionError) as error, Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, STATE, {})
        (tmp_path / "c").rename(tmp_path / "elsewhere")
        raise ZeroDivisionError
    (note,) = error.value.__notes__
    assert note.startswith("the checkpoint of step 1 could not be saved")
