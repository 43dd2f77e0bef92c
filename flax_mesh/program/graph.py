"""A traced function as a graph that spans loops, branches and remats: a walk follows values into and out of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax import core
from jax.extend import core as jex
from jax.typing import ArrayLike

from flax_mesh.jax_compat import JIT, REMAT
from flax_mesh.program.equations import COND, CUSTOM, SCAN, SHARD_MAP, WHILE, body, branches, scan_parts, while_parts
from flax_mesh.program.follow import BodyPath, Rules, all_equations, follow
from flax_mesh.program.program import Eqn, Program, Var, is_var, program_of

T = TypeVar("T")
CLOSED = (*CUSTOM, SHARD_MAP)  # their bodies are searched, and left as they are


class Literal:
    """A constant scalar."""

    __slots__ = ("aval", "value")

    def __init__(self, value: np.ndarray | float, aval: core.ShapedArray):
        self.value, self.aval = value, aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape


class Value:
    """The result of `op`, an array `const`, or an input of a level: of a body, `outer` is then its value outside.

    It is the variable `var` of the body at `path`.
    """

    __slots__ = ("aval", "const", "op", "outer", "path", "var")

    def __init__(
        self,
        var: Var,
        path: BodyPath,
        op: "Op | None" = None,
        outer: "Atom | None" = None,
        const: ArrayLike | None = None,
    ):
        self.var, self.path, self.op, self.outer, self.const = var, path, op, outer, const
        self.aval: core.ShapedArray = var.aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape


Atom: TypeAlias = Value | Literal


class Level:
    """The equations of a function or of one body."""

    def __init__(self, program: Program, op: "Op | None" = None):
        self.program, self.op = program, op  # of which this is a body
        self.ops: list[Op] = []
        self.inputs: list[Value] = []
        self.consts: list[Value] = []
        self.outputs: list[Atom] = []


class Op:
    """An equation. `bodies` are the levels of a scan, a remat, a cond or a while; of others, only to be searched."""

    __slots__ = ("bodies", "eqn", "inputs", "level", "outputs", "region")

    def __init__(self, eqn: Eqn, inputs: list[Atom], level: Level, path: BodyPath):
        self.eqn, self.inputs, self.level = eqn, inputs, level
        self.outputs = [Value(v, path, self) for v in eqn.outvars]
        self.bodies: list[Level] = []
        self.region: Any = None  # of the product whose attention is computed in blocks

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def is_closed(self) -> bool:
        return self.name in CLOSED


def build(closed: jex.ClosedJaxpr) -> Level:
    top = Level(program_of(closed))
    top.inputs = [Value(v, ()) for v in top.program.inputs]
    top.outputs = _fill(top, top.program, top.inputs, ())
    return top


def _fill(level: Level, program: Program, inputs: Sequence[Atom], path: BodyPath) -> list[Atom]:
    env: dict[Var, Atom] = dict(zip(program.inputs, inputs, strict=True))
    consts = {v: Value(v, path, const=const) for v, const in program.consts.items()}
    level.consts += consts.values()
    env |= consts

    def read(atom: Any) -> Atom:
        return env[atom] if is_var(atom) else Literal(atom.val, atom.aval)

    for eqn in program.eqns:
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in JIT or _is_softmax(eqn):
            outputs = _fill(level, body(eqn), values, (*path, (id(eqn), 0)))
        else:
            op = Op(eqn, values, level, path)
            op.bodies = [_body(op, *each, (*path, (id(eqn), n))) for n, each in enumerate(_bodies_of(op))]
            level.ops.append(op)
            outputs = op.outputs
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def _is_softmax(eqn: Eqn) -> bool:
    """Whether it is a function of JAX, with the derivative of its equations; other functions define derivatives."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    jaxpr = eqn.params["call_jaxpr"].jaxpr
    if f" at {Path(jax.__file__).parent}" not in str(jaxpr.debug_info.func_src_info):
        return False
    return {"exp", "reduce_sum"} <= {inner.primitive.name for inner in all_equations(jaxpr.eqns)}


def _bodies_of(op: Op) -> Iterable[tuple[Program, Sequence[Atom | None]]]:
    """(body, the values of its inputs: None where they change) of an equation."""
    name, eqn, given = op.name, op.eqn, op.inputs
    if name == SCAN:
        scan = scan_parts(eqn)
        consts = scan.inputs(given)[0]
        yield scan.body, [*consts, *[None] * (len(given) - len(consts))]
    elif name in REMAT:
        yield body(eqn), given
    elif name == COND:
        yield from ((branch, given[1:]) for branch in branches(eqn))
    elif name == WHILE:
        loop = while_parts(eqn)
        _, consts, carry = loop.inputs(given)
        yield loop.body, [*consts, *[None] * len(carry)]
    elif op.is_closed:
        yield body(eqn), [None] * len(given)


def _body(op: Op, program: Program, given: Sequence[Atom | None], path: BodyPath) -> Level:
    level = Level(program, op)
    level.inputs = [Value(v, path, outer=outer) for v, outer in zip(program.inputs, given, strict=True)]
    level.outputs = _fill(level, program, level.inputs, path)
    return level


def facts_of(top: Level, given: Sequence[T | None], rules: Rules[T | None]) -> dict[int, T]:
    """The facts of values by their ids, unless they are None, from the facts `given` of the inputs."""
    facts = follow(top.program, given, rules)
    values = [x for level in all_levels(top) for x in (*level.inputs, *level.consts)]
    values += [out for level in all_levels(top) for op in level.ops for out in op.outputs]
    return {id(x): fact for x in values if (fact := facts.of(x.var, x.path)) is not None}


def source(x: Atom) -> Atom:
    """The value outside of all bodies that `x` is."""
    while isinstance(x, Value) and x.op is None and x.outer is not None:
        x = x.outer
    return x


def all_levels(level: Level) -> Iterable[Level]:
    yield level
    for op in level.ops:
        for inner in op.bodies:
            yield from all_levels(inner)


def closed_around(level: Level) -> str:
    """The name of the operation whose body is left as it is, and around a level; "" if there is none."""
    name = ""
    while (op := level.op) is not None:
        name = op.name if op.is_closed else name
        level = op.level
    return name


def repeats(level: Level) -> tuple[int, bool]:
    """(how often the loops around a level run it, whether a remat is around it)."""
    times, inside = 1, False
    while (op := level.op) is not None:
        times *= scan_parts(op.eqn).length if op.name == SCAN else 1
        inside |= op.name in REMAT
        level = op.level
    return times, inside
