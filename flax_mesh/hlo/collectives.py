"""The collectives of a compiled step: their mesh axes, executions per step and bytes.

Payload: bytes of the result on one device (all-gather), of the input (reduce-scatter), or of either (all others).
Sent: bytes that one of n devices sends with the usual ring algorithms (Patarasuk and Yuan 2009): payload * (n - 1) / n;
twice that for an all-reduce; the entire payload for a permute or a broadcast.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.errors import ShardingError
from flax_mesh.hlo.program import HloProgram, Instruction
from flax_mesh.text import grouped

GATHER = ("all-gather", "reduce-scatter", "all-reduce")
ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
POINT_TO_POINT = ("collective-permute", "collective-broadcast")
KINDS = (*GATHER, *ALL_TO_ALL, *POINT_TO_POINT)
_GROUPS = re.compile(
    r"replica_groups=(?P<list>\{(?:\{[\d,]*\},?)*\})"
    r"|replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
    r"|replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[^()]*(?:\([\d,]*\))?)\))? \{(?P<axes>[^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """One collective instruction. Bytes are per device and per execution, as defined in the module docstring."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices of one group differ, in mesh order
    group_size: int
    payload_bytes: int
    times: int  # executions per step
    times_known: bool  # False inside a loop of unknown trip count, which is counted once
    source: str  # operation of the traced function, such as "jit(step)/while/body/dot_general"
    name: str = ""  # name of the instruction

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends per execution with a ring algorithm."""
        return ring_bytes(self.kind, self.payload_bytes, self.group_size)


def ring_bytes(kind: str, payload: int, group_size: int) -> int:
    """Bytes that one device of a group sends, as defined in the module docstring."""
    if kind in POINT_TO_POINT:
        return payload
    once = payload * (group_size - 1) // group_size
    return 2 * once if kind == "all-reduce" else once


class Traffic(NamedTuple):
    """All collectives of one kind over the same mesh axes, per device and step."""

    axes: tuple[str, ...]
    kind: str
    times: int
    payload_bytes: int
    sent_bytes: int
    times_known: bool


def read_collectives(program: HloProgram, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Returns every collective of a compiled step.

    `mesh` must be the mesh of the step: device ids in the program are positions in `mesh.devices.flat`. Collectives
    over groups of one device are left out, since they transfer nothing. Raises a ShardingError for a notation of device
    groups that it cannot parse.
    """
    partitions = re.search(r"num_partitions=(\d+)", program.head)
    if int(partitions[1] if partitions else 1) != mesh.size:
        raise ShardingError(
            f"mesh must be the mesh of the compiled step, but the step runs on {partitions[1] if partitions else 1} "
            f"devices and the mesh {dict(mesh.shape)} has {mesh.size}. Pass the mesh of its shardings."
        )
    collectives: list[Collective] = []
    for name, instructions in program.computations.items():
        times, known = program.executions[name]
        for instruction in instructions if times else ():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            ids = _pairs(instruction) if kind == "collective-permute" else _groups(instruction, mesh.size)
            if axes := axes_of(ids, mesh.shape):
                size = ids.shape[1]
                payload = _result_bytes(instruction, kind) * (size if kind == "reduce-scatter" else 1)
                collectives.append(
                    Collective(kind, axes, size, payload, times, known, instruction.source, instruction.name)
                )
    return collectives


def sum_traffic(collectives: Iterable[Collective]) -> list[Traffic]:
    """Sums per kind and combination of mesh axes, in descending order of the bytes sent."""
    sums = [
        Traffic(
            *key,
            sum(collective.times for collective in group),
            sum(collective.payload_bytes * collective.times for collective in group),
            sum(collective.sent_bytes * collective.times for collective in group),
            all(collective.times_known for collective in group),
        )
        for key, group in grouped(collectives, lambda collective: (collective.axes, collective.kind)).items()
    ]
    return sorted(sums, key=lambda traffic: (-traffic.sent_bytes, traffic.axes, traffic.kind))


