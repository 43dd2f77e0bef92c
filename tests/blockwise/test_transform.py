"""What is said about attention, when it changes nothing, and what is left to JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import flax_mesh as fm
from flax_mesh.blockwise import loops
from flax_mesh.errors import ConfigError
from flax_mesh.kernels import RESIDUALS
from tests.blockwise.compare import PLANTED, difference, largest_square, plant, square_of_gradient
from tests.blockwise.programs import PROGRAMS, B, S, by_hand, causal, distance, qkv


def lines_of(fn, args, block=40):
    lines = []
    jax.eval_shape(fm.blockwise_attention(fn, block=block, say=lines.append), *args)
    return lines


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("causal", "1 attention, q 96 k 96, 6 of 9 blocks"),
        ("window", "1 attention, q 96 k 96, 5 of 9 blocks"),
        ("cross", "1 attention, q 96 k 70, 6 of 6 blocks"),
        ("segments_as_input", "1 attention, q 96 k 96, blocks by data"),
        ("two_products_of_one_softmax", "2 attentions, q 96 k 96, 6 of 9 blocks"),
        ("mask_outside_of_scan_and_remat", "3 attentions, q 96 k 96, 6 of 9 blocks"),
        ("mask_of_quotients", "1 attention, q 96 k 96, 7 of 9 blocks"),  # numbers between -1 and 1 are cut to 0
    ],
)
def test_a_line_counts_the_attentions_of_a_kind_and_their_blocks(name, line):
    assert lines_of(*PROGRAMS[name]()) == [line]


@pytest.mark.slow
def test_blocks_of_two_documents_are_not_visited(monkeypatch):
    visited, forward = [], loops.Loops.forward

    def observed(self, values, visits):
        out, saved = forward(self, values, visits)
        jax.debug.callback(lambda x: visited.append(x.tolist()), saved.visited)
        return out, saved

    def fn(q, k, v, document):
        least = jnp.asarray(-1e9)  # not a literal of the operation that selects
        return by_hand(q, k, v, lambda s: jnp.where((document[:, None] == document) & (distance() >= 0), s, least))

    monkeypatch.setattr(loops.Loops, "forward", observed)
    fm.blockwise_attention(fn, block=24)(*qkv(), jnp.arange(S) // 40)
    jax.effects_barrier()
    assert visited == [[1, 2, 2, 3]]


def test_a_line_names_what_stays_with_its_place_bytes_and_reason():
    (line,) = lines_of(*PROGRAMS["returned_weights"]())
    assert "programs.py" in line and line.endswith("f32[2,4,96,96], 288 KiB, stays: the softmax is summed itself")


def test_attention_in_a_function_with_its_own_derivative_stays_and_is_named():
    own = jax.custom_vjp(lambda q, k, v: by_hand(q, k, v, causal))
    own.defvjp(lambda *x: (own(*x), x), lambda x, g: x)
    (line,) = lines_of(own, qkv())
    assert line.endswith("stays: it is inside of custom_vjp_call")


def scores(x, y):
    return jnp.einsum("bqd,bkd->bqk", x, y)


def over_its_sum(e):
    return e / e.sum(-1, keepdims=True)


UNRECOGNIZED = {
    "its softmax is computed by exp2": lambda x, y: over_its_sum(jnp.exp2(scores(x, y))) @ y,
    "its softmax is followed by dot_general": lambda x, y: (
        jnp.einsum("hg,hqk->gqk", jnp.eye(B), jax.nn.softmax(scores(x, y))) @ y
    ),
    "its softmax is followed by stop_gradient": lambda x, y: jax.lax.stop_gradient(jax.nn.softmax(scores(x, y))) @ y,
    # Without a softmax, two dims that come from the dim of one input show it.
    "no attention is recognized in it": lambda x, y: jax.checkpoint(lambda z: jax.nn.sigmoid(scores(z, z)) @ z)(2 * x),
    # At the same scores, a block and the whole array may be rounded in different ways.
    "ge compares its scores with values computed from the same scores": lambda x, y: (
        jax.nn.softmax(jnp.where(scores(x, y) >= jax.lax.top_k(scores(x, y), 9)[0][..., -1:], scores(x, y), -1e9)) @ y
    ),
    "gt compares its scores with values computed from the same scores": lambda x, y: (
        jax.nn.softmax(jnp.where(scores(x, y) - scores(x, y).mean(-1, keepdims=True) > 0, scores(x, y), -1e9)) @ y
    ),
    "it is divided by the sum of other rows": lambda x, y: (
        (lambda e: e / e.sum(-1)[:, None])(jnp.exp(scores(x, y))) @ y
    ),
    "no product of queries and keys is above the softmax": lambda x, y: (
        jax.nn.softmax(jnp.tanh(x[:, :, None] + y[:, None]).sum(-1)) @ y
    ),
}


@pytest.mark.parametrize("reason", UNRECOGNIZED)
def test_a_square_array_in_which_no_attention_is_recognized_is_named(reason):
    args = jnp.ones((B, S, 8)), jnp.ones((B, S, 8))
    (line,) = lines_of(UNRECOGNIZED[reason], args)

    def closed_over(zero):
        jax.debug.print("{}", zero)
        return UNRECOGNIZED[reason](*args) + zero

    assert lines_of(closed_over, (0.0,)) == [line]
    assert line.endswith(f"f32[2,96,96], 72.0 KiB, stays: {reason}")


def test_neither_a_router_nor_a_loss_nor_attention_of_one_block_is_touched():
    x, w = jnp.ones((B, S, 8)), jnp.ones((8, S))
    mlp = lambda x, w: jax.nn.softplus(x[:, 1:] @ w) @ w.T  # noqa: E731
    loss = lambda x, w: jax.nn.log_softmax(x @ w)[:, 0].sum()  # noqa: E731
    assert lines_of(*PROGRAMS["router"]()) == lines_of(mlp, (x, w)) == lines_of(loss, (x, w)) == []
    assert lines_of(lambda x: jnp.exp(x) @ x, (jnp.ones((B, 8, 8)),)) == []  # the decay of a state space, in chunks
    fn, args = PROGRAMS["causal"]()
    assert lines_of(fn, args, block=512) == []


def test_scores_that_are_compared_with_numbers_are_in_blocks():
    fn = lambda x, y: jax.nn.softmax(jnp.where(scores(x, y) >= 0.5, scores(x, y), -1e9)) @ y  # noqa: E731
    assert lines_of(fn, (jnp.ones((B, S, 8)), jnp.ones((B, S, 8)))) == ["1 attention, q 96 k 96, 9 of 9 blocks"]


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (1, 96), (96, 8)])
def test_an_attention_that_stays_because_it_is_small_is_said_to_be_small(queries, keys):
    (line,) = lines_of(by_hand, (jnp.ones((B, queries, 4, 4)), *[jnp.ones((B, keys, 4, 4))] * 2), block=2)
    assert line.endswith("stays: it has fewer than 32 queries or keys, or fewer scores than a block")


EMPTY = {  # shapes of queries, keys and values
    "rows": [(0, S, 4, 8)] * 3,
    "queries": [(B, 0, 4, 8), (B, S, 4, 8), (B, S, 4, 8)],
    "keys": [(B, S, 4, 8), (B, 0, 4, 8), (B, 0, 4, 8)],
    "heads": [(B, S, 0, 8)] * 3,
    "contracted dim": [(B, S, 4, 0), (B, S, 4, 0), (B, S, 4, 8)],
    "values": [(B, S, 4, 8), (B, S, 4, 8), (B, S, 4, 0)],
}


@pytest.mark.parametrize("dim", EMPTY)
def test_arrays_without_elements_stay(dim):
    args = [jnp.ones(shape) for shape in EMPTY[dim]]
    loss = lambda *x: fm.blockwise_attention(by_hand, block=22)(*x).sum()  # noqa: E731
    assert [x.shape for x in jax.eval_shape(jax.grad(loss, (0, 1, 2)), *args)] == EMPTY[dim]
    named = "stays: an operand of its products has no elements"
    assert [x.partition(", 288 KiB, ")[2] for x in lines_of(by_hand, args)] == [named] * (dim[0] in "cv")


def chain(x, length=5000):
    for _ in range(length):
        x = jnp.sin(x)
    return x


CHAINS = {  # where an attention has a chain of operations
    "before the scores": lambda q, k, v: by_hand(chain(q), k, v),
    "between the products": lambda q, k, v: by_hand(q, k, v, chain),
    "in a mask": lambda q, k, v: by_hand(q, k, v, lambda s: jnp.where(chain(jnp.arange(float(S))) >= 0, s, -1e9)),
}


@pytest.mark.parametrize("where", [pytest.param(x, marks=[pytest.mark.slow] * (n > 0)) for n, x in enumerate(CHAINS)])
def test_walks_do_not_recurse_over_the_length_of_a_program(where):
    (line,) = lines_of(CHAINS[where], qkv())
    assert line.startswith("1 attention, q 96 k 96, ")


class Counts(nnx.Module):
    """Its changes are statistics, random counts, a new Variable and a number."""

    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.number = 0

    def __call__(self, x):
        self.last, self.number = nnx.Intermediate(x.sum()), self.number + 1
        return self.dropout(self.norm(x))


# How a function gets a module: (args, kwargs) of the module, and the modules in them in the order of their calls.
ARGUMENTS = {
    "positional": lambda m: ((m,), {}),
    "keyword": lambda m: ((), {"m": m}),
    "dict": lambda m: (({"a": {"m": m}},), {}),
    "list": lambda m: (([2.0, m],), {}),
    "tuple of a keyword": lambda m: ((), {"a": (m, 1)}),
    "twice": lambda m: ((m, [m]), {"m": m}),
    "module and a part of it": lambda m: ((m.norm, m), {"m": {"dropout": m.dropout}}),
    "State": lambda m: ((nnx.state(m.norm), m), {}),
}


@pytest.mark.parametrize("how", ARGUMENTS)
def test_changes_of_modules_anywhere_in_the_arguments_are_kept(how):
    def call(*args, **kwargs):
        x = jnp.arange(12.0).reshape(4, 3)
        for module in jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, nnx.Module | nnx.Variable)):
            if isinstance(module, nnx.BatchStat):
                module[...] += 1
            x = module(x) if isinstance(module, nnx.Module) else x
        return x

    found, expected = Counts(), Counts()
    for _ in range(2):
        args, kwargs = ARGUMENTS[how](found)
        result = fm.blockwise_attention(call)(*args, **kwargs)
        args, kwargs = ARGUMENTS[how](expected)
        np.testing.assert_allclose(result, call(*args, **kwargs), rtol=1e-6)
    assert found.number == expected.number > 0
    for x, y in zip(*(jax.tree.leaves(nnx.state(m, nnx.Not(nnx.RngKey))) for m in (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_keywords_are_passed_on():
    q, k, v = qkv()
    found = fm.blockwise_attention(lambda q, **x: by_hand(q, k, v, lambda s: s * x["scale"]), block=40)(q, scale=2.0)
    np.testing.assert_allclose(found, by_hand(q * 2, k, v), atol=1e-5)


@pytest.mark.slow
def test_a_row_without_keys_is_nan_if_one_of_its_weights_is_not_selected_away():
    """The weight that is left is in a block that is skipped otherwise."""

    def fn(q, k, v):
        mask = (distance() >= 0) & (jnp.arange(S) > 1)  # two rows without keys
        p = jax.nn.softmax(jnp.where(mask, jnp.einsum("bqnh,bknh->bnqk", q, k), -jnp.inf), -1)
        return jnp.einsum("bnqk,bknh->bqnh", jnp.where(mask | (distance() == -95), p, 0), v)

    found, expected = fm.blockwise_attention(fn, block=24)(*qkv()), fn(*qkv())
    assert np.isnan(expected).any() and not np.isnan(expected[:, 1]).any()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def small(q, k, v):
    s = causal(jnp.einsum("bqnh,bknh->bnqk", q, k) / 3)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s, -1), v)


def test_the_gradient_of_a_sink_has_its_type_with_64_bit_types():
    def with_sink(q, k, v, sink):
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k)
        sinks = jnp.broadcast_to(sink, (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)[..., :-1]
        return jnp.einsum("bnqk,bknh->bqnh", weights, v).sum()

    with jax.enable_x64(True):
        sink = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
        gradient = jax.grad(fm.blockwise_attention(with_sink, block=40), argnums=3)
        assert jax.eval_shape(gradient, *qkv(), sink).dtype == jnp.float32


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_are_those_of_the_function():
    args = tuple(x[:1, :, :1, :2] for x in qkv())
    blockwise = fm.blockwise_attention(small, block=40)
    assert difference(lambda *x: jax.jvp(small, x, x)[1], lambda *x: jax.jvp(blockwise, x, x)[1], args) < 1e-5
    of = lambda fn: lambda *x: jax.grad(lambda q: jnp.sum(jnp.sin(fn(q, *x[1:]))))(x[0])  # noqa: E731
    assert difference(of(small), of(blockwise), args) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["vmap of grad", "grad of vmap"])
def test_a_batch_of_functions_is_that_of_the_function(outer):
    args = tuple(jnp.stack([x, 2 * x]) for x in qkv())
    blockwise = fm.blockwise_attention(small, block=40)
    loss = lambda fn: lambda *x: jnp.sum(jnp.sin(fn(*x)))  # noqa: E731
    if outer == "vmap of grad":
        each = [jax.vmap(jax.grad(loss(fn), (0, 1, 2))) for fn in (small, blockwise)]
        pairs = zip(*(fn(*args) for fn in each), strict=True)
        assert all(float(jnp.abs(x - y).max()) < 1e-5 for x, y in pairs)
    else:
        assert difference(jax.vmap(small), jax.vmap(blockwise), args) < 1e-5


def test_a_policy_that_saves_the_name_does_not_compute_the_loops_again():
    policy = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
    blockwise = fm.blockwise_attention(small, block=40)

    def loops_of(policy):
        loss = lambda *x: jnp.sum(checkpoint_name(jax.checkpoint(blockwise, policy=policy)(*x), "y"))  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*qkv())).count("while[")

    assert loops_of(policy) < loops_of(None)


def test_no_array_of_scores_is_left_in_the_program_of_a_gradient():
    fn, args = PROGRAMS["mask_outside_of_scan_and_remat"]()
    assert square_of_gradient(fn, args, S) > 0
    assert square_of_gradient(fm.blockwise_attention(fn, block=40), args, S) == 0
    assert largest_square(jax.make_jaxpr(lambda x: x @ x.T)(jnp.ones((S, 2))).jaxpr, S) == S * S


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    plant(mistake, monkeypatch)
    fn, args = PROGRAMS[PLANTED[mistake]]()
    found = difference(fn, fm.blockwise_attention(fn, block=40), args)
    assert not found < 1e-3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"block": 0}, "block must be an integer from 1 to "),
        ({"block": -3}, "block must be an integer from 1 to "),
        ({"in_specs": [1] * 3}, "in_specs must contain PartitionSpecs, got 1"),
        ({"in_specs": [P()]}, "in_specs must be a sequence with a PartitionSpec for every argument"),
        ({"in_specs": 3}, "in_specs must be a sequence with a PartitionSpec for every argument"),
        ({"in_specs": [P(None, "sp", None, None, None)] * 3}, r"has more dims than its array of shape \(2, 96, 4, 8\)"),
        ({"in_specs": [P("no")] * 3}, "names no, but the mesh in context has sp"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(arguments, problem):
    fn, args = PROGRAMS["causal"]()
    mesh = jax.sharding.AbstractMesh((2,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ConfigError, match=problem):
        jax.eval_shape(fm.blockwise_attention(fn, **arguments), *args)


def test_specs_need_a_mesh_in_context():
    fn, args = PROGRAMS["causal"]()
    with pytest.raises(ConfigError, match=r"names sp, but the mesh in context is missing; set it by jax\.set_mesh"):
        jax.eval_shape(fm.blockwise_attention(fn, in_specs=[P(None, "sp")] * 3), *args)
