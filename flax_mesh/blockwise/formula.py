"""The formula of an attention, read from its equations: softmax(scores, in a band and within documents) @ values.

The scores are `scale * q @ k`, or `cap * tanh(scale * q @ k / cap)`, plus numbers that `mask` decides about, and a
further column with a number per head (a sink). Data of queries and of keys, by rows, are padding.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from flax_mesh.blockwise.masks.mask import Bands, NoFormulaError, band_of, needed_steps
from flax_mesh.blockwise.masks.padding import (
    before_views,
    elements_of,
    is_by_lengths,
    numbers_of,
    padding_of,
    sees_itself,
)
from flax_mesh.blockwise.masks.visits import Static
from flax_mesh.blockwise.traced.dims import (
    VIEWS,
    Labels,
    Order,
    dim_map,
    order_after,
    order_of,
)
from flax_mesh.blockwise.traced.find import is_view
from flax_mesh.blockwise.traced.graph import Atom, Literal, Op, Value, source
from flax_mesh.blockwise.traced.region import Key, Region, Step
from flax_mesh.kernels import EVERY, Band

FEATURE = -1  # the role of the dim that a product of queries and keys contracts, and of its counterpart in values
Role: TypeAlias = int | None  # the dim of the product of queries and keys, or FEATURE; None for dims of size 1


class Operand(NamedTuple):
    value: Value
    labels: Labels
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class Formula:
    operands: Mapping[str, Operand]  # "q", "k" and "v"; may have "q_ids" and "k_ids", or "q_pad" and "k_pad"; "sink"
    out: tuple[Role, ...]
    rows: tuple[int, ...]  # roles: independent attentions
    heads: tuple[int, ...]  # also of keys and values
    groups: tuple[int, ...]  # queries of the same keys and values
    at: tuple[int, int]  # roles of the dims of queries and of keys
    scale: float
    cap: float
    band: Band
    padding: str  # of keys: by "lengths" of rows or "any"
    seen: Mapping[str, int]  # for "q_pad" and "k_pad": their number for queries and keys that are left
    low: float | None  # the score of every key for a query that sees none; None: not needed
    needs_keys: bool  # the formula holds only if every query sees a key

    @property
    def text(self) -> str:
        """Of the mask."""
        left, right = self.band
        names = {EVERY: "every key", (None, 0): "causal"}
        window = (
            f"causal in a window of {(left or 0) + 1}"
            if right == 0
            else f"keys {'all' if left is None else left} before to {'all' if right is None else right} after"
        )
        texts = [names.get(self.band, window)]
        texts += [f"capped at {self.cap:g}"] if self.cap else []
        names = {"q_ids": "within documents", "q_pad": "padded queries", "sink": "a sink"}
        texts += [text for name, text in names.items() if name in self.operands]
        return ", ".join([*texts, f"keys by {self.padding.replace('any', 'a mask')}"] if self.padding else texts)


def formula_of(region: Region, static: Static, bands: Bands) -> Formula:
    """Raises NoFormulaError. `bands` as in `band_of`."""
    scores = _follow_scores(region, static)
    product, eqn = scores.step, scores.step.op.eqn
    roles = {label: dim[0][0] for label, dim in enumerate(scores.order) if _is_whole(dim, product.op)}
    if region.q not in roles or region.k not in roles:
        raise NoFormulaError("the dims of queries or of keys are split or merged")
    at = _dim(roles[region.q]), _dim(roles[region.k])
    _check_precision(product.op)
    operands = [_of_product(product, n) for n in (0, 1)]
    q, k = operands if at[0] in operands[0].roles else operands[::-1]
    if at[0] in k.roles or at[1] in q.roles or [*q.roles].count(FEATURE) != 1 or [*k.roles].count(FEATURE) != 1:
        raise NoFormulaError("the product of its scores has other dims than queries and keys")
    v, out = _of_values(region, scores)
    of_q, of_k, of_v = ({*each.roles} - {None, FEATURE, *at} for each in (q, k, v))
    if of_k != of_v or not of_k <= of_q or {*out} - {None} != of_q | {at[0], FEATURE}:
        raise NoFormulaError("its queries, keys and values have different dims")
    ids, fixed = _segments(region, static, roles)
    data = {name: _by_roles(*region.leaves[key], roles) for name, key in ids.items()}
    pads = padding_of(region, static, roles, {*ids.values()})
    data |= {name: _by_roles(x.origin, x.labels, roles) for name, x in pads.items()}
    common = sorted(map(_dim, of_k))
    rows = [{*x.roles} - {None, *at} for x in data.values()] or [{*(common[:-1] or common)}]
    if any(each != rows[0] or not each <= of_k for each in rows):
        raise NoFormulaError("its documents or its padding differ between heads of the same keys")
    is_padded = bool(pads) and not region.extra  # a query without a key sees the sink
    if is_padded and ids and not sees_itself(region, pads, ids["k_ids"]):
        raise NoFormulaError("its padding within documents comes from other data than its ids or its padded queries")
    conditions = {**dict.fromkeys(fixed, (0.0, 1.0)), **numbers_of(pads)}
    band, low, seen = band_of(region, static, product.output, conditions, bands, is_padded=is_padded)
    low = None if scores.is_sum or not is_padded else low
    if low is None and is_padded and "q_pad" in pads:
        raise NoFormulaError("a padded query has weights of its scores: replace hidden scores by one number")
    if not all(seen[: len(fixed)]):
        raise NoFormulaError("its mask leaves the keys of other documents")
    if ids and len({*seen[len(fixed) :]}) > 1:
        raise NoFormulaError("its padding leaves the keys of other queries")
    of_pads = dict(zip(pads, seen[len(fixed) :], strict=True))
    by_lengths = "k_pad" in pads and is_by_lengths(pads["k_pad"], region.k, of_pads["k_pad"])
    sink = _sink(region, roles, of_q - rows[0]) if region.extra else {}
    cap = scores.outer if scores.is_capped else 0.0
    ordered = [d for d in range(len(eqn.outvars[0].aval.shape)) if d in of_q]
    return Formula(
        operands={"q": q, "k": k, "v": v, **data, **sink},
        out=out,
        rows=tuple(d for d in ordered if d in rows[0]),
        heads=tuple(d for d in ordered if d in of_k - rows[0]),
        groups=tuple(d for d in ordered if d not in of_k),
        at=at,
        scale=scores.inner * scores.outer,
        cap=cap,
        band=band,
        padding=("lengths" if by_lengths else "any") if "k_pad" in pads else "",
        seen=of_pads,
        low=low,
        needs_keys=is_padded and low is None,
    )


# From the product to the scores


class _Scores(NamedTuple):
    """outer * product * inner, or outer * tanh(product * inner), and anything that is added."""

    step: Step  # the product
    order: Order  # of its dims
    inner: float = 1.0
    outer: float = 1.0
    is_capped: bool = False
    is_added: bool = False
    is_sum: bool = False  # hidden scores are not replaced by a number: they have the gradient of the product


def _follow_scores(region: Region, static: Static) -> _Scores:
    known: dict[Key, _Scores | float | None] = {key: _number(static.get(key)) for key in region.leaves}
    for step in needed_steps(region.score_steps, region.scores, {}):
        args = [_number(_rounded(x.value, x)) if isinstance(x, Literal) else known[x] for x in step.inputs]
        scored = [n for n, x in enumerate(args) if isinstance(x, _Scores)]
        if step.op.name == "dot_general":
            if scored or any(key not in region.leaves for key in step.inputs):
                raise NoFormulaError("its scores are multiplied by an array")
            known[step.output] = _Scores(step, order_of(step.op.outputs[0].shape))
        elif len(scored) > 1:
            raise NoFormulaError(f"{step.op.name} combines scores")
        elif scored:
            known[step.output] = _after(step.op, scored[0], args)
        else:
            is_number = is_view(step.op) and isinstance(args[0], float)
            known[step.output] = _number(_rounded(args[0], step.op.outputs[0])) if is_number else None
    scores = known.get(region.scores)
    if not isinstance(scores, _Scores):
        raise NoFormulaError("its scores are no product")
    return scores


def _after(op: Op, at: int, args: Sequence[_Scores | float | None]) -> _Scores:
    scores, other = args[at], args[1 - at] if len(args) == 2 else None
    assert isinstance(scores, _Scores)
    if (order := order_after(op, at, scores.order)) is None:
        raise NoFormulaError(f"its dims are lost in {op.name}")
    scores = scores._replace(order=order)
    if op.name in ("mul", "div") and isinstance(other, float) and other > 0 and (op.name == "mul" or at == 0):
        factor = other if op.name == "mul" else 1 / other
        return scores._replace(outer=scores.outer * factor)
    if op.name in ("mul", "div"):
        raise NoFormulaError("its scores are multiplied by an array")
    if op.name == "tanh" and not scores.is_capped and not scores.is_added:
        return scores._replace(inner=scores.outer, outer=1.0, is_capped=True)
    if op.name == "add" or (op.name == "sub" and at == 0) or (op.name == "select_n" and at > 0):
        return scores._replace(is_added=True, is_sum=scores.is_sum or op.name != "select_n")
    if is_view(op) or op.name in ("optimization_barrier", "layout_constraint"):
        return scores
    raise NoFormulaError(f"its scores are changed by {op.name}")


def _number(x: np.ndarray | None) -> float | None:
    """The number that all elements of an array are."""
    if x is None or x.size == 0 or not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        return None
    first = x.reshape(-1)[0]
    return float(first) if bool((x == first).all()) else None


def _rounded(x: object, like: Atom) -> np.ndarray:
    return np.asarray(x).astype(like.aval.dtype)


# Dims


def _is_whole(dim: tuple[tuple[int | None, int, int], ...], product: Op) -> bool:
    return len(dim) == 1 and dim[0][0] is not None and dim[0][1:] == (1, product.outputs[0].shape[dim[0][0]])


def _dim(role: Role) -> int:
    assert role is not None
    return role


def _of_product(product: Step, number: int) -> Operand:
    key, dims = product.inputs[number], dim_map(product.op.eqn, number) or []
    value = product.op.inputs[number]
    roles = [FEATURE if d is None else None if n == 1 else d for d, n in zip(dims, value.shape, strict=True)]
    return _operand(key, value, roles)


def _operand(key: Key, value: Atom, roles: Sequence[Role]) -> Operand:
    """The operand of a product: before it was converted to a wider dtype, which a kernel does itself."""
    x = source(value)
    assert isinstance(x, Value) and not isinstance(key, Literal)
    if x.op is not None and x.op.name == "convert_element_type":
        before = source(x.op.inputs[0])
        narrow = before.aval.dtype in (jnp.bfloat16, jnp.float16) and x.aval.dtype == jnp.float32
        if isinstance(before, Value) and narrow:
            x = before
    return Operand(x, key[1], tuple(roles))


def _of_values(region: Region, scores: _Scores) -> tuple[Operand, tuple[Role, ...]]:
    """The values, and the roles of the dims of the result."""
    softmax, order = region.softmax, scores.order
    if others := [x.op.name for x in region.weight_steps if not (x.divides or is_view(x.op))]:
        raise NoFormulaError(f"its weights are changed by {others[0]}")
    after = {id(softmax.exp.outputs[0]): order}
    for op, i in softmax.weights:
        new = order_after(op, i, after[id(op.inputs[i])])
        if new is None:
            raise NoFormulaError(f"its dims are lost in {op.name}")
        after[id(op.outputs[0])] = new
    weights = after[id(softmax.weighted)]
    if any(dim and not _is_whole(dim, scores.step.op) for dim in weights):
        raise NoFormulaError("its heads are split or merged before the product with the values")
    product, at = softmax.product, softmax.value_at
    _check_precision(product)
    out: list[Role] = [None if size == 1 else FEATURE for size in region.out.shape]
    of_weights = dim_map(product.eqn, 1 - at) or []
    for dim, o in zip(weights, of_weights, strict=True):
        if o is not None:
            out[o] = dim[0][0] if dim else None
    contracted = product.params["dimension_numbers"][0]
    of_key = {
        v: weights[w][0][0] if weights[w] else None for v, w in zip(contracted[at], contracted[1 - at], strict=True)
    }
    value = product.inputs[at]
    roles = [
        of_key[d] if o is None else FEATURE if o not in of_weights else out[o]
        for d, o in enumerate(dim_map(product.eqn, at) or [])
    ]
    feature = [o for o in range(len(out)) if o not in of_weights]
    if len(feature) != 1:
        raise NoFormulaError("its values have several dims of their own")
    out[feature[0]] = FEATURE
    return _operand(region.values, value, roles), tuple(out)


def _check_precision(product: Op) -> None:
    given = product.params["precision"]
    names = {str(x) for x in (given if isinstance(given, tuple) else (given,))}
    if not names <= {"None", "DEFAULT"} and product.inputs[0].aval.dtype == jnp.float32:
        raise NoFormulaError(f"its products have the precision {', '.join(sorted(names))}")


# Which elements a mask leaves


def _segments(region: Region, static: Static, roles: Mapping[int, Role]) -> tuple[dict[str, Key], list[Key]]:
    """The ids of documents, of which queries and keys must have the same, and this condition."""
    given = {key for key in region.leaves if static.get(key) is None}
    pairs: list[tuple[Step, Key, Key]] = []
    for step in region.score_steps:
        if step.op.name == "eq" and all(key in given for key in step.inputs):
            left, right = (_ids(region, key, roles) for key in step.inputs)
            pairs.append((step, left, right) if region.q in region.leaves[left][1] else (step, right, left))
    if not pairs:
        return {}, []
    step, q, k = pairs[0]
    of_q, of_k = region.leaves[q], region.leaves[k]
    same = [elements_of(*x, {region.q, region.k}) for x in (of_q, of_k)]
    if len(pairs) > 1 or region.q not in of_q[1] or region.k not in of_k[1] or None in same or same[0] != same[1]:
        raise NoFormulaError("its mask compares different arrays")
    return {"q_ids": q, "k_ids": k}, [step.output]


def _ids(region: Region, key: Key, roles: Mapping[int, Role]) -> Key:
    value, labels = region.leaves[key]
    is_integer = jnp.issubdtype(value.aval.dtype, jnp.integer) and value.aval.dtype.itemsize <= 4
    if not is_integer or any(x is not None and x not in roles for x in labels):
        raise NoFormulaError("its mask compares data that are not integers of 32 bits, by rows")
    return key


def _by_roles(value: Value, labels: Labels, roles: Mapping[int, Role]) -> Operand:
    return Operand(value, labels, tuple(None if x is None else roles[x] for x in labels))


def _sink(region: Region, roles: Mapping[int, Role], heads: set[Role]) -> dict[str, Operand]:
    """The further column of the scores, as an array with one number for each head."""
    column = region.leaves.get(region.extra[0]) if len(region.extra) == 1 else None
    if column is None or column[0].shape[region.k] > 1:
        raise NoFormulaError(
            "its scores have several further columns, or a known one; a kernel takes one sink per head"
        )
    x, labels = before_views(*column, VIEWS - {"convert_element_type"})
    of = [None if label is None else roles.get(label) for label in labels]
    if {role for role, n in zip(of, x.shape, strict=True) if n > 1} != heads or x.aval.size != math.prod(
        region.shape[label] for label in labels if label is not None
    ):
        raise NoFormulaError("its further column of scores is not one number per head (a sink)")
    return {"sink": Operand(x, labels, tuple(of))}
