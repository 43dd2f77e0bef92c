"""Splits the optimizer update, one program over the leaves of all groups, into programs of one group each.

Arrays stay on their group. Only scalars are exchanged, such as one partial sum per leaf for the norm of all gradients.
So every optax transformation works whose update of a leaf depends on other leaves only through scalars. The phase of an
equation is the number of exchanges that must precede it.

Example: clip_by_global_norm on two leaves with gradients g0 on group 0 and g1 on group 1.

    equation              placed on        phase
    s0 = sum(g0 * g0)     group 0          0
    s1 = sum(g1 * g1)     group 1          0
    n = sqrt(s0 + s1)     SHARED           1       depends on scalars of both groups: each group computes it
    u0 = g0 / n           group 0          1
    u1 = g1 / n           group 1          1

                group 0                                 group 1
    phase 0     s0 = sum(g0 * g0)                       s1 = sum(g1 * g1)
                        +------------- s0 ------------------->+
                        +<------------ s1 --------------------+
    phase 1     n = sqrt(s0 + s1);  u0 = g0 / n         n = sqrt(s0 + s1);  u1 = g1 / n

Each line of a group is one `GroupProgram`. `_place` computes place and phase of every equation, `_needed_by_group` the
equations and transfers of each group, `_latest_phases` moves equations to later phases where that saves memory traffic,
and `_group_program` builds the programs.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from flax_mesh.program.program import Program, Var, is_var, needed, variables

SHARED = -1  # replicated over all groups: every group computes it for itself


class MixedGroups(ValueError):
    """An equation requires arrays of several groups. `inputs` are the inputs of the program that it depends on."""

    def __init__(self, primitive: str, inputs: list[int]):
        self.primitive, self.inputs = primitive, inputs
        super().__init__(f"{primitive} requires arrays of several groups")


class GroupProgram(NamedTuple):
    """The program of one group in one phase. Its inputs are `arguments`, then the scalars of `receives`."""

    group: int
    phase: int
    program: Program
    arguments: tuple[Var, ...]  # inputs of the update, or outputs of an earlier part of the same group
    receives: tuple[tuple[int, int], ...]  # (group, phase) of the parts whose packs are inputs
    results: tuple[Var, ...]  # the first outputs: results, and values for later parts of the same group
    packs: tuple[Var, ...]  # the other outputs: scalars for other groups
    last_used: tuple[Var, ...]  # the `arguments` whose last use is in this part


def cut_by_group(
    program: Program, groups: Sequence[int], required: Sequence[Sequence[int]]
) -> tuple[list[GroupProgram], list[tuple[int, ...]]]:
    """Returns (programs in a valid order of execution, groups that have each output).

    `groups` contains the group of every input, or SHARED. `required` contains the groups that need each output, or
    () if any group may have it.
    """
    place, ready, phases = _place(program, groups)
    default = [(max(place.get(v, 0), 0),) if is_var(v) else (0,) for v in program.outputs]
    required = [tuple(chosen) or fallback for chosen, fallback in zip(required, default, strict=True)]
    producer = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    eqns_of, transfers = _needed_by_group(program, place, producer, required)
    packs: dict[tuple[int, int], list[Var]] = {}
    for sender, v in sorted(
        {(place[v], v) for _, v in transfers}, key=lambda pair: _sort_key(pair[1], producer, program)
    ):
        packs.setdefault((sender, ready[v]), []).append(v)
    phases_of = {
        group: _latest_phases(program, group, sorted(eqns), phases, transfers, packs, ready, required)
        for group, eqns in eqns_of.items()
    }
    last = 1 + max([*phases, *ready.values()], default=0)
    parts = [
        part
        for phase in range(last + 1)
        for group in sorted(phases_of)
        if (part := _group_program(program, group, phase, phases_of[group], transfers, packs, ready, place, required))
    ]
    return parts, required


def _place(program: Program, groups: Sequence[int]) -> tuple[dict[Var, int], dict[Var, int], list[int]]:
    """Returns (group of every variable, phase in which it is available, phase of every equation)."""
    place = dict(zip(program.inputs, groups, strict=True)) | dict.fromkeys(program.consts, SHARED)
    ready = dict.fromkeys(place, 0)
    phases = []
    for eqn in program.eqns:
        inputs = variables(eqn.invars)
        among = {place[v] for v in inputs} - {SHARED}
        arrays = {place[v] for v in inputs if _is_array(v)} - {SHARED}
        if len(arrays) > 1:
            live = set(needed(program.eqns, inputs, effects=False)[1])
            raise MixedGroups(eqn.primitive.name, [at for at, v in enumerate(program.inputs) if v in live])
        # An array computed from scalars only, such as the zero gradient of an unused leaf, is SHARED: it must not be
        # transferred, so the group that needs it computes it.
        from_scalars = not arrays and any(map(_is_array, eqn.outvars))
        # A value that depends on scalars of several groups is SHARED. Otherwise a sum over leaves that alternate
        # between groups, ((s0 + s1) + s2) + s3, would be transferred to and fro, with one exchange per addition.
        mixed = any(place[v] == SHARED and ready[v] for v in inputs)
        on_one_group = (arrays or (len(among) == 1 and not mixed)) and not from_scalars
        here = next(iter(arrays or among), SHARED) if on_one_group else SHARED
        # An input on another group must be exchanged first, which makes it available one phase later.
        phase = max((ready[v] + (place[v] not in (SHARED, here)) for v in inputs), default=0)
        phases.append(phase)
        place |= dict.fromkeys(eqn.outvars, here)
        ready |= dict.fromkeys(eqn.outvars, phase)
    return place, ready, phases


def _needed_by_group(program, place, producer, required) -> tuple[dict[int, set[int]], set[tuple[int, Var]]]:
    """Returns (equations that every group runs, transfers as pairs of receiving group and scalar)."""
    eqns_of: dict[int, set[int]] = {g: set() for groups in required for g in groups}
    transfers: set[tuple[int, Var]] = set()
    seen: set[tuple[int, Any]] = set()
    todo = [(g, v) for v, groups in zip(program.outputs, required, strict=True) for g in groups]
    while todo:
        group, v = todo.pop()
        if not is_var(v) or v in program.consts or (group, v) in seen:
            continue
        seen.add((group, v))
        if place[v] not in (SHARED, group):
            transfers.add((group, v))
            todo.append((place[v], v))
            eqns_of.setdefault(place[v], set())
        elif v in producer:
            eqns_of[group].add(producer[v])
            todo += [(group, atom) for atom in program.eqns[producer[v]].invars]
    return eqns_of, transfers


def _latest_phases(program, group, eqns, phases, transfers, packs, ready, required) -> dict[int, int]:
    """The last phase in which each equation of a group can run without delaying a result or a transfer.

    An equation that needs no exchange, such as the decay of a moment, then runs in the program that uses its result.
    In an earlier program it would write the result to memory, to be read again. A result that needs no exchange, such
    as a counter, is computed in a program that exists in any case. Equations with outputs smaller than their inputs,
    such as norms, run as early as possible, because delaying them would keep the inputs alive.
    """
    exchanges = {phase for sender, phase in packs if sender == group}
    exchanges |= {ready[v] + 1 for g, v in transfers if g == group}
    due: dict[Var, int] = {}
    for v, groups in zip(program.outputs, required, strict=True):
        if group in groups and is_var(v):
            due[v] = min((phase for phase in exchanges if phase >= ready[v]), default=ready[v])
    due |= {v: phase for (sender, phase), sent in packs.items() if sender == group for v in sent}
    latest: dict[int, int] = {}
    for i in reversed(eqns):
        inputs, outputs = variables(program.eqns[i].invars), program.eqns[i].outvars
        shrinks = sum(prod(v.aval.shape) for v in outputs) < max([prod(v.aval.shape) for v in inputs], default=0)
        latest[i] = phases[i] if shrinks else max(phases[i], min(due[v] for v in outputs if v in due))
        for v in inputs:
            due[v] = min(due.get(v, latest[i]), latest[i])
    return latest


def _group_program(program, group, phase, phases, transfers, packs, ready, place, required) -> GroupProgram | None:
    local = sorted(i for i in phases if phases[i] == phase)
    later = [i for i in phases if phases[i] > phase]
    computed = {v for i in local for v in program.eqns[i].outvars}
    results = {v for v, groups in zip(program.outputs, required, strict=True) if group in groups and is_var(v)}
    sent = packs.get((group, phase), [])
    fetched = [v for v in results if (group, v) in transfers and ready[v] + 1 == phase]  # results from other groups
    if not (local or sent or fetched):
        return None
    used = dict.fromkeys(v for i in local for v in variables(program.eqns[i].invars)) | dict.fromkeys([*sent, *fetched])
    outside = [v for v in used if v not in computed and v not in program.consts]
    receives = sorted({(place[v], ready[v]) for v in outside if (group, v) in transfers})
    arguments = [v for v in outside if (group, v) not in transfers]
    needed_later = {v for i in later for v in program.eqns[i].invars if is_var(v)} | results
    needed_later |= {v for (g, p), vs in packs.items() if g == group and p > phase for v in vs}
    results = [
        v for v in dict.fromkeys(v for i in local for v in program.eqns[i].outvars) if v in needed_later
    ] + fetched
    inputs = (*arguments, *(v for key in receives for v in packs[key]))
    eqns = tuple(program.eqns[i] for i in local)
    return GroupProgram(
        group=group,
        phase=phase,
        program=Program(eqns, inputs, (*results, *sent), program.consts),
        arguments=tuple(arguments),
        receives=tuple(receives),
        results=tuple(results),
        packs=tuple(sent),
        last_used=tuple(v for v in arguments if v not in needed_later),
    )


def _is_array(v: Var) -> bool:
    """Whether a value cannot be transferred as one number: it has several elements, or none."""
    return prod(v.aval.shape) != 1


def _sort_key(v: Var, producer, program: Program) -> tuple[int, int]:
    """A sort key that is the same in all processes: inputs first, then by equation."""
    if v in producer:
        return producer[v] + 1, program.eqns[producer[v]].outvars.index(v)
    return 0, program.inputs.index(v)


def pack(values: Sequence[Any]) -> list[Any]:
    """One vector of scalars per dtype, in the order in which the dtypes first occur: one transfer instead of many."""
    dtypes = list(dict.fromkeys(v.dtype for v in values))
    return [jnp.stack([v.reshape(()) for v in values if v.dtype == d]) for d in dtypes]


def unpack(packed: Sequence[Any], like: Sequence[Var]) -> list[Any]:
    """The inverse of `pack`: scalars in the order of the variables `like`."""
    dtypes = list(dict.fromkeys(v.aval.dtype for v in like))
    rows = {d: iter(vector) for d, vector in zip(dtypes, packed, strict=True)}
    return [next(rows[v.aval.dtype]).reshape(v.aval.shape) for v in like]
