"""One program over the leaves of all groups, the optimizer's update, cut into programs of one group each.

Arrays stay where they are. Only scalars cross: the norm of all gradients is made of one partial sum a leaf. So any
optax transformation works that looks at other leaves through scalars alone; the global-norm clip is one. What depends
on scalars of other groups waits for them: equations have a phase, the number of exchanges before it.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from flax_mesh.mpmd.split.jaxpr import Program, Var, is_var, needed, variables

SHARED = -1  # the same on every group: each makes it for itself


class MixedGroups(ValueError):
    """An equation wants arrays of several groups; `inputs` are the inputs of the program that they depend on."""

    def __init__(self, primitive: str, inputs: list[int]):
        self.primitive, self.inputs = primitive, inputs
        super().__init__(f"{primitive} takes arrays of several groups")


class GroupProgram(NamedTuple):
    """What one group runs in one phase. Inputs of the program: `takes`, then the scalars of the packs in `receives`."""

    group: int
    phase: int
    program: Program
    takes: tuple[Var, ...]  # inputs of the whole program, or given by an earlier part of the group
    receives: tuple[tuple[int, int], ...]  # (group, phase) of the parts whose packs it reads
    gives: tuple[Var, ...]  # the first outputs
    packs: tuple[Var, ...]  # the other outputs: scalars that other groups want
    dies: tuple[Var, ...]  # of `takes`, what nothing needs afterwards


def cut_by_group(
    program: Program, groups: Sequence[int], wanted: Sequence[Sequence[int]]
) -> tuple[list[GroupProgram], list[tuple[int, ...]]]:
    """The parts in an order in which they can run, and the groups that hold each output.

    `groups` holds the group of every input, or SHARED; `wanted` the groups in which every output is wanted, () for one
    that may be anywhere.
    """
    place, ready, phases = _place(program, groups)
    anywhere = [(max(place.get(v, 0), 0),) if is_var(v) else (0,) for v in program.outputs]
    wanted = [tuple(here) or there for here, there in zip(wanted, anywhere, strict=True)]
    producer = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    eqns_of, crossing = _gather(program, place, producer, wanted)
    packs: dict[tuple[int, int], list[Var]] = {}
    for sender, v in sorted({(place[v], v) for _, v in crossing}, key=lambda pair: _order(pair[1], producer, program)):
        packs.setdefault((sender, ready[v]), []).append(v)
    late = {
        group: _late(program, group, sorted(eqns), phases, crossing, packs, ready, wanted)
        for group, eqns in eqns_of.items()
    }
    last = 1 + max([*phases, *ready.values()], default=0)
    parts = [
        part
        for phase in range(last + 1)
        for group in sorted(late)
        if (part := _part(program, group, phase, late[group], crossing, packs, ready, place, wanted))
    ]
    return parts, wanted


def _place(program: Program, groups: Sequence[int]) -> tuple[dict[Var, int], dict[Var, int], list[int]]:
    """Group and phase of every variable, and the phase of every equation."""
    place = dict(zip(program.inputs, groups, strict=True)) | dict.fromkeys(program.consts, SHARED)
    ready = dict.fromkeys(place, 0)
    phases = []
    for eqn in program.eqns:
        inputs = variables(eqn.invars)
        among = {place[v] for v in inputs} - {SHARED}
        arrays = {place[v] for v in inputs if prod(v.aval.shape) > 1} - {SHARED}
        if len(arrays) > 1:
            raise MixedGroups(eqn.primitive.name, _roots(program, inputs))
        # An array made of scalars, such as the gradient of a leaf that the loss does not use, is made where wanted.
        grows = not arrays and any(prod(v.aval.shape) > 1 for v in eqn.outvars)
        # What is made of several groups' scalars is each group's own: else a sum over leaves that alternate between
        # groups would cross to and fro.
        mixed = any(place[v] == SHARED and ready[v] for v in inputs)
        alone = (arrays or (len(among) == 1 and not mixed)) and not grows
        here = next(iter(arrays or among), SHARED) if alone else SHARED
        phase = max((ready[v] + (place[v] not in (SHARED, here)) for v in inputs), default=0)
        phases.append(phase)
        place |= dict.fromkeys(eqn.outvars, here)
        ready |= dict.fromkeys(eqn.outvars, phase)
    return place, ready, phases


def _gather(program, place, producer, wanted) -> tuple[dict[int, set[int]], set[tuple[int, Var]]]:
    """Equations that every group runs, and (receiver, scalar) for all that crosses."""
    eqns_of: dict[int, set[int]] = {g: set() for groups in wanted for g in groups}
    crossing: set[tuple[int, Var]] = set()
    seen: set[tuple[int, Any]] = set()
    todo = [(g, v) for v, groups in zip(program.outputs, wanted, strict=True) for g in groups]
    while todo:
        group, v = todo.pop()
        if not is_var(v) or v in program.consts or (group, v) in seen:
            continue
        seen.add((group, v))
        if place[v] not in (SHARED, group):
            crossing.add((group, v))
            todo.append((place[v], v))
            eqns_of.setdefault(place[v], set())
        elif v in producer:
            eqns_of[group].add(producer[v])
            todo += [(group, atom) for atom in program.eqns[producer[v]].invars]
    return eqns_of, crossing


def _late(program, group, eqns, phases, crossing, packs, ready, wanted) -> dict[int, int]:
    """The last phase in which each equation of a group may run without holding up a result.

    What needs no exchange, such as a decayed moment, is then made in the program that uses it, not in one before that
    would write it to memory; and a result that needs none, such as a counter, in a program that is there anyway.
    What is smaller than what it is made of, such as a norm, is made at once: it would keep that.
    """
    exchanges = {phase for sender, phase in packs if sender == group}
    exchanges |= {ready[v] + 1 for g, v in crossing if g == group}
    due: dict[Var, int] = {}
    for v, groups in zip(program.outputs, wanted, strict=True):
        if group in groups and is_var(v):
            due[v] = min((phase for phase in exchanges if phase >= ready[v]), default=ready[v])
    due |= {v: phase for (sender, phase), sent in packs.items() if sender == group for v in sent}
    found: dict[int, int] = {}
    for i in reversed(eqns):
        inputs, outputs = variables(program.eqns[i].invars), program.eqns[i].outvars
        shrinks = sum(prod(v.aval.shape) for v in outputs) < max([prod(v.aval.shape) for v in inputs], default=0)
        found[i] = phases[i] if shrinks else max(phases[i], min(due[v] for v in outputs if v in due))
        for v in inputs:
            due[v] = min(due.get(v, found[i]), found[i])
    return found


def _part(program, group, phase, phases, crossing, packs, ready, place, wanted) -> GroupProgram | None:
    mine = sorted(i for i in phases if phases[i] == phase)
    later = [i for i in phases if phases[i] > phase]
    made = {v for i in mine for v in program.eqns[i].outvars}
    results = {v for v, groups in zip(program.outputs, wanted, strict=True) if group in groups and is_var(v)}
    sent = packs.get((group, phase), [])
    fetched = [v for v in results if (group, v) in crossing and ready[v] + 1 == phase]  # wanted here, made elsewhere
    if not (mine or sent or fetched):
        return None
    used = dict.fromkeys(v for i in mine for v in variables(program.eqns[i].invars)) | dict.fromkeys([*sent, *fetched])
    outside = [v for v in used if v not in made and v not in program.consts]
    receives = sorted({(place[v], ready[v]) for v in outside if (group, v) in crossing})
    takes = [v for v in outside if (group, v) not in crossing]
    needed_later = {v for i in later for v in program.eqns[i].invars if is_var(v)} | results
    needed_later |= {v for (g, p), vs in packs.items() if g == group and p > phase for v in vs}
    gives = [v for v in dict.fromkeys(v for i in mine for v in program.eqns[i].outvars) if v in needed_later] + fetched
    inputs = (*takes, *(v for key in receives for v in packs[key]))
    eqns = tuple(program.eqns[i] for i in mine)
    return GroupProgram(
        group=group,
        phase=phase,
        program=Program(eqns, inputs, (*gives, *sent), program.consts),
        takes=tuple(takes),
        receives=tuple(receives),
        gives=tuple(gives),
        packs=tuple(sent),
        dies=tuple(v for v in takes if v not in needed_later),
    )


def _roots(program: Program, atoms: Sequence[Var]) -> list[int]:
    """Inputs of the program that `atoms` depend on."""
    live = set(needed(program.eqns, atoms, effects=False)[1])
    return [at for at, v in enumerate(program.inputs) if v in live]


def _order(v: Var, producer, program: Program) -> tuple[int, int]:
    """A stable order: inputs first, then by equation."""
    if v in producer:
        return producer[v] + 1, program.eqns[producer[v]].outvars.index(v)
    return 0, program.inputs.index(v)


def pack(values: Sequence[Any]) -> list[Any]:
    """Scalars as one vector a dtype, in the order in which the dtypes come first: one transfer instead of many."""
    dtypes = list(dict.fromkeys(v.dtype for v in values))
    return [jnp.stack([v.reshape(()) for v in values if v.dtype == d]) for d in dtypes]


def unpack(packed: Sequence[Any], like: Sequence[Var]) -> list[Any]:
    """The scalars of `pack`, in the order of the variables `like`."""
    dtypes = list(dict.fromkeys(v.aval.dtype for v in like))
    rows = {d: iter(vector) for d, vector in zip(dtypes, packed, strict=True)}
    return [next(rows[v.aval.dtype]).reshape(v.aval.shape) for v in like]
