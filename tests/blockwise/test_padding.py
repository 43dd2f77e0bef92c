"""Padding and sinks in kernels: which are recognized, and queries without a key."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.blockwise.fused import _segments
from tests.blockwise.attentions import (
    HOLES,
    IDS,
    LENGTH,
    LENGTHS,
    SINKS,
    by_lengths,
    cast,
    distance,
    masked,
    operands,
    per_head,
    with_sinks,
)
from tests.blockwise.compare import difference, gradients, rewritten, with_kernel
from tests.blockwise.programs import by_hand


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        (
            lambda s, pad: jnp.where(pad[:, None, :, None], masked(lambda d: d >= 0)(s), -1e9),
            np.ones((2, LENGTH), bool),
            "a padded query has weights of its scores: replace hidden scores by one number",
        ),
        (
            lambda s, pad: jnp.where(pad[:, None, None, :] | (distance(s) == 0), s, -1e9),
            np.ones((2, LENGTH), bool),
            "its mask depends on data other than ids of documents or padding",
        ),
        (
            lambda s, x: jnp.where((x > 0)[:, None, None], jnp.where((x < 3)[:, None, None], s, -1e9), -1e9),
            IDS,
            "its padding is several arrays, or not by rows",
        ),
    ],
    ids="two_numbers padding_and_more two_masks".split(),  # noqa: SIM905
)
def test_other_masks_of_data_are_no_kernel(change, given, reason):
    fn = lambda q, k, v, x: by_hand(q, k, v, lambda s: change(s, x))  # noqa: E731
    (line,) = rewritten(fn, (*operands(), given), "splash").lines
    assert line.endswith(f"; no kernel: {reason}")


def test_padded_queries_and_keys_have_ids_that_nothing_else_has():
    ids, kept = jnp.array([[0, 0, 1, 2], [-1, 1, 1, 9]]), jnp.array([[1, 0, 1, 1], [1, 1, 0, 1]], bool)
    q, k = _segments({"q": ids, "k": ids, "q_ids": ids, "k_ids": ids, "q_pad": kept, "k_pad": kept})
    sees = (ids[:, :, None] == ids[:, None]) & kept[:, :, None] & kept[:, None]
    assert np.array_equal(np.equal(q[:, :, None], k[:, None]), sees)


@pytest.mark.parametrize(
    "sinks",
    [
        lambda w, s: per_head(w, s) * 2,
        lambda w, s: [jnp.concatenate(per_head(w, s) * 2, -1)],
        lambda w, s: [s[..., :1] + w.reshape(2, 2, 1, 1)],
        lambda w, s: [jnp.broadcast_to(w[:2, None, None, None], (*s.shape[:-1], 1))],
    ],
    ids=["twice", "two columns", "by query", "one for a group"],
)
def test_further_columns_but_one_number_per_head_are_no_kernel(sinks):
    (line,) = rewritten(with_sinks(sinks), SINKS, "splash").lines
    assert re.search(r"no kernel: its .*further columns?.* per head", line)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: jnp.arange(LENGTH) < x.reshape(2, LENGTH),
        lambda x: jnp.arange(LENGTH) >= x[:2, None],
        lambda x: jnp.arange(LENGTH) % 64 < x[:2, None],
    ],
    ids=["a number for each key", "the other keys", "a period"],
)
def test_comparisons_that_are_no_lengths_are_a_mask_of_any_data(keep):
    fn = lambda q, k, v, x: by_hand(q, k, v, lambda s: jnp.where(keep(x)[:, None, None], s, -1e9))  # noqa: E731
    (line,) = rewritten(fn, (*cast(operands(), jnp.bfloat16), np.arange(2 * LENGTH)), "cudnn").lines
    assert "keys by a mask" in line and line.endswith("; in blocks if a row has a key behind padding")


@pytest.mark.slow
def test_a_row_without_keys_is_not_a_number_where_it_is_none_as_written():
    fn, args = by_lengths(-jnp.inf), (*operands(), LENGTHS)
    kernel = with_kernel(fn, "splash")
    assert difference(fn, kernel, (*args[:3], LENGTHS + 1)) < 1e-5  # every query sees a key
    found, written = ([np.isnan(x).all() for x in gradients(each, args)[0]] for each in (kernel, fn))
    assert written[0] and found[0]
    np.testing.assert_array_equal(np.isnan(kernel(*args)), np.isnan(fn(*args)))


@pytest.mark.slow
def test_padding_outside_of_a_scan_and_sinks_of_its_layers():
    def fn(x, w, sinks, ids):
        def layer(x, of_layer):
            w, sinks = of_layer
            h = (x @ w).reshape(2, LENGTH, 4, 8)
            y = with_sinks(per_head)(h, h[..., :2, :], h[..., 2:, :], sinks, lengths)
            return x + y.reshape(2, LENGTH, 32), None

        lengths = (ids > 0).sum(1)
        return jax.lax.scan(jax.checkpoint(layer), x, (w, sinks))[0]

    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in ((2, LENGTH, 32), (3, 32, 32), (3, 4))]
    assert difference(fn, with_kernel(fn, "splash"), (args[0], args[1] * 0.1, args[2], HOLES)) < 1e-5


def packed(q, k, v, tokens, ids):
    """Rows of documents: queries and keys are padded, as in Flax's examples."""
    mask = nnx.combine_masks(
        nnx.make_causal_mask(tokens),
        nnx.make_attention_mask(tokens > 0, tokens > 0),
        nnx.make_attention_mask(ids, ids, jnp.equal),
    )
    return nnx.dot_product_attention(q, k, v, mask=mask)