def _result_bytes(instruction: Instruction, kind: str) -> int:
    sizes = [array.content for array in jax.tree.leaves(instruction.shape)]
    if instruction.opcode.endswith("-start"):
        # The result is a tuple of the operands, the results, and for a permute two u32 contexts.
        if kind == "collective-permute":
            sizes = sizes[:2]
        if kind != "all-reduce" and len(sizes) > 1:
            sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _groups(instruction: Instruction, num_devices: int) -> np.ndarray:
    """Device ids [group, member] from any of XLA's three notations.

    {{0,2},{1,3}}            lists of ids
    [2,2]<=[2,2]T(1,0)       the same: ids 0..3 as a 2x2 array, transposed, reshaped to 2 groups of 2
    mesh['x'=2,'y'=2] {'x'}  the same: groups along axis x of a mesh that the compiler defines
    """
    match = _GROUPS.search(instruction.text)
    if match is None:
        raise ShardingError(
            "replica_groups must be in a notation that this parser knows, got: "
            f"{str(instruction)[:200]}. Please report it."
        )
    if match["list"] is not None:
        groups = [_integers(group) for group in re.findall(r"\{([\d,]*)\}", match["list"][1:-1])]
        return np.array(groups or [list(range(num_devices))])  # {}: all devices in one group
    if match["iota"] is not None:
        return _iota(match["iota"], match["perm"]).reshape(_integers(match["shape"]))
    return _mesh_groups(match)


def _mesh_groups(match: re.Match[str]) -> np.ndarray:
    """Groups along axes of a mesh that the compiler defines: `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}`."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match["mesh"])}
    ids = match["ids"]
    if ids is None:
        devices = np.arange(math.prod(shape.values()))
    elif iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids):
        devices = _iota(iota[1], iota[2])
    else:
        devices = np.array(_integers(ids))
    # A sub-axis 'a':(2)4 of an axis of size 16 is the factor of size 4 in 16 = 2 * 4 * 2. It lies between the partial
    # products 2 and 8, and the axis is factored at the partial products of all its sub-axes: 1, 2, 8, 16.
    bounds: dict[str, set[int]] = {name: {1, size} for name, size in shape.items()}
    selected: list[tuple[str, int, int]] = []
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match["axes"]):
        if name not in shape:
            raise ShardingError(f"replica_groups must name axes of their mesh, got {name!r}: {match[0]}")
        first, last = (int(before), int(before) * int(size)) if size else (1, shape[name])
        bounds[name] |= {first, last}
        selected.append((name, first, last))
    factors = [(name, a, b) for name in shape for a, b in pairwise(sorted(bounds[name]))]
    sizes = [b // a for _, a, b in factors]
    inner = [
        i
        for part, first, last in selected
        for i, (name, a, b) in enumerate(factors)
        if name == part and first <= a and b <= last
    ]
    outer = [i for i in range(len(factors)) if i not in inner]
    return devices.reshape(sizes).transpose(*outer, *inner).reshape(-1, math.prod(sizes[i] for i in inner))


def _pairs(instruction: Instruction) -> np.ndarray:
    """(source, target) of every pair of different devices."""
    match = _PAIRS.search(instruction.text)
    if match is None:
        raise ShardingError(f"a collective-permute must have source_target_pairs, got: {str(instruction)[:200]}")
    pairs = [_integers(pair) for pair in re.findall(r"\{([\d,]*)\}", match[1])]
    return np.array([pair for pair in pairs if pair[0] != pair[1]], int).reshape(-1, 2)


def axes_of(ids: np.ndarray, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; `ids` [group, member] are positions in the mesh."""
    places = np.stack(np.unravel_index(ids, tuple(sizes.values())), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(name for name, yes in zip(sizes, differ, strict=True) if yes)


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    dims = _integers(shape)
    return np.arange(math.prod(dims)).reshape(dims).transpose(_integers(permutation) if permutation else None).ravel()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
