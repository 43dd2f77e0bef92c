"""Losses of the next token from hidden states, as sums or by token, with all logits at once or in chunks.

Shape letters: B batch, S sequence, D hidden, E hidden of a teacher, V vocab; in chunks: N chunks, G groups of tokens,
one per shard of the tokens on the mesh, C tokens of a group in one chunk.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from flax_mesh.axes import Mode, PartitionAxis, as_tuple
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.ops.divergence import Divergence
from flax_mesh.models.ops.matmul import dot_float32
from flax_mesh.models.ops.scores import soft_cap
from flax_mesh.models.parts import token_dims
from flax_mesh.modes import promotions
from flax_mesh.sharding.constrain import constrain, with_sharding_constraint
from flax_mesh.sharding.explicit import on_auto_axes

_Gradients = tuple[jax.Array, jax.Array]  # of hidden states and weights
_Teacher = tuple[jax.Array, ...]  # hidden states and weights, or nothing
_Sums = tuple[jax.Array, ...]
_Carry = tuple[jax.Array, _Sums, jax.Array, jax.Array]


def project(x_BSD: jax.Array, weights_DV: jax.Array, axes: PartitionAxis, mode: Mode = "train") -> jax.Array:
    """Logits (B, S, V) float32."""
    logical = (*token_dims(mode), "vocab")

    def logits(x_BSD: jax.Array, weights_DV: jax.Array) -> jax.Array:
        return constrain(dot_float32(x_BSD, weights_DV, (((2,), (0,)), ((), ()))), logical, axes=axes, mode=mode)

    return on_auto_axes(logits, x_BSD, weights_DV, out=[logical], axes=axes, mode=mode)


def cross_entropy(
    x_BSD: jax.Array,
    weights_DV: jax.Array,
    targets_BS: jax.Array,
    *,
    axes: PartitionAxis,
    chunk: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """Sum in nats, float32, over the targets that are not negative; logits with the soft cap `cap`, 0 for none.

    NaN if a target is not in the vocabulary.

    With `chunk` above 0 only the logits of that many tokens per device exist at a time, forward and backward; sum and
    gradients are equal up to rounding. The gradients are computed in the forward pass, so that no logits are computed
    twice: the residuals are the gradients of `x_BSD` and `weights_DV`.
    """

    def loss(x_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array) -> jax.Array:
        if chunk:
            *arrays, layout = _in_chunks(x_BSD, weights_DV, targets_BS, chunk, axes)
            (loss,) = _chunked(*arrays, (), layout._replace(cap=cap))
            return loss
        return jnp.sum(_losses(soft_cap(project(x_BSD, weights_DV, axes), cap), targets_BS)[0])

    return on_auto_axes(loss, x_BSD, weights_DV, targets_BS, out=[()], axes=axes)


def token_losses(
    x_BSD: jax.Array,
    weights_DV: jax.Array,
    targets_BS: jax.Array,
    *,
    axes: PartitionAxis,
    chunk: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """The terms (B, S) of the sum `cross_entropy`, 0 without a target.

    With `chunk` above 0 the backward pass computes the logits again, since their cotangents are not known before.
    """

    def losses(x_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array) -> jax.Array:
        if chunk:
            *arrays, layout = _in_chunks(x_BSD, weights_DV, targets_BS, chunk, axes)
            return _out_of_chunks(_chunked_tokens(*arrays, layout._replace(cap=cap)), targets_BS.shape, axes)
        return _losses(soft_cap(project(x_BSD, weights_DV, axes), cap), targets_BS)[0]

    return on_auto_axes(losses, x_BSD, weights_DV, targets_BS, out=[("batch", "sequence")], axes=axes)


def distillation(
    x_BSD: jax.Array,
    weights_DV: jax.Array,
    targets_BS: jax.Array,
    *,
    teacher: tuple[jax.Array, jax.Array],
    divergence: Divergence,
    axes: PartitionAxis,
    chunk: int = 0,
    cap: float = 0.0,
    teacher_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over the targets that are not negative: the loss, the cross-entropy, and the scaled KL divergence.

    `teacher` are the hidden states (B, S, E) and output weights (E, V) of the teacher, which are constants, and
    `teacher_cap` the soft cap of its logits. `chunk` is as in `cross_entropy`, for the logits of both.
    """

    def losses(
        x_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array, x_BSE: jax.Array, weights_EV: jax.Array
    ) -> _Sums:
        x_BSE, weights_EV = jax.lax.stop_gradient((x_BSE, weights_EV))
        if chunk:
            *arrays, layout = _in_chunks(x_BSD, weights_DV, targets_BS, chunk, axes)
            others = _in_chunks(x_BSE, weights_EV, targets_BS, chunk, axes)[:2]
            layout = layout._replace(cap=cap, teacher_cap=teacher_cap, divergence=divergence)
            return _chunked(*arrays, others, layout)
        logits = soft_cap(project(x_BSD, weights_DV, axes), cap)
        of_teacher = soft_cap(project(x_BSE, weights_EV, axes), teacher_cap)
        entropy_BS = _losses(logits, targets_BS)[0]
        return tuple(map(jnp.sum, _distilled(entropy_BS, logits, of_teacher, targets_BS, divergence)))

    return on_auto_axes(losses, x_BSD, weights_DV, targets_BS, *teacher, out=[(), (), ()], axes=axes)


