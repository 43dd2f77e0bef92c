"""The rows of a global batch that each process makes itself (`data.rows=process`)."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.processes.agree import decide_at_process_0
from flax_mesh.step.batch import ProcessRows, batch_sharding, rows_problems
from flax_mesh.text import at_most, count_text
from flax_mesh.tree import PyTree, path_of

State = dict[str, Any]  # of an iterator, as JSON; {"shards": states} of the iterators of several processes


@check_types
def process_rows(num_rows: int, mesh: Mesh | AbstractMesh, axes: PartitionAxis = DEFAULT_AXES) -> ProcessRows:
    """The rows of a batch that this process must have: pass them to `place_batch`, which copies none between hosts.

    All rows in a run of one process, and on an AbstractMesh.

    Args:
        num_rows: Rows of the global batch.
        mesh: The mesh of the state.
        axes: Maps the logical axis "batch" to mesh axes.

    Raises:
        ConfigError: The mesh axes of the batch do not divide `num_rows`, or two processes share a part of their rows.

    Example:
        >>> from flax_mesh.train import place_batch, process_rows
        >>> mesh = fm.create_mesh((2, 4), ("fsdp", "tp"))
        >>> rows = process_rows(8, mesh)
        >>> rows.index, rows.num_shards
        (array([0, 1, 2, 3, 4, 5, 6, 7]), 1)
        >>> place_batch({"x": np.ones((8, 16))[rows.index]}, mesh, rows=rows)["x"].shape
        (8, 16)
    """
    if problems := rows_problems(num_rows, 1, mesh, axes):
        raise ConfigError(problems)
    if isinstance(mesh, AbstractMesh):
        return ProcessRows(np.arange(num_rows))
    owned: dict[int, set[int]] = {}
    for device, index in batch_sharding((num_rows,), mesh, axes).devices_indices_map((num_rows,)).items():
        owned.setdefault(device.process_index, set()).update(range(num_rows)[index[0]])
    return rows_of(jax.process_index(), owned)


def rows_of(process: int, owned: Mapping[int, set[int]]) -> ProcessRows:
    """The rows of a process, from the rows that the devices of each process need."""
    shards = sorted({tuple(sorted(rows)) for rows in owned.values()})
    if sum(map(len, shards)) != len(set().union(*shards)) or len({*map(len, shards)}) > 1:
        raise ConfigError(
            "data.rows=process needs processes that have equally many rows of a batch, either the same or none in "
            "common, but on this mesh some have more, or share a part of their rows; use data.rows=all, or a mesh "
            "whose batch axes are outermost"
        )
    rows = tuple(sorted(owned[process]))
    return ProcessRows(np.array(rows), shards.index(rows), len(shards))


def global_shapes(shapes: PyTree, own_rows: ProcessRows | None, num_rows: int) -> PyTree:
    """The shapes of the global batch, from the shapes of the rows of this process."""
    if own_rows is None:
        return shapes
    size = len(own_rows.index)
    return jax.tree.map(
        lambda x: x.update(shape=(num_rows, *x.shape[1:])) if x.shape and x.shape[0] == size else x, shapes
    )


def row_digests(batch: PyTree) -> list[str]:
    """A checksum of every row: paths, dtypes and values, and the scalars of the batch."""
    import xxhash  # imported here: only runs need it

    named = [(path_of(path), x) for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]]
    num_rows = next(len(x) for _, x in named if x.ndim)
    head = "".join(f"{path} {x.dtype} {x.shape[1:]}\n" for path, x in named).encode()
    head += b"".join(x.tobytes() for _, x in named if not x.ndim)

    def digest(row: int) -> str:
        content = xxhash.xxh3_64(head)
        for _, x in named:
            if x.ndim:
                content.update(np.ascontiguousarray(x[row]).tobytes())
        return content.hexdigest()

    return [digest(row) for row in range(num_rows)]


def of_processes(
    name: str, own_rows: ProcessRows, digests: Sequence[str], states: Sequence[State]
) -> dict[str, list[object]]:
    """{"digests": of all rows of the batch, "states": a list of `states` for every shard}, in all processes.

    Every process must call it with the same `name`, in the same order. A ConfigError names processes that must have
    the same rows and do not.
    """

    def join(texts: Sequence[str]) -> str:
        of_row: dict[int, tuple[str, int]] = {}
        of_shard: dict[int, Sequence[State]] = {}
        problems: dict[tuple[int, int], str] = {}
        for process, (shard, rows, digests, states) in enumerate(map(json.loads, texts)):
            of_shard.setdefault(shard, states)
            for row, digest in zip(rows[: len(digests)], digests, strict=True):  # before the first step there are none
                other, first = of_row.setdefault(row, (digest, process))
                if other != digest and (first, process) not in problems:
                    problems[first, process] = f"processes {first} and {process} have different values in row {row}"
        if problems:
            repair = "Processes with the same rows.shard must make the same rows."
            raise ConfigError([f"{name}: {problem}" for problem in at_most([*problems.values()])], repair=repair)
        digests = [of_row[row][0] for row in sorted(of_row)]
        return json.dumps({"digests": digests, "states": [of_shard[shard] for shard in sorted(of_shard)]})

    text = json.dumps([own_rows.shard, own_rows.index.tolist(), list(digests), list(states)])
    return json.loads(decide_at_process_0(name, text, join))


def state_of_shard(state: State | None, own_rows: ProcessRows | None) -> State | None:
    """The state of the iterator of this process, from a record. A ConfigError if it has those of other shards."""
    saved = 1 if state is None or "shards" not in state else len(state["shards"])
    now = 1 if own_rows is None else own_rows.num_shards
    if state is not None and saved != now:
        raise ConfigError(
            f"the checkpoint has the states of iterators for {count_text(saved, 'shard')} of the rows of a batch, but "
            f"data.rows and the processes on this mesh make {now}. Resume with as many processes along the batch axes, "
            "or use a function of the step, whose rows can be divided in any way"
        )
    return state["shards"][own_rows.shard if own_rows else 0] if state and "shards" in state else state
