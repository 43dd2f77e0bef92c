"""Which steps of Orbax are complete: renamed to their final name, or with commit_success.txt if saved in place."""

import json
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import options

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import find_step, find_steps, find_valid
from flax_mesh.cli.checkpoint import _list, _verify
from flax_mesh.errors import CheckpointCorruptedError, ConfigError

Mode = options.AtomicityMode
RECORD, DONE = "_CHECKPOINT_METADATA", "commit_success.txt"
STATE = {"a": np.ones(4)}


class Copied(ocp.StandardCheckpointHandler):
    """Copies the folder of checkpoints before the step is committed."""

    def __init__(self, folder, copy):
        super().__init__()
        self.folder, self.copy = folder, copy

    def finalize(self, directory):
        super().finalize(directory)
        shutil.copytree(self.folder, self.copy, dirs_exist_ok=True)


def save(folder, mode, *steps, handler=None):
    settings = ocp.CheckpointManagerOptions(atomicity_options=options.AtomicityOptions(mode=mode))
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardSave, handler or ocp.StandardCheckpointHandler())
    with ocp.CheckpointManager(folder, options=settings, handler_registry=handlers) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(STATE)))


@pytest.mark.parametrize("mode", [Mode.COMMIT_FILE, Mode.ATOMIC_RENAME, Mode.AUTO])
def test_a_step_of_orbax_is_found_once_it_is_committed(mode, tmp_path):
    folder, copy = tmp_path / "steps", tmp_path / "interrupted"
    save(folder, mode, 3, handler=Copied(folder, copy))
    assert find_step(folder) == folder / "3" and Checkpointer(folder).steps() == [3]
    for path in [copy] + [copy / "3"] * (mode is Mode.COMMIT_FILE):
        with pytest.raises(ConfigError, match=r"contains no checkpoint \(only 3.*, of a save in progress or interrupt"):
            find_steps(path)
    assert Checkpointer(copy).steps() == [] and Checkpointer(copy).latest_step() is None
    (folder / "3" / DONE).unlink()  # as of Orbax before 0.12.3: the record has the time of the commit
    assert find_step(folder) == folder / "3" and Checkpointer(folder).steps() == [3]


@pytest.mark.parametrize("has_time", [False, True])
def test_an_uncommitted_step_is_no_step_for_any_reader_and_is_never_removed(has_time, tmp_path):
    """The process died before or after it wrote the time of the commit, while Orbax was saving in place."""
    folder = tmp_path / "steps"
    with Checkpointer(folder, keep=1) as checkpointer:
        checkpointer.save(3, STATE, {"finite": True})
        checkpointer.wait()
        path = folder / "5"
        save(folder, Mode.COMMIT_FILE, 5)
        (path / DONE).unlink()
        if not has_time:
            record = json.loads((path / RECORD).read_text())
            (path / RECORD).write_text(json.dumps(record | {"commit_timestamp_nsecs": None}))
        before = sorted(one.name for one in path.iterdir())
        assert checkpointer.steps() == [3] and checkpointer.latest_step() == checkpointer.newest_finite_step() == 3
        assert find_steps(folder) == [folder / "3"] and find_step(folder) == folder / "3"
        assert find_valid(folder) == (folder / "3", {})
        with pytest.raises(ConfigError, match=r"contains no checkpoint of step 5; its steps: \[3\]"):
            checkpointer.verify(5)
        with pytest.raises(ConfigError, match="has no step 5; it has 3"):
            find_valid(folder, 5)
        found = _list(str(folder), verify=True).data
        assert [step["name"] for step in found["checkpoints"]] == ["3"] and found["leftovers"] == ["5"]
        assert [step["name"] for step in _verify(str(folder), None).data["checkpoints"]] == ["3"]
        np.testing.assert_array_equal(checkpointer.restore(STATE)["a"], STATE["a"])
        problem = f"{folder} already contains 5, which is not a committed checkpoint; nothing was overwritten"
        with pytest.raises(ConfigError, match=re.escape(problem)):
            checkpointer.save(5, STATE)
        checkpointer.save(4, STATE, {"finite": True})
        checkpointer.wait()
        assert checkpointer.steps() == [4]  # 5 does not count as the one to keep
    assert sorted(one.name for one in path.iterdir()) == before


def test_older_steps_without_the_file_remain_steps_where_orbax_wrote_it_later(tmp_path):
    """Orbax before 0.12.3 wrote step 3, a newer one step 5."""
    save(tmp_path, Mode.ATOMIC_RENAME, 3, 5)
    (tmp_path / "3" / DONE).unlink()
    assert Checkpointer(tmp_path).steps() == [3, 5] == [int(step.name) for step in find_steps(tmp_path)]


def test_files_and_empty_folders_with_a_number_as_name_are_no_steps(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "5").write_text("")
    assert Checkpointer(tmp_path).steps() == [] and Checkpointer(tmp_path).latest_step() is None
    with pytest.raises(ConfigError, match="contains no checkpoint;"):
        find_steps(tmp_path)


def test_a_step_of_which_any_part_is_left_is_damaged_rather_than_absent(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, STATE)
    for name in (DONE, "checksums.json", RECORD):
        (tmp_path / "3" / name).unlink()
        assert Checkpointer(tmp_path).steps() == [3]
    with pytest.raises(CheckpointCorruptedError, match=r"checksums\.json is missing"):
        Checkpointer(tmp_path).latest_step()
