"""Checkpointer: checkpoints that any layout restores, written atomically and verified before they are read.

On disk every parameter is stored under its global path, one array per layer, for any mesh and whether the layers were
a list, one scanned stack or the stages of a pipeline: "model/layers/3/attention/q/kernel". Plain Orbax reads them.
"""

import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import jax
from flax import nnx

from flax_mesh.checkpoint.base import (
    BASE,
    Base,
    fingerprints,
    frozen_arrays,
    frozen_on_disk,
    make_base,
    read_arrays,
    read_base,
    stored_arrays,
)
from flax_mesh.checkpoint.checksums import find_damage, read_metadata
from flax_mesh.checkpoint.find import (
    LAST_STEP,
    check_path,
    check_whole,
    committed_steps,
    damage_lines,
    find_valid,
    newest_valid,
    step_number,
)
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.hf.kept import is_huggingface
from flax_mesh.checkpoint.layout import (
    Reader,
    Target,
    arrays_on_disk,
    check_same,
    from_disk,
    paths_on_disk,
    read_scaled,
    to_disk,
    with_numbers,
)
from flax_mesh.checkpoint.retention import RetentionPolicy, newest_finite_step, retained_steps
from flax_mesh.checkpoint.stacks import check_stacks_are_named, layers_of, tree_of, with_leaves
from flax_mesh.checkpoint.warm_start import RestoreReport, restore_partial
from flax_mesh.checkpoint.writer import Writer
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, SaveError
from flax_mesh.fields import check_types
from flax_mesh.processes.agree import decide_at_process_0
from flax_mesh.step.state import TrainState, TreeDefinition
from flax_mesh.store import StorePath, model_folder, stored_path
from flax_mesh.text import count_text, paths_text, shown
from flax_mesh.tree import Constant, PyTree, Shaped, named_leaves

Tree = TypeVar("Tree")
REPAIR = "Restore it into the model it was saved from, or start another run (another folder, or --restart)."


