"""Attention whose scores are arrays of the program: with a soft cap, with sinks, and with any mask.

Shape letters: B batch, S queries, T keys, K key-value heads, G query heads of each, H = K G, C head dim.
"""

import jax
import jax.numpy as jnp


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """`x`, smoothly limited to -cap ... cap (Gemma 2); 0 disables the cap."""
    return cap * jnp.tanh(x / cap) if cap else x


def causal_mask(length: int, window: int, segment_ids_BS: jax.Array | None) -> jax.Array:
    """(1 or B, S, S): each query reads itself and earlier keys, within the window and the segment."""
    distance_SS = jnp.arange(length)[:, None] - jnp.arange(length)
    mask_BSS = ((distance_SS >= 0) & (distance_SS < (window or length)))[None]
    return mask_BSS if segment_ids_BS is None else mask_BSS & (segment_ids_BS[:, :, None] == segment_ids_BS[:, None])


def plain_attention(
    q_BSHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    mask_BST: jax.Array,
    *,
    scale: float,
    cap: float = 0.0,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Weighted sums of values (B, S, H, V), whose head dim V may differ from C; scores and weights are float32.

    A sink is a learned score of no key: it takes a share of the weight of every query of its head (gpt-oss).
    """
    return weighted_values(head_scores(q_BSHC, k_BTKC), v_BTKC, mask_BST, scale=scale, cap=cap, sinks_H=sinks_H)


def head_scores(q_BSHC: jax.Array, k_BTKC: jax.Array) -> jax.Array:
    """Products (B, K, G, S, T) float32 of queries and the keys of their heads."""
    batch, queries, heads, width = q_BSHC.shape
    q_BSKGC = q_BSHC.reshape(batch, queries, k_BTKC.shape[2], heads // k_BTKC.shape[2], width)
    return jnp.einsum("bskgc,btkc->bkgst", q_BSKGC, k_BTKC, preferred_element_type=jnp.float32)


def weighted_values(
    scores: jax.Array,
    v_BTKC: jax.Array,
    mask_BST: jax.Array,
    *,
    scale: float,
    cap: float = 0.0,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Sums of values with weights from `head_scores`; see `plain_attention`."""
    groups, scores = scores.shape[1:3], scores * scale
    scores = jnp.where(mask_BST[:, None, None], soft_cap(scores, cap), jnp.finfo(jnp.float32).min)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(*groups, 1, 1)
    largest = jax.lax.stop_gradient(largest if sinks is None else jnp.maximum(largest, sinks))
    exp = jnp.exp(scores - largest)
    total = jnp.sum(exp, axis=-1, keepdims=True)
    weights = exp / (total if sinks is None else total + jnp.exp(sinks - largest))
    y_BSKGC = jnp.einsum("bkgst,btkc->bskgc", weights.astype(v_BTKC.dtype), v_BTKC)
    return y_BSKGC.reshape(*y_BSKGC.shape[:2], -1, v_BTKC.shape[-1])
