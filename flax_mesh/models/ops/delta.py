"""The gated delta rule (Yang et al. 2025): a matrix for each head is read and changed by every token.

Shape letters: B batch, S sequence, H heads, C head dim of queries and keys, V head dim of values, W tokens of a
convolution. In chunks: P parts of a sequence, N chunks of a part, L tokens of a chunk.

    state = exp(g) state;  state += beta k (v - k state);  y = q state

The chunked form (Yang et al. 2024) has the same values by products of matrices. Everything is float32.
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens, a power of two
_EPSILON = 1e-6
_HIGHEST = jax.lax.Precision.HIGHEST


class Tokens(NamedTuple):
    """Queries and keys (B, S, H, C) of length one, values (B, S, H, V), log decays g and beta (B, S, H)."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class _Chunks(NamedTuple):
    """What a chunk does with a state (B, P, H, C, V): new = u - w state; y = q state + scores new; and so on."""

    u: jax.Array
    w: jax.Array
    q: jax.Array
    scores: jax.Array
    k: jax.Array
    decay: jax.Array


def unit(x: jax.Array) -> jax.Array:
    """`x` with vectors of length one along its last dim, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)


def runs_of(segment_ids_BS: jax.Array) -> jax.Array:
    """The number of the run of equal ids of every token: a document, whose tokens follow each other."""
    return jnp.cumsum(jnp.diff(segment_ids_BS, axis=1, prepend=segment_ids_BS[:, :1]) != 0, axis=1)


def causal_conv(x_BSHC: jax.Array, kernel_WHC: jax.Array, runs_BS: jax.Array | None = None) -> jax.Array:
    """silu of the sum over the last W tokens of a run, each multiplied by its row of the kernel, the last row last."""
    y_BSHC = jnp.zeros((), jnp.float32)
    for back in range(len(kernel_WHC)):
        x = _before(x_BSHC, back)
        if back and runs_BS is not None:
            x = jnp.where((_before(runs_BS, back) == runs_BS)[..., None, None], x, 0)
        y_BSHC += x.astype(jnp.float32) * kernel_WHC[-1 - back].astype(jnp.float32)
    return jax.nn.silu(y_BSHC).astype(x_BSHC.dtype)


def _before(x: jax.Array, count: int) -> jax.Array:
    """The values that many tokens before; zeros before the first token."""
    padding = [(0, 0), (count, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding)[:, : x.shape[1]] if count else x


def delta_step(tokens: Tokens, state_BHCV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y (B, 1, H, V) of one token of each row, and the state after it."""
    q, k, v, g, beta = (x[:, 0] for x in tokens)
    state_BHCV = state_BHCV * jnp.exp(g)[..., None, None]
    change = beta[..., None] * (v - jnp.einsum("bhc,bhcv->bhv", k, state_BHCV))
    state_BHCV = state_BHCV + k[..., None] * change[..., None, :]
    return jnp.einsum("bhc,bhcv->bhv", q, state_BHCV)[:, None], state_BHCV