class Checkpointer:
    """Saves states to a folder, one checkpoint per step, and restores them into any other layout.

    A checkpoint does not depend on the mesh or on the form of the layers: a list, one scanned stack, the stages of a
    pipeline. Its name appears once all of it is written, and `restore` first compares every byte with its checksum.
    Every process writes only its shards. Reading never changes the folder; saving first removes the leftovers of
    interrupted saves and quarantines checkpoints that were found damaged.

    Use it as a context manager. Saves run in the background: one is durable after `wait`, `close` or the end of the
    block, which raise SaveError if it failed.

    Args:
        folder: Where the checkpoints are stored, one sub-folder per step. The first save creates it. An address such as
            s3://bucket/run or gs://bucket/run is a folder in a store.
        keep: Which checkpoints to retain: a RetentionPolicy, or the number of the newest ones. Default: 3. The newest
            one with finite numbers is always retained; `metadata` decides this ("finite", or the losses in "metrics").
        layers: Paths of layer lists (`PartitionRules.layers`): scanned stacks there are saved layer by layer. Default:
            the paths of a TrainState's model (`@partitioned(layers=...)`), none for other trees.
        best_metric: The metric by which `RetentionPolicy.best` ranks, a key of `metadata["metrics"]`; lower is better.
        host_bytes: None: `save` returns once this process's shards are copied to the host, all of them at a time. A
            number: `save` returns once everything is written, with at most this many bytes on the host, or two of the
            largest arrays.
        compress: Compress with zstd, as Orbax does by default. False makes saves faster and larger.
        before_commit: Called in process 0 for each step, after its files are written and before it appears under its
            name. If it raises an OSError or a ConfigError, the save fails in all processes. Default: None.

    Raises:
        ConfigError: Orbax would take `folder` for a pattern, or it is a file or a broken link.

    Example:
        >>> from flax_mesh.checkpoint import Checkpointer
        >>> from flax_mesh.models import DecoderConfig, make_decoder
        >>> make = lambda: make_decoder(DecoderConfig(), nnx.Rngs(0))
        >>> fsdp = fm.abstract_state(make, fm.create_mesh((8,), ("fsdp",)))
        >>> tp = fm.abstract_state(make, fm.create_mesh((2, 4), ("fsdp", "tp")))
        >>> with Checkpointer("checkpoints") as checkpointer:
        ...     checkpointer.save(1, fm.init_state(make, fsdp))
        ...     restored = checkpointer.restore(tp)
        >>> restored["layers"][0]["mlp"]["up"]["kernel"].sharding.spec
        P('fsdp', 'tp')
    """

    @check_types
    def __init__(
        self,
        folder: str | Path,
        *,
        keep: RetentionPolicy | int | None = 3,
        layers: str | Iterable[str] | None = None,
        best_metric: str = "eval_loss",
        host_bytes: int | None = None,
        compress: bool = True,
        before_commit: Callable[[], None] | None = None,
    ):
        self.folder = stored_path(folder).absolute()
        check_path(self.folder)
        if not isinstance(self.folder, StorePath) and os.path.lexists(self.folder) and not self.folder.is_dir():
            kind = "a broken link" if self.folder.is_symlink() else "a file"
            raise ConfigError(
                f"{self.folder} must be a folder, found {kind}; rename or remove it, or use another folder"
            )
        self.layers = (layers,) if isinstance(layers, str) else None if layers is None else tuple(layers)
        self.keep = keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(keep)
        self.best_metric, self.host_bytes, self.compress = best_metric, host_bytes, compress
        self.base: Base | None = None  # where the arrays are that saves leave out; see `load_base`
        self._in_base: dict[str, int] = {}  # path -> fingerprint of the parameters that may be left out
        self.damaged: dict[int, list[str]] = {}  # step -> problems that `latest_step` found
        self._checked: TreeDefinition | None = None  # the definition of the last TrainState that was saved
        retained = lambda: retained_steps(self.folder, self.keep, self.best_metric)  # noqa: E731
        self._writer = Writer(self.folder, retained, before_commit, host_bytes=host_bytes, compress=compress)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the exception that ended the block must reach the caller

    def steps(self) -> list[int]:
        """Committed steps, oldest first, damaged ones included."""
        return committed_steps(self.folder)

    def latest_step(self) -> int | None:
        """The newest valid step, or None if the folder contains no checkpoint; compares every byte with its checksum.

        Newer damaged steps are then listed in `damaged`, and the next save quarantines them. Raises
        CheckpointCorruptedError if the folder contains checkpoints and all of them are damaged, and UnreadableError if
        the system refuses to read one: that is not damage, and it may be the newest valid one.
        """
        newest, damaged = newest_valid(lambda: [self._path(step) for step in self.steps()])
        self.damaged = {step_number(path): problems for path, problems in damaged.items()}
        if newest is None and damaged:
            raise CheckpointCorruptedError(
                [
                    f"{self.folder} contains {count_text(len(damaged), 'checkpoint')}, and none is valid:",
                    *(f"  {line}" for line in damage_lines(damaged)),
                    "  Restore one from a backup, or start a new run (another folder, or --restart).",
                ]
            )
        return None if newest is None else step_number(newest)

    def newest_finite_step(self) -> int | None:
        """The newest step with finite numbers according to its metadata; reads no array, and verifies nothing."""
        return newest_finite_step(self.folder)

    def verify(self, step: int) -> list[str]:
        """Problems of the files of a step, one line each, after reading all of them; empty for a valid checkpoint.

        Raises UnreadableError if the system refuses to read a file, which is not damage.
        """
        return find_damage(self._step(step))

    def save(self, step: int, state: PyTree, metadata: Mapping[str, object] | None = None) -> None:
        """Save `state` as the checkpoint of `step`, in the background unless `host_bytes` is set.

        When this returns, the arrays of `state` may be donated.

        Args:
            step: Number of the checkpoint, an integer from 0 to 10**18 - 1. It must not exist in the folder, unless it
                was found damaged.
            state: A TrainState, an nnx.State or another tree of arrays, random keys and numbers of Python.
            metadata: Stored as JSON beside the arrays. Default: {}.

        Raises:
            SaveError: This save failed, or the one before it.
            ConfigError: The step exists already or is out of its limits, a leaf cannot be stored (such as text),
                two arrays have the same name on disk, or `layers` does not name a stack of layers. A stack is
                recognized in a TrainState and in a pipeline only.
        """
        self.wait()
        step = _checked(step)
        definition = state.definition if isinstance(state, TrainState) else None
        if definition is None or definition is not self._checked:
            check_stacks_are_named(state, layers_of(state, self.layers))
            self._checked = definition
        named, stacks = paths_on_disk(tree_of(state), layers_of(state, self.layers))
        if abstract := [path for path, x in named if isinstance(x, jax.ShapeDtypeStruct)]:
            raise ConfigError(f"save requires arrays, but these are abstract: {paths_text(abstract)}")
        record = {key: value for key, value in (metadata or {}).items() if key != BASE}
        if isinstance(state, TrainState) and self.base is not None:
            base = self.base.restricted(frozen_on_disk(state, self.layers, without=self._changed(state)))
            named = [(path, x) for path, x in named if not all(p in base.arrays for p in stacks.get(path, [path]))]
            record[BASE] = base._asdict()
        self._writer.begin(step, self.damaged)
        self.damaged = {}
        self._writer.write(step, to_disk(named, stacks, on_host=self.host_bytes is None), record)
        if self.host_bytes is not None:
            self.wait()

    def wait(self) -> None:
        """Return once the save in progress is durable and old checkpoints are being deleted; SaveError if it failed."""
        self._writer.wait()

    def close(self) -> None:
        """`wait`, then end the background threads."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def clear_leftovers(self) -> None:
        """Remove the leftovers of interrupted saves and deletions, as the first save does. No save may be running."""
        self._writer.clear_leftovers()

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata of a step, as given to `save`."""
        return read_metadata(self._step(step))

    def arrays(self, step: int) -> dict[str, Shaped]:
        """Shape and dtype of every array of a step, by path on disk; reads no array."""
        return stored_arrays(self._step(step))

    def check(self, abstract: PyTree, step: int, *, include: str = "", cast: bool = False) -> Target:
        """Raise the ConfigError that `restore` would raise for another model, without reading an array.

        Returns shape, dtype and sharding of every array to restore, by path on disk.
        """
        stored = self.arrays(step)
        target = arrays_on_disk(abstract, self.layers, stored)
        stored = {path: leaf for path, leaf in stored.items() if re.match(include, path)}
        check_same(target, stored, f"checkpoint {self._step(step)}", cast=cast, repair=REPAIR)
        return target

    def restore(
        self,
        abstract: Tree,
        step: int | None = None,
        *,
        include: str = "",
        cast: bool = False,
        verify: bool = True,
        scaled: Mapping[str, tuple[str, float]] | None = None,
    ) -> Tree:
        """Restore a checkpoint in the layout of `abstract`, whatever layout it was saved in.

        Waits for a save in progress first.

        Args:
            abstract: A TrainState or another tree, of ShapeDtypeStructs with shardings or of arrays.
            step: The step to restore. Default: the newest valid one.
            include: Regular expression; only paths that start with a match are compared and restored, as in
                `restore({"model": abstract["model"]}, include="model/")`.
            cast: Whether float arrays of another dtype are cast to the dtype in `abstract`.
            verify: Whether to compare all files with their checksums first.
            scaled: Path on disk -> (another path on disk, factor): the product of that array and the factor is restored
                there instead, such as the moving average of a parameter.

        Returns:
            A tree of the same structure as `abstract`, of arrays with its shapes, dtypes and shardings.

        Raises:
            ConfigError: The checkpoint does not exist, or does not match `abstract`: the error lists every path that
                is missing, left over, or of another shape or dtype.
            CheckpointCorruptedError: A file is damaged, of `step` or of all checkpoints.
            SaveError: The save in progress failed.
        """
        self.wait()
        step = self._valid_step(step, verify)
        target = self.check(abstract, step, include=include, cast=cast)
        layers = layers_of(abstract, self.layers, target)
        read = self._reader(step, target)
        if scaled:
            read = partial(read_scaled, scaled, self.arrays(step), target, partial(self._reader, step))
        tree = tree_of(abstract)
        restored = with_leaves(abstract, with_numbers(from_disk(read, *paths_on_disk(tree, layers)), tree))
        if isinstance(abstract, TrainState):
            self.set_base(read_base(self._step(step)), restored)
        return restored

    def restore_partial(
        self, state: Tree, step: int | None = None, *, include: str = "", cast: bool = True, verify: bool = True
    ) -> tuple[Tree, RestoreReport]:
        """Restore the arrays that the checkpoint has in the shape of `state`: a warm start from a similar model.

        Other leaves keep their values; the report lists them. Arguments are as in `restore`, with `include` applied to
        the paths of both; with `cast=False` a leaf of another dtype keeps its value. A scanned stack is restored with
        all its layers or not at all. Raises ConfigError if no array matches.
        """
        self.wait()
        step = self._valid_step(step, verify)
        stored = self.arrays(step)
        tree = tree_of(state)
        named, stacks = paths_on_disk(tree, layers_of(state, self.layers, stored))
        leaves, report = restore_partial(named, stored, partial(self._reader, step), stacks, include, cast)
        return with_leaves(state, with_numbers(leaves, tree)), report

    def load_base(self, folder: str | Path, state: TrainState) -> tuple[TrainState, RestoreReport]:
        """Load the parameters of `folder` as `restore_partial` does; then save only arrays that training changes.

        The checkpoints leave out the parameters that were loaded and that the optimizer does not train (`wrt`), such
        as the frozen weights of `flax_mesh.lora`. They contain the path of `folder` and the checksums of its files, and
        read these parameters there: `folder` must stay as it is. A parameter that a call of the model has assigned
        since is saved. After `restore` of a TrainState, saves continue likewise.

        Args:
            folder: A Hugging Face folder or id of a decoder, or a folder of checkpoints, of which the newest valid one
                is loaded.
            state: The state whose parameters are replaced. Parameters not in `folder` keep their values, and are saved.

        Raises:
            ConfigError: `folder` contains neither, or no parameter of the model.
        """
        step = None if is_huggingface(str(folder)) else find_valid(folder)[0]
        state, report = load_parameters(step or model_folder(folder), state, self.layers)
        self.set_base(make_base(step or folder, frozen_on_disk(state, self.layers, report.restored)), state)
        return state, report

    def set_base(self, base: Base | None, state: TrainState) -> None:
        """Leave out the arrays of `base` from the next saves while they are as in `state`, which was read there."""
        self.base, self._in_base = base, {} if base is None else fingerprints(frozen_arrays(state))

    def _changed(self, state: TrainState) -> list[str]:
        """The paths of frozen parameters that are not as in the base: a call of the model may assign them."""
        now = fingerprints(frozen_arrays(state))
        changed = json.dumps([path for path, number in now.items() if self._in_base.get(path) != number])
        together = lambda texts: json.dumps(sorted({path for text in texts for path in json.loads(text)}))  # noqa: E731
        return json.loads(decide_at_process_0("changed since the base", changed, together))

    def _valid_step(self, step: int | None, verify: bool) -> int:
        if step is None:
            step = self.latest_step() if verify else max(self.steps(), default=None)
            if step is None:
                raise ConfigError(f"{self.folder} contains no checkpoint.")
        elif verify:
            check_whole(self._step(step))
        return step

    def _reader(self, step: int, target: Target) -> Reader:
        return lambda paths: read_arrays(self._step(step), {path: target[path] for path in paths}) if paths else {}

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    def _step(self, step: int) -> Path:
        step = _checked(step)
        if step not in (steps := self.steps()):
            raise ConfigError(f"{self.folder} contains no checkpoint of step {step}; its steps: {steps or 'none'}.")
        return self._path(step)


