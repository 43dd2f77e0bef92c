"""Damaged files of a checkpoint: every damage is found and reported, and an older valid step is used."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.checkpoint import Checkpointer, checksums
from flax_mesh.checkpoint.checksums import CHECKSUMS, MARKERS, find_damage, write_checksums
from flax_mesh.errors import CheckpointCorruptedError
from tests.checkpoint.states import check_leaves
from tests.train.bigram import snapshot


@pytest.fixture(scope="module")
def state():
    draw, split = np.random.default_rng(0), jax.NamedSharding(create_mesh(), jax.P(None, "fsdp"))
    kernels = [jax.device_put(draw.random((32, 64), np.float32), split) for _ in range(3)]
    return nnx.State({"layers": {i: {"kernel": kernels[i], "bias": jnp.zeros(64)} for i in range(3)}})


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory) -> Path:
    """A folder with the valid steps 1 and 2; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state, {"step": step})
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def flip(path: Path, at: int | np.integer, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[int(at)] ^= 1 << bit
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_every_flipped_bit_is_found(copy, monkeypatch):
    step, rng = copy / "2", np.random.default_rng(0)
    monkeypatch.setattr(checksums, "BLOCK", 4096)  # so that there are first, middle and last blocks
    write_checksums(step)
    sizes = {name: len(content) for name, content in snapshot(step).items() if name not in MARKERS}
    assert {CHECKSUMS, "state/_METADATA", "state/manifest.ocdbt", "metadata/metadata"} <= sizes.keys()
    assert sum("/d/" in name for name in sizes) >= 5 and max(sizes.values()) > 3 * 4096 and find_damage(step) == []
    for name, size in sizes.items():
        for at in rng.integers(size, size=20 if name == CHECKSUMS or size > 4096 else 5):
            bit = int(rng.integers(8))
            flip(step / name, at, bit)
            (problem,) = find_damage(step)
            where = " is" if name == CHECKSUMS else f": damaged within bytes {at // 4096 * 4096} to "
            assert problem.startswith(name + where) and "damaged" in problem, problem
            flip(step / name, at, bit)
    assert find_damage(step) == []


def test_a_damaged_index_is_reported_before_it_is_read(copy, capfd):
    """Orbax by itself prints a traceback for every array, some of them in threads where no caller can catch them."""
    step = copy / "2"
    index = [name for name in snapshot(step) if name.startswith("state/d/")]
    index += ["state/_METADATA", "state/_sharding", "state/manifest.ocdbt"]
    data = [name for name in snapshot(step) if "/ocdbt.process_0/" in name]
    assert len(index) > 3 and data
    with Checkpointer(copy) as checkpointer:
        expected = checkpointer.arrays(2)
        for name in data:
            flip(step / name, 5, 1)
            assert checkpointer.arrays(2) == expected  # reads no data; `verify` does
        for name in index:
            for at in np.linspace(0, (step / name).stat().st_size - 1, 5).astype(int):
                flip(step / name, at, 0)
                problem = f"its tree cannot be read:\n  {name}: damaged within"
                with pytest.raises(CheckpointCorruptedError, match=problem):
                    checkpointer.arrays(2)
                flip(step / name, at, 0)
    assert capfd.readouterr().err == ""


@pytest.mark.sampled
@pytest.mark.parametrize("harm", [truncate, Path.unlink], ids=["truncated", "removed"])
def test_a_truncated_or_missing_file_is_found_whichever_it_is(harm, copy, state):
    """Never a wrong value, never a new run: the damaged file is named, and the step before is used."""
    step, caught = copy / "2", 0
    for name in snapshot(step):
        before = (step / name).read_bytes()
        harm(step / name)
        with Checkpointer(copy) as checkpointer:
            if name == "commit_success.txt":  # contains no more than the name of the folder implies
                assert checkpointer.latest_step() == 2 and checkpointer.verify(2) == []
                check_leaves(state, checkpointer.restore(state))
            else:
                caught += 1
                (problem,) = checkpointer.verify(2)
                assert problem.startswith(name)
                if name in MARKERS:  # restoring does not read them
                    check_leaves(state, checkpointer.restore(state, 2, verify=False))
                for read in (checkpointer.restore, checkpointer.restore_partial):
                    with pytest.raises(CheckpointCorruptedError, match=rf"checkpoint .*2 is damaged:\n  {name}"):
                        read(state, 2)
                assert checkpointer.latest_step() == 1 and checkpointer.damaged == {2: [problem]}
        (step / name).write_bytes(before)
    assert caught == len(snapshot(step)) - 1 >= 12
    with Checkpointer(copy) as checkpointer:
        assert checkpointer.latest_step() == 2 and checkpointer.damaged == {}


def test_a_damaged_step_is_skipped_and_quarantined(copy, state):
    truncate(copy / "2" / "state" / "_METADATA")
    damaged = (copy / "2" / "state" / "_METADATA").read_bytes()
    with Checkpointer(copy) as checkpointer:
        check_leaves(state, checkpointer.restore(state))
        assert checkpointer.steps() == [1, 2] and list(checkpointer.damaged) == [2]  # reading has renamed nothing
        checkpointer.save(2, state, {"step": "again"})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2] and checkpointer.latest_step() == 2 and not checkpointer.damaged
        assert checkpointer.metadata(2) == {"step": "again"}
    assert (copy / "2.damaged" / "state" / "_METADATA").read_bytes() == damaged
    truncate(copy / "2" / "metadata" / "metadata")  # a second time: the first is not overwritten
    with Checkpointer(copy) as checkpointer:
        assert checkpointer.latest_step() == 1
        checkpointer.save(3, state, {})
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2.damaged", "2.damaged-2", "3"]
    assert (copy / "2.damaged" / "state" / "_METADATA").read_bytes() == damaged


