"""The collectives of a compiled step: their mesh axes, executions per step and bytes.

They are parsed from the text of the optimized program (`compiled.as_text()`), because `cost_analysis()` does not report
collectives and counts the body of a loop once.

Payload: bytes of the result on one device (all-gather), of the input (reduce-scatter), or of either (all others).
Sent: bytes that one of n devices sends with the usual ring algorithms (Patarasuk and Yuan 2009): payload * (n - 1) / n;
twice that for an all-reduce; the entire payload for a permute or a broadcast.
"""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.errors import ShardingError

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2}  # other names contain the bits: bf16

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<= ]*)\]")
_CALLS = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"s32\[\](?:\{[^}]*\})? constant\((\d+)\)")
_GROUPS = re.compile(
    r"replica_groups=(?P<list>\{(?:\{[\d,]*\},?)*\})"
    r"|replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?"
    r"|replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[^()]*(?:\([\d,]*\))?)\))? \{(?P<axes>[^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')


class Collective(NamedTuple):
    """One collective instruction. Bytes are per device and per execution, as defined in the module docstring."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices of one group differ, in mesh order
    group_size: int
    payload_bytes: int
    times: int  # executions per step
    times_known: bool  # False inside a loop of unknown trip count, which is counted once
    source: str  # operation of the traced function, such as "jit(step)/while/body/dot_general"
    name: str = ""  # of the instruction

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends per execution with a ring algorithm."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload_bytes
        once = self.payload_bytes * (self.group_size - 1) // self.group_size
        return 2 * once if self.kind == "all-reduce" else once


class Line(NamedTuple):
    """One instruction: `text` is what follows its name and "="."""

    name: str
    text: str
    is_root: bool


class Traffic(NamedTuple):
    """All collectives of one kind over the same mesh axes, per device and step."""

    axes: tuple[str, ...]
    kind: str
    times: int
    payload_bytes: int
    sent_bytes: int
    times_known: bool


def read_collectives(compiled: Any, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Returns every collective of a compiled step, a `jax.stages.Compiled` or its `as_text()`.

    `mesh` must be the mesh of the step: device ids in the program are positions in `mesh.devices.flat`. Collectives
    over groups of one device are left out, since they transfer nothing. Raises a ShardingError for a notation of device
    groups that it cannot parse.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    partitions = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    if int(partitions[1] if partitions else 1) != mesh.size:
        raise ShardingError(
            f"mesh must be the one of the compiled step, but the step runs on {partitions[1] if partitions else 1} "
            f"devices and the mesh {dict(mesh.shape)} has {mesh.size}. Pass the mesh of its shardings."
        )
    computations, entry = read_computations(text)
    executions = count_executions(computations, entry)
    found = []
    for name, lines in computations.items():
        times, known = executions[name]
        for line in lines if times else ():
            if not (parsed := _collective(line.text)):
                continue
            kind, result, attributes = parsed
            ids = _pairs(attributes) if kind == "collective-permute" else _groups(attributes, mesh.size)
            axes = _axes_of(ids, mesh)
            if not axes:
                continue
            size = ids.shape[1]
            payload = result * size if kind == "reduce-scatter" else result
            source = _SOURCE.search(attributes)
            found.append(Collective(kind, axes, size, payload, times, known, source[1] if source else "", line.name))
    return found


def sum_traffic(collectives: Iterable[Collective]) -> list[Traffic]:
    """Sums per kind and combination of mesh axes, in descending order of the bytes sent."""
    sums: dict[tuple[tuple[str, ...], str], Traffic] = {}
    for one in collectives:
        before = sums.get((one.axes, one.kind), Traffic(one.axes, one.kind, 0, 0, 0, True))
        sums[one.axes, one.kind] = Traffic(
            one.axes,
            one.kind,
            before.times + one.times,
            before.payload_bytes + one.payload_bytes * one.times,
            before.sent_bytes + one.sent_bytes * one.times,
            before.times_known and one.times_known,
        )
    return sorted(sums.values(), key=lambda traffic: (-traffic.sent_bytes, traffic.axes, traffic.kind))


def read_computations(text: str) -> tuple[dict[str, list[Line]], str]:
    """(computation -> its instructions, name of the entry computation)."""
    computations: dict[str, list[Line]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}"):
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            current.append(Line(instruction[2], instruction[3], bool(instruction[1])))
    if not entry:
        raise ShardingError(
            "the text must be an optimized HLO program, but it has no ENTRY computation. Pass "
            "jax.jit(f).lower(...).compile().as_text()."
        )
    return computations, entry


def count_executions(computations: dict[str, list[Line]], entry: str) -> dict[str, tuple[int, bool]]:
    """Computation -> (executions per step, whether that number is exact). All branches of a conditional count once."""
    calls = {name: list(_calls(lines, computations)) for name, lines in computations.items()}
    executions: dict[str, tuple[int, bool]] = dict.fromkeys(computations, (0, True))

    def run(name: str, times: int, known: bool) -> None:
        count, certain = executions[name]
        executions[name] = count + times, certain and known
        for callee, trips in calls[name]:
            if callee in executions:
                run(callee, times * (trips or 1), known and trips is not None)

    run(entry, 1, True)
    return executions


def _calls(lines: Iterable[Line], computations: dict[str, list[Line]]) -> Iterator[tuple[str, int | None]]:
    """(computation, times) of every call; None for the body of a loop whose trip count is not known."""
    for _, instruction, _ in lines:
        callees = _CALLS.findall(instruction)
        trips = _trip_count(instruction, computations.get(dict(callees).get("condition", ""), ()))
        for role, callee in callees:
            # The condition of a loop is counted once: it contains no collectives.
            yield callee, 1 if role != "body" else trips
        for branches in _BRANCHES.findall(instruction):
            yield from ((name.strip().lstrip("%"), 1) for name in branches.split(","))


def _trip_count(loop: str, condition: Iterable[Line]) -> int | None:
    """The trip count that the compiler has written, or n of the condition `i < n`: programs for TPUs have only that."""
    if trips := _TRIPS.search(loop):
        return int(trips[1])
    texts = [line.text for line in condition]
    limits = [limit[1] for text in texts if (limit := _LIMIT.match(text))]
    compared = any(" compare(" in text and "direction=LT" in text for text in texts)
    return int(limits[0]) if len(limits) == 1 and compared else None


def _collective(instruction: str) -> tuple[str, int, str] | None:
    """(kind, bytes of the result, attributes) of a collective; None for other instructions and `-done` operations."""
    result, rest = split_tuple(instruction) if instruction.startswith("(") else instruction.split(" ", 1)
    opcode = _OPCODE.match(rest)
    if not opcode:
        return None
    kind = opcode[1].removesuffix("-start")
    if kind not in KINDS:
        return None
    sizes = [_bytes(*found) for found in _ARRAY.findall(result)]
    if opcode[1].endswith("-start"):  # a tuple of the operands, the results, and for a permute two u32 contexts
        if kind == "collective-permute":
            sizes = sizes[:2]
        if kind != "all-reduce" and len(sizes) > 1:
            sizes = sizes[len(sizes) // 2 :]
    return kind, sum(sizes), rest


def split_tuple(text: str) -> list[str]:
    """The balanced parentheses at the start of `text`, and the remaining text."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return [text[: i + 1], text[i + 1 :]]
    return [text, ""]


def _bytes(dtype: str, dims: str) -> int:
    bits = BITS[dtype] if dtype in BITS else int(re.findall(r"\d+", dtype)[0])
    size = math.prod(int(d.replace("<=", "")) for d in dims.split(",") if d.strip())
    return -(-size * bits // 8)


def _groups(attributes: str, num_devices: int) -> np.ndarray:
    """Device ids [group, member] from any of XLA's three notations.

    {{0,2},{1,3}}            lists of ids
    [2,2]<=[2,2]T(1,0)       the same: ids 0..3 as a 2x2 array, transposed, reshaped to 2 groups of 2
    mesh['x'=2,'y'=2] {'x'}  the same: groups along axis x of a mesh that the compiler defines
    """
    match = _GROUPS.search(attributes)
    if match is None:
        raise ShardingError(
            f"replica_groups must be in a notation that this parser knows, got: {attributes[:200]}. Please report it."
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


def _pairs(attributes: str) -> np.ndarray:
    """(source, target) of every pair of different devices."""
    match = _PAIRS.search(attributes)
    if match is None:
        raise ShardingError(f"a collective-permute must have source_target_pairs, got: {attributes[:200]}")
    pairs = [_integers(pair) for pair in re.findall(r"\{([\d,]*)\}", match[1])]
    return np.array([pair for pair in pairs if pair[0] != pair[1]], int).reshape(-1, 2)


def _axes_of(ids: np.ndarray, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    places = np.stack(np.unravel_index(ids, tuple(mesh.shape.values())), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(name for name, yes in zip(mesh.axis_names, differ, strict=True) if yes)


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    dims = _integers(shape)
    return np.arange(math.prod(dims)).reshape(dims).transpose(_integers(permutation) if permutation else None).ravel()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
