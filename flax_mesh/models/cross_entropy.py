"""Cross-entropy of the next token from hidden states, with or without all logits at a time.

Shape letters: B batch, S sequence, D hidden, V vocab; in chunks: N chunks, G groups of tokens, one for each way in
which the mesh splits the tokens, C tokens of a group in one chunk.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from flax_mesh.axes import PartitionAxis, as_tuple
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.matmul import dot_float32
from flax_mesh.sharding.constrain import constrain, with_sharding_constraint


def project(x_BSD: jax.Array, weights_DV: jax.Array, axes: PartitionAxis, mode: Any = "train") -> jax.Array:
    """Logits (B, S, V) float32."""
    logits_BSV = dot_float32(x_BSD, weights_DV, (((2,), (0,)), ((), ())))
    return constrain(logits_BSV, ("batch", "sequence", "vocab"), axes=axes, mode=mode)


def cross_entropy(
    x_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array, *, axes: PartitionAxis, chunk: int = 0
) -> jax.Array:
    """Sum in nats, float32, over the targets that are not below 0.

    With `chunk` above 0 there are logits of at most that many tokens a device at a time, forward and backward, not all;
    the sum and its gradients are the same to rounding. The gradients are made in the forward pass, so that no logits
    are computed twice: what stays for the backward pass is that of `x_BSD` and that of `weights_DV`.
    """
    if chunk:
        return _chunked(*_in_chunks(x_BSD, weights_DV, targets_BS, chunk, axes))
    return jnp.sum(_losses(project(x_BSD, weights_DV, axes), targets_BS)[0])


class LossLayout(NamedTuple):
    """Mesh axes that split tokens and vocabulary, none without a mesh."""

    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()


def _losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token the loss, 0 without a target, and the logsumexp; which logit is the target's, (..., V)."""
    # A masked sum, not a gather: it stays on the shards of a vocabulary that is split over tp.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    loss = lse - jnp.sum(logits, axis=-1, where=is_target)
    return jnp.where(targets >= 0, loss, 0), lse, is_target


