"""Follows the weights of a model through its traced program to their matrix products."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from flax_mesh.jax_compat import evaluate
from flax_mesh.lora.weight import Weight
from flax_mesh.program.program import CUSTOM, Eqn, Program, body
from flax_mesh.program.rewrite import Composite, Value, has_composite, inline, rewrite, whole

# Operations that change no element but by rounding: a weight behind them is the same weight.
CASTS = frozenset({"convert_element_type", "copy", "copy_p", "name", "reduce_precision", "sharding_constraint"})
_MOVES = frozenset({"reshape", "reshard", "slice", "split", "squeeze", "transpose"})

# Addition to a product: (equation, values of its operands, index of the operand that is a Weight) -> the array to add
# to the result, or None.
OnProduct = Callable[[Eqn, Sequence[Value], int], jax.Array | None]
# Any other use of a weight.
OnOther = Callable[[Eqn, Weight], None]


def evaluate_products(
    program: Program, values: Sequence[Value], on_product: OnProduct, on_other: OnOther
) -> list[ArrayLike]:
    """The outputs of a program in which some values are Weights.

    Args:
        program: The program.
        values: One value per input.
        on_product: Returns the array that is added to the matrix product of a weight.
        on_other: Called with each use of a weight that is neither a product nor moves it there; it has no other effect.
    """

    def lost(eqn: Eqn, value: Composite) -> None:
        if isinstance(value, Weight):
            on_other(eqn, value)

    def run(program: Program, values: Sequence[Value]) -> list[Value]:
        return rewrite(program, values, rule, touches=has_composite, lost=lost)

    def rule(eqn: Eqn, values: list[Value]) -> Sequence[Value] | None:
        name, weights = eqn.primitive.name, [isinstance(x, Weight) for x in values]
        if name == "dot_general" and not all(weights):
            return [added(eqn, values, evaluate(eqn, [*map(whole, values)])[0])]
        if name in CUSTOM and (product := _only_product(eqn)) is not None:
            before, dot = product
            (result,) = evaluate(eqn, [*map(whole, values)])
            return [added(dot, run(before, values), result)]
        return _moved(eqn, values[0]) if isinstance(values[0], Weight) else None

    def added(eqn: Eqn, values: Sequence[Value], result: jax.Array) -> jax.Array:
        if not any(isinstance(x, Weight) for x in values):
            return result
        low_rank = on_product(eqn, values, int(isinstance(values[1], Weight)))
        return result if low_rank is None else result + low_rank

    return [whole(x) for x in run(program, values)]


def _only_product(eqn: Eqn) -> tuple[Program, Eqn] | None:
    """The product in a function with a custom derivative, and the program of its operands; None for other functions."""
    inner = inline(body(eqn))
    if not inner.eqns:
        return None
    *before, last = inner.eqns
    if last.primitive.name != "dot_general" or tuple(last.outvars) != inner.outputs:
        return None
    if any(each.primitive.name not in CASTS for each in before):
        return None
    return inner._replace(eqns=tuple(before), outputs=tuple(last.invars)), last


def _moved(eqn: Eqn, weight: Weight) -> list[Weight] | None:
    """The Weights that an operation makes of one by a cast, or by moving or selecting its dims; None for any other."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _MOVES and name not in CASTS:
        return None
    outs: list[jax.Array] = evaluate(eqn, [weight.value])
    if name in CASTS:
        return [weight.changed(outs[0], lambda x: x)]
    if name == "reshape":
        return _in_periods(weight, outs[0])
    if name == "reshard":
        return [weight.changed(outs[0], partial(_placed, like=outs[0]))]
    if name == "transpose":
        order = params["permutation"]
        return [weight.changed(outs[0], lambda x: x.transpose(*order, x.ndim - 1), [weight.dims[d] for d in order])]
    if name == "squeeze":
        gone = params["dimensions"]
        kept = [dim for d, dim in enumerate(weight.dims) if d not in gone]
        return [weight.changed(outs[0], lambda x: x.squeeze(gone), kept)]
    if name == "split":
        ends = [*accumulate(params["sizes"], initial=0)]
        limits = [{params["axis"]: limit} for limit in pairwise(ends)]
    elif params["strides"] is None:
        both = zip(params["start_indices"], params["limit_indices"], strict=True)
        limits = [{d: limit for d, limit in enumerate(both) if limit != (0, weight.value.shape[d])}]
    else:
        return None
    return [weight.cut(out, each) for out, each in zip(outs, limits, strict=True)]


def _in_periods(weight: Weight, out: jax.Array) -> list[Weight] | None:
    """The Weight of a stack of layers whose first dim became two: a loop over repetitions of the kinds of layers."""
    before, after = weight.value.shape, out.shape
    if before[1:] != after[2:] or any(x is not None and x.shape[0] != before[0] for x in (weight.a, weight.b)):
        return None

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*after[:2], *x.shape[1:])

    # No product may contract or keep one of the two dims: that would be a part of the first one.
    moved = weight.changed(out, split, [weight.dims[0], *weight.dims])
    return [replace(moved, cuts=weight.cuts | {weight.dims[0]})]


def _placed(factor: jax.Array, like: jax.Array) -> jax.Array:
    """A factor with the sharding, and the types of mesh axes, of its weight, on the dims that both have."""
    sharding = jax.typeof(like).sharding
    spec = [entry if factor.shape[d] > 1 else None for d, entry in enumerate(sharding.spec)]
    return jax.sharding.reshard(factor, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
