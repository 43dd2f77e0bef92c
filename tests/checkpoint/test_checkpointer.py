import dataclasses
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import ConfigError, SaveError, abstract_state, create_mesh
from flax_mesh.checkpoint import Checkpointer, orbax
from flax_mesh.checkpoint.writer import Writer
from flax_mesh.models import Decoder
from tests.checkpoint.states import SMALL, by_layer, check_leaves, check_same, random_values

pytestmark = pytest.mark.usefixtures("quick_compilation")

SCANNED = dataclasses.replace(SMALL, scan=True)


def maker(config):
    def make():
        model = Decoder(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    return make


def abstract_of(config, *dims):
    return abstract_state(maker(config), create_mesh(dims, devices=jax.devices()[: np.prod(dims)]))


@pytest.fixture(scope="module")
def scanned():
    """A state on eight devices."""
    return random_values(abstract_of(SCANNED, 1, 4, 1, 2, 1))


def save(folder, state, step=1, **kinds):
    with Checkpointer(folder, layers=["layers"], **kinds) as checkpointer:
        checkpointer.save(step, state, {"step": step, "text": "ä"})


# A program without flax_mesh, on one device; the code of docs/checkpoints.md is put between.
PLAIN_ORBAX = """
import sys
from pathlib import Path
from types import SimpleNamespace
import jax
import numpy as np
jax.config.update("jax_platforms", "cpu")
checkpointer = SimpleNamespace(folder=Path(sys.argv[1]))
{code}
assert jax.device_count() == 1 and not any(name.startswith(("flax_mesh", "flax.nnx")) for name in sys.modules)
assert sorted(tree) == ["model", "optimizer"] and sorted(tree["model"]["layers"]) == ["0", "1", "2"]
np.save(sys.argv[2], tree["model"]["layers"]["2"]["attention"]["q"]["kernel"])
"""


@pytest.mark.slow
def test_plain_orbax_reads_a_checkpoint(scanned, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"^```python\n(import orbax.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = code.replace("(32, 4, 8)", "(16, 4, 4)")  # the model of the page and the one of this file
    save(tmp_path / "c", scanned)
    command = [sys.executable, "-c", PLAIN_ORBAX.format(code=code), tmp_path / "c", tmp_path / "kernel.npy"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert np.array_equal(np.load(tmp_path / "kernel.npy"), by_layer(scanned)["model/layers/2/attention/q/kernel"])


def test_another_model_is_refused_with_the_paths_and_both_shapes(tmp_path):
    save(tmp_path, random_values(abstract_of(SMALL, 1, 1, 1, 1, 1)))
    other = dataclasses.replace(SMALL, num_layers=2, num_kv_heads=4, tied=False)
    abstract = abstract_state(maker(other), create_mesh())
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer, pytest.raises(ConfigError) as error:
        checkpointer.restore(abstract)
    text = "\n".join(error.value.lines)
    assert "--restart" in str(error.value) and len(str(error.value)) <= 2000
    assert re.match(r"checkpoint \S*/1 does not match the model \(42 of \d+ leaves differ\):\n", text), text
    assert "--restart" in text
    assert "model/layers/{0..1}/attention/k/kernel: checkpoint f32[16,2,4], model f32[16,4,4]" in text
    assert "model/layers/2/mlp/up/kernel: only in the checkpoint, f32[16,32]" in text
    assert "model/head/kernel: only in the model, f32[16,32]" in text
    assert "optimizer/opt_state/0/mu/head/kernel: only in the model" in text and "\n  and 12 more\n" in text
    assert "layers/0/mlp/up" not in text


@pytest.mark.slow
def test_restore_waits_for_the_save_in_progress(tmp_path, monkeypatch):
    """Three lines move a state to another layout: no metadata, no wait."""
    state, other = random_values(abstract_of(SMALL, 1, 8, 1, 1, 1)), abstract_of(SMALL, 2, 2, 1, 2, 1)
    write_checksums, released = orbax.write_checksums, threading.Event()

    def write_later(*args):
        released.wait(30)
        write_checksums(*args)

    monkeypatch.setattr(orbax, "write_checksums", write_later)
    with Checkpointer(tmp_path) as checkpointer:
        for step, restore in ((1, checkpointer.restore), (2, lambda abstract: checkpointer.restore_partial(state)[0])):
            released.clear()
            checkpointer.save(step, state)
            assert step not in checkpointer.steps()  # still being written
            threading.Timer(0.2, released.set).start()
            check_same(state, restore(other))
            assert checkpointer.latest_step() == step and checkpointer.metadata(step) == {}


def test_restore_reports_that_the_save_in_progress_failed(tmp_path, monkeypatch):
    def fail(self, phase):
        if phase == "commit":
            raise OSError("the disk is gone")

    state = nnx.State({"w": jnp.arange(8.0)})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        monkeypatch.setattr(Writer, "_meet", fail)
        checkpointer.save(2, state)
        with pytest.raises(SaveError, match=r"step 2 could not be saved .*the disk is gone"):
            checkpointer.restore(state)
        check_leaves(state, checkpointer.restore(state))


def test_a_folder_in_which_nothing_can_be_saved_or_read_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    pattern = r"takes a path with \*, \? or \[ for a pattern"
    for name, problem in (
        *((f"{name}/checkpoints", pattern) for name in ("a*b", "a?", "[1]")),
        ("file", "file must be a folder, found a file; rename or remove it"),
        ("link", "link must be a folder, found a broken link; rename or remove it"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Checkpointer(tmp_path / name)


# --- saves that fail: the error, the files that are left, and that the next save succeeds ---


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
