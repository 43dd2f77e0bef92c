"""Batches of a recipe's `make_batches`, checked against the first one; batches of arrays in memory.

Hashes of encoded rows, which a checkpoint keeps, show the differences between the rows of two runs.
"""

import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import PartitionAxis
from flax_mesh.data.batches import sample_rows
from flax_mesh.data.iterators import KEPT, METHODS, IteratorBatches, State, StreamBatches, decode, encode
from flax_mesh.data.rows.tokens import num_equal
from flax_mesh.data.streams.process_rows import global_shapes, of_processes, row_digests, state_of_shard
from flax_mesh.data.streams.rollouts import Rollouts
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.step.batch import ProcessRows, batch_sharding, on_device_dtypes, rows_problems, shapes_of
from flax_mesh.text import array_text, at_most, count_text
from flax_mesh.tree import PyTree, array_problem, path_of
from flax_mesh.user_code import joined, place_of, user_code

BYTES = 4  # of the hash of a row: enough to find the rows that changed, where `content` shows that some have


class RowHashes(NamedTuple):
    """SHA-256 of all rows, and a short hash of each of them in base64."""

    content: str
    each: str


def hash_rows(rows: Iterable[Sequence[np.ndarray]]) -> RowHashes:
    digests = [hashlib.sha256(b"".join(x.tobytes() for x in row)).digest() for row in rows]
    each = b"".join(digest[:BYTES] for digest in digests)
    return RowHashes(hashlib.sha256(b"".join(digests)).hexdigest(), base64.b64encode(each).decode())


def is_hashes(text: object) -> bool:
    """Whether a value from a file can be the `each` of RowHashes."""
    try:
        return isinstance(text, str) and len(base64.b64decode(text, validate=True)) % BYTES == 0
    except ValueError:
        return False


def _hashes(content: bytes) -> list[bytes]:
    return [content[i : i + BYTES] for i in range(0, len(content), BYTES)]


def row_changes(saved: str, now: str) -> tuple[str, list[str]]:
    """The number of rows before, and for each kind of change the number of rows now and of those that changed.

    >>> rows = [hash_rows([[np.arange(i)] for i in sizes]).each for sizes in ([1, 2, 3], [1, 5, 3, 4])]
    >>> row_changes(*rows)
    ('3 rows', ['4 rows, 1 changed, the first difference at row 2', '4 rows, 1 added, the first difference at row 2'])
    """
    old, new = (_hashes(base64.b64decode(text)) for text in (saved, now))
    first = num_equal(old, new) + 1
    gone, come = (Counter(a) - Counter(b) for a, b in ((old, new), (new, old)))
    changed = min(gone.total(), come.total())
    counts = {"changed": changed, "added": come.total() - changed, "removed": gone.total() - changed}
    texts = [f"{count} {kind}" for kind, count in counts.items() if count] or ["in another order"]
    size = count_text(len(new), "row")
    return count_text(len(old), "row"), [f"{size}, {text}, the first difference at row {first}" for text in texts]