def gated_delta(tokens: Tokens, runs_BS: jax.Array | None = None, *, parts: int = 1) -> tuple[jax.Array, jax.Array]:
    """y (B, S, H, V), and the state (B, H, C, V) after the last token. A run starts with a state of zeros.

    A token with g and beta 0 does not change the state. The sequence is P = `parts` parts, such as the parts of devices
    that share it: each computes the state after it as a function of the state before it, and a prefix scan composes
    these functions, so that no part needs the tokens of another.
    """
    length = tokens.q.shape[1]
    runs_BS = jnp.zeros(tokens.g.shape[:2], jnp.int32) if runs_BS is None else runs_BS
    before_BS = jnp.concatenate([runs_BS[:, :1], runs_BS[:, :-1]], axis=1)
    size = min(CHUNK, 1 << (length // parts - 1).bit_length())
    in_chunks = partial(_in_chunks, parts=parts, size=size)
    runs, before = in_chunks(runs_BS, repeat=True), in_chunks(before_BS)[..., :1]
    chunks = _chunks(Tokens(*(jnp.moveaxis(in_chunks(x), 4, 3) for x in tokens)), runs, before)
    start = jnp.zeros((*chunks.u.shape[1:4], tokens.q.shape[-1], tokens.v.shape[-1]), jnp.float32)
    if parts > 1:
        start = _states_before_parts(chunks, start)
    state, y = jax.lax.scan(_advance, start, chunks)
    y_BSHV = jnp.moveaxis(y, (0, 3), (2, 4)).reshape(*y.shape[1:3], -1, *tokens.v.shape[2:])
    return y_BSHV[:, :, : length // parts].reshape(tokens.v.shape), state[:, -1]


def _in_chunks(x: jax.Array, *, parts: int, size: int, repeat: bool = False) -> jax.Array:
    """(B, S, ...) as (N, B, P, L, ...). At the end of each part are zeros, which do not change a state, or its last."""
    x = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
    if padding := -x.shape[2] % size:
        end = x[:, :, -1:] if repeat else jnp.zeros((), x.dtype)
        x = jnp.concatenate([x, jnp.broadcast_to(end, (*x.shape[:2], padding, *x.shape[3:]))], axis=2)
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)


def _chunks(tokens: Tokens, runs: jax.Array, before: jax.Array) -> _Chunks:
    """Of tokens (N, B, P, H, L, ...), their runs (N, B, P, L), and the runs of the tokens before the chunks."""
    q, k, v, g, beta = tokens
    size = g.shape[-1]
    # Sums of differences of cumulative sums would round away the small decays after a large one.
    is_later = jnp.tri(size, k=-1, dtype=bool)
    sums = jnp.cumsum(jnp.where(is_later, g[..., None], 0), axis=-2)
    is_read = jnp.tri(size, dtype=bool) & (runs[..., :, None] == runs[..., None, :])[..., None, :, :]
    decay = jnp.exp(jnp.where(is_read, sums, -jnp.inf))
    since_start = jnp.exp(jnp.cumsum(g, axis=-1)) * (runs == before)[..., None, :]
    products = jnp.einsum("...ic,...jc->...ij", k, k)
    inverse = _inverse_of_unit_lower(jnp.where(is_later, beta[..., None] * products * decay, 0))
    u, w = (inverse @ (beta[..., None] * x) for x in (v, k * since_start[..., None]))
    scores = jnp.einsum("...ic,...jc->...ij", q, k) * decay
    return _Chunks(
        u, w, q * since_start[..., None], scores, k * decay[..., -1, :, None], since_start[..., -1, None, None]
    )


def _advance(state: jax.Array, chunk: _Chunks) -> tuple[jax.Array, jax.Array]:
    new = chunk.u - chunk.w @ state
    y = chunk.q @ state + chunk.scores @ new
    return state * chunk.decay + jnp.einsum("...lc,...lv->...cv", chunk.k, new), y


def _states_before_parts(chunks: _Chunks, start: jax.Array) -> jax.Array:
    """The states (B, P, H, C, V) before the parts. A part maps a state to factor state + offset."""
    size = start.shape[-2]
    offset, _ = jax.lax.scan(_advance, start, chunks)
    identity = jnp.broadcast_to(jnp.eye(size), (*start.shape[:-1], size))
    factor, _ = jax.lax.scan(_advance, identity, chunks._replace(u=jnp.zeros_like(chunks.w)))

    def compose(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return second[0] @ first[0], second[0] @ first[1] + second[1]

    _, states = jax.lax.associative_scan(compose, (factor, offset), axis=1)
    return _before(states, 1)


@jax.custom_vjp
def _inverse_of_unit_lower(below: jax.Array) -> jax.Array:
    """The inverse of the identity plus `below` (..., L, L), which is strictly lower, by blocks of twice the size.

    Sums of powers of `below` would overflow where the keys of a chunk are equal.
    """
    lead, size, block = below.shape[:-2], below.shape[-1], 1
    inverse = jnp.ones((*lead, size, 1, 1), below.dtype)  # of the blocks on the diagonal
    while block < size:
        count = size // (2 * block)
        corners = below.reshape(*lead, count, 2, block, count, 2, block)[..., :, 1, :, :, 0, :]
        corner = jnp.moveaxis(jnp.diagonal(corners, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        left = -jnp.matmul(jnp.matmul(second, corner, precision=_HIGHEST), first, precision=_HIGHEST)
        rows = [jnp.concatenate([first, jnp.zeros_like(first)], -1), jnp.concatenate([left, second], -1)]
        inverse, block = jnp.concatenate(rows, -2), 2 * block
    return inverse[..., 0, :, :]


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse_of_unit_lower(below)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-jnp.matmul(jnp.matmul(turned, cotangent, precision=_HIGHEST), turned, precision=_HIGHEST), -1),)


# Saves one array, where JAX would save and transpose every size of blocks.
_inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)
