"""A handwritten Llama training step in jax and optax, for one device: the baseline of the benchmark `gpu`.

Parameters are {"embed" (V, D), "layers" [{"attention_norm", "q" (D, H, C), "k" and "v" (D, K, C), "o" (H, C, D),
"mlp_norm", "gate" and "up" (D, F), "down" (F, D)}], "norm", "head" (D, V) unless tied}, float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flax_mesh.models import DecoderConfig

SUM = {"preferred_element_type": jnp.float32}


def make_step(config: DecoderConfig, optimizer: optax.GradientTransformation, options: dict[str, Any]):
    """step(params, optimizer state, batch) -> params, optimizer state, loss, norm of the gradients."""

    @partial(jax.jit, donate_argnums=(0, 1), compiler_options=options or None)
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(partial(mean_loss, config))(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    return step


def make_optimizer(settings: Any) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, without weight decay of norms."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    start, end = peak / (warmup + 1), settings.end_learning_rate
    rate = optax.warmup_cosine_decay_schedule(start, peak, warmup, settings.decay_steps, end)
    decayed = partial(jax.tree_util.tree_map_with_path, lambda path, _: "norm" not in jax.tree_util.keystr(path))
    decay = {"weight_decay": settings.weight_decay, "mask": decayed}
    adamw = optax.adamw(rate, settings.b1, settings.b2, settings.epsilon, **decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), adamw)


def mean_loss(config: DecoderConfig, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    table = params["embed"].astype(config.dtype)
    x = table[batch["inputs"]]
    layer = partial(run_layer, config)
    if config.remat != "none":
        policy = None if config.remat == "full" else getattr(jax.checkpoint_policies, config.remat)
        layer = jax.checkpoint(layer, policy=policy)
    for weights in params["layers"]:
        x = layer(weights, x)
    x = norm(config, x, params["norm"])
    head = params["head"].astype(config.dtype) if "head" in params else table.T
    x, targets = x.reshape(-1, x.shape[-1]), batch["targets"].reshape(-1)
    if config.loss_chunk:
        size = min(config.loss_chunk, len(targets))
        assert len(targets) % size == 0
        total = loss_in_chunks(x.reshape(-1, size, x.shape[-1]), head, targets.reshape(-1, size))
    else:
        total = losses(dot("td,dv->tv", x, head), targets)[0].sum()
    return total / len(targets)


def run_layer(config: DecoderConfig, w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    w = {name: value if "norm" in name else value.astype(config.dtype) for name, value in w.items()}
    h = norm(config, x, w["attention_norm"])
    q, k, v = (jnp.einsum("bsd,dhc->bshc", h, w[name]) for name in "qkv")
    q, k, kernel = rotate(config, q), rotate(config, k), config.attention
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)  # pyright: ignore
    x = (x + dot("bshc,hcd->bsd", y, w["o"])).astype(x.dtype)
    h = norm(config, x, w["mlp_norm"])
    h = jax.nn.silu(h @ w["gate"]) * (h @ w["up"])
    return (x + dot("bsf,fd->bsd", h, w["down"])).astype(x.dtype)


def norm(config: DecoderConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + config.norm_epsilon)
    return (x32 * scale).astype(x.dtype)


def rotate(config: DecoderConfig, x: jax.Array) -> jax.Array:
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    factor, low, high, length = config.rope_scaling[:4]
    if factor != 1:
        kept = jnp.clip((length * frequency / (2 * jnp.pi) - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _dot(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """A product accumulated in float32 whose cotangent is rounded to the dtype of `x` before the backward products."""
    return jnp.einsum(spec, x, w, **SUM)


def _dot_backward(spec: str, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    (left, right), out = spec.split("->")[0].split(","), spec.split("->")[1]
    g = g.astype(x.dtype)
    dx, dw = jnp.einsum(f"{out},{right}->{left}", g, w, **SUM), jnp.einsum(f"{left},{out}->{right}", x, g, **SUM)
    return dx.astype(x.dtype), dw.astype(w.dtype)


dot: Any = jax.custom_vjp(_dot, nondiff_argnums=(0,))
dot.defvjp(lambda spec, x, w: (dot(spec, x, w), (x, w)), _dot_backward)


def losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    lse = jax.nn.logsumexp(logits, -1)
    return lse - jnp.sum(logits, -1, where=is_target), lse, is_target


@jax.custom_vjp
def loss_in_chunks(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum of the losses of x (N, C, D); the gradients are computed chunk by chunk in the forward pass."""
    return _chunks(x, head, targets)[0]


def _chunks(x: jax.Array, head: jax.Array, targets: jax.Array):
    def add(carry, part):
        total, d_head = carry
        x, targets = part
        logits = jnp.einsum("cd,dv->cv", x, head, **SUM)
        loss, lse, is_target = losses(logits, targets)
        d = (jnp.exp(logits - lse[:, None]) - is_target).astype(x.dtype)
        d_x = jnp.einsum("cv,dv->cd", d, head, **SUM).astype(x.dtype)
        return (total + loss.sum(), d_head + jnp.einsum("cd,cv->dv", x, d, **SUM)), d_x

    (total, d_head), d_x = jax.lax.scan(add, (jnp.float32(0), jnp.zeros(head.shape, jnp.float32)), (x, targets))
    return total, (d_x, d_head.astype(head.dtype))


loss_in_chunks.defvjp(_chunks, lambda saved, g: (*((g * d).astype(d.dtype) for d in saved), None))
