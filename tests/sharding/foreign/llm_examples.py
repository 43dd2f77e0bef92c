"""A decoder with the habits of jax-llm-examples on Auto axes: no modules, but registered dataclasses of arrays.

A dataclass describes every array by its shape, the logical names of its dims and an initializer. A second dataclass
maps these names to the axes x, y and z of the mesh. Functions compute with the weights. The kernels of the MLP are
int8 with scales, and are not trained.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from tests.mpmd.zoo.base import VOCAB, cross_entropy
from tests.sharding.foreign.initializers import hashed_uniform

struct = jax.tree_util.register_dataclass


@dataclasses.dataclass
class ShardingRules:
    batch: Any = "x"
    vocab: Any = ("y", "z")
    embed: Any = "x"
    q_heads: Any = "y"
    head_dim: Any = None
    ffw: Any = ("y", "z")


@jax.tree_util.register_static
@dataclasses.dataclass
class Config:
    embed: int = 16
    q_heads: int = 4
    head_dim: int = 4
    ffw: int = 32
    num_layers: int = 2
    rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    initializer: Callable[..., jax.Array] = hashed_uniform
    dtype: Any = jnp.float32
    trained: bool = True


def spec_of(axes: tuple[str | None, ...], rules: ShardingRules) -> PartitionSpec:
    return PartitionSpec(*(getattr(rules, axis) if axis else None for axis in axes))


@struct
@dataclasses.dataclass
class QuantArray:
    quant: Any
    scale: Any


@struct
@dataclasses.dataclass
class Layer:
    q: Any
    k: Any
    v: Any
    o: Any
    up: Any
    down: Any
    norm: Any

    @classmethod
    def abstract(cls, cfg: Config) -> "Layer":
        heads = ArrayInfo((cfg.embed, cfg.q_heads, cfg.head_dim), ("embed", "q_heads", "head_dim"))
        out = ArrayInfo((cfg.q_heads, cfg.head_dim, cfg.embed), ("q_heads", "head_dim", "embed"))
        up, down = quantized((cfg.embed, cfg.ffw), ("embed", "ffw")), quantized((cfg.ffw, cfg.embed), ("ffw", "embed"))
        return Layer(heads, heads, heads, out, up, down, ArrayInfo((cfg.embed,), ("embed",), jax.nn.initializers.ones))


@struct
@dataclasses.dataclass
class Weights:
    embedding: Any
    layers: list[Layer]
    norm: Any

    @classmethod
    def abstract(cls, cfg: Config) -> "Weights":
        layers = [Layer.abstract(cfg) for _ in range(cfg.num_layers)]
        norm = ArrayInfo((cfg.embed,), ("embed",), jax.nn.initializers.ones)
        return Weights(ArrayInfo((VOCAB, cfg.embed), ("vocab", "embed")), layers, norm)

    @classmethod
    def init(cls, key: jax.Array, cfg: Config, wrap: Callable[[Any, ArrayInfo], Any] = lambda x, _: x) -> "Weights":
        """`wrap` may turn an array into a Variable."""
        infos, treedef = jax.tree.flatten(cls.abstract(cfg), is_leaf=lambda x: isinstance(x, ArrayInfo))
        keys = jax.random.split(key, len(infos))
        values = [info.initializer(key, info.shape, info.dtype) for key, info in zip(keys, infos, strict=True)]
        return jax.tree.unflatten(treedef, [wrap(x, info) for x, info in zip(values, infos, strict=True)])


def quantized(shape: tuple[int, int], axes: tuple[str, str]) -> QuantArray:
    integers = lambda key, shape, dtype: jax.random.randint(key, shape, -127, 128, dtype)  # noqa: E731
    scales = lambda key, shape, dtype: jnp.full(shape, 0.25 / 73, dtype)  # noqa: E731
    scale = ArrayInfo(shape[1:], axes[1:], scales, trained=False)
    return QuantArray(ArrayInfo(shape, axes, integers, jnp.int8, trained=False), scale)


def einsum(formula: str, x, kernel):
    if isinstance(kernel, QuantArray):
        return jnp.einsum(formula, x, kernel.quant[...].astype(x.dtype)) * kernel.scale[...]
    return jnp.einsum(formula, x, kernel[...])


def rms_norm(x, gamma):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-2) * gamma[...]


def forward_layer(x, segments, layer: Layer, cfg: Config):
    x = jax.lax.with_sharding_constraint(x, spec_of(("batch", None, None), cfg.rules)) if _has_mesh() else x
    h = rms_norm(x, layer.norm)
    q, k, v = (einsum("btd,dhk->bthk", h, kernel) for kernel in (layer.q, layer.k, layer.v))
    at = jnp.arange(x.shape[1])
    mask = (segments[:, :, None] == segments[:, None]) & (at[:, None] >= at)
    weights = jax.nn.softmax(jnp.where(mask[:, None], jnp.einsum("bthk,bshk->bhts", q, k), -1e9))
    x = x + einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v), layer.o)
    return x + einsum("btf,fd->btd", jax.nn.silu(einsum("btd,df->btf", rms_norm(x, layer.norm), layer.up)), layer.down)


def forward(tokens, segments, weights: Weights, cfg: Config):
    x = weights.embedding[...][tokens] * cfg.embed**0.5
    for layer in weights.layers:
        x = jax.checkpoint(forward_layer, static_argnums=3)(x, segments, layer, cfg)
    return rms_norm(x, weights.norm) @ weights.embedding[...].T


def _has_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


class Frozen(nnx.Variable):
    """An array that is not trained."""


class Holder(nnx.Module):
    """The ten lines that such a model needs: its arrays as Variables, which carry their axes."""

    def __init__(self, cfg: Config, key: jax.Array):
        def variable(x, info: ArrayInfo):
            kind = nnx.Param if info.trained else Frozen
            return kind(x, out_sharding=spec_of(info.logical_axes, cfg.rules))

        self.cfg, self.weights = cfg, nnx.data(Weights.init(key, cfg, variable))

    def __call__(self, tokens, segments):
        return forward(tokens, segments, self.weights, self.cfg)


def make(depth: int = 2) -> Holder:
    return Holder(Config(num_layers=depth), jax.random.key(0))


def loss_fn(model, batch):
    return cross_entropy(model(batch["tokens"], batch["segments"]), batch)
