"""Random attentions: a chain of operations between its two products, which a list of names determines."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

B, H, D = 2, 4, 4
LOW = float(np.finfo(np.float32).min)
LAYOUTS = ("heads", "keys_first", "grouped", "merged_groups", "merged_batch")


class Chain(NamedTuple):
    layout: str
    queries: int
    keys: int
    block: int
    scores: tuple[str, ...]  # operations before the softmax
    softmax: str
    weights: tuple[str, ...]  # operations after it
    products: str


class Place(NamedTuple):
    """Positions and numbers of heads and rows, as arrays that can be broadcast to the scores."""

    i: Any
    j: Any
    head: Any
    row: Any
    q: int  # dims of the scores
    k: int


Change = Callable[[Any, Place, dict[str, Any]], Any]
POSITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "causal": lambda i, j: i >= j,
    "window": lambda i, j: (i >= j) & (i - j < 11),
    "outside": lambda i, j: abs(i - j) > 6,
    "prefix": lambda i, j: (i >= j) | (j < 5),
    "chunk": lambda i, j: i // 7 == j // 7,
    "quotient": lambda i, j: ((i - j) / 7).astype(jnp.int32) == 0,
    "unsigned": lambda i, j: (i - j).astype(jnp.uint32) < 9,
    "unsigned_outside": lambda i, j: (i - j).astype(jnp.uint32) >= 9,
    "bfloat16": lambda i, j: (i - j + 300).astype(jnp.bfloat16) <= 300,
    "int8": lambda i, j: (8 * (i - j)).astype(jnp.int8) >= 0,
    "overflow": lambda i, j: (i - j) * 100_000_000 >= 0,
    "remainder": lambda i, j: (i - j) % 5 == 0,
    "clipped": lambda i, j: jnp.clip(i - j, -3, 4) == 4,
    "maximum": lambda i, j: jnp.maximum(i, 20) >= j,
    "tanh": lambda i, j: jnp.tanh((i - j) / 8.0) >= 0.0,
    "square": lambda i, j: jnp.square(i - j) < 90,
    "not": lambda i, j: ~(i < j),
    "xor": lambda i, j: (i < j) ^ (j < 9),
    "sign": lambda i, j: jnp.sign(i - j) >= 0,
    "product": lambda i, j: (i - 15) * (j - 15) >= 0,
    "last": lambda i, j: j == 17,
    "none": lambda i, j: i < 0,
    "late": lambda i, j: (i > 12) & (i >= j),
}
DATA: dict[str, Callable[[Place, dict[str, Any]], Any]] = {
    "documents": lambda p, x: x["document"][p.row, p.i] == x["document"][p.row, p.j % x["document"].shape[1]],
    "padding": lambda p, x: x["padding"][p.row, p.j],
    "padded_queries": lambda p, x: x["document"][p.row, p.i] > 0,
    "lengths": lambda p, x: p.j < x["length"][p.row],
    "shifted": lambda p, x: p.i + x["length"][p.row] - 20 >= p.j,
    "key_of_documents": lambda p, x: (
        x["document"][p.row, p.i] * 4099 * 4099 + p.i >= x["document"][p.row, p.j % 32] * 4099 * 4099 + p.j
    ),
}
VALUES = {"inf": -np.inf, "1e9": -1e9, "least": LOW, "1e4": -1e4}
MASKS = [f"{kind}:{where}:{value}" for kind in (*POSITIONS, *DATA) for where in ("where", "add") for value in VALUES]
# Whole rows are covered.
MASKS_OF_ROWS = [x for x in MASKS if x.startswith(("none:where", "late:where", "padded_queries:where"))]

SCORES: dict[str, Change] = {
    "scale": lambda s, p, x: s * 0.6,
    "scale_10": lambda s, p, x: s * 10,
    "bias": lambda s, p, x: s + x["scalar"],
    "bias_per_head": lambda s, p, x: s + x["head"][p.head],
    "bias_per_query": lambda s, p, x: s + x["query"][p.i],
    "bias_per_key": lambda s, p, x: s - x["key"][p.j],
    "bias_per_row_and_key": lambda s, p, x: s + x["rows"][p.row, p.j],
    "table": lambda s, p, x: s + x["table"][jnp.clip(p.i - p.j, -5, 5) + 5, p.head],
    "distance": lambda s, p, x: s - jax.nn.softplus(x["head"][p.head]) * abs(p.i - p.j),
    "inverse_position": lambda s, p, x: s + x["scalar"] / (x["key"].shape[0] - p.j),
    "temperature_of_keys": lambda s, p, x: s / (1 + x["key"][p.j] ** 2),
    "temperature_of_queries": lambda s, p, x: s * (1 + x["query"][p.i] ** 2),
    "logarithm_of_keys": lambda s, p, x: s + jnp.log(0.1 + x["key"][p.j] ** 2),
    "cap": lambda s, p, x: 3 * jnp.tanh(s / 3),
    "clamp": lambda s, p, x: jnp.clip(s, -2.5, 2.5),
    "maximum": lambda s, p, x: jnp.maximum(s, x["scalar"]),
    "minimum": lambda s, p, x: jnp.minimum(s, 2 + x["query"][p.i]),
    "powers_of_two": lambda s, p, x: jnp.log2(jnp.exp2(jnp.clip(s, -20, 20) * 1.4427)) * 0.6931,
    "bfloat16": lambda s, p, x: s.astype(jnp.bfloat16).astype(s.dtype),
    "twice": lambda s, p, x: s + jnp.sin(s),
    "logistic": lambda s, p, x: s * jax.nn.sigmoid(s),
    "transposed": lambda s, p, x: jnp.swapaxes(jnp.swapaxes(s, 0, -1) * 1.5, 0, -1),
    "split": lambda s, p, x: (s.reshape(2, s.shape[0] // 2, *s.shape[1:]) * 0.9).reshape(s.shape),
    "merged": lambda s, p, x: (s.reshape(-1, *s.shape[2:]) + 0.5).reshape(s.shape),
    "more_dims": lambda s, p, x: (s[:, None] * jnp.array([0.5, 0.25])[(slice(None), *[None] * (s.ndim - 1))]).sum(1),
    "no_gradient": lambda s, p, x: s + jax.lax.stop_gradient(s * 0.3),
    "top_k": lambda s, p, x: jnp.where(s >= jnp.sort(s, p.k).take(jnp.array([-9]), p.k), s, -1e9),
    "largest": lambda s, p, x: jnp.where(s >= s.max(p.k, keepdims=True), s, -3.0),
    "above_mean": lambda s, p, x: jnp.where(s - s.mean(p.k, keepdims=True) > 0, s, -2.0),
    "minus_mean": lambda s, p, x: s - 0.5 * s.mean(p.k, keepdims=True),
    "above_number": lambda s, p, x: jnp.where(s > 0.25, s, -4.0),
}
# Rows without a key, whose weights are selected or multiplied away.
ABSENT = lambda p, x: (p.i >= p.j) & x["padding"][p.row, p.j] & (p.j > 1)  # noqa: E731
WEIGHTS: dict[str, Change] = {
    "dropout": lambda w, p, x: jnp.where(jax.random.bernoulli(jax.random.key(3), 0.8, w.shape), w / 0.8, 0.0),
    "gate_of_keys": lambda w, p, x: w * x["key"][p.j],
    "gate_of_queries": lambda w, p, x: w * x["query"][p.i],
    "gate_of_heads": lambda w, p, x: w * x["head"][p.head],
    "gate_of_rows": lambda w, p, x: x["rows"][p.row, p.j] * w,
    "gate_of_both": lambda w, p, x: w * jnp.cos(p.i - p.j + x["scalar"]),
    "divided": lambda w, p, x: w / (1 + x["key"][p.j] ** 2),
    "masked": lambda w, p, x: jnp.where(p.i >= p.j, w, 0.0),
    "masked_by_data": lambda w, p, x: w * x["padding"][p.row, p.j],
    "bfloat16": lambda w, p, x: w.astype(jnp.bfloat16).astype(w.dtype),
    "transposed": lambda w, p, x: jnp.swapaxes(jnp.swapaxes(w, 0, -1) * 1.5, 0, -1),
    "split": lambda w, p, x: (w.reshape(2, w.shape[0] // 2, *w.shape[1:]) * 0.9).reshape(w.shape),
    "merged": lambda w, p, x: w.reshape(-1, *w.shape[2:]).reshape(w.shape),
    "selected": lambda w, p, x: jnp.where(ABSENT(p, x), w, 0.0),
    "selected_outside": lambda w, p, x: jnp.where(p.j != 3, w, 0),
    "renormalized": lambda w, p, x: w / w.sum(p.k, keepdims=True),
    "no_gradient": lambda w, p, x: jax.lax.stop_gradient(w),
    "integers": lambda w, p, x: (w * 50).astype(jnp.int32).astype(w.dtype),
    "squared": lambda w, p, x: w * w,
    "every_other_row": lambda w, p, x: w * w.sum(p.q, keepdims=True),
}
SOFTMAX = [
    "jax",
    "jax_where",
    "absent_where",
    "absent_where_by_hand",
    "absent_selected",
    "absent_selected_twice",
    "absent_finite",
    "absent_multiplied",
    "by_hand",
    "no_shift",
    "inverse",
    "factor",
    "signed_factor",
    "sink",
    "sink_in_front",
    "sink_zero",
    "data_shift",
    "other_rows",
    "part",
    "no_gradient",
]
PRODUCTS = ("one", "two", "chained", "gated")
SPECIAL = {"renormalized", "no_gradient", "integers", "squared", "every_other_row"}  # these stay as they are


def chains() -> st.SearchStrategy[Chain]:
    return _chains(st.sampled_from(SOFTMAX))


def rare_chains() -> st.SearchStrategy[Chain]:
    """Attentions with rows without keys, or with statistics of the scores among the scores."""
    absent = st.sampled_from([name for name in SOFTMAX if name.startswith("absent")])
    return st.one_of(_chains(absent), _chains(st.sampled_from(SOFTMAX), st.sampled_from(STATISTICS)))


STATISTICS = ("top_k", "largest", "above_mean", "minus_mean", "above_number")


def _chains(softmax: st.SearchStrategy[str], first: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[Chain]:
    """`first` is an operation on the scores themselves."""
    masks = st.sampled_from(MASKS)
    some = st.lists(st.one_of(st.sampled_from([*SCORES]), masks, st.sampled_from(MASKS_OF_ROWS)), max_size=5)
    before = some.map(tuple) if first is None else st.tuples(first, some).map(lambda x: (x[0], *x[1]))
    plain = st.sampled_from([name for name in WEIGHTS if name not in SPECIAL])
    after = st.one_of(st.lists(plain, max_size=3), st.lists(st.sampled_from([*WEIGHTS]), max_size=3))
    length = st.integers(32, 45)
    return st.builds(
        Chain,
        st.sampled_from(LAYOUTS),
        length,
        length,
        st.integers(5, 31),
        before,
        softmax,
        after.map(tuple),
        st.sampled_from(PRODUCTS),
    )


def program_of(chain: Chain) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(function, arguments), as in `programs`."""
    random = np.random.default_rng(7)
    groups = 1 if chain.layout in ("heads", "keys_first", "merged_batch") else 2
    rand = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    q, k, v = rand(B, chain.queries, H, D), *(rand(B, chain.keys, H // groups, D) for _ in range(2))
    data = {
        "scalar": rand(),
        "head": rand(H),
        "query": rand(chain.queries),
        "key": rand(chain.keys),
        "rows": rand(B, chain.keys),
        "table": rand(11, H),
        "document": jnp.asarray(np.sort(random.integers(0, 4, (B, 45)), 1)),
        "padding": jnp.asarray(np.arange(chain.keys) < np.array([[chain.keys], [20]])),
        "length": jnp.asarray([25, 31]),
    }

    def fn(q: Any, k: Any, v: Any, data: dict[str, Any]) -> Any:
        scores, place, value_of = _scores(chain, q, k, groups)
        endless = False
        for name in chain.scores:
            if ":" in name:
                kind, where, value = name.split(":")
                mask = POSITIONS[kind](place.i, place.j) if kind in POSITIONS else DATA[kind](place, data)
                endless |= value == "inf"
                if where == "where":
                    scores = jnp.where(mask, scores, VALUES[value])
                else:
                    scores = scores + jnp.where(mask, 0.0, VALUES[value])
            else:
                scores = SCORES[name](scores, place, data)
        if endless:  # every row has a key
            scores = jnp.where(place.j == 3, 0.1 * jnp.ones((), scores.dtype), scores)
        weights = _softmax(chain.softmax, scores, place, data)
        for name in chain.weights:
            weights = WEIGHTS[name](weights, place, data)
        out = value_of(weights, v)
        if chain.products == "two":
            out = out + value_of(weights, jnp.sin(v))
        elif chain.products == "gated":
            out = out + value_of(weights * jnp.tanh(out.sum()), v)
        elif chain.products == "chained":
            out = out + value_of(weights, v * out.mean())
        return out

    return fn, (q, k, v, data)


def _scores(chain: Chain, q: Any, k: Any, groups: int) -> tuple[Any, Place, Callable[[Any, Any], Any]]:
    at = lambda size, dim, rank: jnp.arange(size).reshape([-1 if d == dim else 1 for d in range(rank)])  # noqa: E731
    sizes = chain.queries, chain.keys
    if chain.layout == "keys_first":
        s = jnp.einsum("bqnh,bknh->bknq", q, k) * 0.5
        place = Place(at(sizes[0], 3, 4), at(sizes[1], 1, 4), at(H, 2, 4), at(B, 0, 4), 3, 1)
        return s, place, lambda w, v: jnp.einsum("bknq,bknh->bqnh", w, v)
    if chain.layout == "merged_batch":
        flat = lambda x: x.transpose(0, 2, 1, 3).reshape(B * H, -1, D)  # noqa: E731
        s = jnp.einsum("xqh,xkh->xqk", flat(q), flat(k)) * 0.5
        number = at(B * H, 0, 3)
        place = Place(at(sizes[0], 1, 3), at(sizes[1], 2, 3), number % H, number // H, 1, 2)
        return s, place, lambda w, v: jnp.einsum("xqk,xkh->xqh", w, flat(v))
    if chain.layout == "heads":
        s = jnp.einsum("bqnh,bknh->bnqk", q, k) * 0.5
        value_of = lambda w, v: jnp.einsum("bnqk,bknh->bqnh", w, v)  # noqa: E731
    else:
        grouped = q.reshape(B, sizes[0], H // groups, groups, D)
        s = jnp.einsum("bqngh,bknh->bngqk", grouped, k) * 0.5
        value_of = lambda w, v: jnp.einsum("bngqk,bknh->bqngh", w.reshape(B, H // groups, groups, *sizes), v)  # noqa: E731
        if chain.layout == "grouped":
            head = at(H // groups, 1, 5) * groups + at(groups, 2, 5)
            return s, Place(at(sizes[0], 3, 5), at(sizes[1], 4, 5), head, at(B, 0, 5), 3, 4), value_of
        s = s.reshape(B, H, *sizes)
    return s, Place(at(sizes[0], 2, 4), at(sizes[1], 3, 4), at(H, 1, 4), at(B, 0, 4), 2, 3), value_of


def _softmax(kind: str, s: Any, p: Place, data: dict[str, Any]) -> Any:
    total = lambda e: e.sum(p.k, keepdims=True)  # noqa: E731
    if kind == "jax":
        return jax.nn.softmax(s, p.k)
    if kind == "jax_where":
        return jax.nn.softmax(s, p.k, where=(p.i >= p.j) | (p.j == 3))
    if kind.startswith("absent"):
        return _absent(kind, s, p, ABSENT(p, data))
    if kind.startswith("sink"):
        shape = [2 if d == p.k else n for d, n in enumerate(s.shape)]
        sink = jnp.broadcast_to(0.0 if kind == "sink_zero" else data["head"][p.head], shape).astype(s.dtype)
        joined = jnp.concatenate([sink, s] if kind == "sink_in_front" else [s, sink], p.k)
        first = 2 if kind == "sink_in_front" else 0
        return jax.lax.slice_in_dim(jax.nn.softmax(joined, p.k), first, first + s.shape[p.k], axis=p.k)
    shift = s.max(p.k, keepdims=True)
    if kind == "no_gradient":
        e = jnp.exp(s - shift)
        return e / jax.lax.stop_gradient(total(e))
    if kind == "no_shift":
        e = jnp.exp(jnp.clip(s, -30, 30))
        return e / total(e)
    if kind == "data_shift":
        shift = jax.lax.stop_gradient(shift) + data["query"][p.i]
    e = jnp.exp(s - shift)
    if kind == "inverse":
        return e * (1 / total(e))
    if kind in ("factor", "signed_factor"):
        factor = 0.5 + data["key"][p.j] ** 2
        e = e * (-factor if kind == "signed_factor" else factor)
    if kind == "part":
        return e / (0.1 + total(jax.lax.slice_in_dim(e, 0, 20, axis=p.k)))
    if kind == "other_rows" and s.shape[p.q] == s.shape[p.k]:
        return e / jnp.swapaxes(total(e), p.q, p.k)
    return e / total(e)


def _absent(kind: str, s: Any, p: Place, mask: Any) -> Any:
    if kind == "absent_where":
        return jax.nn.softmax(s, p.k, where=mask)
    if kind == "absent_where_by_hand":
        s = jnp.where(mask, s, -1e30)
        e = jnp.exp(s - s.max(p.k, keepdims=True))
        return jnp.where(mask, e / e.sum(p.k, keepdims=True, where=mask), 0)
    if kind == "absent_finite":
        return jnp.where(mask, jax.nn.softmax(jnp.where(mask, s, LOW), p.k), 0)
    if kind == "absent_multiplied":
        return mask * jax.nn.softmax(jnp.where(mask, s, -1e9), p.k)
    if kind == "absent_selected":
        return jnp.where(mask, jax.nn.softmax(jnp.where(mask, s, -jnp.inf), p.k), 0)
    e = jnp.where(mask, jnp.exp(jnp.where(mask, s, -jnp.inf)), 0)
    return jnp.where(mask, e / e.sum(p.k, keepdims=True), 0)