OTHER = "the folder is named 20, but contains the checkpoint of step 3: it was renamed or overwritten. Rename it to 3"


def test_the_checkpoint_of_another_step_is_damage(copy, state):
    """A run would otherwise continue from its arrays as from the step in the name of the folder. The number of a step
    does not depend on its metadata."""
    with Checkpointer(copy, keep=None) as checkpointer:
        checkpointer.save(3, state, {"format": 1, "step": 9})
        checkpointer.save(20, state)
        checkpointer.wait()
        assert checkpointer.verify(3) == checkpointer.verify(20) == []
    shutil.rmtree(copy / "20")
    (copy / "3").rename(copy / "20")
    with Checkpointer(copy, keep=None) as checkpointer:
        (problem,) = checkpointer.verify(20)
        assert problem.startswith(OTHER)
        for read in (checkpointer.restore, checkpointer.restore_partial):
            with pytest.raises(CheckpointCorruptedError, match="the checkpoint of step 3"):
                read(state, 20)
        assert checkpointer.latest_step() == 2 and checkpointer.damaged == {20: [problem]}
        checkpointer.save(21, state)
    assert sorted(path.name for path in copy.iterdir()) == ["1", "2", "20.damaged", "21"]
    (copy / "20.damaged").rename(copy / "3")
    with Checkpointer(copy, keep=None) as checkpointer:
        assert not any(checkpointer.verify(step) for step in checkpointer.steps())


def test_no_valid_checkpoint_is_an_error_that_names_every_file(copy, state):
    truncate(copy / "1" / "metadata" / "metadata")
    (copy / "2" / CHECKSUMS).unlink()
    before = snapshot(copy)
    with Checkpointer(copy) as checkpointer:
        for read in (lambda _: checkpointer.latest_step(), checkpointer.restore, checkpointer.restore_partial):
            with pytest.raises(CheckpointCorruptedError, match="contains 2 checkpoints, and none is valid") as error:
                read(state)
    text = str(error.value)
    assert "1 is damaged:\n    metadata/metadata: 5 bytes, saved with 11" in text
    assert "2 is damaged:\n    checksums.json is missing" in text and "--restart" in text
    assert before == snapshot(copy)


def test_an_invalid_table_of_checksums_is_damage(copy, monkeypatch):
    table = copy / "2" / CHECKSUMS
    valid = table.read_bytes()
    for name in ("../1/metadata/metadata", "/etc/hostname", "state/../../1/metadata/metadata"):
        table.write_bytes(checksums._encode(4096, {name: [11, [0]]}))
        assert find_damage(copy / "2") == [f"{CHECKSUMS} is damaged: it names files outside the checkpoint: {name}"]
    files: Any
    for files in ([], {"a": 5}, {"a": [4097, [0]]}, {"a": ["b", [0]]}, {"a": [1, [0], 2]}):
        table.write_bytes(checksums._encode(4096, files))
        assert find_damage(copy / "2") == [f"{CHECKSUMS} is damaged: its own checksum does not match"]
    table.write_bytes(valid)
    monkeypatch.setattr(checksums, "BLOCK", 1000)  # a later release may choose another size
    assert find_damage(copy / "2") == []
