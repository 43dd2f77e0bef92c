import dataclasses
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import ConfigError, SaveError, abstract_state, create_mesh, init_state
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


def test_random_keys_and_batch_statistics_are_saved_and_restored(tmp_path):
    split, replicated = (jax.NamedSharding(create_mesh(), spec) for spec in (jax.P("fsdp"), jax.P()))
    kinds = (("threefry2x32", split), ("rbg", split), ("unsafe_rbg", replicated))
    keys = {impl: jax.device_put(jax.random.split(jax.random.key(3, impl=impl), 8), place) for impl, place in kinds}

    def make():
        stack = nnx.vmap(lambda k: nnx.Dropout(0.5, rngs=nnx.Rngs(k)))(jax.random.split(jax.random.key(1), 3))
        other = nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(2, impl="rbg")))
        return nnx.Dict(other=other, layers=stack, norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0)))

    state: Any = init_state(make, abstract_state(make, create_mesh(), [(".*", ())]))
    state |= {"keys": nnx.State(keys)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        with pytest.raises(ConfigError, match="contains no checkpoint"):
            checkpointer.restore(abstract)
        checkpointer.save(1, state, {"step": 1, "text": "ä"})
        checkpointer.wait()
        got = checkpointer.restore(abstract)
        assert checkpointer.metadata(1) == {"step": 1, "text": "ä"}
    assert sum(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(got)) == 5
    check_leaves(state, got)


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
