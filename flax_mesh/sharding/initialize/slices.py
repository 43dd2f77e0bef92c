"""A traced function without inputs, cut into slices: each computes a few of its outputs.

**Early** equations have small results that are the same on every machine, whole numbers and random keys: they are
evaluated once. The other equations that an output needs, back to random keys, are its slice. An equation that costs
next to nothing may be in several slices; outputs that share any other equation, or a large constant, are in one slice.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Sharding

from flax_mesh.program.program import (
    SHARD_MAP,
    Eqn,
    Program,
    Var,
    bodies,
    flops,
    has_explicit_axes,
    is_var,
    needed,
    variables,
)
from flax_mesh.tree import is_key

SMALL = 2**10  # elements
FILLS = ("broadcast_in_dim", "iota")  # they cost nothing, whatever the size of their results is
DRAWS = ("random_bits", "rng_bit_generator")  # their bits may depend on how XLA shards them


class Slice(NamedTuple):
    """`program` computes the outputs at `positions`. Its inputs are random keys; or it returns its input.

    Whole numbers are no inputs of arithmetic, since XLA may round results of constants differently.
    """

    program: Program
    positions: tuple[int, ...]


class Cut(NamedTuple):
    """The slices, and a program without inputs whose outputs are the variables that are inputs of slices."""

    early: Program
    slices: tuple[Slice, ...]


def cut(program: Program) -> Cut | None:
    """The slices of a program without inputs; None if it must not be cut.

    It must not be cut if it has effects or calls the host, nor if values belong to a mesh: on Explicit axes, and in
    `jax.shard_map`.
    """
    if any(map(_is_whole, program.eqns)):
        return None
    eqns = [program.eqns[at] for at in needed(program.eqns, program.outputs)[0]]
    here = [v for v, x in program.consts.items() if getattr(x, "is_fully_replicated", True)]
    known = set(filter(_is_small_and_exact, here))
    early, late = list[Eqn](), list[Eqn]()
    for eqn in eqns:
        if known.issuperset(variables(eqn.invars)) and all(map(_is_small_and_exact, eqn.outvars)) and _is_exact(eqn):
            early.append(eqn)
            known |= set(eqn.outvars)
        else:
            late.append(eqn)
    maker = {v: (at, eqn) for at, eqn in enumerate(eqns) for v in eqn.outvars if not (v in known and is_key(v.aval))}
    slices = tuple(_slice(program, each, known, maker) for each in _together(program, late, known))
    inputs = variables(v for each in slices for v in each.program.inputs)
    return Cut(program._replace(eqns=tuple(early), outputs=tuple(inputs)), slices)


def _is_whole(eqn: Eqn) -> bool:
    """Whether an equation, or one in its bodies, must not be cut from others."""
    if eqn.effects or "callback" in eqn.primitive.name or eqn.primitive.name == SHARD_MAP:
        return True
    if any(has_explicit_axes(v.aval.sharding.mesh) for v in eqn.outvars if hasattr(v.aval, "sharding")):
        return True
    return any(_is_whole(inner) for each in bodies(eqn) for inner in each.eqns)


def _is_small_and_exact(v: Var) -> bool:
    """Whether a value may be early. An argument cannot have a weak type."""
    return v.aval.size <= SMALL and not v.aval.weak_type and _is_whole_number(v)


def _is_whole_number(v: Var) -> bool:
    return is_key(v.aval) or v.aval.dtype.kind in "biu"


def _is_exact(eqn: Eqn) -> bool:
    """Whether nothing in an equation is rounded, or placed on a mesh."""
    params: list[object] = jax.tree.leaves([*eqn.params.values()])
    if eqn.primitive.name in DRAWS or any(isinstance(x, Sharding) for x in params):
        return False
    if not all(map(_is_whole_number, eqn.outvars)):
        return False
    return all(_is_exact(inner) for each in bodies(eqn) for inner in each.eqns)


def _slice(program: Program, positions: Sequence[int], known: set[Var], maker: Mapping[Var, tuple[int, Eqn]]) -> Slice:
    outputs = tuple(program.outputs[at] for at in positions)
    if known.issuperset(variables(outputs)):
        return Slice(Program((), tuple(variables(outputs)), outputs, {}), tuple(positions))
    kept, pending = dict[int, Eqn](), [maker[v] for v in variables(outputs) if v in maker]
    while pending:
        at, eqn = pending.pop()
        if at not in kept:
            kept[at] = eqn
            pending += [maker[v] for v in variables(eqn.invars) if v in maker]
    eqns = tuple(kept[at] for at in sorted(kept))
    used = variables([*(atom for eqn in eqns for atom in eqn.invars), *outputs])
    inputs = tuple(v for v in used if v in known and is_key(v.aval))
    consts = {v: program.consts[v] for v in used if v in program.consts and v not in inputs}
    return Slice(Program(eqns, inputs, outputs, consts), tuple(positions))


def _together(program: Program, eqns: Sequence[Eqn], known: set[Var]) -> list[list[int]]:
    """The positions of outputs that must be in one slice: they share a value that is not cheap."""
    cheap = known | {v for v in program.consts if v.aval.size <= SMALL}
    shared = dict[Var, Var]()  # a value that is not cheap -> another one of the same slice

    def first(v: Var) -> Var:
        while (parent := shared.setdefault(v, v)) is not v:
            shared[v] = v = shared[parent]
        return v

    for eqn in eqns:
        read = variables(eqn.invars)
        if cheap.issuperset(read) and _is_cheap(eqn):
            cheap |= set(eqn.outvars)
            continue
        root = first(eqn.outvars[0])
        for v in (*eqn.outvars, *(v for v in read if v not in cheap)):
            shared[first(v)] = root
    groups = dict[object, list[int]]()
    for at, atom in enumerate(program.outputs):
        groups.setdefault(first(atom) if is_var(atom) and atom not in cheap else at, []).append(at)
    return list(groups.values())


def _is_cheap(eqn: Eqn) -> bool:
    return eqn.primitive.name in FILLS or (all(v.aval.size <= SMALL for v in eqn.outvars) and flops(eqn) <= SMALL)