def packed_by_ids(q, k, v, tokens, ids):
    """The document 0 is padding."""
    mask = (ids[:, None, :, None] == ids[:, None, None]) & (ids > 0)[:, None, None]
    return by_hand(q, k, v, lambda s: jnp.where(mask & (distance(s) >= 0), s, -1e9))


def added_by_ids(q, k, v, tokens, ids):
    mask = (ids[:, None, :, None] == ids[:, None, None]) & (ids > 0)[:, None, None]
    return by_hand(q, k, v, lambda s: s + jnp.where(mask & (distance(s) >= 0), 0.0, -1e9))


DOCUMENTS = {"packed": packed, "by ids": packed_by_ids, "added": added_by_ids}
ROWS = np.asarray([[2] * 50 + [-7] * 40 + [5] * 20 + [0] * 18, [0] * 9 + [1] * 100 + [0] * 19], np.int32)


PACKED = (*operands(), (ROWS != 0).astype(np.int32), ROWS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_padding_within_documents_is_computed_by_splash_attention(name):
    (line,) = rewritten(DOCUMENTS[name], PACKED, "splash").lines
    assert ", splash attention, causal, within documents, " in line and "keys by a mask" in line


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_padding_within_documents_has_the_results_of_the_program_as_written(name):
    fn = DOCUMENTS[name]
    assert difference(fn, with_kernel(fn, "splash"), PACKED) < 2e-6


@pytest.mark.slow
def test_a_document_of_which_some_keys_are_padding():
    tokens = np.random.default_rng(0).integers(0, 2, ROWS.shape).astype(np.int32)
    assert difference(packed, with_kernel(packed, "splash"), (*operands(), tokens, ROWS)) < 2e-6


def test_padding_by_other_data_than_the_documents_is_no_kernel():
    def fn(q, k, v, tokens, ids):
        mask = (ids[:, None, :, None] == ids[:, None, None]) & (tokens > 0)[:, None, None]
        return by_hand(q, k, v, lambda s: jnp.where(mask, s, -1e9))

    (line,) = rewritten(fn, (*operands(), ROWS, ROWS), "splash").lines
    reason = "its padding within documents comes from other data than its ids or its padded queries"
    assert line.endswith(f"; no kernel: {reason}")


def by_both(s, keep):
    return jnp.where((keep > 0)[:, None, :, None] & (keep > 0)[:, None, None], s, -1e9)


def by_numbers(s, keep):
    """Padded queries alone, by numbers that are added."""
    return s + (1.0 - keep[:, None, :, None]) * -1e9


@pytest.mark.slow
@pytest.mark.parametrize("mask", [by_both, by_numbers])
def test_a_padded_query_sees_a_sink_alone(mask):
    def fn(q, k, v, w, keep):
        s = mask(jnp.einsum("bqnh,bknh->bnqk", q, k), keep)
        s = jnp.concatenate([s, jnp.broadcast_to(w[:, None, None], (*s.shape[:3], 1))], -1)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s, -1)[..., :LENGTH], v)

    args = (*operands(), np.asarray([0.3, -1], np.float32), (HOLES > 0).astype(np.int32))
    assert difference(fn, with_kernel(fn, "splash"), args) < 2e-6
