"""A traced function without inputs, cut into slices: each computes a few of its outputs.

**Early** equations have small results that are the same on every machine, whole numbers and random keys: they are
evaluated once, and their results are the inputs of the slices. The other equations that an output needs are its slice.
An equation that costs next to nothing may be in several slices; outputs that share any other equation, or a large
constant, are in one slice. Two slices to which `Kinds` gives one number differ only in the values of their inputs.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend import core as jex

from flax_mesh.program.equations import CUSTOM
from flax_mesh.program.program import (
    Atom,
    Eqn,
    Program,
    Var,
    bodies,
    flops,
    has_explicit_axes,
    is_var,
    needed,
    program_of,
    variables,
)
from flax_mesh.tree import is_key

SMALL = 2**10  # elements
FILLS = ("broadcast_in_dim", "iota")  # they cost nothing, whatever the size of their results is
DRAWS = ("random_bits", "rng_bit_generator")  # their bits may depend on how XLA shards them


class Slice(NamedTuple):
    """`program` computes the outputs at `positions`. Its inputs are results of early equations."""

    program: Program
    positions: tuple[int, ...]


class Cut(NamedTuple):
    """The slices, and a program without inputs whose outputs are the variables that are inputs of slices."""

    early: Program
    slices: tuple[Slice, ...]


def cut(program: Program) -> Cut | None:
    """The slices of a program without inputs; None if it must not be cut.

    It must not be cut if it has effects or calls the host, nor on Explicit axes, where every value belongs to a mesh.
    """
    if any(map(_is_whole, program.eqns)):
        return None
    known = {v for v in program.consts if _is_small_and_exact(v)}
    early, late = list[Eqn](), list[Eqn]()
    for at in needed(program.eqns, program.outputs)[0]:
        eqn = program.eqns[at]
        if known.issuperset(variables(eqn.invars)) and all(map(_is_small_and_exact, eqn.outvars)) and _is_exact(eqn):
            early.append(eqn)
            known |= set(eqn.outvars)
        else:
            late.append(eqn)
    slices = tuple(_slices(program, late, known))
    inputs = variables(v for each in slices for v in each.program.inputs)
    return Cut(program._replace(eqns=tuple(early), outputs=tuple(inputs)), slices)


def _is_whole(eqn: Eqn) -> bool:
    """Whether an equation, or one in its bodies, has effects, calls the host, or is on Explicit axes."""
    if eqn.effects or "callback" in eqn.primitive.name:
        return True
    if any(has_explicit_axes(v.aval.sharding.mesh) for v in eqn.outvars if hasattr(v.aval, "sharding")):
        return True
    return any(_is_whole(inner) for each in bodies(eqn) for inner in each.eqns)


def _is_small_and_exact(v: Var) -> bool:
    """Whether a value can be an early one. An argument cannot have a weak type."""
    return v.aval.size <= SMALL and not v.aval.weak_type and _is_whole_number(v)


def _is_whole_number(v: Var) -> bool:
    return is_key(v.aval) or v.aval.dtype.kind in "biu"


def _is_exact(eqn: Eqn) -> bool:
    """Whether nothing in an equation is rounded."""
    if eqn.primitive.name in DRAWS or not all(map(_is_whole_number, eqn.outvars)):
        return False
    return all(_is_exact(inner) for each in bodies(eqn) for inner in each.eqns)


def _slices(program: Program, eqns: Sequence[Eqn], known: set[Var]) -> Iterable[Slice]:
    maker = {v: at for at, eqn in enumerate(eqns) for v in eqn.outvars}
    for outputs in _together(program, eqns, known):
        atoms = [program.outputs[at] for at in outputs]
        kept, found = set[int](), [maker[v] for v in variables(atoms) if v in maker]
        while found:
            if (at := found.pop()) not in kept:
                kept.add(at)
                found += [maker[v] for v in variables(eqns[at].invars) if v in maker]
        of_slice = tuple(eqns[at] for at in sorted(kept))
        used = variables([a for eqn in of_slice for a in eqn.invars] + atoms)
        consts = {v: program.consts[v] for v in used if v in program.consts and v not in known}
        yield Slice(Program(of_slice, tuple(v for v in used if v in known), tuple(atoms), consts), tuple(outputs))


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


class Kinds:
    """Numbers of programs. Two have the same number only if their equations, parameters and constants are equal."""

    def __init__(self) -> None:
        self._numbers = dict[Hashable, int]()
        self._kept = dict[int, tuple[object, Hashable]]()  # by id; an object that is kept keeps its id

    def of(self, program: Program) -> int:
        names = {v: at for at, v in enumerate((*program.consts, *program.inputs))}

        def name(atom: Atom) -> Hashable:
            return names[atom] if is_var(atom) else (atom.aval, self._frozen(np.asarray(atom.val)))

        rows = list[Hashable]()
        for eqn in program.eqns:
            read = tuple(map(name, eqn.invars))
            names |= {v: len(names) + at for at, v in enumerate(eqn.outvars)}
            params = self._params(eqn)
            rows.append((eqn.primitive, read, params, tuple(v.aval for v in eqn.outvars), self._identity(eqn.ctx)))
        consts = tuple((v.aval, self._frozen(x)) for v, x in program.consts.items())
        inputs = tuple(v.aval for v in program.inputs)
        return self._number((consts, inputs, tuple(rows), tuple(map(name, program.outputs))))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _params(self, eqn: Eqn) -> Hashable:
        if eqn.primitive.name in CUSTOM:  # nothing is differentiated
            return tuple(self._body(each) for each in bodies(eqn))
        return tuple((key, self._frozen(eqn.params[key])) for key in sorted(eqn.params))

    def _body(self, inner: jex.Jaxpr | jex.ClosedJaxpr) -> Hashable:
        if id(inner) not in self._kept:
            self._kept[id(inner)] = inner, ("body", self.of(program_of(inner)))
        return self._kept[id(inner)][1]

    def _identity(self, x: object) -> Hashable:
        return self._kept.setdefault(id(x), (x, ("object", id(x))))[1]

    def _frozen(self, x: object) -> Hashable:
        """A value that is equal only for equal `x`; 1, 1.0 and True, or 0.0 and -0.0, are not."""
        if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr):
            return self._body(x)
        if isinstance(x, tuple | list):
            return (type(x), *map(self._frozen, x))
        if isinstance(x, Mapping):
            return (type(x), *((self._frozen(key), self._frozen(value)) for key, value in x.items()))
        if isinstance(x, float | complex | np.generic | np.ndarray) and np.size(x) <= SMALL:
            array = np.asarray(x)
            return type(x), array.dtype, array.shape, array.tobytes()
        try:
            hash(x)
        except TypeError:
            return self._identity(x)
        return self._identity(x) if hasattr(x, "__array__") else (type(x), x)


def work(program: Program) -> int:
    """The number of equations, with those in bodies."""
    return sum(1 + sum(work(program_of(each)) for each in bodies(eqn)) for eqn in program.eqns)
