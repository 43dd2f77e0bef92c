"""Evaluates a graph with its attentions in blocks. Values that only they needed, such as masks, are not computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend import core as jex

from flax_mesh.blockwise.dims import Block, evaluate_block
from flax_mesh.blockwise.place import mesh_of
from flax_mesh.jax_compat import REMAT, evaluate, in_source_of, scan_sizes
from flax_mesh.program.graph import Level, Literal, Op, Value, source
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
        if op.name == "scan":
            kept = op.inputs[scan_sizes(op.eqn)[0] :]  # constants only if the body needs them
        elif op.name == "while":
            first, consts = op.params["cond_nconsts"], op.params["body_nconsts"]
            kept = [*op.inputs[:first], *op.inputs[first + consts :]]
        else:
            kept = op.inputs[:1] if op.name == "cond" else []
        return [*kept, *op.bodies]


def run(level: Level, env: Mapping[int, Any], needed: Needed, attend: Attend) -> list[Any]:
    """The outputs of a level, given the values of its inputs and of everything around it by their ids."""
    env = dict(env)

    def read(x: Any) -> Any:
        if isinstance(x, Literal):
            return x.value
        if id(x) in env:
            return env[id(x)]
        return x.const if x.const is not None else read(x.outer)

    for op in level.ops:
        if id(op) not in needed.ops:
            continue
        if op.region is not None:
            values = [jnp.asarray(read(x)) for x, _ in op.region.leaves.values()]
            mesh = mesh_of(op.outputs[0], jax.sharding.get_abstract_mesh())
            with jax.sharding.use_abstract_mesh(mesh), in_source_of(op.eqn), jax.named_scope("blockwise_attention"):
                outputs = [attend(op, values)]
        elif op.bodies and not op.is_closed:
            outputs = _run_bodies(op, env, read, needed, attend)
        else:
            outputs = evaluate(op.eqn, [read(x) for x in op.inputs])
        env.update((id(v), x) for v, x in zip(op.outputs, outputs, strict=True))
    return [read(x) for x in level.outputs]


def _run_bodies(
    op: Op, env: Mapping[int, Any], read: Callable[[Any], Any], needed: Needed, attend: Attend
) -> Sequence[Any]:
    params = op.params

    def call(body: Level, inputs: Sequence[Value], values: Sequence[Any]) -> list[Any]:
        inner = {**env, **{id(v): x for v, x in zip(inputs, values, strict=True)}}
        return run(body, inner, needed, attend)

    if op.name == "scan":
        consts, carried = scan_sizes(op.eqn)
        (body,) = op.bodies
        given = [_as_array(read(x), x) for x in op.inputs[consts:]]

        def step(carry: Any, xs: Any) -> Any:
            results = call(body, body.inputs[consts:], [*carry, *xs])
            results = [_as_array(x, v) for x, v in zip(results, body.outputs, strict=True)]
            return tuple(results[:carried]), tuple(results[carried:])

        how = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(step, tuple(given[:carried]), tuple(given[carried:]), **how)
        return [*carry, *stacked]
    if op.name == "while":
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        (body,), condition = op.bodies, params["cond_jaxpr"]
        of_condition = [read(x) for x in op.inputs[:first]]
        given = [_as_array(read(x), x) for x in op.inputs[first + consts :]]
        goes_on = lambda carry: jex.jaxpr_as_fun(condition)(*of_condition, *carry)[0]  # noqa: E731
        return lax.while_loop(goes_on, lambda carry: call(body, body.inputs[consts:], carry), given)
    if op.name == "cond":
        # Both branches have the same operands, those that one of them reads.
        used = [n for n in range(len(op.inputs) - 1) if any(id(b.inputs[n]) in needed.values for b in op.bodies)]
        branches = [
            lambda *values, b=body: [
                _as_array(x, v) for x, v in zip(call(b, [b.inputs[n] for n in used], values), b.outputs, strict=True)
            ]
            for body in op.bodies
        ]
        operands = [_as_array(read(op.inputs[n + 1]), op.inputs[n + 1]) for n in used]
        return lax.switch(jnp.asarray(read(op.inputs[0]), jnp.int32), branches, *operands)
    assert op.name in REMAT
    (body,) = op.bodies
    inputs = [v for v in body.inputs if id(v) in needed.values]
    remat = jax.checkpoint(
        lambda *values: call(body, inputs, values), policy=params["policy"], prevent_cse=params["prevent_cse"]
    )
    return remat(*(_as_array(read(v.outer), v) for v in inputs))


def _as_array(x: Any, of: Any) -> Any:
    """A literal is a number in a jaxpr, and an array in the function that is traced again."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, of.aval.dtype)


def known_value(x: Any, cache: dict[int, Any]) -> Any:
    """A value that depends on no input, as an array of NumPy; None for every other value."""
    todo = [x := source(x)]
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