class UserBatches:
    """step -> batch on the host. Every batch must have the tree, shapes and dtypes of batch 0.

    Calls `make_batches`; raises a ConfigError with the line of its code for an exception, and for an invalid batch.
    """

    def __init__(
        self, make: Callable[[], Any], rows: int, *, resumable: bool = True, own_rows: ProcessRows | None = None
    ):
        self.place, self.own_rows = place_of(make), own_rows
        with user_code("make_batches", self.place):
            batches = make()
        missing = [name for name in METHODS if not hasattr(batches, name)]
        if problem := _kind_problem(batches, missing, resumable):
            raise ConfigError(joined("make_batches", self.place, problem))
        self.rollouts = batches if isinstance(batches, Rollouts) else None
        self.iterator = None if missing else IteratorBatches(batches, self.place)
        stream = self.iterator if resumable else StreamBatches(batches, self.place)
        self._function, self._batch, self._stream, self._num_rows = batches, stream or self._call, stream, rows
        self._content_hash: str | None = None
        self._checksums: dict[int, list[str]] = {}  # of the newest batches: one, or with `own_rows` one for each row
        # The iterator of `read_preferences` knows the shapes: what it computes for a batch is left to the run.
        self.shapes = getattr(batches, "flax_mesh_shapes", None) or self._shapes_of(self.first)

    @cached_property
    def first(self) -> PyTree:
        """Batch 0, which is not consumed. It must be requested before any other batch is."""
        if self.rollouts is not None:
            first = self.rollouts.example
        else:
            first = self._stream.first(batch_problems) if self._stream else self._call(0)
        if problems := [*batch_problems(first), *_row_problems(first, self._num_rows, self.own_rows)]:
            raise ConfigError([joined("make_batches", self.place, problem) for problem in problems])
        return on_device_dtypes(first, "make_batches: batch 0")

    @cached_property
    def rows(self) -> RowHashes | None:
        """Of all rows, from which the iterator of `read_chats` draws its batches; None for others."""
        rows = getattr(self._function, "flax_mesh_rows", None)
        rows = rows() if callable(rows) else None
        return rows if isinstance(rows, RowHashes) else None

    @property
    def content_hash(self) -> str:
        """SHA-256 of all rows, if they are known, or of the first batch: paths, dtypes, shapes and values."""
        if self._content_hash is None:  # not a cached_property: Python 3.11 would hold its lock during the exchange
            self._content_hash = self._hash_content()
        return self._content_hash

    def _hash_content(self) -> str:
        if self.rows:
            return self.rows.content
        if self.own_rows is None:
            return _digest(hashlib.sha256(), self.first)
        digests = of_processes("make_batches: batch 0", self.own_rows, row_digests(self.first), [])["digests"]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    @property
    def description(self) -> str:
        """`make_batches of FILE, line N: 16 rows; images f32[16,8,8,1], labels i32[16]`."""
        arrays = [f"{path or 'one array'} {array_text(x)}" for path, x in _named(self.shapes)]
        kind = "make_batches" if self._batch == self._call else "iterator of make_batches"
        text = getattr(self._function, "description", "")  # of the iterator, such as one of `read_chats`
        return f"{kind}{self.place and ' of '}{self.place}: {', '.join(arrays)}{text and '; '}{text}"

    def __call__(self, step: int, *model: Callable[[], nnx.Module]) -> PyTree:
        """`model` for rollouts."""
        batch, what = self._batch(step, *model), f"make_batches: batch {step}"
        problems = batch_problems(batch) or self._differences(batch)
        if problems:
            raise ConfigError([joined(what, self.place, problem) for problem in problems])
        batch = on_device_dtypes(batch, what)
        self._checksums[step] = [_checksum(batch)] if self.own_rows is None else row_digests(batch)
        self._checksums = {at: value for at, value in self._checksums.items() if at > step - KEPT}
        return batch

    def record(self, step: int) -> dict[str, object]:
        """The record in the checkpoint of `step`: the rows, the last batch before it, and states of an iterator.

        With `own_rows`, every process calls it; the record has the checksums of all rows, and the states of all shards.
        """
        checksums = self._checksums.get(step - 1, [])  # empty until a step was computed
        states: list[State] = []
        if self.iterator is not None:
            states = [self.iterator.state(step), *([self.iterator.state(step - 1)] if checksums else [])]
        if self.rollouts is not None:
            return {**({"rows": self.rows.each} if self.rows else {}), "state": encode(self.rollouts.state(step))}
        if self.own_rows is not None:
            of_all = of_processes(f"make_batches: batch {step - 1}", self.own_rows, checksums, states)
            checksums = cast(list[str], of_all["digests"])
            states = [{"shards": list(each)} for each in zip(*cast(list[list[State]], of_all["states"]), strict=True)]
        record: dict[str, object] = {"rows": self.rows.each} if self.rows else {}
        if states:
            record["state"] = states[0]
        if checksums:
            before = {"state": states[1]} if states else {}
            record["last_batch"] = {"checksum": " ".join(checksums), **before}
        return record

    def resume(self, step: int, saved: Mapping[str, Any]) -> str:
        """Continue with the batch of `step`, from `record(step)`. Returns one line if the batch before it has changed.

        The batch before it is computed again. An iterator is set to the state before that batch, and the batch must
        lead to the next one: that an iterator returns a state that it was given does not show that it uses it.
        """
        state, last = state_of_shard(saved.get("state"), self.own_rows), saved.get("last_batch")
        if self.rollouts is not None:  # the parameters that made the batch before it are gone
            self.rollouts.resume(step, decode(state) if state else b"")
            return ""
        if self.iterator is not None and (last is None or "state" not in last):  # saved by a function, or before
            self.iterator.resume(step, state)
            return ""
        if last is None:
            return ""
        if self.iterator is not None:
            self.iterator.resume(step - 1, state_of_shard(last["state"], self.own_rows))
        self(step - 1)
        if self._checksums[step - 1] == self._of_own_rows(last["checksum"].split()):
            return ""
        if self.iterator is not None:
            self.iterator.resume(step, state)
        cause = "set_state does not restore all" if self.iterator else "it depends on more than the step"
        problem = f"batch {step - 1} differs from the one that the run used, so the data changed, or {cause}"
        return joined("make_batches", self.place, problem)

    def _of_own_rows(self, checksums: list[str]) -> list[str]:
        if self.own_rows is None or len(checksums) != self._num_rows:
            return checksums
        return [checksums[row] for row in self.own_rows.index]

    def _shapes_of(self, batch: PyTree) -> PyTree:
        """The shapes of the global batch."""
        return global_shapes(shapes_of(batch), self.own_rows, self._num_rows)

    def _call(self, step: int, *model: Callable[[], nnx.Module]) -> PyTree:
        with user_code(f"make_batches: batch {step}", self.place):
            return self._function(step, *model)

    def _differences(self, batch: PyTree) -> list[str]:
        """One line for every leaf that differs from batch 0, or one if the trees differ."""
        shapes, wanted = self._shapes_of(batch), self.shapes
        mine, first = dict(_named(shapes)), dict(_named(wanted))
        if jax.tree.structure(shapes) != jax.tree.structure(wanted):
            changed = [f"{path!r} is missing" for path in first if path not in mine]
            changed += [f"{path!r} is new" for path in mine if path not in first]
            return [f"its tree must be that of batch 0, but {', '.join(changed) or 'its containers differ'}"]
        return [
            f"{path!r} must be {array_text(first[path])} as in batch 0, got {array_text(x)}"
            for path, x in mine.items()
            if (x.shape, x.dtype) != (first[path].shape, first[path].dtype)
        ]


