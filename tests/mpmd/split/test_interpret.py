"""The assumptions of flax_mesh.program.program about JAX. The names of failing tests report the change.

JAX's semi-public interpreter is used in flax_mesh/program and jax_compat.py, so only these files need a change.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from flax_mesh.jax_compat import JIT, REMAT, evaluate
from flax_mesh.mpmd.chunks import Chunks, whole
from flax_mesh.mpmd.split.assign import is_expensive
from flax_mesh.mpmd.split.interpret import interpret
from flax_mesh.program.program import bodies, body, flops, is_var, needed, trace, variables
from flax_mesh.program.rewrite import inline
from flax_mesh.tree import num_bytes

DEPTH = 4  # layers of the stacks that are split into chunks


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def names(program):
    return [eqn.primitive.name for eqn in program.eqns]


# Names and parameters that the split reads.


@pytest.mark.parametrize(("fn", "known"), [(jax.jit(jnp.sin), JIT), (jax.checkpoint(jnp.sin), REMAT)])
def test_jit_and_remat_keep_their_names_and_their_body(fn, known):
    program, _ = trace(fn, f32(2))
    (eqn,) = program.eqns
    assert eqn.primitive.name in known
    assert names(body(eqn)) == ["sin"] == [inner.primitive.name for inner in bodies(eqn)[0].eqns]
    assert names(inline(program, lambda eqn: eqn.primitive.name in REMAT)) == ["sin"]


def test_a_call_of_a_traced_function_is_inlined():
    """The call is a separate equation in JAX 0.12; before, the caller contains its equations."""
    traced = jax.jit(jnp.sin).trace(f32(2))
    program, _ = trace(lambda x: traced(x), f32(2))
    assert names(inline(program)) == ["sin"]


def test_a_program_can_be_called_and_its_constants_are_numpy_arrays():
    table = jnp.arange(3.0)  # an array that the function closes over
    program, shape = trace(lambda x: {"y": x + table, "one": 1.0}, f32(3))
    assert all(isinstance(const, np.ndarray) for const in program.consts.values()) and program.consts
    assert shape["y"].shape == (3,) and not is_var(program.outputs[0])  # a literal: "one" sorts first
    np.testing.assert_array_equal(program.call(np.ones(3, np.float32))[1], [1, 2, 3])


def test_a_random_key_constant_stays_a_key():
    key = jax.random.key(0)
    program, _ = trace(lambda x: x + jax.random.normal(key, (2,)), f32(2))
    np.testing.assert_array_equal(program.call(np.zeros(2, np.float32))[0], jax.random.normal(key, (2,)))
    assert num_bytes(key.aval) == 8 and num_bytes(f32(3, 5)) == 60
    program, _ = trace(lambda x: x.astype(jnp.bfloat16), f32(2, 3))
    assert program.outputs[0].aval.str_short(short_dtypes=True) == "bf16[2,3]"


def test_equations_with_function_parameters_can_be_evaluated():
    program, _ = trace(lambda x: jax.nn.relu(x), f32(3))
    program = inline(program)
    values = [normal(0, 3)]
    for eqn in program.eqns:
        values = evaluate(eqn, values)
    np.testing.assert_array_equal(values[0], np.maximum(normal(0, 3), 0))
    grad = jax.grad(lambda x: program.call(x)[0].sum())(jnp.zeros(3))
    np.testing.assert_array_equal(grad, np.zeros(3))  # the custom rule of relu at 0, not the rule of max


# inline and interpret


def deep(x, w):
    inner = jax.jit(lambda x: jnp.tanh(x @ w))
    return jax.jit(lambda x: inner(x) + inner(2 * x))(x)


def test_inlining_removes_all_jits_and_keeps_the_values():
    program, _ = trace(deep, f32(2, 3), f32(3, 3))
    flat = inline(program)
    assert set(names(program)) & set(JIT) and not set(names(flat)) & set(JIT)
    args = normal(0, 2, 3), normal(1, 3, 3)
    np.testing.assert_array_equal(flat.call(*args)[0], program.call(*args)[0])
    assert inline(flat) is flat


def test_remat_and_cond_are_opened_only_if_requested():
    def fn(x):
        return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, jax.checkpoint(lambda x: x * x)(x))

    program, _ = trace(fn, f32(3))
    for opened_names in (set(), {"cond"}, set(REMAT), {"cond", *REMAT}):
        opened, _ = trace(
            lambda x, opened_names=opened_names: interpret(
                program, [x], lambda eqn: eqn.primitive.name in opened_names
            ),
            f32(3),
        )
        closed = {"cond", *REMAT} & set(names(program))
        assert closed & set(names(opened)) == closed - opened_names
        for x in (np.ones(3, np.float32), np.zeros(3, np.float32)):  # either branch
            np.testing.assert_array_equal(opened.call(x)[0], fn(x))


# Chunks: functions of a stack, evaluated on the entire stack and on chunks


def layer(carry, w):
    carry = jnp.tanh(carry @ w)
    return carry, carry.sum()


def period(carry, ws):
    """Two layers in one step of a scan."""
    sums = []
    for i in range(2):
        carry, total = layer(carry, ws[i])
        sums.append(total)
    return carry, jnp.stack(sums)


def of_periods(w, x, **kinds):
    carry, sums = lax.scan(period, x, w.reshape(2, 2, 3, 3), **kinds)
    return carry, sums.reshape(4)


STACKED = {  # (stack (DEPTH, 3, 3), x (2, 3)) -> a pytree
    "scan": lambda w, x: lax.scan(layer, x, w),
    "scan backwards": lambda w, x: lax.scan(layer, x, w, reverse=True),
    "scan of two": lambda w, x: lax.scan(lambda c, ab: layer(c, ab[0] * ab[1]), x, (w, jnp.arange(1, 5.0) / 4)),
    "scan of periods": of_periods,
    "scan of periods backwards": lambda w, x: of_periods(w, x, reverse=True),
    "scan of one period": lambda w, x: lax.scan(
        lambda c, ws: (period(c, ws[1:3])[0], 2 * ws), x, w.reshape(1, 4, 3, 3)
    ),
    "scan of periods and numbers": lambda w, x: lax.scan(
        lambda c, ab: period(c, ab[0] * ab[1]), x, (w.reshape(2, 2, 3, 3), jnp.arange(1, 3.0))
    ),
    "periods": lambda w, x: jnp.flip(2 * w.reshape(2, 2, 3, 3), 0) + w.reshape(2, 2, 3, 3)[1],
    "layers": lambda w, x: jnp.tanh(jnp.tanh(x @ w[1]) @ w[-1]) @ w[2:].sum((0, 1)),
    "parts of layers": lambda w, x: w[:, 1:, ::2] + w[::2][1, 1, 2],
    "gradient": lambda w, x: jax.grad(lambda w: lax.scan(layer, x, w)[0].sum())(w),
    "elementwise": lambda w, x: jnp.where(w > 0, w * 2 + 1, jnp.exp(w)) - jnp.arange(36.0).reshape(4, 3, 3),
    "derivative": lambda w, x: jax.grad(lambda w: jnp.tanh(w).sum())(w),
    "logarithm": lambda w, x: jnp.log2(2 + w * w),
    "norm": lambda w, x: jnp.sqrt(jnp.sum(w * w)) + jnp.max(jnp.abs(w)),
    "norm of each layer": lambda w, x: jnp.sum(w * w, axis=(1, 2)),
    "minimum over layers": lambda w, x: jnp.min(w, axis=0) @ x.T,
    "all finite": lambda w, x: jnp.all(jnp.isfinite(w)) | jnp.any(w > 9),
    "concatenated": lambda w, x: jnp.flip(w, 0).reshape(2, 18) + jnp.flip(w.reshape(2, 18), 0),
    "jit": lambda w, x: jax.jit(lambda w: lax.scan(layer, x, 2 * w)[0])(w),
    "split": lambda w, x: jnp.split(w, [1, 3]),
    "by row": lambda w, x: jnp.swapaxes(w @ w, 1, 2).reshape(12, 3).reshape(4, 9) / (w * w).sum((1, 2))[:, None],
    "over rows": lambda w, x: jnp.einsum("lij,lkj->ik", w, w) @ jnp.transpose(w, (2, 1, 0)).sum(2),
    "an input": lambda w, x: w,
}
OTHER_CUTS = [(), (1,), (3,), (1, 2), (2, 3), (1, 2, 3)]  # than those between periods of two layers, and through both
# Functions whose result is Chunks as well.
IN_CHUNKS = {"gradient", "elementwise", "derivative", "logarithm", "norm of each layer", "split", "by row", "an input"}


@pytest.mark.parametrize("cuts", [(2,), (1, 3), *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in OTHER_CUTS)])
def test_chunks_compute_the_same_as_the_entire_stack(cuts):
    starts = (0, *cuts)
    stack, x = normal(0, DEPTH, 3, 3), normal(1, 2, 3)
    programs = {name: trace(fn, stack, x)[0] for name, fn in STACKED.items()}

    @jax.jit
    def run(chunks, stack, x):
        return {name: (interpret(one, [chunks, x]), one.call(stack, x)) for name, one in programs.items()}

    for name, (outs, whole_outs) in run(Chunks(np.split(stack, cuts), starts), stack, x).items():
        assert any(isinstance(out, Chunks) for out in outs) == (name in IN_CHUNKS or name.startswith("scan")), name
        whole_chunks = name != "split" and "period" not in name
        assert all(out.starts == starts for out in outs if isinstance(out, Chunks) and whole_chunks), name
        for have, want in zip(outs, whole_outs, strict=True):
            # XLA inlines a scan of one layer and then rounds its tanh differently: each of DEPTH layers adds an error
            # of one ulp to values of at most 1, and the product of the next layer sums 3 of them. Results and
            # cotangents are sums of such values, so that a small value has the error of the largest.
            eps, largest = np.finfo(np.float32).eps, max(1, np.abs(want).max())
            assert np.abs(want).max() > 0
            bound = DEPTH * 3 * np.abs(stack).max() * eps * largest
            np.testing.assert_allclose(whole(have), want, rtol=0, atol=bound, err_msg=name)


def test_stacks_with_different_chunks_can_be_combined():
    program, _ = trace(lambda a, b: a + b, f32(4, 2), f32(4, 2))
    a, b = normal(0, 4, 2), normal(1, 4, 2)
    out = interpret(program, [Chunks(np.split(a, [1]), (0, 1)), Chunks(np.split(b, [3]), (0, 3))])[0]
    np.testing.assert_array_equal(whole(out), a + b)


def in_two_chunks(fn, first, second):
    program, _ = trace(fn, f32(first + second, 3, 3), f32(2, 3))
    both = lambda a, b, x: [whole(out) for out in interpret(program, [Chunks((a, b), (0, first)), x])]  # noqa: E731
    return trace(both, f32(first, 3, 3), f32(second, 3, 3), f32(2, 3))[0]


def test_a_scan_over_chunks_becomes_one_scan_per_chunk():
    split = in_two_chunks(STACKED["scan"], 3, 1)
    assert [eqn.params["length"] for eqn in split.eqns if eqn.primitive.name == "scan"] == [3, 1]


def test_a_period_in_two_chunks_is_evaluated_layer_by_layer():
    split = in_two_chunks(lambda w, x: lax.scan(period, x, w.reshape(5, 2, 3, 3)), 5, 5)
    assert [eqn.params["length"] for eqn in split.eqns if eqn.primitive.name == "scan"] == [2, 2]
    assert sum(name == "dot_general" for name in names(split)) == 2
    for of_one_chunk in split.inputs[:2]:  # no equation combines the layers of both
        used = [eqn for eqn in split.eqns if of_one_chunk in eqn.invars]
        assert [eqn.primitive.name for eqn in used] == ["split"]


def test_chunks_are_a_pytree_whose_paths_contain_the_first_layer():
    chunks = Chunks((np.ones(3), np.ones(1)), (0, 3))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(chunks)[0]]
    assert paths == ["['from 0']", "['from 3']"]
    doubled = jax.tree.map(lambda x: 2 * x, chunks)
    assert doubled.starts == (0, 3) and doubled.whole().tolist() == [2, 2, 2, 2]


# Counts


def conv(x, kernel, **kinds):
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), **kinds)


def ragged(mode):
    """`lax.ragged_dot` of all rows in one group: XLA on CPU multiplies every row with the matrices of all groups."""
    contracted, ragged_dim, groups = {"rows": (([1], [1]), [0], [0]), "contracted rows": (([0], [0]), [0], [])}[mode]
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ([], [])), lhs_ragged_dimensions=ragged_dim, rhs_group_dimensions=groups
    )
    return lambda x, w: lax.ragged_dot_general(x, w, jnp.full(1, x.shape[0], jnp.int32), dims)


CONTRACTIONS = {  # function, shapes, expected count
    "dot": (jnp.matmul, [(24, 64), (64, 32)], 2 * 24 * 64 * 32),
    "batched dot": (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), [(3, 16, 64), (3, 24, 64)], 2 * 3 * 16 * 24 * 64),
    "convolution": (conv, [(2, 40, 16), (5, 16, 24)], 2 * (2 * 36 * 24) * (5 * 16)),
    "groups": (lambda x, k: conv(x, k, feature_group_count=4), [(2, 40, 16), (5, 4, 24)], 2 * (2 * 36 * 24) * (5 * 4)),
    "dilated": (lambda x, k: conv(x, k, rhs_dilation=(2,)), [(2, 40, 16), (5, 16, 24)], 2 * (2 * 32 * 24) * (5 * 16)),
    "ragged rows": (ragged("rows"), [(24, 64), (1, 64, 32)], 2 * 24 * 64 * 32),
    "ragged contraction": (ragged("contracted rows"), [(64, 128), (64, 128)], 2 * 64 * 128 * 128),
}
FLOPS = {
    "scan": (lambda c, w: lax.scan(lambda c, w: (c @ w, None), c, w)[0], [(2, 3), (7, 3, 3)], 7 * 2 * 2 * 3 * 3),
    "remat": (lambda a, b: jax.checkpoint(lambda a: a @ b)(a), [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
    "elementwise": (lambda a: jnp.tanh(a), [(4, 5)], 20),
}


@pytest.mark.parametrize("name", CONTRACTIONS | FLOPS)
def test_flops_equal_the_expected_count_and_for_contractions_xlas_count(name):
    fn, shapes, want = (CONTRACTIONS | FLOPS)[name]
    shapes = [f32(*shape) for shape in shapes]
    eqns = trace(fn, *shapes)[0].eqns
    # A ragged product comes with the sizes of its groups, which are elementwise operations.
    assert want <= sum(map(flops, eqns)) <= want + ("ragged" in name)
    if name in CONTRACTIONS:
        analysis: Any = jax.jit(fn).lower(*shapes).cost_analysis()
        assert sum(map(flops, eqns)) == pytest.approx(analysis["flops"], rel=0.06)
        assert any(map(is_expensive, eqns))


@pytest.mark.parametrize("groups", [1, 4])
def test_flops_of_ragged_products_do_not_depend_on_the_number_of_groups(groups):
    gradients = jax.grad(lambda x, w, sizes: lax.ragged_dot(x, w, sizes).sum(), (0, 1))
    program, _ = trace(gradients, f32(24, 64), f32(groups, 64, 32), jax.ShapeDtypeStruct((groups,), "int32"))
    counts = [flops(eqn) for eqn in program.eqns if "ragged" in eqn.primitive.name]
    assert counts == [2 * 24 * 64 * 32] * 3


def test_a_cond_counts_its_most_expensive_branch():
    program, _ = trace(lambda p, a: lax.cond(p, lambda: a @ a, lambda: a), jax.ShapeDtypeStruct((), bool), f32(3, 3))
    assert [flops(eqn) for eqn in program.eqns if eqn.primitive.name == "cond"] == [2 * 3 * 3 * 3]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12), st.data())
def test_needed_returns_the_ancestors_of_the_required_variables(pairs, data):
    def fn(x, y):
        values = [x, y]
        for a, b in pairs:
            values.append(values[a % len(values)] * values[b % len(values)])
        return values

    program, _ = trace(fn, f32(), f32())
    outs = data.draw(st.sets(st.integers(2, len(pairs) + 1), min_size=1))
    wanted = [program.outputs[i] for i in outs]
    ancestors, todo = set(), [i - 2 for i in outs]
    while todo:  # equation k depends on the earlier values in pairs[k]
        k = todo.pop()
        if k not in ancestors:
            ancestors.add(k)
            todo += [j % (k + 2) - 2 for j in pairs[k] if j % (k + 2) >= 2]
    eqns, live = needed(program.eqns, wanted)
    assert eqns == sorted(ancestors)
    assert set(live) == {v for k in ancestors for v in variables(program.eqns[k].invars)} | set(wanted)


def test_equations_with_effects_are_always_needed():
    def fn(x):
        jax.debug.callback(lambda _: None, x)
        return 2 * x

    program, _ = trace(fn, f32())
    wanted = program.outputs
    assert len(needed(program.eqns, wanted)[0]) == len(needed(program.eqns, wanted, effects=False)[0]) + 1 == 2
