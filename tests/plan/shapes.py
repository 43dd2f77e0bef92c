"""Decoders of published training runs, made of the layers that recipes have.

A `Shape` adds what `DecoderConfig` lacks: windows in all layers but every `period`-th, an MLP of width `shared` beside
the experts, low ranks of queries, and of keys and values (MLA), and MLPs without a gate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
from flax import nnx

from flax_mesh.models import Decoder, DecoderConfig
from flax_mesh.models.layer import MLP, DecoderLayer
from flax_mesh.models.parts import linear_options
from flax_mesh.models.settings.remat import named
from flax_mesh.sharding.abstract import partition_rules, partitioned
from flax_mesh.sharding.constrain import constrain


@dataclass(frozen=True)
class Shape(DecoderConfig):
    period: int = 1
    shared: int = 0
    ranks: tuple[int, int] = (0, 0)
    gated: bool = True
    products: str = ""  # the type of the operands of products of layers but experts, if it is not `dtype`

    def attention_kernel(self, *_: Any, **__: Any) -> str:
        return self.attention  # cuDNN's stands for other kernels, on TPUs and for split sequences too

    def problems_on(self, *_: Any) -> list[str]:
        return []


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _narrow(x: jax.Array, w: jax.Array, k: int, dtype: str) -> jax.Array:
    """The product of the last k dims of `x` and the first of `w`, rounded to a narrower type, as in its gradients."""
    return _dot(x, w, range(x.ndim - k, x.ndim), range(k), dtype)


def _backward(k: int, dtype: str, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    rows = range(x.ndim - k)
    return _dot(g, w, range(len(rows), g.ndim), range(k, w.ndim), dtype), _dot(x, g, rows, rows, dtype)


_narrow.defvjp(lambda x, w, k, dtype: (_narrow(x, w, k, dtype), (x, w)), _backward)


def _dot(x: jax.Array, y: jax.Array, x_dims: Iterable[int], y_dims: Iterable[int], dtype: str) -> jax.Array:
    dims = ((tuple(x_dims), tuple(y_dims)), ((), ()))
    return jax.lax.dot_general(x.astype(dtype), y.astype(dtype), dims, preferred_element_type=x.dtype)


def _product(dtype: str, x: jax.Array, w: jax.Array, dims: Any, **_: object) -> jax.Array:
    """Sums over shards are rounded to `x`'s type first, unlike the sums of recipes."""
    return _narrow(x, w, len(dims[0][0]), dtype) if dtype else jax.lax.dot_general(x, w, dims)


class LowRank(nnx.Module):
    def __init__(self, config: Shape, rank: int, heads: int, rngs: nnx.Rngs):
        options = linear_options(config, rngs)
        self.low = nnx.LinearGeneral(config.hidden_size, rank, **options)
        self.high = nnx.LinearGeneral(rank, (heads, config.head_dim), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.high(self.low(x))


class Ungated(MLP):
    def __init__(self, config: Shape, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        del self.gate

    def __call__(self, x: jax.Array, mode: Any = "train") -> jax.Array:
        h = jax.nn.relu(named(self.up(x), "mlp_up", self.config.remat))
        return self.down(constrain(h, ("batch", "sequence", "mlp"), axes=self.config.axes))


class Layer(DecoderLayer):
    def __init__(self, config: Shape, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if config.shared or not config.num_experts:
            sized = replace(config, mlp_size=config.shared or config.mlp_size)
            self.mlp = (MLP if config.gated else Ungated)(sized, rngs=rngs)
        if config.ranks[0]:
            (of_q, of_kv), attention = config.ranks, cast("Any", self.attention)
            attention.q = LowRank(config, of_q, config.num_heads, rngs)
            attention.k, attention.v = (LowRank(config, of_kv, config.num_kv_heads, rngs) for _ in range(2))

        for linear in (x for _, x in nnx.iter_graph(self) if isinstance(x, nnx.LinearGeneral)):
            linear.dot_general = partial(_product, config.products)

    def _rest(self, x_BSD: jax.Array, y_BSD: jax.Array, mode: Any, counted_BS: jax.Array | None = None) -> Any:
        out_BSD, aux = super()._rest(x_BSD, y_BSD, mode, counted_BS)
        has_both = self.config.num_experts and hasattr(self, "mlp")
        return (out_BSD + self.mlp(x_BSD)).astype(out_BSD.dtype) if has_both else out_BSD, aux


class Period(nnx.Module):
    """`period` layers, of which the last one attends globally."""

    def __init__(self, config: Shape, *, rngs: nnx.Rngs):
        last = replace(config, sliding_window=0) if config.period > 1 else config
        self.layers = nnx.List([Layer(each, rngs=rngs) for each in [config] * (config.period - 1) + [last]])

    def __call__(self, x_BSD: jax.Array, *more: Any) -> tuple[jax.Array, Any]:
        found = []
        for layer in self.layers:
            x_BSD, aux = layer(x_BSD, *more)
            found.append(aux)
        return x_BSD, jax.tree.map(lambda *each: sum(each), *found)


@partitioned(
    rules=[
        (r"attention/[qkv]/low/kernel$", ("embed", None)),
        (r"attention/q/high/kernel$", (None, "heads", "head_dim")),
        (r"attention/(k|v)/high/kernel$", (None, "kv_heads", "head_dim")),
        *partition_rules(Decoder).table,
    ],
    layers="layers",
)
class Model(Decoder):
    def __init__(self, config: Shape, *, rngs: nnx.Rngs):
        super().__init__(replace(config, num_layers=1, remat="none"), rngs=rngs)
        self.config = config
        keys = jax.random.split(rngs.params(), config.num_layers // config.period)
        self.layers = nnx.vmap(lambda key: Period(config, rngs=nnx.Rngs(params=key)))(keys)


def make_model(config: Shape, rngs: nnx.Rngs) -> Model:
    return Model(config, rngs=rngs)