def load_parameters(folder: Path, state: TrainState, layers: Sequence[str] | None) -> tuple[TrainState, RestoreReport]:
    """`state` with the parameters of a step, which was verified, or of a Hugging Face folder, and its report."""
    if not is_huggingface(str(folder)):
        with Checkpointer(folder.parent, layers=layers) as checkpointer:
            return checkpointer.restore_partial(state, step_number(folder), include="model/", verify=False)
    tree = state.to_nnx()
    others, weights = nnx.split_state(tree["model"], (nnx.LoRAParam, Constant), ...)
    model = open_decoder(folder).load(weights)
    state = state.with_state(nnx.State({**tree.raw_mapping, "model": nnx.merge_state(model, others)}))
    loaded = {f"model/{path}" for path, _ in named_leaves(model)}
    named, stacks = paths_on_disk(tree_of(state), layers_of(state, layers))
    restored = tuple(part for path, _ in named if path in loaded for part in stacks.get(path, [path]))
    return state, RestoreReport(restored, {}, ())


def _checked(step: SupportsIndex) -> int:
    """`step` as an int. ConfigError for anything else, since the text of a step is the name of a folder."""
    with suppress(TypeError):
        if not isinstance(step, bool) and 0 <= operator.index(step) <= LAST_STEP:
            return operator.index(step)
    raise ConfigError(f"a step must be an integer from 0 to {LAST_STEP}, got {shown(step)}")
