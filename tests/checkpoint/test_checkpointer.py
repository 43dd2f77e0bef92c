import dataclasses
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import ConfigError, SaveError, abstract_state, create_mesh, init_state, named_leaves
from flax_mesh.checkpoint import Checkpointer, orbax
from flax_mesh.models import Decoder, DecoderConfig
from flax_mesh.train import abstract_train_state
from tests.checkpoint.by_layer import by_layer, check_same

pytestmark = pytest.mark.usefixtures("quick_compilation")

LISTED = DecoderConfig(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=32
)
SCANNED = dataclasses.replace(LISTED, scan=True)
LAYOUTS = {
    "one": ((1, 1, 1, 1, 1), LISTED),
    "fsdp8": ((1, 8, 1, 1, 1), LISTED),
    "dp2fsdp2tp2": ((2, 2, 1, 2, 1), LISTED),
    "scanned": ((1, 4, 1, 2, 1), SCANNED),
    "scanned on one": ((1, 1, 1, 1, 1), SCANNED),
}


def maker(config):
    def make():
        model = Decoder(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    return make


def abstract_of(layout):
    dims, config = LAYOUTS[layout]
    return abstract_state(maker(config), create_mesh(dims, devices=jax.devices()[: np.prod(dims)]))


def state_of(layout):
    state = init_state(maker(LAYOUTS[layout][1]), abstract_of(layout))
    leaves = [  # moments that are not all zero, and differ from path to path and from row to row
        jax.device_put(_moment(path, x), x.sharding) if "/mu/" in path else x for path, x in named_leaves(state)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _moment(path, x):
    return (np.arange(x.size, dtype=np.float32) + len(path)).reshape(x.shape)


def save(folder, state, step=1, **kinds):
    with Checkpointer(folder, layers=["layers"], **kinds) as checkpointer:
        checkpointer.save(step, state, {"step": step, "text": "ä"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "restored"),
    [pytest.param("fsdp8", "dp2fsdp2tp2", marks=pytest.mark.slow), ("scanned", "one")],
)
def test_restore_returns_the_saved_values_in_another_layout(saved, restored, tmp_path):
    state, abstract = state_of(saved), abstract_of(restored)
    save(tmp_path, state)
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        got = checkpointer.restore(abstract)
        assert checkpointer.metadata(1) == {"step": 1, "text": "ä"}
    for want, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(got), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    check_same(state, got)


@pytest.mark.slow
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_restores_into_every_other(saved, tmp_path):
    state = state_of(saved)
    save(tmp_path, state)
    for restored in LAYOUTS:
        with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
            check_same(state, checkpointer.restore(abstract_of(restored)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("one", marks=pytest.mark.slow), "scanned"])
def test_plain_orbax_reads_a_checkpoint(layout, tmp_path):
    state = state_of(layout)
    save(tmp_path, state)
    code = f"""
import sys, jax, orbax.checkpoint as ocp, numpy as np
tree = ocp.StandardCheckpointer().restore({str(tmp_path / "1" / "state")!r})
assert "flax_mesh" not in sys.modules and "flax.nnx" not in sys.modules
q = tree["model"]["layers"]["2"]["attention"]["q"]["kernel"]
print(sorted(tree), sorted(tree["model"]["layers"]), q.shape, repr(float(np.asarray(q).sum())))
"""
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert run.returncode == 0, run.stderr
    kernel = by_layer(state)["model/layers/2/attention/q/kernel"]
    total = repr(float(np.asarray(kernel).sum()))
    assert run.stdout.split("\n")[0] == f"['model', 'optimizer'] ['0', '1', '2'] (16, 4, 4) {total}"


@pytest.mark.slow
def test_another_model_is_refused_with_the_paths_and_both_shapes(tmp_path):
    save(tmp_path, state_of("one"))
    other = dataclasses.replace(LISTED, num_layers=2, num_kv_heads=4, tied=False)
    abstract = abstract_state(maker(other), create_mesh())
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer, pytest.raises(ConfigError) as error:
        checkpointer.restore(abstract)
    text = str(error.value)
    assert "does not match the model" in text and "--restart" in text
    assert "model/layers/{0..1}/attention/k/kernel: checkpoint f32[16,2,4], model f32[16,4,4]" in text
    assert "model/layers/2/mlp/up/kernel: only in the checkpoint, f32[16,32]" in text
    assert "model/head/kernel: only in the model, f32[16,32]" in text
    assert "optimizer/opt_state/0/mu/head/kernel: only in the model" in text and "\nand 12 more\n" in text
    assert "layers/0/mlp/up" not in text


def test_random_keys_and_batch_statistics_are_saved_and_restored(tmp_path):
    def make():
        stack = nnx.vmap(lambda k: nnx.Dropout(0.5, rngs=nnx.Rngs(k)))(jax.random.split(jax.random.key(1), 3))
        other = nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(2, impl="rbg")))
        drop = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
        return nnx.Dict(drop=drop, other=other, layers=stack, norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0)))

    abstract = abstract_state(make, create_mesh(), [(".*", ())])
    state = init_state(make, abstract)
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        got = checkpointer.restore(abstract)
    assert sum(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(got)) == 3
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())


