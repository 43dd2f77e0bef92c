"""Which steps of Orbax are complete: renamed to their final name, or with commit_success.txt if saved in place."""

import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import options

from flax_mesh.checkpoint.find import find_step, find_steps
from flax_mesh.errors import ConfigError

Mode = options.AtomicityMode


class Copied(ocp.StandardCheckpointHandler):
    """Copies the folder of checkpoints before the step is committed."""

    def __init__(self, folder, copy):
        super().__init__()
        self.folder, self.copy = folder, copy

    def finalize(self, directory):
        super().finalize(directory)
        shutil.copytree(self.folder, self.copy)


@pytest.mark.parametrize("mode", [Mode.COMMIT_FILE, Mode.ATOMIC_RENAME, Mode.AUTO])
def test_a_step_of_orbax_is_found_once_it_is_committed(mode, tmp_path):
    folder, copy = tmp_path / "steps", tmp_path / "interrupted"
    settings = ocp.CheckpointManagerOptions(atomicity_options=options.AtomicityOptions(mode=mode))
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardSave, Copied(folder, copy))
    with ocp.CheckpointManager(folder, options=settings, handler_registry=handlers) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave({"a": np.ones(4)})))
    assert find_step(folder) == folder / "3"
    with pytest.raises(ConfigError, match=r"contains no checkpoint \(only 3.*, of a save in progress or interrupted"):
        find_steps(copy)
    (folder / "3" / "commit_success.txt").unlink()  # as of Orbax before 0.12.3: the record has the time of the commit
    assert find_step(folder) == folder / "3"
