"""A traced function as a graph that spans loops, branches and remats: a walk follows values into and out of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend import core as jex

from flax_mesh.jax_compat import JIT, REMAT, scan_sizes

CLOSED = (
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "shard_map",
)  # their bodies are searched, and left as they are


class Literal:
    """A constant scalar."""

    __slots__ = ("aval", "value")

    def __init__(self, value: Any, aval: Any):
        self.value, self.aval = value, aval


class Value:
    """The result of `op`, an array `const`, or an input of a level: of a body, `outer` is then its value outside."""

    __slots__ = ("aval", "const", "op", "outer")

    def __init__(self, aval: Any, op: "Op | None" = None, outer: Any = None, const: Any = None):
        self.aval, self.op, self.outer, self.const = aval, op, outer, const

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape


class Level:
    """The equations of a function or of one body."""

    def __init__(self, op: "Op | None" = None):
        self.op = op  # of which this is a body
        self.ops: list[Op] = []
        self.inputs: list[Value] = []
        self.consts: list[Value] = []
        self.outputs: list[Any] = []


class Op:
    """An equation. `bodies` are the levels of a scan, a remat, a cond or a while; of others, only to be searched."""

    __slots__ = ("bodies", "eqn", "inputs", "level", "outputs", "region")

    def __init__(self, eqn: Any, inputs: list[Any], level: Level):
        self.eqn, self.inputs, self.level = eqn, inputs, level
        self.outputs = [Value(v.aval, self) for v in eqn.outvars]
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
    top = Level()
    top.inputs = [Value(v.aval) for v in closed.jaxpr.invars]
    top.outputs = _fill(top, closed.jaxpr, closed.consts, top.inputs)
    return top


def _fill(level: Level, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    for v, const in zip(jaxpr.constvars, consts, strict=True):
        env[v] = Value(v.aval, const=const)
        level.consts.append(env[v])

    def read(atom: Any) -> Any:
        return Literal(atom.val, atom.aval) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        inner = _inlined(eqn)
        if inner is not None:
            outputs = _fill(level, *_parts(inner), values)
        else:
            op = Op(eqn, values, level)
            op.bodies = [_body(op, *each) for each in _bodies_of(op)]
            level.ops.append(op)
            outputs = op.outputs
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _parts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def _inlined(eqn: Any) -> Any:
    name = eqn.primitive.name
    if name in JIT:
        return eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    if name == "custom_jvp_call" and _is_softmax(eqn.params["call_jaxpr"]):
        return eqn.params["call_jaxpr"]
    return None


def _is_softmax(jaxpr: jex.ClosedJaxpr) -> bool:
    """Whether it is a function of JAX, with the derivative of its equations; other functions define derivatives."""
    names, stack = set(), [jaxpr]
    if f" at {Path(jax.__file__).parent}" not in str(jaxpr.jaxpr.debug_info.func_src_info):
        return False
    while stack:
        for eqn in _parts(stack.pop())[0].eqns:
            names.add(eqn.primitive.name)
            if eqn.primitive.name in JIT:
                stack.append(_inlined(eqn))
    return {"exp", "reduce_sum"} <= names


def _bodies_of(op: Op) -> Iterable[tuple[Any, list[Any]]]:
    """(jaxpr, the values of its inputs: None where they change) of the bodies of an equation."""
    name, params, given = op.name, op.params, op.inputs
    if name == "scan":
        consts = scan_sizes(op.eqn)[0]
        yield params["jaxpr"], [*given[:consts], *[None] * (len(given) - consts)]
    elif name in REMAT:
        yield params["jaxpr"], given
    elif name == "cond":
        yield from ((branch, given[1:]) for branch in params["branches"])
    elif name == "while":
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        after = len(given) - first - consts
        yield params["body_jaxpr"], [*given[first : first + consts], *[None] * after]
    elif op.is_closed:
        jaxpr = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
        if jaxpr is not None:
            yield jaxpr, [None] * len(_parts(jaxpr)[0].invars)


def _body(op: Op, jaxpr: Any, given: Sequence[Any]) -> Level:
    level = Level(op)
    plain, consts = _parts(jaxpr)
    level.inputs = [Value(v.aval, outer=outer) for v, outer in zip(plain.invars, given, strict=True)]
    level.outputs = _fill(level, plain, consts, level.inputs)
    return level


def source(x: Any) -> Any:
    """The value outside of all bodies that `x` is."""
    while isinstance(x, Value) and x.op is None and x.outer is not None:
        x = x.outer
    return x


def all_levels(level: Level) -> Iterable[Level]:
    yield level
    for op in level.ops:
        for body in op.bodies:
            yield from all_levels(body)


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
        times *= op.params["length"] if op.name == "scan" else 1
        inside |= op.name in REMAT
        level = op.level
    return times, inside
