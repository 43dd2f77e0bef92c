"""What flax_mesh adds to Orbax. The one file that imports it at its head, and that nobody imports at theirs.

Three things differ from what Orbax does by itself: a leaf is a `ShardedArray`, which need not be an array over devices;
a step gets its checksums before it is committed; and processes meet where `meet` says. Orbax's own barriers know of no
failure: those who wait in one for a process that could not write would wait for many minutes.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from flax_mesh.checkpoint.checksums import find_damage, write_checksums, write_part
from flax_mesh.checkpoint.layout import ShardedArray
from flax_mesh.errors import CheckpointCorruptedError
from flax_mesh.tree import named_leaves, nest

STATE, METADATA = "state", "metadata"  # the two items of a step
PART = "checksums.process_{}.json"  # of the files that one process of several has written; gone in the end
STEP_FILES = 10  # more than Orbax writes beside the two items
# Tensorstore raises ValueError for most of what goes wrong with files, Orbax RuntimeError and TimeoutError.
STORAGE_ERRORS = (OSError, RuntimeError, TypeError, ValueError)


class _Step(ocp.CompositeCheckpointHandler):
    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        step = Path(directory)
        write_checksums(step, step.glob(PART.format("*")))


@ocp.args.register_with_handler(_Step, for_save=True, for_restore=True)
class _StepArgs(ocp.args.Composite):
    pass


class _State(ocp.PyTreeCheckpointHandler):
    """Writes nothing before `meet("folders")`: process 0 has made them by then."""

    def __init__(self, meet: Callable[[str], None], **options: Any):
        super().__init__(**options)
        self._meet = meet

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        self._meet("folders")
        self._folder = Path(directory)
        return await super().async_save(directory, *args, **kwargs)

    def write_part(self) -> None:
        """Checksums of what this process has written: process 0 need not read it all."""
        process = jax.process_index()
        write_part(self._folder.parent / PART.format(process), self._folder, f"ocdbt.process_{process}", STATE)


@ocp.args.register_with_handler(_State, for_save=True, for_restore=True)  # both must be there
class _StateArgs(ocp.args.PyTreeSave):
    pass


class Storage:
    """Steps written and read by Orbax; each is one ordinary checkpoint of Orbax, of an item "state" and one of JSON.

    `host_bytes`: how much of the state may be on the host at a time; None for no limit. Orbax goes array by array, and
    has one lot on the host while the next one comes: each gets half. `meet(phase)` returns once all processes have come
    to the end of a phase: "folders" in the thread that saves; "files", then "commit" in the background, of several.
    """

    def __init__(self, *, compress: bool, host_bytes: int | None, meet: Callable[[str], None]):
        def files_written() -> None:
            state.write_part()
            meet("files")

        # Each process alone, in Orbax's eyes: it has no barriers then but the two that it asks `barrier_sync_fn` for.
        together = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={jax.process_index()})
        in_background = ocp.options.AsyncOptions(
            barrier_sync_fn=lambda key, timeout_ms: (
                files_written() if "async_write_complete" in key else meet("commit")
            ),
            # Where a folder cannot be made in the background, threads that wait for it keep the process for minutes.
            create_directories_asynchronously=False,
        )
        state = _State(
            meet,
            use_compression=compress,
            save_device_host_concurrent_gb=None if host_bytes is None else host_bytes / 2e9,  # pyright: ignore
            type_handler_registry=_type_handlers(in_turn=host_bytes is not None),
            multiprocessing_options=together,
        )
        metadata = ocp.JsonCheckpointHandler(multiprocessing_options=together)
        self._orbax = ocp.AsyncCheckpointer(
            _Step(
                composite_options=ocp.CompositeOptions(multiprocessing_options=together, async_options=in_background),
                state=state,
                metadata=metadata,
            ),
            multiprocessing_options=together,
            async_options=in_background,
        )

    def save(self, step: Path, arrays: Any, metadata: dict[str, Any]) -> None:
        """Start to write; returns once what is in memory may change."""
        args = {STATE: _StateArgs(nest(arrays)), METADATA: ocp.args.JsonSave(metadata)}
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
    return dict(ocp.JsonCheckpointHandler().restore(_path(step / METADATA)))


def stored_arrays(step: Path) -> dict[str, Any]:
    """path on disk -> shape and dtype; reads no array. CheckpointCorruptedError where a file it reads is damaged."""
    # Orbax asks for all arrays at once, and of a damaged index every answer but the first ends in a traceback.
    if problems := find_damage(step, _is_index):
        found = [f"  {problem}" for problem in problems]
        raise CheckpointCorruptedError(
            [f"{step}: its tree cannot be read:", *found, "flax-mesh checkpoint verify tells what else is damaged"]
        )
    return dict(named_leaves(ocp.PyTreeCheckpointHandler().metadata(_path(step / STATE)).tree))


def _is_index(name: str) -> bool:
    return name.startswith(f"{STATE}/") and not name.startswith(f"{STATE}/ocdbt.process_")


def read_arrays(step: Path, target: dict[str, Any]) -> dict[str, Any]:
    """path on disk -> array, of the paths in `target`, laid out and cast as it says."""
    item = nest(target.items())
    args = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    return dict(named_leaves(ocp.PyTreeCheckpointHandler().restore(_path(step / STATE), args=args)))


def _path(path: Path) -> Any:
    return path  # Orbax asks for a class of its own, and takes this


def deferred() -> Any:
    """A callback for Orbax by which arrays are brought to the host in turn, as `save_device_host_concurrent_gb` allows.

    Orbax limits only the arrays that it is told to defer, and does nothing with its own `is_prioritized_key_fn`. It has
    no public name for this: the one private name of Orbax in flax_mesh (tested with 0.12.8). Where it has moved, saving
    with `host_bytes` is an ImportError; saving without, and all reading, goes on.
    """
    from orbax.checkpoint._src.serialization import types

    class Deferred(types.DefaultSerializationStatusCallback):
        def key_priority(self, *_: Any, **__: Any) -> types.TransferPriority:
            return types.TransferPriority.ASYNCHRONOUS_DEPRIORITIZED

    return Deferred()


def _type_handlers(*, in_turn: bool) -> Any:
    handlers = ocp.type_handlers
    # Each part is written by one device only: a `ShardedArray` knows no others.
    arrays = handlers.ArrayHandler(use_replica_parallel=False, callback=deferred() if in_turn else None)
    kinds = [
        (kind, arrays if kind is jax.Array else handlers.get_type_handler(kind)) for kind in handlers.supported_types()
    ]
    return handlers.create_type_handler_registry(*kinds, (ShardedArray, arrays))