class _LossLayout(NamedTuple):
    """Mesh axes that split tokens and vocabulary; empty without a mesh. And the soft caps of the logits."""

    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    cap: float = 0.0
    teacher_cap: float = 0.0
    divergence: Divergence | None = None  # without: the cross-entropy


def _losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss (0 without a target) and logsumexp of each token, and a mask (..., V) of the target's logit.

    A target at or above V makes both NaN, and by them the gradients.
    """
    # A masked sum instead of a gather stays local to the shards of a vocabulary that is split over tp.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    lse = jax.nn.logsumexp(logits, axis=-1) * jnp.where(targets < logits.shape[-1], jnp.float32(1), jnp.nan)
    loss = lse - jnp.sum(logits, axis=-1, where=is_target)
    return jnp.where(targets >= 0, loss, 0), lse, is_target


def _distilled(
    entropy: jax.Array, logits: jax.Array, teacher: jax.Array, targets: jax.Array, divergence: Divergence
) -> _Sums:
    """Loss, cross-entropy and divergence of each token, 0 without a target."""
    scaled = jnp.where(targets >= 0, divergence.scaled(logits, teacher), 0)
    return divergence.mixed(entropy, scaled), entropy, scaled


def _in_chunks(
    x_BSD: jax.Array, weights_DV: jax.Array, targets_BS: jax.Array, chunk: int, axes: PartitionAxis
) -> tuple[jax.Array, jax.Array, jax.Array, _LossLayout]:
    """Arguments of `_chunked`: x (N, G, C, D), weights gathered over D, targets (N, G, C), and their layout."""
    batch, sequence, vocab = _split_axes(axes, x_BSD.shape)
    layout, shards = _LossLayout(batch[0] + sequence[0], vocab[0]), (batch[1], sequence[1])

    def in_chunks(a: jax.Array, padding: int) -> jax.Array:
        (b, s), rest = shards, a.shape[2:]
        a = a.reshape(b, a.shape[0] // b, s, a.shape[1] // s, *rest)
        a = jnp.swapaxes(a, 1, 2).reshape(b * s, -1, *rest)
        tokens = a.shape[1]
        size = math.ceil(tokens / math.ceil(tokens / chunk))  # equal chunks with little padding
        a = jnp.pad(a, [(0, 0), (0, -tokens % size), *[(0, 0)] * len(rest)], constant_values=padding)
        a = jnp.swapaxes(a.reshape(b * s, -1, size, *rest), 0, 1)
        return _constrain(a, None, layout.tokens)

    return in_chunks(x_BSD, 0), _constrain(weights_DV, None, layout.vocab), in_chunks(targets_BS, -1), layout


def _out_of_chunks(losses_NGC: jax.Array, shape: tuple[int, ...], axes: PartitionAxis) -> jax.Array:
    """The inverse of `in_chunks` in `_in_chunks`, without the padding: (B, S)."""
    (_, b), (_, s), _ = _split_axes(axes, shape)
    tokens_GT = jnp.swapaxes(losses_NGC, 0, 1).reshape(b * s, -1)[:, : math.prod(shape) // (b * s)]
    return jnp.swapaxes(tokens_GT.reshape(b, s, shape[0] // b, shape[1] // s), 1, 2).reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    x_NGCD: jax.Array, weights_DV: jax.Array, targets_NGC: jax.Array, teacher: _Teacher, layout: _LossLayout
) -> _Sums:
    """The sum of the loss, and for a divergence the sums of its two parts, which have no gradient."""

    def add(sums_G: _Sums, part: _Teacher) -> tuple[_Sums, None]:
        losses_GC, _ = _part(part[0], weights_DV, part[1], (*part[2:], *teacher[1:]), layout)
        return _added(sums_G, losses_GC, layout), None

    parts = (x_NGCD, targets_NGC, *teacher[:1])
    return tuple(map(jnp.sum, jax.lax.scan(add, _zeros(x_NGCD.shape[1], layout), parts)[0]))


@promotions()  # this and the next functions may be traced without the caller
def _forward(
    x_NGCD: jax.Array,
    weights_DV: jax.Array,
    targets_NGC: jax.Array,
    teacher: _Teacher,
    layout: _LossLayout,
    g_NGC: jax.Array | None = None,
) -> tuple[_Sums, _Gradients]:
    """The sums and the gradients of the first, with the losses of the tokens multiplied by `g_NGC` in the gradients."""

    def add(carry: _Carry) -> _Carry:
        n, sums_G, dx_NGCD, dw_GDV = carry
        x_GCD = x_NGCD[n]
        others = (*(x[n] for x in teacher[:1]), *teacher[1:])
        losses_GC, derivative = _part(x_GCD, weights_DV, targets_NGC[n], others, layout)
        d_GCV = derivative()
        if g_NGC is not None:
            d_GCV = d_GCV * g_NGC[n][..., None]
        d_GCV = d_GCV.astype(x_GCD.dtype)
        dx_GCD = jnp.einsum("gcv,dv->gcd", d_GCV, weights_DV, preferred_element_type=jnp.float32)
        dx_GCD = _constrain(dx_GCD.astype(x_GCD.dtype), layout.tokens)
        # Each group sums over its tokens; one all-reduce at the end instead of one per chunk.
        dw_GDV += jnp.einsum("gcd,gcv->gdv", x_GCD, d_GCV, preferred_element_type=jnp.float32)
        dw_GDV = _constrain(dw_GDV, layout.tokens, None, layout.vocab)
        dx_NGCD = jax.lax.dynamic_update_index_in_dim(dx_NGCD, dx_GCD, n, 0)
        return n + 1, _added(sums_G, losses_GC, layout), dx_NGCD, dw_GDV

    num_chunks, groups = x_NGCD.shape[:2]
    dw_GDV = _constrain(jnp.zeros((groups, *weights_DV.shape), jnp.float32), layout.tokens, None, layout.vocab)
    start = (jnp.int32(0), _zeros(groups, layout), jnp.zeros_like(x_NGCD), dw_GDV)
    # Not a scan: a pipeline that delays the weight gradients would split it in two, with all logits as residuals.
    _, sums_G, dx_NGCD, dw_GDV = jax.lax.while_loop(lambda carry: carry[0] < num_chunks, add, start)
    return tuple(map(jnp.sum, sums_G)), (dx_NGCD, jnp.sum(dw_GDV, axis=0).astype(weights_DV.dtype))


def _part(
    x_GCD: jax.Array, weights_DV: jax.Array, targets_GC: jax.Array, teacher: _Teacher, layout: _LossLayout
) -> tuple[_Sums, Callable[[], jax.Array]]:
    """The losses of the tokens of a chunk, as `_chunked` sums them, and the derivative of the first by the logits."""
    logits_GCV, divergence = _logits(x_GCD, weights_DV, layout), layout.divergence
    loss_GC, lse_GC, is_target_GCV = _losses(logits_GCV, targets_GC)
    others_GCV = _logits(teacher[0], teacher[1], layout._replace(cap=layout.teacher_cap)) if divergence else None

    def derivative() -> jax.Array:
        d_GCV = jnp.exp(logits_GCV - lse_GC[..., None]) - is_target_GCV
        if divergence is not None and others_GCV is not None:
            scaled = divergence.scaled
            of_sum = jax.grad(lambda x_GCV, y_GCV: jnp.sum(scaled(x_GCV, y_GCV)))(logits_GCV, others_GCV)
            d_GCV = divergence.mixed(d_GCV, of_sum)
        d_GCV = jnp.where((targets_GC >= 0)[..., None], d_GCV, 0)
        # The second factor is the derivative of the soft cap.
        return d_GCV * (1 - jnp.square(logits_GCV / layout.cap)) if layout.cap else d_GCV

    if divergence is None or others_GCV is None:
        return (loss_GC,), derivative
    return _distilled(loss_GC, logits_GCV, others_GCV, targets_GC, divergence), derivative


def _zeros(groups: int, layout: _LossLayout) -> _Sums:
    count = 1 if layout.divergence is None else 3
    return tuple(_constrain(jnp.zeros(groups, jnp.float32), layout.tokens) for _ in range(count))


def _added(sums_G: _Sums, losses_GC: _Sums, layout: _LossLayout) -> _Sums:
    pairs = zip(sums_G, losses_GC, strict=True)
    return tuple(sum_G + _constrain(jnp.sum(loss_GC, axis=-1), layout.tokens) for sum_G, loss_GC in pairs)


@promotions()
def _backward(layout: _LossLayout, saved: _Gradients, g: _Sums) -> tuple[jax.Array | None, ...]:
    return *((g[0] * d).astype(d.dtype) for d in saved), None, None


_chunked.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked_tokens(x_NGCD: jax.Array, weights_DV: jax.Array, targets_NGC: jax.Array, layout: _LossLayout) -> jax.Array:
    def losses_of(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _losses(_logits(part[0], weights_DV, layout), part[1])[0]

    return jax.lax.map(losses_of, (x_NGCD, targets_NGC))


@promotions()
def _forward_tokens(
    x_NGCD: jax.Array, weights_DV: jax.Array, targets_NGC: jax.Array, layout: _LossLayout
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _chunked_tokens(x_NGCD, weights_DV, targets_NGC, layout), (x_NGCD, weights_DV, targets_NGC)


@promotions()
def _backward_tokens(
    layout: _LossLayout, saved: tuple[jax.Array, ...], g_NGC: jax.Array
) -> tuple[jax.Array | None, ...]:
    x_NGCD, weights_DV, targets_NGC = saved
    return *_forward(x_NGCD, weights_DV, targets_NGC, (), layout, g_NGC)[1], None


_chunked_tokens.defvjp(_forward_tokens, _backward_tokens)


def _logits(x_GCD: jax.Array, weights_DV: jax.Array, layout: _LossLayout) -> jax.Array:
    logits_GCV = jnp.einsum("gcd,dv->gcv", x_GCD, weights_DV, preferred_element_type=jnp.float32)
    return soft_cap(_constrain(logits_GCV, layout.tokens, None, layout.vocab), layout.cap)


def _split_axes(axes: PartitionAxis, shape: tuple[int, ...]) -> list[tuple[tuple[str, ...], int]]:
    """(mesh axes, number of shards) of batch, sequence and vocab; a dim that does not divide is not split."""
    mesh = current_mesh()
    if mesh is None:
        return [((), 1)] * 3
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    splits = []
    for entry, size in zip(axes.resolve(("batch", "sequence", "vocab")), (*shape[:2], None), strict=True):
        names = tuple(name for name in as_tuple(entry) if name in kinds and kinds[name] != AxisType.Manual)
        shards = math.prod(mesh.shape[name] for name in names)
        splits.append(((), 1) if size is not None and size % shards else (names, shards))
    return splits


def _constrain(x: jax.Array, *dims: tuple[str, ...] | None) -> jax.Array:
    if current_mesh() is None:
        return x
    return with_sharding_constraint(x, PartitionSpec(*(dim or None for dim in dims)), on_mismatch="drop")