def _kind_problem(batches: object, missing: Sequence[str], resumable: bool) -> str:
    """Why `made`, which lacks the METHODS `missing`, does not have the batches of a run, "" if it has."""
    is_iterator, kind = "__next__" not in missing, type(batches).__name__
    if not missing or (callable(batches) and not is_iterator):
        needless = "its batches need no data.resumable=false; remove that, so that the run can be resumed"
        return "" if resumable else needless
    if is_iterator and not resumable:
        return ""
    has_no = f", which has no {' and no '.join(missing)}" if len(missing) < len(METHODS) else ""
    repair = ". Set data.resumable=false for a run that need not be resumed" if is_iterator else ""
    problem = "it must return a function of the step, or an iterator with get_state and set_state"
    return f"{problem}, got {kind}{has_no}{repair}"


@check_types
def array_batches(
    arrays: PyTree, *, batch_size: int, seed: int, rows: ProcessRows | None = None
) -> Callable[[int], PyTree]:
    """Batches of numpy arrays for `make_batches`: a function of the step, for every mesh and number of processes.

    An epoch visits every row once, in an order that depends on (seed, epoch) only. A batch may span two epochs.

    Args:
        arrays: A pytree of numpy arrays with equal numbers of rows, their first dim.
        batch_size: Rows of a batch, `config.data.batch_size`.
        seed: Seed of the order, such as `config.run.seed`.
        rows: The rows of each batch that this process makes, the second argument of `make_batches` with
            `data.rows=process`. None: all.

    Returns:
        step -> batch, a pytree like `arrays`.

    Raises:
        ConfigError: A leaf is not an array of numbers, the numbers of rows differ, or they are fewer than `batch_size`.

    Example:
        >>> from flax_mesh.train import array_batches
        >>> batch = array_batches({"x": np.arange(6), "y": np.arange(6) ** 2}, batch_size=3, seed=0)
        >>> sorted([*batch(0)["x"], *batch(1)["x"]]) == list(range(6))
        True
    """
    problems = batch_problems(arrays)
    size = 0 if problems else len(jax.tree.leaves(arrays)[0])
    if not problems and size < batch_size:
        problems.append(f"they have {count_text(size, 'row')}, but one batch has {batch_size} (data.batch_size)")
    if batch_size < 1:
        problems.append(f"batch_size must be at least 1, got {batch_size}")
    if problems:
        raise ConfigError([f"array_batches: {problem}" for problem in problems])

    numbers = np.arange(batch_size) if rows is None else rows.index

    def batch_fn(step: int) -> PyTree:
        index = sample_rows(step * batch_size + numbers, size, seed)
        return jax.tree.map(lambda x: x[index], arrays)

    return batch_fn


