"""A decoder with the habits of EasyDeL: a config object that knows the rule table, and names of Hugging Face.

The config is a mutable object that every module keeps, with its partition rules of mesh axes, dtypes and the remat
policy. Outputs are a dataclass. The layers are two levels deep, have a mixture of experts in a dict, and sow the load
of its router, which the loss pops.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from tests.mpmd.zoo.base import LENGTH, VOCAB, cross_entropy
from tests.sharding.foreign.initializers import hashed_uniform

EPSILON = 1e-2  # With Flax's 1e-6, gradients of different meshes differ by 1e-5 in float32, and by 1e-14 in float64.


class BaseConfig:
    """Attributes by keyword. Equal configs are different objects, and can be changed."""

    def __init__(self, **kinds: Any):
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers, self.num_experts = 16, 4, 2, 2
        self.attribute_map: dict[str, Any] = {"gradient_checkpointing": "nothing_saveable"}
        vars(self).update(kinds)

    def get_partition_rules(self):
        return (
            ("model/embed_tokens/embedding", PartitionSpec("tp", ("fsdp", "sp"))),
            ("self_attn/(q_proj|k_proj|v_proj)/kernel", PartitionSpec(("fsdp", "sp"), "tp")),
            ("self_attn/o_proj/kernel", PartitionSpec("tp", ("fsdp", "sp"))),
            ("experts/.*/(gate_proj|up_proj)/kernel", PartitionSpec(("fsdp", "sp"), "tp")),
            ("experts/.*/down_proj/kernel", PartitionSpec("tp", ("fsdp", "sp"))),
            ("lm_head/kernel", PartitionSpec(("fsdp", "sp"), "tp")),
            (".*", PartitionSpec(None)),
        )


@partial(jax.tree_util.register_dataclass, data_fields=["logits", "hidden_states"], meta_fields=["kind"])
@dataclasses.dataclass
class CausalLMOutput:
    logits: jax.Array
    hidden_states: tuple[jax.Array, ...] | None = None
    kind: str = "causal"


class Attention(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config, self.rngs = config, rngs
        linear = partial(
            nnx.Linear, config.hidden_size, config.hidden_size, use_bias=False, kernel_init=hashed_uniform, rngs=rngs
        )
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linear(), linear(), linear(), linear()
        self.resid_dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, hidden_states, attention_mask, causal_mask):
        heads = (*hidden_states.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (f(hidden_states).reshape(heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(attention_mask[:, None, None] & causal_mask, scores, -1e9))
        return self.resid_dropout(self.o_proj(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(hidden_states.shape)))


class Expert(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        up, linear = 2 * config.hidden_size, partial(nnx.Linear, use_bias=False, kernel_init=hashed_uniform, rngs=rngs)
        self.gate_proj, self.up_proj = linear(config.hidden_size, up), linear(config.hidden_size, up)
        self.down_proj = linear(up, config.hidden_size)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(
            config.hidden_size, config.num_experts, use_bias=False, kernel_init=hashed_uniform, rngs=rngs
        )
        self.experts = nnx.Dict({f"expert_{i}": Expert(config, rngs=rngs) for i in range(config.num_experts)})

    def __call__(self, x):
        probabilities = jax.nn.softmax(self.gate(x))
        self.sow(nnx.Intermediate, "router_load", jnp.sum(probabilities.mean((0, 1)) ** 2))
        parts = [probabilities[..., i, None] * self.experts[name](x) for i, name in enumerate(self.experts)]
        return sum(parts)


class DecoderLayer(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config, norm = config, partial(nnx.RMSNorm, config.hidden_size, epsilon=EPSILON, rngs=rngs)
        self.self_attn, self.block_sparse_moe = Attention(config, rngs=rngs), SparseMoe(config, rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def __call__(self, hidden_states, attention_mask, causal_mask):
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), attention_mask, causal_mask)
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))


class Model(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Embed(VOCAB, config.hidden_size, embedding_init=hashed_uniform, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=EPSILON, rngs=rngs)
        self.causal_mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))  # an array that is an attribute

    def __call__(self, input_ids, attention_mask):
        x, states = self.embed_tokens(input_ids), []
        for layer in self.layers:
            states.append(x)
            x = layer(hidden_states=x, attention_mask=attention_mask, causal_mask=self.causal_mask)
        return self.norm(x), tuple(states)


class ForCausalLM(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config, self.model = config, Model(config, rngs=rngs)
        self.lm_head = nnx.Linear(config.hidden_size, VOCAB, use_bias=False, kernel_init=hashed_uniform, rngs=rngs)

    def __call__(self, input_ids, attention_mask) -> CausalLMOutput:
        hidden, states = self.model(input_ids, attention_mask)
        return CausalLMOutput(self.lm_head(hidden), states)


def make(depth: int = 2) -> ForCausalLM:
    return ForCausalLM(BaseConfig(num_hidden_layers=depth), rngs=nnx.Rngs(0))


def loss_fn(model, batch):
    output = model(batch["tokens"], batch["tokens"] > 1)
    loss, weight, metrics = cross_entropy(output.logits, batch)
    load = sum(jax.tree.leaves(nnx.pop(model, nnx.Intermediate)))
    return loss + 0.01 * weight * load, weight, metrics | {"load": load}
