"""Checkpointer: checkpoints of one layout-free state that is written atomically and read only if it is whole.

On disk every parameter stands under its own global path, one array a layer, whatever the mesh and whether the layers
were a list, one scanned stack or the stages of a pipeline: "model/layers/3/attention/q/kernel". Plain Orbax reads it.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax

from flax_mesh.checkpoint.checksums import find_damage
from flax_mesh.checkpoint.find import STEP, check_path, find_leftovers
from flax_mesh.checkpoint.layout import check_same, disk_target, from_disk, stacked_paths, to_disk
from flax_mesh.checkpoint.retention import RetentionPolicy
from flax_mesh.checkpoint.stacks import check_stacks_are_named
from flax_mesh.checkpoint.warm_start import RestoreReport, restore_partial
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, PeerError, SaveError
from flax_mesh.processes.agree import Phases
from flax_mesh.step.state import TrainState
from flax_mesh.text import count_text
from flax_mesh.tree import named_leaves

Tree = TypeVar("Tree")
# Of a save; "folders", "files" and "commit" are what the storage tells of.
PHASES = ("begin", "folders", "start", "files", "commit", "clear")
METRICS = "metrics"  # in the metadata of a step: name -> number
REPAIR = "Restore it into the model it was saved from, or start another run (another folder, or --restart)."


class Checkpointer:
    """Checkpoints below `folder`, one a step. Reading changes nothing there; saving clears leftovers away first.

    `layers` are the paths of layer lists (`PartitionRules.layers`): scanned stacks there are saved layer by layer. By
    default those in the table of a TrainState's model (`@partitioned(layers=...)`), and none for other trees.
    `keep` decides which checkpoints stay, also by the metric `best_metric`; an int is `RetentionPolicy(newest=...)`.

    `host_bytes=None` saves in the background: `save` returns once this process's shards are copied to the host, one
    copy of them. A number saves before `save` returns, with at most so many bytes on the host at a time, or two of the
    largest arrays. `compress`: with zstd, as Orbax does by default; without it saves are faster and larger.

    Use it as a context manager: a save is durable only once `wait` or the end of the block has been passed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: RetentionPolicy | int | None = 3,
        layers: str | Iterable[str] | None = None,
        best_metric: str = "eval_loss",
        host_bytes: int | None = None,
        compress: bool = True,
    ):
        self.folder = Path(folder).absolute()
        check_path(self.folder)
        self.layers = (layers,) if isinstance(layers, str) else None if layers is None else tuple(layers)
        self.keep = keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(keep)
        self.best_metric, self.host_bytes, self.compress = best_metric, host_bytes, compress
        self.damaged: dict[int, list[str]] = {}  # step -> what `latest_step` found wrong with it
        self._storage: Any = None  # for writing; made by the first save, and by the first after one that failed
        self._is_tidy = False  # whether leftovers are cleared away for the storage at hand
        self._checked: Any = None  # the definition of the TrainState that was saved last
        self._inode: int | None = None  # of the folder that the first save found or made
        self._saving: int | None = None  # the step on its way
        self._phases: Any = None  # of the last save
        self._deleting: threading.Thread | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what ended the block is what the caller must see

    def steps(self) -> list[int]:
        """Committed steps, whole or damaged; oldest first."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(name) for name in names if STEP.fullmatch(name))

    def latest_step(self) -> int | None:
        """The newest step whose files are whole, every byte compared with its checksum. None: there is none at all.

        Newer ones that are damaged stand in `damaged` afterwards, and the next save sets them aside. A
        CheckpointCorruptedError where there are checkpoints, and not one is whole.
        """
        self.damaged = {}
        for step in reversed(self.steps()):
            if problems := self.verify(step):
                self.damaged[step] = problems
            else:
                return step
        if self.damaged:
            each = [_damage_text(self._path(step), problems) for step, problems in self.damaged.items()]
            raise CheckpointCorruptedError(
                [
                    f"{self.folder} holds {count_text(len(self.damaged), 'checkpoint')}, and none is whole:",
                    *(f"  {line}" for lines in each for line in lines),
                    "  Bring one back from a copy, or start another run (another folder, or --restart).",
                ]
            )
        return None

    def verify(self, step: int) -> list[str]:
        """What is wrong with the files of a step, one line each; reads all of them. Empty: it is whole."""
        return find_damage(self._step(step))

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Start saving `state`, or save it (`host_bytes`); when this returns, its arrays may be donated.

        `state` is a TrainState, an nnx.State or another tree of arrays; `metadata` is JSON. A SaveError says what went
        wrong here, or with the save before. A step that exists is an error, and so is a stack of layers that `layers`
        does not name, where it can be told from other arrays.
        """
        self.wait()
        definition = state.definition if isinstance(state, TrainState) else None
        if definition is None or definition is not self._checked:
            check_stacks_are_named(state, _layers_of(state, self.layers))
            self._checked = definition
        self._phases = Phases("save", PHASES)
        if step in self.steps() and step not in self.damaged:
            problem = f"{self.folder} already holds a checkpoint of step {step}; nothing was overwritten."
            self._phases.failed(f"process {jax.process_index()}: {problem}")  # which the others may not see
            raise ConfigError(problem)
        with self._as_save_error(step):
            storage = self._open()
            self._phases.passed("begin")  # nobody writes there any more
            self._tidy()
            arrays = to_disk(_tree(state), _layers_of(state, self.layers), on_host=self.host_bytes is None)
            self._saving = step
            storage.save(self._path(step), arrays, dict(metadata))
            self._phases.passed("start")
        if self.host_bytes is not None:
            self.wait()

    def wait(self) -> None:
        """Return once every save is durable, and what `keep` leaves out on its way out; SaveError if one is not."""
        if self._saving is not None:
            with self._as_save_error(self._saving):
                self._storage.wait()
                if not self._phases.together:
                    self._meet("commit")
            self._saving = None

    def close(self) -> None:
        """As `wait`, and end the background threads."""
        try:
            self.wait()
        finally:
            if self._deleting is not None:
                self._deleting.join()
            if self._storage is not None:
                self._storage.close()
                self._storage = None

    def clear_leftovers(self) -> None:
        """Remove what interrupted saves and deletions have left, as the first save does; nobody may be saving here."""
        for path in find_leftovers(self.folder):
            shutil.rmtree(path, ignore_errors=True)

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the state."""
        from flax_mesh.checkpoint.orbax import read_metadata

        return read_metadata(self._step(step))

    def arrays(self, step: int) -> dict[str, Any]:
        """path on disk -> shape and dtype; reads no array."""
        from flax_mesh.checkpoint.orbax import stored_arrays

        return stored_arrays(self._step(step))

    def check(self, abstract: Any, step: int, *, include: str = "", cast: bool = False) -> dict[str, Any]:
        """Raise what `restore` would raise about another model; reads no array. path on disk -> what is restored."""
        target = arrays_on_disk(abstract, self.layers)
        stored = {path: leaf for path, leaf in self.arrays(step).items() if re.match(include, path)}
        check_same(target, stored, f"checkpoint {self._step(step)}", cast=cast, repair=REPAIR)
        return target

    def restore(
        self, abstract: Tree, step: int | None = None, *, include: str = "", cast: bool = False, verify: bool = True
    ) -> Tree:
        """The state of `step` (default: the newest whole one) laid out as `abstract` says, whatever layout it had.

        `abstract` is a TrainState or a tree, of ShapeDtypeStructs or arrays; what is restored is of the same kind.
        Raises one ConfigError that lists every path that is missing, left over, or of another shape or dtype.
        `include`: a regular expression; only paths that start with a match are looked at, as in
        `restore({"model": abstract["model"]}, include="model/")`. `cast`: float dtypes may differ, and become those of
        `abstract`. `verify=False` leaves the checksums out; otherwise damage is a CheckpointCorruptedError.
        """
        step = self._whole_step(step, verify)
        target = self.check(abstract, step, include=include, cast=cast)
        named = named_leaves(_tree(abstract))
        leaves = from_disk(self._reader(step, target), named, stacked_paths(named, _layers_of(abstract, self.layers)))
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def restore_partial(
        self, state: Tree, step: int | None = None, *, include: str = "", cast: bool = True, verify: bool = True
    ) -> tuple[Tree, RestoreReport]:
        """`state` with every leaf that the checkpoint holds in the same shape, and what was and was not filled.

        For a warm start from a model that is not quite the same. `include` as in `restore`, on the paths of both; a
        scanned stack is filled whole or not at all. Float dtypes become those of `state`; with `cast=False` a leaf of
        another dtype keeps its value.
        """
        step = self._whole_step(step, verify)
        named, layers = named_leaves(_tree(state)), _layers_of(state, self.layers)
        leaves, report = restore_partial(named, self.arrays(step), partial(self._reader, step), layers, include, cast)
        return jax.tree.unflatten(jax.tree.structure(state), leaves), report

    def _whole_step(self, step: int | None, verify: bool) -> int:
        if step is None:
            step = self.latest_step() if verify else max(self.steps(), default=None)
            if step is None:
                raise ConfigError(f"{self.folder} holds no checkpoint.")
        elif verify and (problems := self.verify(step)):
            raise CheckpointCorruptedError(_damage_text(self._step(step), problems))
        return step

    def _reader(self, step: int, target: Mapping[str, Any]) -> Any:
        from flax_mesh.checkpoint.orbax import read_arrays

        return lambda paths: read_arrays(self._step(step), {path: target[path] for path in paths}) if paths else {}

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    def _step(self, step: int) -> Path:
        if step not in (steps := self.steps()):
            raise ConfigError(f"{self.folder} holds no checkpoint of step {step}; it holds {steps or 'none'}.")
        return self._path(step)

    def _meet(self, phase: str) -> None:
        """Wait for all processes at the end of a phase, in the thread that has come to it."""
        if phase == "commit" and self._clears:
            self._check_folder()
            if self._saving not in self.steps():
                raise OSError("its folder is gone")
        self._phases.passed(phase)
        if phase == "commit":
            if self._clears:
                self._delete(sorted({*self.steps()} - self._staying()))
            self._phases.passed("clear")

    @contextmanager
    def _as_save_error(self, step: int) -> Iterator[None]:
        """Turn what storage libraries raise when they cannot write `step` into a SaveError of one line."""
        try:
            yield
        # Tensorstore raises ValueError for most of what goes wrong with files, Orbax RuntimeError and TimeoutError.
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            reason, self._saving = _reason(error), None
            if self._phases.together and not isinstance(error, PeerError):
                reason = f"process {jax.process_index()}: {reason}"
            self._phases.failed(reason)
            self._give_up()
            committed = self._phases.is_past("commit")
            what = f"the checkpoint of step {step} could not be saved"
            what = "checkpoints that are not to stay could not be removed" if committed else what
            left = [one for one in self.steps() if committed or one != step]
            newest = f"the newest there is of step {left[-1]}" if left else "there is none"
            raise SaveError(f"{what} in {self.folder}: {reason}; {newest}") from error

    @property
    def _clears(self) -> bool:
        """Whether this process renames and deletes: of several, process 0 alone."""
        return jax.process_index() == 0

    def _open(self) -> Any:
        from flax_mesh.checkpoint.orbax import Storage

        self._check_folder()
        if self._storage is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._inode = self.folder.stat().st_ino
            self._storage = Storage(compress=self.compress, host_bytes=self.host_bytes, meet=self._meet)
            self._is_tidy = False
        return self._storage

    def _check_folder(self) -> None:
        """Raise OSError where the folder is gone. One made anew, as by a save on its way, may be on another disk."""
        found = self.folder.stat().st_ino if self.folder.is_dir() else None
        if self._inode is not None and found != self._inode:
            raise OSError("the folder is gone")

    def _give_up(self) -> None:
        """Leave nothing of a save that failed: neither its errors nor, on a disk that may be full, its files."""
        if self._storage is not None:
            self._storage.abandon()
            self._storage = None
        for path in self.folder.glob("*.orbax-checkpoint-tmp*") if self._clears else ():
            shutil.rmtree(path, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove what earlier saves have left, and quarantine damaged steps under another name."""
        if self._clears and not self._is_tidy:
            if self._deleting is not None:
                self._deleting.join()
            self.clear_leftovers()
        self._is_tidy = True
        for step in self.damaged if self._clears else ():
            names = (f"{step}.damaged" + (f"-{i}" if i > 1 else "") for i in range(1, 10_000))
            os.rename(self._path(step), next(self.folder / name for name in names if not (self.folder / name).exists()))
        self.damaged = {}

    def _staying(self) -> set[int]:
        steps = self.steps()
        metrics = {}
        for step in steps if self.keep.best else ():
            try:
                value = self.metadata(step).get(METRICS, {}).get(self.best_metric)
            except (OSError, ValueError):  # damaged: it is no candidate for the best
                continue
            metrics |= {} if value is None else {step: float(value)}
        return self.keep.steps(steps, metrics)

    def _delete(self, steps: Iterable[int]) -> None:
        """Rename at once, so that no half of a checkpoint is ever seen, and delete in the background."""
        doomed = [self.folder / f"{step}.deleted" for step in steps]
        for path in doomed:
            os.rename(path.with_suffix(""), path)
        if self._deleting is not None:
            self._deleting.join()
        # What cannot be deleted is a leftover, which the next run tries again.
        self._deleting = threading.Thread(target=lambda: [shutil.rmtree(path, ignore_errors=True) for path in doomed])
        self._deleting.start()


def arrays_on_disk(state: Any, layers: Sequence[str] | None = None) -> dict[str, Any]:
    """path on disk -> shape, dtype and sharding of what a Checkpointer with these `layers` saves of `state`."""
    named = named_leaves(_tree(state))
    return disk_target(named, stacked_paths(named, _layers_of(state, layers)))


def _tree(state: Any) -> Any:
    return state.to_nnx() if isinstance(state, TrainState) else state


def _layers_of(state: Any, layers: Sequence[str] | None) -> Sequence[str]:
    """`layers`, or by default those of the table of the model, where it is known."""
    if layers is not None:
        return layers
    return state.definition.layers if isinstance(state, TrainState) else ()


def _reason(error: BaseException) -> str:
    """The text of an error in one line; of tensorstore's long ones, what the system reported."""
    text = " ".join(str(error).split()) or type(error).__name__
    if code := re.search(r"\[os_error_code='(\d+)'\]", text):
        return os.strerror(int(code[1]))
    return re.sub(r" \[\w+=.*", "", text)[:300]


def _damage_text(folder: Path, problems: list[str]) -> list[str]:
    return [f"checkpoint {folder} is damaged:", *(f"  {problem}" for problem in problems)]
