"""Attentions in the forms in which models write them: (function, arguments) by name. Sequences have S = 96 elements."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

S, B = 96, 2
Program = tuple[Callable[..., Any], tuple[Any, ...]]
PROGRAMS: dict[str, Callable[[], Program]] = {}
# These stay as they are.
LEFT = {
    "returned_weights",
    "router",
    "sum_of_other_rows",
    "sums_over_both_dims",
    "sum_of_a_part",
    "sum_without_the_sink",
}
LEFT |= {"weights_without_gradient", "sum_without_gradient", "integer_weights", "own_derivative", "pairs_of_keys"}
LEFT |= {"merged_heads_and_queries", "factor_of_the_sink", "sum_of_swapped_heads"}
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 4, (B, S)), 1)
PADDING = np.arange(S)[None] < np.array([[S - 30], [S - 50]])


def program(fn: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[fn.__name__] = fn
    return fn


def rand(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + 7 * sum(shape)).normal(size=shape), dtype)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def qkv(heads: int = 4, kv_heads: int = 4, keys: int = S, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    shapes = ((B, S, heads, 8), (B, keys, kv_heads, 8), (B, keys, kv_heads, 8))
    return tuple(rand(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes))


def distance() -> jax.Array:
    return jnp.arange(S)[:, None] - jnp.arange(S)


def causal(s: jax.Array) -> jax.Array:
    return jnp.where(distance() >= 0, s, -1e30)


def by_hand(q: Any, k: Any, v: Any, change: Callable[[Any], Any] = lambda s: s) -> jax.Array:
    s = change(jnp.einsum("bqnh,bknh->bnqk", q, k) / 3)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s, -1), v)


def with_weights(weigh: Callable[..., Any], *more: Any) -> Callable[[], Program]:
    """The weights are `weigh(exp of scores, *more)`."""

    def fn(q: Any, k: Any, v: Any, *args: Any) -> Any:
        weights = weigh(jnp.exp(jnp.einsum("bqnh,bknh->bnqk", q, k) / 3), *args)
        return jnp.einsum("bnqk,bknh->bqnh", weights, v)

    return lambda: (fn, (*qkv(), *more))


def total(e: jax.Array) -> jax.Array:
    return e.sum(-1, keepdims=True)


def over_total(e: jax.Array) -> jax.Array:
    return e / total(e)


def _changed(name: str, change: Callable[..., Any], *more: Any) -> None:
    PROGRAMS[name] = lambda: (lambda q, k, v, *args: by_hand(q, k, v, lambda s: change(s, *args)), (*qkv(), *more))


_changed("full", lambda s: s)
_changed("causal", causal)
_changed("soft_cap", lambda s: causal(5 * jnp.tanh(s / 5)))
_changed("window", lambda s: jnp.where((distance() >= 0) & (distance() < 20), s, -jnp.inf))
_changed("additive_mask", lambda s: s + jnp.where(jnp.arange(S)[:, None] >= jnp.arange(S), 0.0, -1e9)[None, None])
_changed("alibi", lambda s: causal(s - (2.0 ** -jnp.arange(4.0))[:, None, None] * jnp.abs(distance())))
_changed("bias_parameter", lambda s, bias: causal(s + bias), normal(4, S, S))
_changed("key_padding", lambda s: jnp.where(jnp.asarray(PADDING)[:, None, None, :], s, -1e9))
_changed("padding_as_input", lambda s, pad: jnp.where(pad[:, None, None, :], s, -1e9), PADDING)
_changed(
    "segments_as_input",
    lambda s, x: jnp.where((distance() >= 0) & (x[:, None, :, None] == x[:, None, None, :]), s, -1e30),
    SEGMENTS,
)
# The first rows have no key. Their mask is finite, so their weights are uniform over all keys.
_changed(
    "empty_rows_finite",
    lambda s, x: jnp.where((distance() >= 0) & x[:, None, None, :], s, jnp.finfo(jnp.float32).min),
    ~PADDING,
)
# Conversions that round, cut off or overflow, in the positions of a mask.
_changed("mask_of_unsigned", lambda s: jnp.where(distance().astype(jnp.uint32) >= 20, s, -1e30))
_changed("mask_of_quotients", lambda s: jnp.where((distance() / 15).astype(jnp.int32) == 0, s, -1e30))
_changed("mask_of_bfloat16", lambda s: jnp.where((distance() + 300).astype(jnp.bfloat16) <= 300, s, -1e30))
_changed("mask_of_overflow", lambda s: jnp.where(distance() * 50000000 >= 0, s, -1e30))
# No operation may see a key or a query that does not exist.
_changed("divided_by_keys", lambda s, x: s / x, 1 + np.arange(S, dtype=np.float32))
_changed("talking_heads", lambda s, w: causal(jnp.einsum("bnqk,nm->bmqk", s, w)), normal(4, 4))


@program
def table_of_biases() -> Program:
    def fn(q: Any, k: Any, v: Any, table: Any) -> Any:
        i = jnp.arange(S)
        bias = jnp.take(table, jnp.clip(i[:, None] - i[None], -15, 16) + 15, axis=0)
        return by_hand(q, k, v, lambda s: s + jnp.transpose(bias, (2, 0, 1))[None])

    return fn, (*qkv(), rand(32, 4))


@program
def grouped_queries() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bqkgh,bskh->bkgqs", q.reshape(B, S, 2, 2, 8), k) * 0.3
        return jnp.einsum("bkgqs,bskh->bqkgh", jax.nn.softmax(causal(s), -1), v).reshape(B, S, 4, 8)

    return fn, qkv(4, 2)


@program
def grouped_queries_merged() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("BTHGD,BSHD->BHGTS", q.reshape(B, S, 2, 2, 8), k) * 0.3
        p = jax.nn.softmax(causal(s.reshape(B, 4, S, S)).astype(jnp.float32), -1).astype(q.dtype)
        return jnp.einsum("BHGTS,BSHD->BTHGD", p.reshape(B, 2, 2, S, S), v).reshape(B, S, 4, 8)

    return fn, qkv(4, 2)


@program
def latent_two_products() -> Program:
    def fn(q: Any, k: Any, v: Any, q_rope: Any, k_rope: Any) -> Any:
        return by_hand(q, k, v, lambda s: causal((3 * s + jnp.einsum("bqnh,bkh->bnqk", q_rope, k_rope)) * 0.2))

    return fn, (*qkv(), rand(B, S, 4, 6), rand(B, S, 6))


@program
def exp_by_hand() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = causal(jnp.einsum("bqnh,bknh->bnqk", q, k))
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.einsum("bnqk,bknh->bqnh", e / e.sum(-1, keepdims=True), v)

    return fn, qkv()


@program
def softmax_where() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("bqnh,bknh->bnqk", q, k)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s, -1, where=distance() >= 0), v)

    return fn, qkv()


def _without_keys(weights: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[], Program]:
    """Rows 40 to 95 of one half of the batch have no key, and two more rows of the other half."""

    def fn(q: Any, k: Any, v: Any, pad: Any) -> Any:
        mask = (distance() >= 0) & (jnp.arange(S) > 1) & (pad[:, None, :, None] > 0)
        return jnp.einsum("bnqk,bknh->bqnh", weights(jnp.einsum("bqnh,bknh->bnqk", q, k) / 3, mask), v)

    return lambda: (fn, (*qkv(), np.arange(S)[None] < np.array([[40], [96]])))


def _softmax_where(s: jax.Array, mask: jax.Array, initial: float = -np.inf) -> jax.Array:
    e = jnp.exp(s - s.max(-1, where=mask, initial=initial, keepdims=True))
    return jnp.where(mask, e / e.sum(-1, keepdims=True, where=mask), 0)


PROGRAMS["no_key_where"] = _without_keys(lambda s, mask: jax.nn.softmax(s, where=mask))
PROGRAMS["no_key_initial"] = _without_keys(lambda s, mask: _softmax_where(jnp.where(mask, s, -1e30), mask, -1e30))
PROGRAMS["no_key_selected"] = _without_keys(
    lambda s, mask: jnp.where(mask, jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1), 0)
)
PROGRAMS["no_key_twice"] = _without_keys(
    lambda s, mask: jnp.where(mask, over_total(jnp.where(mask, jnp.exp(jnp.where(mask, s, -jnp.inf)), 0)), 0)
)
PROGRAMS["no_key_finite"] = _without_keys(lambda s, mask: mask * jax.nn.softmax(jnp.where(mask, s, -1e30), -1))


@program
def dropout() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(causal(jnp.einsum("bqnh,bknh->bnqk", q, k)), -1)
        keep = jax.random.bernoulli(jax.random.key(3), 0.8, p.shape)
        return jnp.einsum("bnqk,bknh->bqnh", jnp.where(keep, p / 0.8, 0), v)

    return fn, qkv()


@program
def sink() -> Program:
    def fn(q: Any, k: Any, v: Any, w: Any) -> Any:
        s = causal(jnp.einsum("bqnh,bknh->bnqk", q, k))
        s = jnp.concatenate([s, jnp.broadcast_to(w[None, :, None, None], (B, 4, S, 1))], -1)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s, -1)[..., :-1], v)

    return fn, (*qkv(), rand(4))


@program
def sink_bfloat16() -> Program:
    fn, args = sink()
    return fn, tuple(x.astype(jnp.bfloat16) for x in args)


@program
def sink_in_front() -> Program:
    def fn(q: Any, k: Any, v: Any, w: Any) -> Any:
        s = causal(jnp.einsum("bqnh,bknh->bnqk", q, k))
        s = jnp.concatenate([jnp.einsum("bqnh,nhz->bnqz", q, w), s], -1)
        return jnp.einsum("bnqk,bknh->bqnh", jax.lax.slice_in_dim(jax.nn.softmax(s, -1), 2, S + 2, axis=3), v)

    return fn, (*qkv(), rand(4, 8, 2))


@program
def two_products_of_one_softmax() -> Program:
    def fn(q: Any, k: Any, v: Any, position: Any) -> Any:
        p = jax.nn.softmax(causal(jnp.einsum("bqnh,bknh->bnqk", q, k)), -1)
        out = jnp.einsum("bnqk,bknh->bqnh", p, v)
        return out + jnp.einsum("bnqk,bkc->bqnc", p, position + out.mean((0, 1, 2)))

    return fn, (*qkv(), rand(B, S, 8))


@program
def in_a_branch() -> Program:
    def fn(q: Any, k: Any, v: Any, flag: Any) -> Any:
        return jax.lax.cond(flag, lambda q, k, v: by_hand(q, k, v, causal), by_hand, q, k, v)

    return fn, (*qkv(), np.True_)


@program
def cross() -> Program:
    return by_hand, qkv(keys=70)


def _of_jax(name: str, *shape: Any, **kwargs: Any) -> None:
    PROGRAMS[name] = lambda: (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **kwargs), qkv(*shape))


_of_jax("of_jax", 4, 2, is_causal=True)
_of_jax("of_jax_window", 4, 2, is_causal=True, local_window_size=(20, 0))
_of_jax("of_jax_bfloat16", 4, 2, S, jnp.bfloat16, is_causal=True)
_LENGTHS = {"key_value_seq_lengths": np.array([40, 70]), "query_seq_lengths": np.array([96, 96])}
_of_jax("of_jax_lengths", 4, 4, **_LENGTHS)


@program
def vmapped() -> Program:
    each = lambda q, k, v: by_hand(q, k, v, causal)  # noqa: E731
    return jax.vmap(each, in_axes=1, out_axes=1), tuple(x[:, None] for x in qkv())


def _of_nnx(**kwargs: Any) -> Program:
    model = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), **kwargs)
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def fn(params: Any, x: Any) -> Any:
        return nnx.merge(graphdef, params, others, copy=True)(x, mask=nnx.make_causal_mask(jnp.ones((B, S))))

    return fn, (params, rand(B, S, 16))


PROGRAMS["of_nnx"] = _of_nnx
PROGRAMS["of_nnx_dropout"] = lambda: _of_nnx(dropout_rate=0.3, deterministic=False)


@program
def mask_outside_of_scan_and_remat() -> Program:
    def fn(x: Any, w: Any) -> Any:
        mask = jnp.where(jnp.arange(S)[:, None] >= jnp.arange(S), 0.0, -1e9)

        def layer(x: Any, w: Any) -> tuple[Any, None]:
            h = (x @ w).reshape(B, S, 4, 4)
            return x + by_hand(h, h, h, lambda s: 3 * s + mask).reshape(B, S, 16), None

        return jax.lax.scan(jax.checkpoint(layer), x, w)[0]

    return fn, (rand(B, S, 16), rand(3, 16, 16) * 0.3)


@program
def returned_weights() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k), -1)
        return jnp.einsum("bnqk,bknh->bqnh", p, v), p.mean()

    return fn, qkv()


@program
def router() -> Program:
    def fn(x: Any, w: Any, e: Any) -> Any:
        return jnp.einsum("bse,ed->bsd", jax.nn.softmax(x @ w, -1), e)

    return fn, (rand(B, S, 16), rand(16, 8), rand(8, 16))


PROGRAMS["sum_of_other_rows"] = with_weights(lambda e: e / e.sum(-1)[:, :, None])
PROGRAMS["sums_over_both_dims"] = with_weights(lambda e: e / total(e) + e / e.sum(-2, keepdims=True))
PROGRAMS["sum_of_a_part"] = with_weights(lambda e: e / total(e[..., :40]))
PROGRAMS["weights_without_gradient"] = with_weights(lambda e: jax.lax.stop_gradient(e / total(e)))
PROGRAMS["sum_without_gradient"] = with_weights(lambda e: e / jax.lax.stop_gradient(total(e)))
PROGRAMS["integer_weights"] = with_weights(lambda e: (127 * e / total(e)).astype(jnp.int8).astype(jnp.float32))
PROGRAMS["negative_factors"] = with_weights(lambda e, w: e * w / total(e * w), -1 - np.arange(S, dtype=np.float32))
PROGRAMS["weights_divided_by_keys"] = with_weights(lambda e, w: e / total(e) / w, 1 + np.arange(S, dtype=np.float32))


def _with_sink(weigh: Callable[..., Any]) -> Callable[[], Program]:
    """The weights are `weigh(exp of scores and of two columns in front)`."""

    def fn(q: Any, k: Any, v: Any, w: Any) -> Any:
        s = jnp.concatenate([jnp.einsum("bqnh,nhz->bnqz", q, w), jnp.einsum("bqnh,bknh->bnqk", q, k)], -1) / 3
        return jnp.einsum("bnqk,bknh->bqnh", weigh(jnp.exp(s)), v)

    return lambda: (fn, (*qkv(), rand(4, 8, 2)))


PROGRAMS["sum_without_the_sink"] = _with_sink(lambda e: e[..., 2:] / total(e[..., 2:]))
PROGRAMS["factor_of_the_sink"] = _with_sink(lambda e: (e / total(e) * jnp.arange(S + 2.0))[..., 2:])


@program
def own_derivative() -> Program:
    own = jax.custom_jvp(lambda s: jax.nn.softmax(s, -1))
    own.defjvp(lambda s, change: (own(*s), change[0] / 2))
    return lambda q, k, v: jnp.einsum("bnqk,bknh->bqnh", own(jnp.einsum("bqnh,bknh->bnqk", q, k)), v), qkv()


@program
def pairs_of_keys() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k), -1).reshape(B, 4, S, S // 2, 2)
        return jnp.einsum("bnqkp,bknh->bqnhp", p, v[:, ::2])

    return fn, qkv()


@program
def sum_of_swapped_heads() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        e = jnp.exp(jnp.einsum("abcqd,abckd->abcqk", q, k))
        rows = jnp.swapaxes(e.sum(-1), 1, 2).reshape(12, S, 1)  # of (a, c, b)
        return jnp.einsum("nqk,nkd->nqd", e.reshape(12, S, S) / rows, v)

    return fn, (rand(3, 2, 2, S, 8), rand(3, 2, 2, S, 8, seed=1), rand(12, S, 8, seed=2))


@program
def merged_heads_and_queries() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bqnh,bknh->bqnk", q, k), -1).reshape(B, 4 * S, S)
        return jnp.einsum("bqk,bkh->bqh", p, v[:, :, 0])

    return fn, qkv()


@program
def factor_of_another_product() -> Program:
    def fn(q: Any, k: Any, v: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k), -1)
        out = jnp.einsum("bnqk,bknh->bqnh", p, v)
        return jnp.einsum("bnqk,bknh->bqnh", p * jnp.tanh(out.sum(-1)).swapaxes(1, 2)[..., None], v)

    return fn, qkv()


@program
def a_key_of_dropout_per_row() -> Program:
    def one(q: Any, k: Any, v: Any, key: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("qnh,knh->nqk", q, k), -1)
        return jnp.einsum("nqk,knh->qnh", jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p / 0.8, 0), v)

    return lambda q, k, v: jax.vmap(one)(q, k, v, jax.random.split(jax.random.key(3), B)), qkv()