def abstract_batch(shapes: PyTree, mesh: Mesh | AbstractMesh, axes: PartitionAxis) -> PyTree:
    """`shapes` with the shardings of `put_batch`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(x.shape, mesh, axes)), shapes
    )


def batch_problems(batch: PyTree) -> list[str]:
    """One line for every leaf that is not an array of numbers with rows, and one if the numbers of rows differ."""
    named, problems = _named(batch), []
    for path, x in named:
        if not isinstance(x, np.ndarray):
            problems.append(f"{path!r} must be a numpy array, got {type(x).__name__}")
        elif problem := array_problem(x):
            problems.append(f"{path!r} {problem}")
    if not named:
        return [f"a batch must have at least one array, got {type(batch).__name__} without any"]
    rows = [(path, len(x)) for path, x in named if isinstance(x, np.ndarray) and x.ndim]
    if not rows and not problems:
        problems.append("a batch must have at least one array with rows as its first dim, got scalars only")
    if not problems and len({size for _, size in rows}) > 1:
        each = ", ".join(f"{path!r} {size}" for path, size in rows)
        problems.append(f"the arrays of a batch must have equal numbers of rows, got {each}")
    return at_most(problems)


def _row_problems(batch: PyTree, rows: int, own_rows: ProcessRows | None) -> list[str]:
    """One line if the batch has another number of rows than `data.batch_size`, or than `own_rows`."""
    sizes = {len(x) for _, x in _named(batch) if getattr(x, "ndim", 0)}
    if len(sizes) != 1 or sizes == {rows if own_rows is None else len(own_rows.index)}:
        return []
    if own_rows is not None:
        return [
            f"the batch must have the {len(own_rows.index)} rows of this process (data.rows=process), got {sizes.pop()}"
        ]
    return [f"the batch must be the global one of data.batch_size={rows} rows, got {count_text(sizes.pop(), 'row')}"]


def split_problems(batch: PyTree, mesh: Mesh | AbstractMesh, axes: PartitionAxis, parts: int) -> list[str]:
    """One line if the rows cannot be divided into equal `parts`, each split over the mesh axes of the batch."""
    rows = next(len(x) for x in jax.tree.leaves(batch) if x.ndim)
    return rows_problems(rows, parts, mesh, axes, "pipeline.num_microbatches")


def _checksum(batch: PyTree) -> str:
    import xxhash  # imported here: only runs need it

    return _digest(xxhash.xxh3_64(), batch)


def _digest(digest: Any, batch: PyTree) -> str:
    """The hexadecimal digest of paths, dtypes, shapes and values."""
    for path, x in _named(batch):
        digest.update(f"{path} {x.dtype} {x.shape}\n".encode())
        digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _named(batch: PyTree) -> list[tuple[str, PyTree]]:
    return [(path_of(path), x) for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]]


def is_state(value: object) -> bool:
    """Whether a value from a file is a result of `encode`."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    if isinstance(shards := value.get("shards"), list):
        return bool(shards) and all(map(is_state, shards))
    if "base64" not in value:
        return "json" in value
    try:
        decode(value)
    except (TypeError, ValueError, binascii.Error):
        return False
    return True
