"""Kinds of programs: two programs of one kind differ only in the values of their inputs."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Hashable, Mapping

import numpy as np
from jax.extend import core as jex

from flax_mesh.program.program import CUSTOM, Atom, Eqn, Program, bodies, is_var, program_of

SMALL = 2**10  # elements of an array that is compared by its values


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
        of_type: Hashable = type(x)
        if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr):
            return self._body(x)
        if isinstance(x, tuple | list):
            return of_type, *map(self._frozen, x)
        if isinstance(x, Mapping):
            return of_type, *((self._frozen(key), self._frozen(value)) for key, value in x.items())
        if isinstance(x, float | complex | np.generic | np.ndarray):
            array = np.asarray(x)
            return (of_type, array.dtype, array.shape, array.tobytes()) if array.size <= SMALL else self._identity(x)
        return self._identity(x) if hasattr(x, "__array__") or not _is_hashable(x) else (of_type, x)


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:  # also a tuple-like object that contains a list
        return False
    return True


def work(program: Program) -> int:
    """The number of equations, with those in bodies."""
    return sum(1 + sum(work(program_of(each)) for each in bodies(eqn)) for eqn in program.eqns)
