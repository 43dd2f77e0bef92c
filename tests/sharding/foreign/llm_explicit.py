"""The decoder of llm_examples as most of jax-llm-examples are written today: for a mesh with Explicit axes.

Products and lookups state the sharding of their result where it does not follow from their inputs, attention
is a function on Auto axes, and the weights are created by a jit with their shardings. A config has the mesh.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec, auto_axes, reshard

import flax_mesh as fm
from tests.mpmd.zoo.base import cross_entropy
from tests.sharding.foreign import llm_examples
from tests.sharding.foreign.layers import rms_norm, rotate
from tests.sharding.foreign.llm_examples import Config, Holder, Layer, Weights, einsum, spec_of

TENSOR = ("y", "z")


@dataclasses.dataclass
class ShardingRules(llm_examples.ShardingRules):
    embed: Any = None
    q_heads: Any = TENSOR


attention: Any = auto_axes(llm_examples.attention, out_sharding=PartitionSpec("x", None, TENSOR, None))


def forward_layer(x, segments, positions, layer: Layer, cfg: Config):
    out = spec_of(("batch", None, "embed"), cfg.rules)
    h = rms_norm(x, layer.norm)
    q, k, v = (einsum("btd,dhk->bthk", h, kernel) for kernel in (layer.q, layer.k, layer.v))
    positions = reshard(positions, PartitionSpec(None, None))
    heads = attention(rotate(q, positions), rotate(k, positions), v, segments)
    x = x + einsum("bthk,hkd->btd", heads, layer.o, out_sharding=out)
    hidden = jax.nn.silu(einsum("btd,df->btf", rms_norm(x, layer.norm), layer.up))
    return x + einsum("btf,fd->btd", hidden, layer.down, out_sharding=out)


def forward(tokens, segments, positions, weights: Weights, cfg: Config):
    out = spec_of(("batch", None, "embed"), cfg.rules)
    x = weights.embedding.at[tokens, :].get(out_sharding=out) * cfg.embed**0.5
    for layer in weights.layers:
        x = jax.checkpoint(forward_layer, static_argnums=4)(x, segments, positions, layer, cfg)
    logits = jnp.einsum("btd,vd->btv", rms_norm(x, weights.norm), weights.embedding)
    return reshard(logits, spec_of(("batch", None, None), cfg.rules))


def make(depth: int = 2, mesh: Mesh | None = None) -> Holder:
    cfg = Config(num_layers=depth, rules=ShardingRules(), mesh=mesh or fm.current_mesh())
    return Holder(cfg, jax.random.key(0), forward)


def loss_fn(model, batch):
    return cross_entropy(model(batch["tokens"], batch["segments"], batch["positions"]), batch)
