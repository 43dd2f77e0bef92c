"""Additions to Orbax. The only file that imports it at module level; other files import this one inside functions.

Three things differ from Orbax's defaults: a leaf is a `ShardedArray`, which need not be an array over devices; a step
gets its checksums before it is committed; and processes synchronize through `meet`. Orbax's barriers do not
propagate failures: if one process cannot write, the others would wait in a barrier for many minutes.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from flax_mesh.checkpoint.checksums import PART, find_damage, reading, write_checksums, write_number, write_part
from flax_mesh.checkpoint.layout import ShardedArray, Target
from flax_mesh.errors import CheckpointCorruptedError
from flax_mesh.jax_compat import deferred_callback
from flax_mesh.store import StorePath, context
from flax_mesh.tree import Shaped, in_batches, named_leaves, nest, num_bytes

STATE, METADATA = "state", "metadata"  # the two items of a step
# Bytes of arrays that are read from a store at a time. Compressed and decoded, they take up to twice as much memory.
_BATCH_BYTES = 2**29
# Parts of a file in a store that are at most a megabyte apart are read by one request, if they are asked for together.
_JOINED = {
    "experimental_read_coalescing_threshold_bytes": 2**20,
    "experimental_read_coalescing_merged_bytes": 2**26,
    "experimental_read_coalescing_interval": "1ms",
}
_STEP_FILES = 10  # upper bound on the files that Orbax writes beside the two items
# Tensorstore raises ValueError for most file errors, Orbax RuntimeError and TimeoutError.
_STORAGE_ERRORS = (OSError, RuntimeError, TypeError, ValueError)
Gather = Callable[[Path], Mapping[str, StorePath]]


class _Step(ocp.CompositeCheckpointHandler):
    def __init__(self, finish: Callable[[], None], **options: Any):
        super().__init__(**options)
        self._finish = finish

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        step = Path(directory)
        write_number(step)
        write_checksums(step, step.glob(PART.format("*")))
        self._finish()


@ocp.args.register_with_handler(_Step, for_save=True, for_restore=True)
class _StepArgs(ocp.args.Composite):
    pass


class _State(ocp.PyTreeCheckpointHandler):
    """Writes nothing before `meet("folders")`, when process 0 has created the folders. `gather` is as in Storage."""

    def __init__(self, meet: Callable[[str], None], gather: Gather | None, **options: Any):
        super().__init__(**options)
        self._meet, self._gather = meet, gather

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        self._meet("folders")
        self._folder = Path(directory)
        return await super().async_save(directory, *args, **kwargs)

    def write_part(self) -> None:
        """Write the checksums of the files of this process, so that process 0 need not read all files."""
        process = jax.process_index()
        if self._gather is not None:
            self._folder.mkdir(parents=True, exist_ok=True)  # of this process alone, which may have written nothing
        write_part(self._folder.parent / PART.format(process), self._folder, f"ocdbt.process_{process}", STATE)

    def finalize(self, directory: Any) -> None:
        state = Path(directory)
        if self._gather is None:
            super().finalize(directory)
        else:
            _merge(state, self._gather(state.parent))


@ocp.args.register_with_handler(_State, for_save=True, for_restore=True)  # Orbax requires both
class _StateArgs(ocp.args.PyTreeSave):
    pass


class Storage:
    """Writes steps with Orbax: each is an ordinary Orbax checkpoint with an item "state" and a JSON item "metadata".

    `host_bytes` limits the bytes of the state on the host at a time; None for no limit. Orbax copies the next arrays to
    the host while it writes the previous ones, so each of the two gets half. `meet(phase)` returns once all processes
    have reached the end of a phase: "folders" in the thread that saves; with several processes also "files" and
    "commit", in the background. `finish` is called in process 0 before the rename of a step. `file_bytes` limits the
    files of arrays, and the parts of arrays in them.

    `gather` is for several processes that write to a folder each: process 0 calls it with its folder of the step after
    "files". It fetches the checksums of the others, and returns where their files are, by their folder in "state".
    """

    def __init__(
        self,
        *,
        compress: bool,
        host_bytes: int | None,
        meet: Callable[[str], None],
        finish: Callable[[], None],
        file_bytes: int | None = None,
        gather: Gather | None = None,
    ):
        def files_written() -> None:
            state.write_part()
            meet("files")

        # For Orbax each process is the only one: its barriers are then the two that call `barrier_sync_fn`.
        together = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={jax.process_index()})
        in_background = ocp.options.AsyncOptions(
            barrier_sync_fn=lambda key, timeout_ms: (
                files_written() if "async_write_complete" in key else meet("commit")
            ),
            # If a folder cannot be created in the background, threads that wait for it run on for minutes.
            create_directories_asynchronously=False,
        )
        state = _State(
            meet,
            gather,
            use_compression=compress,
            save_device_host_concurrent_gb=None if host_bytes is None else host_bytes / 2e9,  # pyright: ignore
            type_handler_registry=_type_handlers(in_turn=host_bytes is not None),
            multiprocessing_options=together,
        )
        metadata = ocp.JsonCheckpointHandler(multiprocessing_options=together)
        self._file_bytes = file_bytes
        self._orbax = ocp.AsyncCheckpointer(
            _Step(
                finish,
                composite_options=ocp.CompositeOptions(multiprocessing_options=together, async_options=in_background),
                state=state,
                metadata=metadata,
            ),
            multiprocessing_options=together,
            async_options=in_background,
        )

    def save(self, step: Path, arrays: Iterable[tuple[str, object]], metadata: dict[str, object]) -> None:
        """Start writing; returns once the arrays in memory may change."""
        state = _StateArgs(nest(arrays), ocdbt_target_data_file_size=self._file_bytes)
        args = {STATE: state, METADATA: ocp.args.JsonSave(metadata)}
        self._orbax.save(step, args=_StepArgs(**args))

    def wait(self) -> None:
        self._orbax.wait_until_finished()

    def close(self) -> None:
        self._orbax.close()

    def abandon(self) -> None:
        """`close` after a failed save. Its error was reported already, and Orbax raises another one for every file."""
        for _ in range(_STEP_FILES):
            with contextlib.suppress(*_STORAGE_ERRORS):
                return self._orbax.close()


def _merge(state: Path, others: Mapping[str, StorePath]) -> None:
    """Write the index of all arrays to `state`, as Orbax does if the files of all processes are there.

    The files of the other processes are where they will be read, and only their indices are read now. To tensorstore
    they all are in one folder.
    """
    shared = tensorstore.Context(context())
    layers: list[object] = [{"base": {"driver": "file", "path": f"{state}/"}}]
    layers += [{"base": path.objects().spec().to_json(), "prefix": f"{name}/"} for name, path in others.items()]
    # As Orbax writes them: descriptions of arrays in the index, all of it in one node.
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}

    def opened(folder: str) -> Any:
        base = {"driver": "kvstack", "layers": layers, "path": folder}
        spec = {"driver": "ocdbt", "base": base, "config": config, "assume_config": True}
        return tensorstore.KvStore.open(spec, context=shared)

    merged, together = opened("").result(), tensorstore.Transaction(atomic=True)
    for name in [path.name for path in state.glob("ocdbt.process_*")]:
        opened(f"{name}/").result().experimental_copy_range_to(merged.with_transaction(together)).result()
    for name, path in others.items():
        index = path.ask(lambda: opened(f"{name}/"))  # noqa: B023 (it is called at once)
        path.ask(lambda: index.experimental_copy_range_to(merged.with_transaction(together)))  # noqa: B023
    together.commit_async().result()
    # An array without data would be restored as zeros.
    keys = [key.decode().rpartition("/") for key in merged.list().result()]
    if empty := {name for name, _, key in keys if key == ".zarray"} ^ {
        name for name, _, key in keys if key != ".zarray"
    }:
        raise OSError(f"the index of all processes lacks data of {min(empty)}")


def stored_arrays(step: Path) -> dict[str, Shaped]:
    """Shape and dtype by path on disk; reads no array. Raises CheckpointCorruptedError if the index is damaged."""
    # Orbax requests all arrays at once; with a damaged index it prints a traceback for every request but the first.
    if problems := find_damage(step, _is_index):
        lines = [f"  {problem}" for problem in problems]
        raise CheckpointCorruptedError(
            [f"{step}: its tree cannot be read:", *lines, "flax-mesh checkpoint verify reports all damage"]
        )
    with reading(step), _index(step) as state:
        return dict(named_leaves(ocp.PyTreeCheckpointHandler().metadata(_path(state)).tree))


@contextlib.contextmanager
def _index(step: Path) -> Iterator[Path]:
    """The item "state" with all that describes the arrays; of a step in a store, a copy on this machine."""
    if not isinstance(step, StorePath):
        yield step / STATE
        return
    with tempfile.TemporaryDirectory(prefix="flax_mesh-") as folder:
        for name in filter(_is_index, step.names()):
            (copy := Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((step / name).read_bytes())
        yield Path(folder) / STATE


def _is_index(name: str) -> bool:
    return name.startswith(f"{STATE}/") and not name.startswith(f"{STATE}/ocdbt.process_")


def read_arrays(step: Path, target: Target) -> dict[str, jax.Array]:
    """The arrays at the paths of `target`, with its shardings and dtypes."""
    if isinstance(step, StorePath):
        with reading(step):
            return dict(_read_objects(step, target))
    item = nest(target.items())
    args = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    with reading(step):
        return dict(named_leaves(ocp.PyTreeCheckpointHandler().restore(_path(step / STATE), args=args)))


def _read_objects(step: StorePath, target: Target) -> Iterator[tuple[str, jax.Array]]:
    """As `read_arrays`, of a step in a store, which Orbax cannot read; each process reads only its parts of arrays."""
    base, shared = (step / STATE).objects().spec().to_json(), tensorstore.Context(context())
    kvstore = {"driver": "ocdbt", "base": base, **_JOINED}
    for paths in in_batches(target, lambda path: num_bytes(target[path]), _BATCH_BYTES):
        specs = [{"driver": "zarr", "kvstore": {**kvstore, "path": f"{path.replace('/', '.')}/"}} for path in paths]
        opened = [tensorstore.open(spec, open=True, context=shared) for spec in specs]
        read = [_start(step.ask(lambda: array), target[path]) for path, array in zip(paths, opened, strict=True)]  # noqa: B023
        for path, parts in zip(paths, read, strict=True):
            dtype = target[path].dtype
            values = {where: step.ask(lambda: part).astype(dtype, copy=False) for where, part in parts.items()}  # noqa: B023
            yield path, _assembled(target[path], values)


def _start(array: tensorstore.TensorStore, leaf: jax.ShapeDtypeStruct) -> dict[str, tensorstore.Future[np.ndarray]]:
    """Start to read the parts of an array that are on devices of this process, by the text of their index."""
    if array.shape != leaf.shape:
        raise ValueError(f"an array of shape {array.shape} was found, expected {leaf.shape}")
    whole = (slice(None),) * len(leaf.shape)
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values() if leaf.sharding else [whole]
    return {where: array[index].read() for where, index in {str(index): index for index in indices}.items()}


def _assembled(leaf: jax.ShapeDtypeStruct, parts: dict[str, np.ndarray]) -> jax.Array:
    if leaf.sharding is None:  # as Orbax: an array of NumPy
        return next(iter(parts.values()))  # pyright: ignore[reportReturnType]
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: parts[str(index)], dtype=leaf.dtype)


def _path(path: Path) -> Any:
    return path  # annotated as a class of Orbax, which accepts any path


def _type_handlers(*, in_turn: bool) -> Any:
    handlers = ocp.type_handlers
    # Each part is written by one device: a `ShardedArray` contains no replicas.
    arrays = handlers.ArrayHandler(use_replica_parallel=False, callback=deferred_callback() if in_turn else None)
    kinds = [
        (kind, arrays if kind is jax.Array else handlers.get_type_handler(kind)) for kind in handlers.supported_types()
    ]
    return handlers.create_type_handler_registry(*kinds, (ShardedArray, arrays))
