"""Checkpoints of adapters alone: the frozen weights are read in the folder that the run started from."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import ConfigError, abstract_state, create_mesh, named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.base import BASE, fingerprints
from flax_mesh.checkpoint.checksums import RECORD
from flax_mesh.checkpoint.find import find_valid
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.orbax import stored_arrays
from flax_mesh.checkpoint.read import read_record, read_tree
from flax_mesh.cli.common import FINDINGS
from flax_mesh.cli.main import main
from flax_mesh.errors import CheckpointCorruptedError
from flax_mesh.lora.config import LoraConfig
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import TrainState, abstract_train_state
from flax_mesh.train.export import read_values
from tests.checkpoint.hf.make_reference import DATA
from tests.checkpoint.states import random_values

ADAPTED = LoraConfig(2, 3, "attention/(q|v)/kernel")
KINDS = ("step", "huggingface")
OTHER: Any = {"scan": True, "sizes": (1, 1, 1, 1, 4)}  # than the layout of the saved states


@cache
def layout_of(scan: bool = False, wrt: Any = nnx.LoRAParam, sizes: tuple[int, ...] = (1, 1, 1, 2, 2)) -> TrainState:
    """The abstract state of a Llama with adapters, whose layers are a list or a stack."""
    config = DecoderConfig(**open_decoder(DATA / "llama").settings, scan=scan)
    batch = dict.fromkeys(("inputs", "targets"), np.zeros((2, 9), np.int32))
    adapted = ADAPTED.adapted(lambda: make_decoder(config, nnx.Rngs(0)), next_token_loss, batch, 0)

    def make():
        model = adapted()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=wrt)

    mesh = create_mesh(sizes, devices=jax.devices()[: int(np.prod(sizes))])
    return abstract_train_state(make, abstract_state(make, mesh))


def values(state: TrainState) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in named_leaves(state.to_nnx())}


def assert_same(a: TrainState, b: TrainState) -> None:
    a_values, b_values = values(a), values(b)
    assert a_values.keys() == b_values.keys()
    assert [path for path, x in a_values.items() if not np.array_equal(x, b_values[path])] == []


def make_folder(tmp_path: Path, kind: str) -> Path:
    """A folder to start from, with other values than `random_values` returns."""
    if kind == "huggingface":
        return Path(shutil.copytree(DATA / "llama", tmp_path / "llama"))
    state = random_values(layout_of(**OTHER)).to_nnx()["model"]
    _, own = nnx.split_state(state, nnx.LoRAParam, ...)
    with Checkpointer(tmp_path / "start", layers=("layers",)) as checkpointer:
        checkpointer.save(3, {"model": jax.tree.map(lambda x: x / 3, own)})
    return tmp_path / "start"


def save(tmp_path: Path, kind: str, **layout: Any) -> tuple[Path, TrainState]:
    """The folder of checkpoints, and the state of step 1 in it."""
    state = random_values(layout_of(**layout))
    with Checkpointer(tmp_path / "run") as checkpointer:
        state, report = checkpointer.load_base(make_folder(tmp_path, kind), state)
        assert len(report.restored) == 21
        checkpointer.save(1, state, {"more": 1})
    return tmp_path / "run", state


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_the_frozen_weights_is_restored_in_every_layout_and_continued(kind, tmp_path):
    folder, state = save(tmp_path, kind)
    paths = set(stored_arrays(folder / "1"))
    assert not any(path.startswith("model/") and "_lora_" not in path for path in paths)
    with Checkpointer(tmp_path / "whole") as checkpointer:
        checkpointer.save(1, state)
        other = checkpointer.restore(layout_of(**OTHER))
    with Checkpointer(folder) as checkpointer:
        assert_same(checkpointer.restore(layout_of()), state)
        restored = checkpointer.restore(layout_of(**OTHER))
        assert_same(restored, other)
        checkpointer.save(2, restored)
        checkpointer.wait()
        assert set(stored_arrays(folder / "2")) == paths
        assert_same(checkpointer.restore(layout_of()), state)
    record = read_record(folder / "1")
    assert record["more"] == 1 and len(record[BASE]["arrays"]) == 21
    trees = [read_tree(step / "1", read_record(step / "1")) for step in (folder, tmp_path / "whole")]
    assert trees[0] == trees[1]
    read = [dict(read_values(step / "1", tree)) for step, tree in zip((folder, tmp_path / "whole"), trees, strict=True)]
    np.testing.assert_equal(read[0], read[1])


def test_trained_variables_and_variables_missing_in_the_base_are_saved(tmp_path):
    folder, state = save(tmp_path, "step")
    everything = random_values(layout_of(wrt=nnx.Param))
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore(layout_of())
        checkpointer.save(2, everything)
    assert len(stored_arrays(folder / "2")) == len(everything.leaves)
    with Checkpointer(tmp_path / "next") as checkpointer:
        fresh, report = checkpointer.load_base(folder / "1", random_values(layout_of()))
        assert_same(fresh.with_state({**state.to_nnx(), "optimizer": fresh.to_nnx()["optimizer"]}), fresh)
        checkpointer.save(1, fresh)
    bases = [read_record(path / "1")[BASE] for path in (folder, tmp_path / "next")]
    assert len(report.restored) == 29 and bases[0] == bases[1]  # no chain of bases


def test_a_frozen_weight_that_a_call_of_the_model_assigned_is_saved(tmp_path):
    folder, state = save(tmp_path, "step")
    with Checkpointer(folder) as checkpointer:
        old = checkpointer.restore(layout_of())
        model = old.to_nnx()
        weight: Any = dict(nnx.to_flat_state(model))["model", "layers", 1, "mlp", "up", "kernel"]
        weight[...] = weight[...].at[0, 0].add(2**-20)  # one element
        changed = old.with_state(model)
        checkpointer.save(2, changed)
        checkpointer.wait()
        assert set(stored_arrays(folder / "2")) - set(stored_arrays(folder / "1")) == {"model/layers/1/mlp/up/kernel"}
        assert_same(checkpointer.restore(layout_of(), 2), changed)
        assert_same(checkpointer.restore(layout_of(), 1), state)


def test_a_fingerprint_changes_with_every_element_and_with_their_order():
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64", "int4")
    arrays: dict[str, dict[bytes, np.ndarray]] = {}
    for dtype in dtypes:
        x = (np.arange(12).reshape(3, 4) % 7).astype(jnp.dtype(dtype))
        changed = [np.where(np.arange(12).reshape(3, 4) == n, x == 0, x).astype(x.dtype) for n in range(12)]
        arrays[dtype] = {y.tobytes(): y for y in [x, x[::-1], x.T.reshape(3, 4), *changed]}
    named = [(f"{dtype} {n}", jnp.asarray(y)) for dtype in dtypes for n, y in enumerate(arrays[dtype].values())]
    found = fingerprints(named)
    assert all(len(different) > 7 for different in arrays.values())
    assert len({(path.split()[0], number) for path, number in found.items()}) == len(named)
    assert fingerprints(named) == found


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_that_is_gone_or_another_one_is_refused(kind, tmp_path, capsys):
    folder, state = save(tmp_path, kind)
    start = tmp_path / ("start/3" if kind == "step" else "llama")
    file = max((x for x in start.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    old = file.read_bytes()
    file.write_bytes(old[:-1] + bytes([old[-1] ^ 1]))
    message = rf"(?s)1 contains only what its run trained; its other 21 arrays are read in {start}, .*: changed"
    with Checkpointer(folder) as checkpointer:
        for read in (checkpointer.restore, lambda layout: checkpointer.restore(layout, 1)):
            with pytest.raises(ConfigError, match=message):
                read(layout_of())
    with pytest.raises(ConfigError, match=message):
        find_valid(folder)
    assert main(["checkpoint", "verify", str(folder)]) == FINDINGS
    assert f"{file.name}: changed" in capsys.readouterr().out
    file.write_bytes(old)
    start.rename(tmp_path / "moved")
    gone = pytest.raises(ConfigError, match=r"(?s)the folder is gone.*link to a copy")
    with gone, Checkpointer(folder) as checkpointer:
        checkpointer.restore(layout_of())
    start.symlink_to(tmp_path / "moved")
    with Checkpointer(folder) as checkpointer:
        assert_same(checkpointer.restore(layout_of()), state)


def test_a_section_of_another_form_is_damage(tmp_path):
    folder, _ = save(tmp_path, "step")
    record = folder / "1" / RECORD
    saved = json.loads(record.read_text())
    some = next(iter(saved[BASE]["arrays"]))
    for wrong in (
        {},
        [],
        saved[BASE] | {"folder": 1},
        saved[BASE] | {"files": []},
        saved[BASE] | {"more": 1},
        *(saved[BASE] | {"arrays": {some: x}} for x in (None, ["float32"], ["x", [1]], ["float32", [-1]], [1, [2]])),
    ):
        record.write_text(json.dumps(saved | {BASE: wrong}))
        with pytest.raises(CheckpointCorruptedError, match="the section 'base' of its metadata is not as it was saved"):
            read_tree(folder / "1", read_record(folder / "1"))
