"""A traced function as a graph that spans loops, branches and remats: a walk follows values into and out of them.

`run` evaluates it with attentions in blocks. Values that only they needed, such as masks, are not computed.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.typing import ArrayLike

from flax_mesh.jax_compat import evaluate, in_source_of
from flax_mesh.program.follow import BodyPath, Rules, all_equations, follow
from flax_mesh.program.program import (
    CUSTOM,
    JIT,
    REMAT,
    SCAN,
    SHARD_MAP,
    Body,
    Eqn,
    Program,
    Var,
    bodies,
    bodies_of,
    body,
    is_var,
    scan_parts,
)
from flax_mesh.program.rewrite import open_bodies

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
    """An equation. `bodies` are the levels of a scan, a remat, a cond or a while; of others, only to be searched.

    `changing` are the inputs that the bodies do not read as values around them; `leaves`, of a product whose attention
    is computed in blocks, are the values that it needs.
    """

    __slots__ = ("bodies", "changing", "eqn", "inputs", "leaves", "level", "outputs")

    def __init__(self, eqn: Eqn, inputs: list[Atom], level: Level, path: BodyPath):
        self.eqn, self.inputs, self.level = eqn, inputs, level
        self.outputs = [Value(v, path, self) for v in eqn.outvars]
        self.leaves: list[Value] | None = None
        inner = bodies_of(eqn)
        self.changing = {*range(len(inputs))} if self.is_closed else {*inner.carry, *inner.rows, *inner.chooses}
        self.bodies = [self._body(n, x, path, () if n else inner.carry) for n, x in enumerate(inner.all)]

    def _body(self, number: int, body: Body, path: BodyPath, carry: Sequence[int]) -> Level:
        level, path = Level(body.program, self), (*path, (id(self.eqn), number))
        outer = [None if at in self.changing else self.inputs[at] for at in body.at]
        level.inputs = [Value(v, path, outer=x) for v, x in zip(body.program.inputs, outer, strict=True)]
        level.outputs = _fill(level, body.program, level.inputs, path)
        for out, at in zip(level.outputs, carry, strict=False):
            if out is level.inputs[body.at.index(at)]:  # the loop does not change it
                level.inputs[body.at.index(at)].outer = self.inputs[at]
        return level

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def is_closed(self) -> bool:
        return self.name in CLOSED

    @property
    def is_opened(self) -> bool:
        """Whether its bodies are evaluated level by level."""
        return bool(self.bodies) and not self.is_closed


Attend: TypeAlias = Callable[[Op, Sequence[jax.Array]], jax.Array]  # (product with leaves, their values) -> its result


def build(program: Program) -> Level:
    top = Level(program)
    top.inputs = [Value(v, ()) for v in program.inputs]
    top.outputs = _fill(top, program, top.inputs, ())
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
            level.ops.append(op := Op(eqn, values, level, path))
            outputs = [_passed(op, n) or out for n, out in enumerate(op.outputs)]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def _passed(op: Op, number: int) -> Atom | None:
    """The input of a remat that is the output with this number."""
    out = op.bodies[0].outputs[number] if op.name in REMAT else None
    return out.outer if isinstance(out, Value) and any(out is x for x in op.bodies[0].inputs) else None


def _is_softmax(eqn: Eqn) -> bool:
    """Whether it is a function of JAX, with the derivative of its equations; other functions define derivatives."""
    if eqn.primitive.name != "custom_jvp_call":
        return False
    jaxpr = bodies(eqn)[0]
    if f" at {Path(jax.__file__).parent}" not in str(jaxpr.debug_info.func_src_info):
        return False
    return {"exp", "reduce_sum"} <= {inner.primitive.name for inner in all_equations(jaxpr.eqns)}


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


def around(level: Level) -> Iterator[Op]:
    """The operations whose bodies are around a level, the innermost first."""
    while (op := level.op) is not None:
        yield op
        level = op.level


def repeats(level: Level) -> tuple[int, bool]:
    """(how often the loops around a level run it, whether a remat is around it)."""
    ops = [*around(level)]
    times = math.prod(scan_parts(op.eqn).length for op in ops if op.name == SCAN)
    return times, any(op.name in REMAT for op in ops)


def needed_ops(top: Level) -> set[int]:
    """The ids of the operations that the outputs depend on. An attention in blocks depends on its leaves only."""
    reached, todo = set[int](), list[Atom | Op](_ends(top))
    while todo:
        x = todo.pop()
        op = x if isinstance(x, Op) else x.op if isinstance(x := source(x), Value) else None
        if op is None or id(op) in reached:
            continue
        reached.add(id(op))
        if op.leaves is not None:
            todo += op.leaves
        elif op.is_opened:
            todo += [*(op.inputs[at] for at in op.changing), *(x for level in op.bodies for x in _ends(level))]
        else:
            todo += op.inputs
    return reached


def _ends(level: Level) -> list[Atom | Op]:
    return [*level.outputs, *(op for op in level.ops if op.eqn.effects)]


def run(level: Level, env: Mapping[int, Any], needed: set[int], attend: Attend) -> list[ArrayLike]:
    """The outputs of a level, given the values of its inputs and of everything around it by their ids."""
    env = dict(env)

    def read(x: Atom) -> ArrayLike:
        if isinstance(x, Literal):
            return x.value
        if id(x) not in env and x.outer is not None:
            return _as_array(read(x.outer), x)
        return env[id(x)] if x.const is None else x.const

    def call(op: Op, number: int, _: Program, values: Sequence[Any]) -> list[jax.Array]:
        """The outputs of a body, which reads the values around it in the place of inputs that are None."""
        inner = op.bodies[number]
        given = {id(v): x for v, x in zip(inner.inputs, values, strict=True) if x is not None}
        outputs = run(inner, env | given, needed, attend)
        return [_as_array(x, v) for x, v in zip(outputs, inner.outputs, strict=True)]

    for op in level.ops:
        if id(op) not in needed:
            continue
        if op.leaves is not None:
            with in_source_of(op.eqn):
                outputs = [attend(op, [jnp.asarray(read(x)) for x in op.leaves])]
        elif op.is_opened:
            values: list[Any] = [_as_array(read(x), x) if n in op.changing else None for n, x in enumerate(op.inputs)]
            with in_source_of(op.eqn):
                outputs = open_bodies(op.eqn, values, partial(call, op), lambda eqn, x: None)
        else:
            outputs = evaluate(op.eqn, [read(x) for x in op.inputs])
        env.update((id(v), x) for v, x in zip(op.outputs, outputs, strict=True))
    return [read(x) for x in level.outputs]


def _as_array(x: ArrayLike, of: Atom) -> jax.Array:
    """A literal is a number in a jaxpr, and an array in the function that is traced again."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, of.aval.dtype)
