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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tests.mpmd.zoo.base import VOCAB, cross_entropy
from tests.sharding.foreign.layers import attend, hashed_uniform, rms_norm

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
    q_heads: int = 8
    head_dim: int = 2
    ffw: int = 32
    num_layers: int = 2
    rules: ShardingRules = dataclasses.field(default_factory=ShardingRules)
    mesh: Mesh | AbstractMesh | None = None


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
    def init(cls, key: jax.Array, cfg: Config) -> "Weights":
        infos, treedef = jax.tree.flatten(cls.abstract(cfg))

        def values(key):
            keys = jax.random.split(key, len(infos))
            return [info.initializer(key, info.shape, info.dtype) for key, info in zip(keys, infos, strict=True)]

        if cfg.mesh is not None:
            shardings = [NamedSharding(cfg.mesh, spec_of(info.logical_axes, cfg.rules)) for info in infos]
            values = jax.jit(values, out_shardings=shardings)
        return jax.tree.unflatten(treedef, values(key))


def quantized(shape: tuple[int, int], axes: tuple[str, str]) -> QuantArray:
    integers = lambda key, shape, dtype: jax.random.randint(key, shape, -127, 128, dtype)  # noqa: E731
    scale = ArrayInfo(shape[1:], axes[1:], jax.nn.initializers.constant(0.25 / 73), trained=False)
    return QuantArray(ArrayInfo(shape, axes, integers, jnp.int8, trained=False), scale)


def einsum(formula: str, x, kernel, out_sharding: PartitionSpec | None = None):
    if isinstance(kernel, QuantArray):
        return jnp.einsum(formula, x, kernel.quant.astype(x.dtype), out_sharding=out_sharding) * kernel.scale
    return jnp.einsum(formula, x, kernel, out_sharding=out_sharding)


def attention(q, k, v, segments):
    at = jnp.arange(q.shape[1])
    return attend(q, k, v, (segments[:, :, None] == segments[:, None]) & (at[:, None] >= at))


def forward_layer(x, segments, layer: Layer, cfg: Config):
    if not jax.sharding.get_abstract_mesh().empty:
        x = jax.lax.with_sharding_constraint(x, spec_of(("batch", None, None), cfg.rules))
    h = rms_norm(x, layer.norm)
    q, k, v = (einsum("btd,dhk->bthk", h, kernel) for kernel in (layer.q, layer.k, layer.v))
    x = x + einsum("bthk,hkd->btd", attention(q, k, v, segments), layer.o)
    return x + einsum("btf,fd->btd", jax.nn.silu(einsum("btd,df->btf", rms_norm(x, layer.norm), layer.up)), layer.down)


def forward(tokens, segments, weights: Weights, cfg: Config):
    x = weights.embedding[tokens] * cfg.embed**0.5
    for layer in weights.layers:
        x = jax.checkpoint(forward_layer, static_argnums=3)(x, segments, layer, cfg)
    return rms_norm(x, weights.norm) @ weights.embedding.T


class Frozen(nnx.Variable):
    """An array that is not trained."""


class Holder(nnx.Module):
    """The ten lines that such a model needs: its arrays as Variables, which carry their axes."""

    def __init__(self, cfg: Config, key: jax.Array, forward: Callable[..., jax.Array] = forward):
        def variable(info: ArrayInfo, x):
            kind = nnx.Param if info.trained else Frozen
            return kind(x, out_sharding=spec_of(info.logical_axes, cfg.rules))

        self.cfg, self.forward = cfg, forward
        self.weights = nnx.data(jax.tree.map(variable, Weights.abstract(cfg), Weights.init(key, cfg)))

    def __call__(self, *inputs):
        arrays = jax.tree.map(lambda x: x[...], self.weights, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return self.forward(*inputs, arrays, self.cfg)


def make(depth: int = 2) -> Holder:
    return Holder(Config(num_layers=depth), jax.random.key(0))


def loss_fn(model, batch):
    return cross_entropy(model(batch["tokens"], batch["segments"]), batch)
