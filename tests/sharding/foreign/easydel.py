"""A decoder with the habits of EasyDeL: a config object that knows the rule table, and names of Hugging Face.

The config is a mutable object that every module keeps, with its partition rules of mesh axes. Outputs are a dataclass.
The layers are two levels deep, have experts in a dict, and sow the load of their router, which the loss pops.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from tests.mpmd.zoo.base import LENGTH, VOCAB, cross_entropy
from tests.sharding.foreign.layers import attend, hashed_uniform, rms_norm


class BaseConfig:
    """Attributes by keyword. Equal configs are different objects, and can be changed."""

    def __init__(self, **kinds: Any):
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers, self.num_experts = 16, 4, 2, 2
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


linear = partial(nnx.Linear, use_bias=False, kernel_init=hashed_uniform)


class Attention(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config, self.rngs, width = config, rngs, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width, rngs=rngs) for _ in range(4))
        self.resid_dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, attention_mask, causal_mask):
        heads = (*x.shape[:2], self.config.num_attention_heads, -1)
        q, k, v = (project(x).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        y = attend(q, k, v, attention_mask[:, None] & causal_mask)
        return self.resid_dropout(self.o_proj(y.reshape(x.shape)))


class Expert(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.gate_proj, self.up_proj = linear(width, 2 * width, rngs=rngs), linear(width, 2 * width, rngs=rngs)
        self.down_proj = linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config.hidden_size, config.num_experts, rngs=rngs)
        experts = [Expert(config.hidden_size, rngs=rngs) for _ in range(config.num_experts)]
        self.experts = nnx.Dict({f"expert_{i}": expert for i, expert in enumerate(experts)})

    def __call__(self, x):
        probabilities = jax.nn.softmax(self.gate(x))
        self.sow(nnx.Intermediate, "router_load", jnp.sum(probabilities.mean((0, 1)) ** 2))
        return sum(probabilities[..., i, None] * self.experts[name](x) for i, name in enumerate(self.experts))


class DecoderLayer(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config, self.self_attn = config, Attention(config, rngs=rngs)
        self.block_sparse_moe = SparseMoe(config, rngs=rngs)
        self.input_layernorm = nnx.Param(jnp.ones(config.hidden_size))

    def __call__(self, hidden_states, attention_mask, causal_mask):
        x = hidden_states
        x = x + self.self_attn(rms_norm(x, self.input_layernorm[...]), attention_mask, causal_mask)
        return x + self.block_sparse_moe(rms_norm(x, self.input_layernorm[...]))


class Model(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Embed(VOCAB, config.hidden_size, embedding_init=hashed_uniform, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.causal_mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))  # an array that is an attribute

    def __call__(self, input_ids, attention_mask):
        x, states = self.embed_tokens(input_ids), []
        for layer in self.layers:
            states.append(x)
            x = layer(hidden_states=x, attention_mask=attention_mask, causal_mask=self.causal_mask)
        return x, tuple(states)


class ForCausalLM(nnx.Module):
    def __init__(self, config: BaseConfig, *, rngs: nnx.Rngs):
        self.config, self.model = config, Model(config, rngs=rngs)
        self.lm_head = linear(config.hidden_size, VOCAB, rngs=rngs)

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
