"""An attention in blocks as a function that JAX differentiates.

Reverse mode runs the loops. Forward mode, and the derivative of a gradient, compute the attention as it was written.

    function       computes                                 its derivative
    attend         the result                               a linear function, whose transposed is `pulled`
    forwarded      the result and residuals of `pulled`     that of the attention as written
    pulled         the gradients of the leaves              that of the gradients as written
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex

from flax_mesh.blockwise.loops import Saved
from flax_mesh.jax_compat import linear_primitive
from flax_mesh.kernels import RESIDUALS

Arrays = Sequence[jax.Array]
Operands = tuple[Arrays, Saved[jax.Array], jax.Array, jax.Array]  # of the backward pass; last the gradient
Results = tuple[jax.Array, Saved[jax.Array], list[jax.Array]]  # the result, residuals, and the leaves with all keys


class Passes(Protocol):
    """An attention: see `attend.Attention`."""

    def forward(self, values: Arrays) -> Results: ...

    def backward(
        self, wanted: Sequence[int], values: Arrays, saved: Saved[jax.Array], out: jax.Array, gradient: jax.Array
    ) -> list[jax.Array]: ...

    def plain(self, *values: jax.Array) -> jax.Array: ...

    def is_gathered(self, number: int) -> bool: ...


def differentiable(attention: Passes, values: Arrays) -> Callable[..., jax.Array]:
    """`attention` as a function of its leaves, of which `values` are examples."""
    floats = [n for n, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.floating)]
    forwarded, pulled = _forwarded(attention, floats), _pulled(attention, floats)

    @jax.custom_jvp
    def attend(*values: jax.Array) -> jax.Array:
        return attention.forward(values)[0]

    @functools.partial(attend.defjvp, symbolic_zeros=True)
    def jvp(values: Arrays, tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        out, saved, values = forwarded(*values)
        out, saved = jax.tree.map(lambda x: checkpoint_name(x, RESIDUALS), (out, saved))
        values = [checkpoint_name(x, RESIDUALS) if attention.is_gathered(n) else x for n, x in enumerate(values)]
        wanted = [n for n in floats if not isinstance(tangents[n], SymbolicZero)]
        flat, tree = jax.tree.flatten((values, saved, out))

        def apply(flat: Arrays, given: Arrays) -> jax.Array:
            values = jax.tree.unflatten(tree, flat)[0]
            return jax.jvp(_plain_of(attention, values, wanted), tuple(values[n] for n in wanted), tuple(given))[1]

        def transpose(flat: Arrays, gradient: jax.Array) -> Arrays:
            return pulled(wanted, *jax.tree.unflatten(tree, flat), gradient)

        given = [tangents[n] for n in wanted]
        return out, _tangent().bind(
            *flat, *given, count=len(flat), apply=apply, transpose=transpose, out=jax.typeof(out)
        )

    return attend


def _plain_of(attention: Passes, values: Arrays, numbers: Sequence[int]) -> Callable[..., jax.Array]:
    """The attention as written, as a function of the leaves with these numbers."""

    def call(*some: jax.Array) -> jax.Array:
        given = dict(zip(numbers, some, strict=True))
        return attention.plain(*(given.get(n, x) for n, x in enumerate(values)))

    return call


def _forwarded(attention: Passes, floats: Sequence[int]) -> Callable[..., Results]:
    @jax.custom_jvp
    def forwarded(*values: jax.Array) -> Results:
        return attention.forward(values)

    @forwarded.defjvp
    def jvp(values: Arrays, tangents: Arrays) -> tuple[Results, Any]:
        """Of second derivatives. The residuals have no tangents, because the tangents of `pulled` are complete."""
        results = out, saved, _ = forwarded(*values)
        plain = _plain_of(attention, values, floats)
        change = jax.jvp(plain, [values[n] for n in floats], [tangents[n] for n in floats])[1]
        still = Saved(
            jnp.zeros_like(saved.maximum), jnp.zeros_like(saved.total), np.zeros(saved.visited.shape, jax.dtypes.float0)
        )
        return results, (change.astype(out.dtype), still, list(tangents))

    return forwarded


def _pulled(attention: Passes, floats: Sequence[int]) -> Callable[..., tuple[jax.Array, ...]]:
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def pulled(wanted: Sequence[int], values: Arrays, saved: Saved[jax.Array], out: jax.Array, gradient: jax.Array):
        return tuple(attention.backward(wanted, values, saved, out, gradient))

    @pulled.defjvp
    def jvp(wanted: Sequence[int], primals: Operands, tangents: Operands) -> tuple[tuple[jax.Array, ...], Any]:
        values, saved, out, gradient = primals

        def pull(some: Arrays, gradient: jax.Array):
            given = dict(zip(floats, some, strict=True))
            every = [given.get(n, x) for n, x in enumerate(values)]
            return jax.vjp(_plain_of(attention, every, wanted), *(every[n] for n in wanted))[1](gradient)

        at = [values[n] for n in floats], gradient
        change = [tangents[0][n] for n in floats], tangents[3]
        return pulled(wanted, values, saved, out, gradient), jax.jvp(pull, at, change)[1]

    return pulled


# A linear function of its operands from number `count` on, whose transposed is another function than JAX would derive.


def _apply(*args: jax.Array, count: int, apply: Callable[..., Any], **params: object) -> jax.Array:
    return apply(args[:count], args[count:])


def _type(*args: object, out: core.ShapedArray, **params: object) -> core.ShapedArray:
    return out


def _transpose(
    gradient: jax.Array, *args: jax.Array, count: int, transpose: Callable[..., Arrays], **params: object
) -> list[jax.Array | None]:
    return [*[None] * count, *transpose(args[:count], gradient)]


def _batch(
    args: Arrays,
    dims: Sequence[object],
    *,
    count: int,
    apply: Callable[..., Any],
    transpose: Callable[..., Any],
    out: core.ShapedArray,
) -> tuple[jax.Array, int]:
    axes = [d if isinstance(d, int) else None for d in dims]
    size = next(x.shape[d] for x, d in zip(args, axes, strict=True) if d is not None)
    before, given = axes[:count], list[jax.Array]()
    for x, d in zip(args[count:], axes[count:], strict=True):
        given.append(jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0))

    def applied(residuals: Arrays, tangents: Arrays) -> jax.Array:
        return jax.vmap(apply, in_axes=(before, 0))(list(residuals), list(tangents))

    def transposed(residuals: Arrays, gradient: jax.Array) -> Arrays:
        return jax.vmap(transpose, in_axes=(before, 0))(list(residuals), gradient)

    new = core.ShapedArray((size, *out.shape), out.dtype)
    result = _tangent().bind(*args[:count], *given, count=count, apply=applied, transpose=transposed, out=new)
    return result, 0


@functools.cache
def _tangent() -> jex.Primitive:
    return linear_primitive("blockwise_attention_tangent", _apply, _type, _transpose, _batch)
