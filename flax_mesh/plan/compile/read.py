"""From a compiled program to numbers: memory, arrays at the peak, collectives and surprising gathers."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jax.stages import Compiled

from flax_mesh.hlo.collectives import Collective, read_collectives
from flax_mesh.hlo.program import OP_NAME, Array, HloProgram, read_hlo, source_of
from flax_mesh.plan.compile.live import Buffer, largest, walk
from flax_mesh.plan.compile.results import CompiledProgram, LiveArray, Sent, summed
from flax_mesh.plan.compile.target import slice_mesh
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import listed

MOST_ARRAYS = 10
SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
SHARE = 0.1  # of the bytes of all collectives: a smaller gather of an activation is not a finding
WRAPPERS = re.compile(r"jit\((\w+)\)|(?:transpose|jvp|vmap)\(|[()]")
REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization.*?go from sharding (\{.*?\}) to (\{.*?\}) "
    rf".*?metadata=(\{{{OP_NAME}.*?\}})"
)
Paths = Callable[..., str]
NONE_HOSTED: Mapping[str, int] = {}


class Reading(NamedTuple):
    figures: CompiledProgram
    findings: list[Finding]
    program: HloProgram


def read_program(
    program: Compiled,
    name: str,
    times: int,
    mesh: Mesh,
    platform: str,
    paths: Paths,
    hosted: Mapping[str, int] = NONE_HOSTED,
) -> Reading:
    """`paths` returns the path of an argument from its parts: `state.leaves[3]` and `args[0][3]`.

    `hosted` has the paths and bytes of the arguments that are stored in the memory of the host.
    """
    hlo, (inner, outer) = read_hlo(program), slice_mesh(mesh)
    collectives = [*read_collectives(hlo, inner), *_over_slices(hlo, outer)]
    walked, host = walk(hlo), sum(hosted.values())
    live = [_live(group, size, hlo, paths) for group, size in largest(walked.at_peak, MOST_ARRAYS + len(hosted))]
    shown = tuple([each for each in live if each.operation not in hosted][:MOST_ARRAYS])
    memory, sent = memory_of(program, platform, host), tuple(summed(map(_sent, collectives)))
    figures = CompiledProgram(name, times, *memory, walked.peak - host, shown, sent)
    return Reading(figures, gathers(collectives, walked.weights, hlo), hlo)


def _over_slices(program: HloProgram, axes: tuple[str, ...]) -> list[Collective]:
    """Collectives between slices: the program of a slice sends their operands to its host."""
    sends: list[Collective] = []
    for name, instructions in program.computations.items():
        for instruction in instructions:
            kind = SLICES.search(instruction.text) if instruction.opcode == "send" else None
            if kind is None or isinstance(instruction.shape, Array):
                continue
            sent, counts = instruction.shape[0], program.executions[name]
            if isinstance(sent, Array):
                text = kind[1].lower().replace("_", "-")
                sends.append(Collective(text, axes, 2, sent.bytes, *counts, instruction.source, instruction.name))
    return sends


def memory_of(program: Compiled, platform: str, host: int = 0) -> tuple[int, int]:
    """Bytes of the arguments, and at the peak.

    On TPUs XLA states the peak. Elsewhere its number lacks the allocations of loops, so all temporary bytes are added.
    For CPUs XLA counts the `host` bytes among the arguments; for others it counts them separately.
    """
    memory: Any = program.memory_analysis()
    separate = getattr(memory, "host_argument_size_in_bytes", 0)
    host = 0 if separate else host
    total = getattr(memory, "peak_memory_in_bytes", 0) if platform == "tpu" else 0
    if not total:
        written = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + written + memory.temp_size_in_bytes
    return memory.argument_size_in_bytes - host, total - host


def _live(group: Sequence[Buffer], size: int, program: HloProgram, paths: Paths) -> LiveArray:
    first = group[0]
    while first.maker is not None and not first.maker.source and first.origin is not None:  # a copy by the compiler
        first = first.origin
    operation, place = "", ""
    if first.maker is not None:
        target = re.search(r'custom_call_target="([^"]*)"', first.maker.text)
        unnamed = target[1] if target else first.maker.opcode
        operation, place = operation_text(first.maker.source) or unnamed, program.place(first.maker.text)
    elif argument := next((x for x in program.computations[program.entry] if x.number == first.number), None):
        operation, place = argument.source, "argument"
        if leaf := re.fullmatch(r"(.+?)\[(\d+)\](?:\[(\d+)\])?", operation):
            operation = paths(leaf[1], *(int(number) for number in leaf.groups()[1:] if number)) or operation
    return LiveArray(size, len(group), first.array.text, operation, place)


def operation_text(source: str) -> str:
    """`backward dot_general` of `jit(step)/transpose(jvp())/while/body/dot_general`."""
    if not source:
        return ""
    phase = "recomputed " if "rematted_computation" in source else "backward " if "transpose(" in source else ""
    last = WRAPPERS.sub(r"\1", source.rsplit("/", 1)[-1])
    return phase + re.sub(r"\.\d+$", "", last)  # `broadcast.92` is the compiler's


def _sent(collective: Collective) -> Sent:
    operands = collective.payload_bytes / (collective.group_size if collective.kind == "all-gather" else 1)
    return Sent(collective.kind, collective.axes, collective.times, operands * collective.times)


def gathers(collectives: Sequence[Collective], weights: frozenset[str], program: HloProgram) -> list[Finding]:
    """Gathers of values that the model computes, not of its weights, that are a large part of all traffic."""
    places = {each.source: place for each in program.instructions() if (place := program.place(each.text))}
    total = sum(collective.sent_bytes * collective.times for collective in collectives)
    sums: dict[tuple[str, str, tuple[str, ...]], float] = {}
    for collective in collectives:
        kind, source = collective.kind, collective.source
        asked = source.rsplit("/", 1)[-1] in ("all_gather", "all_to_all", "ragged_all_to_all")  # by the model
        if kind in ("all-gather", "all-to-all") and collective.name not in weights and "jvp" in source and not asked:
            key = source, kind, collective.axes
            sums[key] = sums.get(key, 0.0) + collective.sent_bytes * collective.times
    return [
        Finding(
            f"{places.get(source, '')} {operation_text(source)}".strip(),
            f"the compiler exchanges an activation here ({kind} over {listed(axes)}): {size / total:.0%} of the bytes "
            "of all collectives",
            "Constrain its sharding where it is made",
        )
        for (source, kind, axes), size in sorted(sums.items(), key=lambda item: -item[1])
        if size > SHARE * total
    ]


def rematerialized(messages: str, programs: Sequence[HloProgram]) -> list[Finding]:
    """Findings from the compiler's warnings. The code is known if there is one program: frames are counted in each."""

    def place(metadata: str) -> str:
        return programs[0].place(metadata) if len(programs) == 1 else ""

    warnings = dict.fromkeys(REMATERIALIZED.findall(messages))
    return [
        Finding(
            f"{place(metadata)} {operation_text(source_of(metadata))}".strip(),
            f"involuntary full rematerialization: every device gathers the complete array, from {before} to {after}",
            "Constrain the value to a sharding in between, or let both sides split the same dims",
        )
        for before, after, metadata, _ in warnings
    ]
