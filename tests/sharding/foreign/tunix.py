"""A decoder with the habits of Tunix: einsum modules, mesh axes in a frozen sharding config, LoRA on an int8 model.

Only the LoRA parameters are trained. The kernels that they adapt are int8 with a scale per output, in Variables of
a separate type, and the caches of keys and values are Variables that no training step touches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from tests.mpmd.zoo.base import LENGTH, VOCAB, cross_entropy, text
from tests.sharding.foreign.layers import attend, hashed_uniform, rms_norm

Names = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingConfig:
    emb_vd: Names = ("tp", "fsdp")
    qkv_ndh: Names = ("fsdp", "tp", None)
    o_nhd: Names = ("tp", None, "fsdp")
    ffw_df: Names = ("fsdp", "tp")
    ffw_fd: Names = ("tp", "fsdp")
    rms_norm: Names = ("tp",)
    act_btd: Names = ("fsdp", None, None)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 2
    embed_dim: int = 16
    hidden_dim: int = 32
    num_heads: int = 4
    head_dim: int = 4
    shd_config: ShardingConfig = ShardingConfig()


class QuantizedKernel(nnx.Variable):
    """An int8 kernel, or its scale."""


class Cache(nnx.Variable):
    """Keys or values of a sequence that is being generated."""


def shard(x, names: Names):
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec(*names))


class Einsum(nnx.Module):
    def __init__(self, formula: str, shape: tuple[int, ...], *, rngs: nnx.Rngs, sharding: Names):
        self.formula, self.shape, self.sharding = formula, shape, sharding
        self.w = nnx.Param(hashed_uniform(rngs.params(), shape), out_sharding=sharding)

    def __call__(self, x):
        if hasattr(self, "w"):
            return jnp.einsum(self.formula, x, self.w[...])
        kernel = self.qvalue[...].astype(x.dtype) * self.scale[...]  # pyright: ignore[reportAttributeAccessIssue]
        y = jnp.einsum(self.formula, x, kernel)
        a, b = self.w_lora_a[...], self.w_lora_b[...]  # pyright: ignore[reportAttributeAccessIssue]
        dims = tuple(range(x.ndim - (a.ndim - 1), x.ndim)), tuple(range(a.ndim - 1))
        return y + jnp.tensordot(jax.lax.dot_general(x, a, (dims, ((), ()))), b, 1)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        shape, names = (config.embed_dim, config.num_heads, config.head_dim), config.shd_config
        self.q_proj, self.k_proj, self.v_proj = (
            Einsum("BTD,DNH->BTNH", shape, rngs=rngs, sharding=names.qkv_ndh) for _ in range(3)
        )
        self.o_proj = Einsum("BTNH,NHD->BTD", (*shape[1:], shape[0]), rngs=rngs, sharding=names.o_nhd)
        self.cache = nnx.data({name: Cache(jnp.zeros((1, LENGTH, *shape[1:]))) for name in ("k", "v")})

    def __call__(self, x, cache: dict[str, Any] | None, mask):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if cache is not None:
            k, v = cache["k"][...] + k, cache["v"][...] + v
        return cache, self.o_proj(attend(q, k, v, mask))


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        names, width = config.shd_config, config.embed_dim
        self.layernorm = nnx.Param(jnp.ones(width), out_sharding=names.rms_norm)
        self.attn = Attention(config, rngs=rngs)
        up, down = (width, config.hidden_dim), (config.hidden_dim, width)
        self.gate_proj = Einsum("BTD,DF->BTF", up, rngs=rngs, sharding=names.ffw_df)
        self.up_proj = Einsum("BTD,DF->BTF", up, rngs=rngs, sharding=names.ffw_df)
        self.down_proj = Einsum("BTF,FD->BTD", down, rngs=rngs, sharding=names.ffw_fd)
        self.names = names

    def __call__(self, x, cache, mask):
        cache, y = self.attn(rms_norm(x, self.layernorm[...]), cache, mask)
        x = shard(x + y, self.names.act_btd)
        h = rms_norm(x, self.layernorm[...])
        return cache, x + self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h))


class Transformer(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        table = hashed_uniform(rngs.params(), (VOCAB, config.embed_dim))
        self.embedder = nnx.Param(table, out_sharding=config.shd_config.emb_vd)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, tokens, cache: dict[str, Any] | None, mask):
        x, caches = self.embedder[tokens] * self.config.embed_dim**0.5, {}
        for i, layer in enumerate(self.layers):
            run = nnx.remat(type(layer).__call__)
            caches[f"layer_{i}"], x = run(layer, x, cache and cache[f"layer_{i}"], mask)
        return x @ self.embedder[...].T, caches


def quantize_and_adapt(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> None:
    """Replaces every einsum kernel by an int8 kernel and LoRA parameters with axes of the same names."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Einsum):
            outputs = len(module.formula.split("->")[0].split(",")[1]) - (2 if "NHD" in module.formula else 1)
            names, shape, kernel = module.sharding, module.shape, module.w[...]
            inputs = len(shape) - outputs
            largest = jnp.max(jnp.abs(kernel), tuple(range(inputs)), keepdims=True)
            scale = jnp.exp2(jnp.ceil(jnp.log2(largest / 127)))  # the same integers on every mesh
            changed: Any = module
            changed.qvalue = QuantizedKernel(jnp.round(kernel / scale).astype(jnp.int8), out_sharding=names)
            changed.scale = QuantizedKernel(scale, out_sharding=(None,) * inputs + names[inputs:])
            a, b = (*shape[:inputs], rank), (rank, *shape[inputs:])
            changed.w_lora_a = nnx.LoRAParam(hashed_uniform(rngs.lora(), a), out_sharding=(*names[:inputs], None))
            changed.w_lora_b = nnx.LoRAParam(hashed_uniform(rngs.lora(), b) / 4, out_sharding=(None, *names[inputs:]))
            del changed.w


def make(depth: int = 2) -> Transformer:
    model = Transformer(ModelConfig(depth), rngs=nnx.Rngs(0))
    quantize_and_adapt(model, 2, nnx.Rngs(lora=1))
    return model


def masked(rows: int) -> dict[str, np.ndarray]:
    """Prompts are padded on the left; the attention mask is part of the batch."""
    live = np.arange(LENGTH) >= np.random.default_rng(6).integers(0, 3, (rows, 1))
    return text(rows) | {"attention_mask": live[:, None] & np.tril(np.ones((LENGTH, LENGTH), bool))}


def loss_fn(model, batch):
    logits, _ = model(batch["tokens"], None, batch["attention_mask"])
    return cross_entropy(logits, batch)
