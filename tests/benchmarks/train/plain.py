"""A training script in plain Flax NNX and optax: the baseline of the benchmark `train`.

The step is that of Flax's documentation: `nnx.value_and_grad` of a mean loss and `optimizer.update` inside of
`nnx.jit`, whose arguments are donated. Paths and shapes of the parameters are those of `flax_mesh.models.Decoder`, so
both start from the same values.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Attention(nnx.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, rngs: nnx.Rngs):
        self.q = nnx.LinearGeneral(hidden, (heads, head_dim), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(hidden, (kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(hidden, (kv_heads, head_dim), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((heads, head_dim), hidden, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.dot_product_attention(rotate(self.q(x)), rotate(self.k(x)), self.v(x), is_causal=True)
        return self.o(y)


class MLP(nnx.Module):
    def __init__(self, hidden: int, size: int, rngs: nnx.Rngs):
        self.gate = nnx.LinearGeneral(hidden, size, use_bias=False, rngs=rngs)
        self.up = nnx.LinearGeneral(hidden, size, use_bias=False, rngs=rngs)
        self.down = nnx.LinearGeneral(size, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, sizes: Any, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(sizes.hidden_size, epsilon=sizes.norm_epsilon, rngs=rngs)
        heads = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        self.attention = Attention(sizes.hidden_size, *heads, rngs)
        self.mlp_norm = nnx.RMSNorm(sizes.hidden_size, epsilon=sizes.norm_epsilon, rngs=rngs)
        self.mlp = MLP(sizes.hidden_size, sizes.mlp_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nnx.Module):
    """Token ids (B, S) -> logits (B, S, V)."""

    def __init__(self, sizes: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(sizes.vocab_size, sizes.hidden_size, rngs=rngs)
        self.layers = nnx.List([Layer(sizes, rngs) for _ in range(sizes.num_layers)])
        self.norm = nnx.RMSNorm(sizes.hidden_size, epsilon=sizes.norm_epsilon, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def rotate(x: jax.Array, theta: float = 10_000.0) -> jax.Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def make_optimizer(settings: Any) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; norms are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        settings.learning_rate / (settings.warmup_steps + 1),
        settings.learning_rate,
        settings.warmup_steps,
        settings.decay_steps,
        settings.end_learning_rate,
    )
    decayed = partial(jax.tree_util.tree_map_with_path, lambda path, _: "scale" not in jax.tree_util.keystr(path))
    decay = settings.weight_decay
    adamw = optax.adamw(schedule, settings.b1, settings.b2, settings.epsilon, weight_decay=decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), adamw)


@partial(nnx.jit, donate_argnames=("model", "optimizer"))
def train_step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_fn(model: Model) -> jax.Array:
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
