"""A Checkpointer whose saves fail: its error, the files it leaves, and that the next save succeeds."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import SaveError

STATE = nnx.State({"w": jnp.arange(8.0)})

# A limit on the size of files simulates a full disk, in a separate process since it applies to all threads.
PROGRAM = """
import json, logging, os, resource, sys
sys.unraisablehook = lambda found: None  # as the command line: tensorstore reports one failure once per array
for name in ("absl", "asyncio"):  # as the command line: they log errors that the caller gets
    logging.getLogger(name).setLevel(logging.CRITICAL)
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
from flax import nnx
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.errors import SaveError

folder, host_bytes = sys.argv[1], json.loads(sys.argv[2])
rng = np.random.default_rng(0)
state = nnx.State({f"w{i}": jax.numpy.asarray(rng.standard_normal((128, 1024), np.float32)) for i in range(8)})

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def attempt(step):
    try:
        checkpointer.save(step, state, {"step": step})
        checkpointer.wait()
        return "saved"
    except SaveError as error:
        return str(error)

found = {}
with Checkpointer(folder, host_bytes=host_bytes) as checkpointer:
    found["first"] = attempt(1)
    limit(100_000)
    found["full"] = [attempt(2), attempt(3)]
    found["steps then"] = checkpointer.steps()
    limit(resource.RLIM_INFINITY)
    found["after"] = attempt(4)
    found["steps"], found["listing"] = checkpointer.steps(), sorted(os.listdir(folder))
    restored = checkpointer.restore(state, 4)
    found["same"] = all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(restored)))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("host_bytes", [None, pytest.param(2**20, marks=pytest.mark.slow)])
def test_a_save_succeeds_after_a_failed_one(host_bytes, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), json.dumps(host_bytes)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    found = json.loads(run.stdout)
    text = "the checkpoint of step {} could not be saved in {}: File too large; the newest checkpoint is of step 1"
    assert found.pop("full") == [text.format(step, tmp_path / "c") for step in (2, 3)]
    assert found == {
        "first": "saved",
        "steps then": [1],
        "after": "saved",
        "steps": [1, 4],
        "listing": ["1", "4"],
        "same": True,
    }


def test_saves_fail_while_the_folder_is_gone_and_succeed_when_it_is_back(tmp_path):
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, STATE, {})
        checkpointer.wait()
        (tmp_path / "c").rename(tmp_path / "elsewhere")
        for step in (2, 3):
            with pytest.raises(
                SaveError, match=rf"step {step} could not be saved in .*: the folder is gone; no checkpoint exists"
            ):
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
        checkpointer.save(3, STATE, {})  # removes what was still being written of step 1 when its save failed
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


def test_an_exception_in_the_block_is_raised_even_if_the_save_fails_too(tmp_path):
    with pytest.raises(ZeroDivisionError) as error, Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, STATE, {})
        (tmp_path / "c").rename(tmp_path / "elsewhere")
        raise ZeroDivisionError
    (note,) = error.value.__notes__
    assert note.startswith("the checkpoint of step 1 could not be saved")