def test_the_newest_checkpoints_are_retained_and_found_again(tmp_path):
    state = state_of("one")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        for step in (1, 2, 3):
            checkpointer.save(step, state, {"step": step})
        checkpointer.wait()
        with pytest.raises(ConfigError, match="already contains a checkpoint of step 3; nothing was overwritten"):
            checkpointer.save(3, state, {})
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.steps() == [2, 3]
        assert checkpointer.latest_step() == 3
        assert checkpointer.metadata(2) == {"step": 2}


@pytest.mark.slow
def test_arrays_may_be_donated_once_save_has_returned(tmp_path):
    state, abstract = state_of("scanned"), abstract_of("scanned")
    before = by_layer(state)
    overwrite = jax.jit(lambda x: jax.tree.map(lambda y: y * 0 + 1, x), donate_argnums=0)
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        checkpointer.save(1, state, {})
        overwrite(jax.tree.leaves(state))
        checkpointer.wait()
        got = by_layer(checkpointer.restore(abstract))
    assert all(np.array_equal(before[path], got[path]) for path in before)


@pytest.mark.slow
def test_restore_waits_for_the_save_in_progress(tmp_path, monkeypatch):
    """Three lines move a state to another layout: no metadata, no wait."""
    state, other = state_of("fsdp8"), abstract_of("dp2fsdp2tp2")
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

    state = state_of("one")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        monkeypatch.setattr(Checkpointer, "_meet", fail)
        checkpointer.save(2, state)
        with pytest.raises(SaveError, match=r"step 2 could not be saved .*the disk is gone"):
            checkpointer.restore(abstract_of("one"))
        check_same(state, checkpointer.restore(abstract_of("one")))


def test_restoring_from_an_empty_folder_is_an_error(tmp_path):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="contains no checkpoint"):
        checkpointer.restore(abstract_of("one"))


@pytest.mark.slow
def test_a_train_state_is_restored_as_a_train_state(tmp_path):
    """On disk it is equal to the nnx.State of the same arrays."""
    layout = abstract_train_state(maker(SCANNED), abstract_of("scanned"))
    state = layout.with_state(state_of("scanned"))
    save(tmp_path, state)
    with Checkpointer(tmp_path) as checkpointer:
        got, (partial, report) = checkpointer.restore(layout), checkpointer.restore_partial(state)
        check_same(state, checkpointer.restore(abstract_of("one")))
        assert checkpointer.check(layout, 1).keys() == checkpointer.arrays(1).keys()
    assert got.definition is partial.definition is layout.definition and not report.unchanged
    for tree in (got, partial):
        check_same(state, tree)


@pytest.mark.parametrize("name", ["a*b", "a?", "[1]"])
def test_a_folder_that_orbax_takes_for_a_pattern_is_refused(tmp_path, name):
    """A checkpoint saved there could not be read."""
    with pytest.raises(ConfigError, match=r"takes a path with \*, \? or \[ for a pattern"):
        Checkpointer(tmp_path / name / "checkpoints")


def test_a_file_or_a_broken_link_is_no_folder_of_checkpoints(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    for name, found in (("file", "a file"), ("link", "a broken link")):
        with pytest.raises(ConfigError, match=f"{name} must be a folder, found {found}; rename or remove it"):
            Checkpointer(tmp_path / name)
