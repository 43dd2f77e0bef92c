"""A weight on its way from the state of a model to its matrix products, with the two factors of its adapter."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.program.program import Eqn, has_explicit_axes
from flax_mesh.program.rewrite import Composite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weight(Composite):
    """A weight, or a part of one, and the factors of `weight + scale * A @ B`.

    Attributes:
        value: The array.
        a: A with the dims of `value`, where dims of the result have size 1, and the rank as a last dim. None: no
            factors.
        b: B likewise, with contracted dims of size 1.
        path: The path of the weight in the state of the model.
        dims: For every dim of `value`, the dim of the weight that it is.
        scale: alpha / rank.
        cuts: The dims of the weight of which this is a part.
    """

    value: Any
    a: Any
    b: Any
    path: str = field(metadata={"static": True})
    dims: tuple[int, ...] = field(metadata={"static": True})
    scale: float = field(default=1.0, metadata={"static": True})
    cuts: frozenset[int] = field(default=frozenset(), metadata={"static": True})

    def changed(self, value: Any, change: Callable[[Any], Any], dims: Sequence[int] | None = None) -> "Weight":
        """The weight with a new value, and with `change` applied to its factors."""
        a, b = (None if x is None else change(x) for x in (self.a, self.b))
        return replace(self, value=value, a=a, b=b, dims=self.dims if dims is None else tuple(dims))

    def cut(self, value: jax.Array, limits: Mapping[int, tuple[int, int]]) -> "Weight":
        """The part of the weight from one index to another along some dims."""

        def of_factor(x: jax.Array) -> jax.Array:
            for dim, (first, end) in limits.items():
                if x.shape[dim] == self.value.shape[dim]:
                    x = jax.lax.slice_in_dim(x, first, end, axis=dim)
            return x

        return replace(self.changed(value, of_factor), cuts=self.cuts | {self.dims[dim] for dim in limits})

    def whole(self) -> jax.Array:
        return self.value

    def scanned(self) -> "Weight | None":
        """None: in a loop over a dim of its products, one factor has no rows."""
        factors = (x for x in (self.a, self.b) if x is not None)
        has_rows = all(x.shape[0] == self.value.shape[0] for x in factors)
        return replace(self, dims=self.dims[1:]) if has_rows else None

    def low_rank(self, x: Any, at: int, eqn: Eqn) -> Any:
        """scale * (x A) B, with the type of the product of `eqn`, whose operand number `at` is the weight."""
        params = eqn.params
        (contract, batch), (x_contract, x_batch) = (
            tuple(tuple(dims[side]) for dims in params["dimension_numbers"]) for side in (at, 1 - at)
        )
        free = tuple(d for d in range(self.value.ndim) if d not in (*contract, *batch))
        a, b = jnp.squeeze(self.a, free).astype(x.dtype), jnp.squeeze(self.b, contract).astype(x.dtype)
        at_a, at_b = _positions(self.value.ndim, free), _positions(self.value.ndim, contract)
        count, options = len(batch), {"precision": params["precision"]}
        rows = [d for d in range(x.ndim) if d not in (*x_contract, *x_batch)]
        given = jax.typeof(x).sharding
        explicit = has_explicit_axes(given.mesh) and not given.mesh.empty
        spec = PartitionSpec(*(given.spec[d] for d in (*x_batch, *rows)), None) if explicit else PartitionSpec()
        low = jax.lax.dot_general(
            x,
            a,
            ((x_contract, [at_a[d] for d in contract]), (x_batch, [at_a[d] for d in batch])),
            **options,
            out_sharding=NamedSharding(given.mesh, spec) if explicit else None,
        )
        out, order = eqn.outvars[0].aval, _order(count, len(rows), len(free), at)
        product = jax.lax.dot_general(
            low,
            b,
            (([low.ndim - 1], [b.ndim - 1]), (range(count), [at_b[d] for d in batch])),
            preferred_element_type=params["preferred_element_type"],
            **options,
            out_sharding=_moved(out.sharding, order) if explicit else None,
        )
        return (self.scale * product).transpose(order).astype(out.dtype)


def with_factors(value: Any, path: str, a: Any, b: Any, dims: Sequence[Sequence[int | None]], scale: float) -> Weight:
    """A weight with factors as stored in the model; `dims` maps the dims of A and of B to dims of the weight."""
    a, b = (_expanded(x, each, value.ndim) for x, each in zip((a, b), dims, strict=True))
    return Weight(value, a, b, path, tuple(range(value.ndim)), scale)


def _expanded(x: Any, dims: Sequence[int | None], ndim: int) -> Any:
    """A factor with the dims of its weight, of size 1 where it has none, and the rank as the last dim."""
    order = sorted(range(x.ndim), key=lambda at: ndim if (dim := dims[at]) is None else dim)
    missing = [d for d in range(ndim) if d not in dims]
    return jnp.expand_dims(x.transpose(order), missing)


def _positions(ndim: int, without: Sequence[int]) -> dict[int, int]:
    """Maps every dim to its position after the dims `without` are removed."""
    return {d: at for at, d in enumerate(d for d in range(ndim) if d not in without)}


def _order(batch: int, rows: int, free: int, at: int) -> tuple[int, ...]:
    """The dims of the result in terms of (batch, rows of x, dims of weight); dims of the left operand come first."""
    x, weight = range(batch, batch + rows), range(batch + rows, batch + rows + free)
    return (*range(batch), *(weight if at == 0 else x), *(x if at == 0 else weight))


def _moved(sharding: Any, order: Sequence[int]) -> NamedSharding:
    """The sharding before the dims are transposed to `order`."""
    spec: list[Any] = [None] * len(order)
    for at, dim in enumerate(order):
        spec[dim] = sharding.spec[at]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
