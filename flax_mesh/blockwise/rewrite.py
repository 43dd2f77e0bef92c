"""Evaluates a graph with its attentions in blocks. Values that only they needed, such as masks, are not computed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from flax_mesh.blockwise.dims import Block, evaluate_block
from flax_mesh.blockwise.place import mesh_of
from flax_mesh.jax_compat import evaluate, in_source_of
from flax_mesh.program.bodies import open_bodies
from flax_mesh.program.equations import COND, SCAN, WHILE, scan_parts, while_parts
from flax_mesh.program.graph import Level, Literal, Op, Value, source
from flax_mesh.program.program import Program
from flax_mesh.tree import is_key

Attend = Callable[[Op, Sequence[Any]], Any]  # (product with a region, values of its leaves) -> its result
_LARGEST = 2**22  # elements of an array that is computed at trace time


class Needed:
    """The values and the operations that the outputs depend on: an attention needs the leaves of its region only."""

    def __init__(self, top: Level):
        self.values: set[int] = set()
        self.ops: set[int] = set()
        todo: list[Any] = [top]
        while todo:
            x = todo.pop()
            if isinstance(x, Level):
                todo += [*x.outputs, *(op for op in x.ops if op.eqn.effects)]
            elif isinstance(x, Value) and id(x) not in self.values:
                self.values.add(id(x))
                todo += [x.op, x.outer]
            elif isinstance(x, Op) and id(x) not in self.ops:
                self.ops.add(id(x))
                todo += self._of(x)

    def _of(self, op: Op) -> list[Any]:
        """The values and the levels that an operation needs."""
        if op.region is not None:
            return [x for x, _ in op.region.leaves.values()]
        if not op.bodies or op.is_closed:
            return op.inputs
        return [*_given(op), *op.bodies]


def _given(op: Op) -> list[Any]:
    """The inputs of an operation that its bodies do not read as values around them: they change, or choose a body."""
    if op.name == SCAN:
        _, carry, rows = scan_parts(op.eqn).inputs(op.inputs)
        return [*carry, *rows]
    if op.name == WHILE:
        of_test, _, carry = while_parts(op.eqn).inputs(op.inputs)
        return [*of_test, *carry]
    return op.inputs[:1] if op.name == COND else []


def run(level: Level, env: Mapping[int, Any], needed: Needed, attend: Attend) -> list[Any]:
    """The outputs of a level, given the values of its inputs and of everything around it by their ids."""
    env = dict(env)

    def read(x: Any) -> Any:
        if isinstance(x, Literal):
            return x.value
        if id(x) in env:
            return env[id(x)]
        return x.const if x.const is not None else _as_array(read(x.outer), x)

    for op in level.ops:
        if id(op) not in needed.ops:
            continue
        if op.region is not None:
            values = [jnp.asarray(read(x)) for x, _ in op.region.leaves.values()]
            mesh = mesh_of(op.outputs[0], jax.sharding.get_abstract_mesh())
            with jax.sharding.use_abstract_mesh(mesh), in_source_of(op.eqn), jax.named_scope("blockwise_attention"):
                outputs = [attend(op, values)]
        elif op.bodies and not op.is_closed:
            given = {id(x) for x in _given(op)}
            values: list[Any] = [_as_array(read(x), x) if id(x) in given else None for x in op.inputs]
            with in_source_of(op.eqn):
                outputs = open_bodies(op.eqn, values, partial(_call, op, env, needed, attend), lambda eqn, x: None)
        else:
            outputs = evaluate(op.eqn, [read(x) for x in op.inputs])
        env.update((id(v), x) for v, x in zip(op.outputs, outputs, strict=True))
    return [read(x) for x in level.outputs]


def _call(
    op: Op,
    env: Mapping[int, Any],
    needed: Needed,
    attend: Attend,
    number: int,
    program: Program,
    values: Sequence[Any],
) -> list[Any]:
    """The outputs of a body. It reads the values around it in `env`, in the place of inputs that are None."""
    if number >= len(op.bodies):  # the test of a while
        return program.call(*values)
    level = op.bodies[number]
    inner = {id(v): x for v, x in zip(level.inputs, values, strict=True) if x is not None}
    return [_as_array(x, v) for x, v in zip(run(level, {**env, **inner}, needed, attend), level.outputs, strict=True)]


def _as_array(x: Any, of: Any) -> Any:
    """A literal is a number in a jaxpr, and an array in the function that is traced again."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, of.aval.dtype)


def known_value(x: Any, cache: dict[int, Any]) -> Any:
    """A value that depends on no input, as an array of NumPy; None for every other value."""
    todo: list[Any] = [x := source(x)]
    while todo:
        inputs = [] if _is_known(todo[-1], cache) else _inputs_of(todo[-1]) or []
        if missing := [each for each in inputs if not _is_known(each, cache)]:
            todo += missing
        elif not _is_known(value := todo.pop(), cache):
            cache[id(value)] = _computed(value, cache)
    return np.asarray(x.value) if isinstance(x, Literal) else cache[id(x)]


def _is_known(x: Any, cache: Mapping[int, Any]) -> bool:
    return isinstance(x, Literal) or id(x) in cache


def _inputs_of(x: Value) -> list[Any] | None:
    """The values from which the result of an operation is computed at trace time; None if it is not."""
    op = x.op
    if op is None or op.bodies or len(op.outputs) != 1 or x.aval.size > _LARGEST or op.eqn.effects:
        return None
    if op.name == "random_bits" or op.is_closed or is_key(x.aval):
        return None
    return [source(each) for each in op.inputs]


def _computed(x: Value, cache: Mapping[int, Any]) -> Any:
    if x.const is not None:
        return None if isinstance(x.const, core.Tracer) or is_key(x.aval) else np.asarray(x.const)
    values = _inputs_of(x)
    if x.op is None or values is None:
        return None
    inputs = [each.value if isinstance(each, Literal) else cache[id(each)] for each in values]
    if any(each is None for each in inputs):
        return None
    every = Block({}, {}, {}, {})
    with jax.ensure_compile_time_eval():
        inputs = [jnp.asarray(each) for each in inputs]
        return np.asarray(evaluate_block(x.op, (None,) * len(x.shape), inputs, every))
