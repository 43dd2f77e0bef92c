"""What flax_mesh adds to Orbax. The one file that imports it at its head, and that nobody imports at theirs.

Three things differ from what Orbax does by itself: leaves are `Pieces`, which need not be arrays over devices; a step
gets its checksums before it is committed; and processes meet through the coordination service alone, not in programs
on their devices, which would mix with those of a pipeline.
"""

import contextlib
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from flax_mesh.checkpoint.disk import Pieces
from flax_mesh.checkpoint.integrity import write_checksums
from flax_mesh.tree import named_leaves, nest

STATE, METADATA = "state", "metadata"  # the two items of a step
STEP_FILES = 10  # more than Orbax writes beside the two items
# Tensorstore raises ValueError for most of what goes wrong with files, Orbax RuntimeError and TimeoutError.
STORAGE_ERRORS = (OSError, RuntimeError, TypeError, ValueError)


class _Step(ocp.CompositeCheckpointHandler):
    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        write_checksums(Path(directory))


@ocp.args.register_with_handler(_Step, for_save=True, for_restore=True)
class _StepArgs(ocp.args.Composite):
    pass


class Storage:
    """Steps written and read by Orbax; each is one ordinary checkpoint of Orbax, of an item "state" and one of JSON.

    `host_bytes`: how much of the state may be on the host at a time; None for no limit.
    """

    def __init__(self, *, compress: bool, host_bytes: int | None):
        processes = None if jax.process_count() == 1 else set(range(jax.process_count()))
        together = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=processes)
        state = ocp.PyTreeCheckpointHandler(
            use_compression=compress,
            save_device_host_concurrent_gb=None if host_bytes is None else host_bytes / 1e9,  # pyright: ignore
            type_handler_registry=_type_handlers(),
            multiprocessing_options=together,
        )
        metadata = ocp.JsonCheckpointHandler(multiprocessing_options=together)
        self._orbax = ocp.AsyncCheckpointer(
            _Step(
                composite_options=ocp.CompositeOptions(multiprocessing_options=together), state=state, metadata=metadata
            ),
            multiprocessing_options=together,
            # Where a folder cannot be made in the background, threads that wait for it keep the process for minutes.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )

    def save(self, step: Path, arrays: Any, metadata: dict[str, Any]) -> None:
        """Start to write; returns once what is in memory may change."""
        args = {STATE: ocp.args.PyTreeSave(nest(arrays)), METADATA: ocp.args.JsonSave(metadata)}
        self._orbax.save(step, args=_StepArgs(**args))

    def wait(self) -> None:
        self._orbax.wait_until_finished()

    def close(self) -> None:
        self._orbax.close()

    def abandon(self) -> None:
        """As `close`, after a save that failed: its error has been told, and Orbax has one more for every file."""
        for _ in range(STEP_FILES):
            with contextlib.suppress(*STORAGE_ERRORS):
                return self._orbax.close()


def read_metadata(step: Path) -> dict[str, Any]:
    """What was saved beside the state."""
    return ocp.JsonCheckpointHandler().restore(step / METADATA)


def stored_arrays(step: Path) -> dict[str, Any]:
    """path on disk -> shape and dtype; reads no array."""
    return dict(named_leaves(ocp.PyTreeCheckpointHandler().metadata(step / STATE).tree))


def read_arrays(step: Path, target: dict[str, Any]) -> dict[str, Any]:
    """path on disk -> array, of the paths in `target`, laid out and cast as it says."""
    item = nest(target.items())
    args = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    return dict(named_leaves(ocp.PyTreeCheckpointHandler().restore(step / STATE, args=args)))


def _type_handlers() -> Any:
    handlers = ocp.type_handlers
    # Each part is written by one device only: `Pieces` know no others.
    arrays = handlers.ArrayHandler(use_replica_parallel=False)
    kinds = [
        (kind, arrays if kind is jax.Array else handlers.get_type_handler(kind)) for kind in handlers.supported_types()
    ]
    return handlers.create_type_handler_registry(*kinds, (Pieces, arrays))