def _in_chunks(
    x_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array, chunk: int, axes: PartitionAxis
) -> tuple[jax.Array, jax.Array, jax.Array, LossLayout]:
    """Arguments of `_chunked`: x (N, G, C, D), whole columns of the weights, targets (N, G, C), and how they lie."""
    batch, sequence, vocab = _split_axes(axes, x_BSD.shape)
    layout, ways = LossLayout(batch[0] + sequence[0], vocab[0]), (batch[1], sequence[1])

    def cut(a: jax.Array, fill: int) -> jax.Array:
        (b, s), rest = ways, a.shape[2:]
        a = a.reshape(b, a.shape[0] // b, s, a.shape[1] // s, *rest)
        a = jnp.swapaxes(a, 1, 2).reshape(b * s, -1, *rest)
        tokens = a.shape[1]
        size = math.ceil(tokens / math.ceil(tokens / chunk))  # chunks of one size, and little to fill up
        a = jnp.pad(a, [(0, 0), (0, -tokens % size), *[(0, 0)] * len(rest)], constant_values=fill)
        a = jnp.swapaxes(a.reshape(b * s, -1, size, *rest), 0, 1)
        return _lay(a, None, layout.tokens)

    return cut(x_BSD, 0), _lay(weights_DV, None, layout.vocab), cut(targets_BS, -1), layout


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(x_NGCD: jax.Array, weights_DV: jax.Array, targets_NGC: jax.Array, layout: LossLayout) -> jax.Array:
    def add(sum_G: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        loss_GC = _losses(_logits(part[0], weights_DV, layout), part[1])[0]
        return sum_G + _lay(jnp.sum(loss_GC, axis=-1), layout.tokens), None

    sum_G = _lay(jnp.zeros(x_NGCD.shape[1], jnp.float32), layout.tokens)
    return jnp.sum(jax.lax.scan(add, sum_G, (x_NGCD, targets_NGC))[0])


def _forward(x_NGCD: jax.Array, weights_DV: jax.Array, targets_NGC: jax.Array, layout: LossLayout) -> Any:
    def add(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        n, sum_G, dx_NGCD, dw_GDV = carry
        x_GCD, targets_GC = x_NGCD[n], targets_NGC[n]
        logits_GCV = _logits(x_GCD, weights_DV, layout)
        loss_GC, lse_GC, is_target_GCV = _losses(logits_GCV, targets_GC)
        d_GCV = jnp.where((targets_GC >= 0)[..., None], jnp.exp(logits_GCV - lse_GC[..., None]) - is_target_GCV, 0)
        d_GCV = d_GCV.astype(x_GCD.dtype)
        dx_GCD = jnp.einsum("gcv,dv->gcd", d_GCV, weights_DV, preferred_element_type=jnp.float32)
        dx_GCD = _lay(dx_GCD.astype(x_GCD.dtype), layout.tokens)
        # Each group sums its own tokens, and the mesh is summed over once, at the end, not once a chunk.
        dw_GDV += jnp.einsum("gcd,gcv->gdv", x_GCD, d_GCV, preferred_element_type=jnp.float32)
        dw_GDV = _lay(dw_GDV, layout.tokens, None, layout.vocab)
        dx_NGCD = jax.lax.dynamic_update_index_in_dim(dx_NGCD, dx_GCD, n, 0)
        return n + 1, sum_G + _lay(jnp.sum(loss_GC, axis=-1), layout.tokens), dx_NGCD, dw_GDV

    num_chunks, groups = x_NGCD.shape[:2]
    dw_GDV = _lay(jnp.zeros((groups, *weights_DV.shape), jnp.float32), layout.tokens, None, layout.vocab)
    sum_G = _lay(jnp.zeros(groups, jnp.float32), layout.tokens)
    start = (jnp.int32(0), sum_G, jnp.zeros_like(x_NGCD), dw_GDV)
    # Not a scan: a pipeline that wants the gradients of the weights later would cut it in two, with all logits between.
    _, sum_G, dx_NGCD, dw_GDV = jax.lax.while_loop(lambda carry: carry[0] < num_chunks, add, start)
    return jnp.sum(sum_G), (dx_NGCD, jnp.sum(dw_GDV, axis=0).astype(weights_DV.dtype))


def _backward(layout: LossLayout, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[Any, ...]:
    return *((g * d).astype(d.dtype) for d in saved), None


_chunked.defvjp(_forward, _backward)


def _logits(x_GCD: jax.Array, weights_DV: jax.Array, layout: LossLayout) -> jax.Array:
    logits_GCV = jnp.einsum("gcd,dv->gcv", x_GCD, weights_DV, preferred_element_type=jnp.float32)
    return _lay(logits_GCV, layout.tokens, None, layout.vocab)


def _split_axes(axes: PartitionAxis, shape: tuple[int, ...]) -> list[tuple[tuple[str, ...], int]]:
    """(mesh axes, their ways) of batch, sequence and vocab; a dim that does not divide is not split."""
    mesh = current_mesh()
    if mesh is None:
        return [((), 1)] * 3
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    found = []
    for entry, size in zip(axes.resolve(("batch", "sequence", "vocab")), (*shape[:2], None), strict=True):
        names = tuple(name for name in as_tuple(entry) if name in kinds and kinds[name] != AxisType.Manual)
        ways = math.prod(mesh.shape[name] for name in names)
        found.append(((), 1) if size is not None and size % ways else (names, ways))
    return found


def _lay(x: jax.Array, *dims: tuple[str, ...] | None) -> jax.Array:
    if current_mesh() is None:
        return x
    return with_sharding_constraint(x, PartitionSpec(*(dim or None for dim in dims)), on_mismatch="drop")
