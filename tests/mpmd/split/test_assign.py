"""Labels, stages, and the backward programs B and W, on small random models."""

from itertools import combinations, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.mpmd.split import assign
from flax_mesh.mpmd.split.assign import DATA, VARIABLES
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.mpmd.split.stages.bounds import balanced, layer_order
from flax_mesh.program.program import Program, bodies, trace, variables
from tests.mpmd.fuzz.operations import RULES

ROWS, WIDTH = 2, 3
few = settings(max_examples=25, deadline=None)
# balance


@few
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_balance_minimizes_the_heaviest_stage_and_leaves_no_stage_empty(weights, data):
    stages = data.draw(st.integers(1, len(weights)))

    def heaviest(bounds):
        return max(sum(weights[a:b]) for a, b in pairwise(bounds))

    every = [(0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), stages - 1)]
    bounds = balanced(weights, stages)
    assert tuple(bounds) in every  # `stages` ranges, none empty
    assert heaviest(bounds) == min(map(heaviest, every))


# Random models. The leaves are one matrix per layer and a table outside the layers; `x` is the batch.


class Net(NamedTuple):
    """A forward pass (leaves, x) -> loss, metric. `ops[r]` are the operations of layer `order[r]`."""

    order: tuple[int, ...]
    ops: tuple[tuple[str, ...], ...]

    def __call__(self, leaves, x):
        *matrices, table = leaves
        mask, h = x > 0, x @ table
        hidden, aux = [h], 0.0
        for at, ops in zip(self.order, self.ops, strict=True):
            p = matrices[at] * 2.0  # depends on the layer alone, so it does not count as a use
            for op in ops:
                h = {
                    "matmul": lambda h, p: jnp.tanh(h @ p),
                    "scale": lambda h, p: h * p[0],
                    "skip": lambda h, p: h * p[1] + hidden[len(hidden) // 2],
                    "mask": lambda h, p: jnp.where(mask, h, p[2]),
                    "tied": lambda h, p: h @ table.T @ p,
                    "positions": lambda h, p: h + jnp.arange(WIDTH) * p[0] + x[:, :1],
                }[op](h, p)
            aux = aux + jnp.sum(p * p)
            hidden.append(h)
        return jnp.sum(h @ table.T) + 0.1 * aux, jnp.sum(mask)


@st.composite
def nets(draw, ops=("matmul", "scale", "skip", "mask", "tied", "positions"), max_layers=4):
    order = draw(st.permutations(range(draw(st.integers(1, max_layers)))))
    kinds = st.lists(st.sampled_from(ops), min_size=1, max_size=2).map(tuple)
    return Net(tuple(order), tuple(draw(kinds) for _ in order))


class Traced(NamedTuple):
    net: Net
    program: Program
    ranks: dict  # of every input
    values: list  # of every input


def traced(net: Net) -> Traced:
    """The layer called r-th has rank r. All models have the same sizes, so that few operations are compiled."""
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2 for _ in (*net.order, None)]
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    program, _ = trace(net, leaves, x)
    *matrices, table, data = program.inputs
    ranks = {matrices[at]: rank for rank, at in enumerate(net.order)} | {table: VARIABLES, data: DATA}
    return Traced(net, program, ranks, [*leaves, x])


def staged(model: Traced, num_stages: int):
    """(bounds, stage of every equation, programs of the stages)."""
    program, num_ranks = model.program, len(model.net.order)
    labels = assign.label(program, model.ranks, num_ranks)
    bounds = balanced([1] * num_ranks, num_stages)
    stages = [next(k for k in range(num_stages) if r < bounds[k + 1]) if r >= 0 else r for r in labels]
    stages, makers = assign.settle(program, stages, num_stages, {})
    is_data = [model.ranks[v] == DATA for v in program.inputs]
    return bounds, stages, assign.stage_programs(program, stages, makers, num_stages, is_data)


@few
@given(nets())
def test_layers_are_ordered_by_their_calls(net):
    program = traced(net).program
    layer_of = {program.inputs[at]: ("layers", at) for at in net.order}
    assert layer_order(program, layer_of, program.inputs[-1:]) == [("layers", at) for at in net.order]


def test_summing_weights_before_the_call_is_not_a_use():
    def loss(leaves, x):
        decay = sum(jnp.sum(p * p) for p in leaves)
        for p in (leaves[2], leaves[0], leaves[1]):
            x = jnp.tanh(x @ p)
        return jnp.sum(x) + decay

    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    program, _ = trace(loss, [matrix] * 4, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))
    layer_of = {v: ("layers", at) for at, v in enumerate(program.inputs[:4])}
    order = layer_order(program, layer_of, program.inputs[-1:])
    assert [at for _, at in order] == [2, 0, 1, 3]  # the last is never called


def with_stages(model_nets):
    return model_nets.flatmap(lambda net: st.tuples(st.just(net), st.integers(1, len(net.order))))


@few
@given(with_stages(nets()))
def test_stages_contain_their_layers_and_receive_only_from_earlier_stages(case):
    net, num_stages = case
    model = traced(net)
    bounds, stages, parts = staged(model, num_stages)
    program = model.program
    stage_of = {v: stage for eqn, stage in zip(program.eqns, stages, strict=True) for v in eqn.outvars}
    for k, part in enumerate(parts):
        own = {at for rank, at in enumerate(net.order) if bounds[k] <= rank < bounds[k + 1]}
        assert own <= set(part.inputs) <= own | {len(net.order), len(net.order) + 1}
        assert all(stage_of[v] < k and v in parts[stage_of[v]].sent for v in part.received)
        known = {*(program.inputs[at] for at in part.inputs), *part.received, *program.consts}
        for eqn in part.forward.eqns:  # the stage has all inputs of its equations
            assert set(variables(eqn.invars)) <= known
            known |= set(eqn.outvars)
    assert sorted(at for part in parts for at in part.outputs) == [0, 1]
    assert 0 in parts[-1].outputs  # the loss
    ran = [id(eqn) for part in parts for eqn in part.forward.eqns if eqn.primitive.name == "dot_general"]
    assert sorted(ran) == sorted(id(e) for e in program.eqns if e.primitive.name == "dot_general")  # none twice


@few
@given(with_stages(nets()))
def test_running_the_stages_in_order_equals_the_unsplit_program(case):
    net, num_stages = case
    model = traced(net)
    sent, outputs = {}, {}
    for stage in staged(model, num_stages)[2]:
        outs = stage.call(stage.forward, [model.values[at] for at in stage.inputs], [sent[v] for v in stage.received])
        sent |= dict(zip(stage.sent, outs, strict=False))
        outputs |= dict(zip(stage.outputs, outs[len(stage.sent) :], strict=True))
    for at, want in enumerate(model.program.call(*model.values)):
        np.testing.assert_array_equal(outputs[at], want)


def test_a_wrong_order_of_stages_raises():
    model = traced(Net((0, 1), (("matmul",), ("matmul",))))
    _, stages, _ = staged(model, 2)
    with pytest.raises(assign.CutError, match=r"is computed in stage 1 but used in stage 0, which runs before it"):
        exchanged = [1 - s if s >= 0 else s for s in stages]
        assign.stage_programs(model.program, exchanged, [(1,), (1,)], 2, [False] * 3 + [True])


# F, B and W


def differentiated(model: Traced, num_stages: int, recompute: bool = False, split: bool = True):
    """Every stage with F, B and, if `split`, W. All leaves are trained."""
    trained = range(len(model.values) - 1)
    remat = "full" if recompute else "none"
    return [differentiate(stage, trained, remat=remat, split=split) for stage in staged(model, num_stages)[2]]


def dots(part):
    """The number of matrix products of a program, including those inside scans and remats."""

    def count(eqns):
        inner = [(eqn.params.get("length", 1), body.eqns) for eqn in eqns for body in bodies(eqn)]
        return sum(eqn.primitive.name == "dot_general" for eqn in eqns) + sum(n * count(body) for n, body in inner)

    return 0 if part is None else count(part.eqns)


@pytest.mark.parametrize(("recompute", "repeated"), [(False, 0), (True, 3)])
def test_b_computes_no_matrix_product_of_a_weight_gradient(recompute, repeated):
    net = Net(tuple(range(6)), (("matmul",),) * 6)
    first, last = differentiated(traced(net), 2, recompute)
    # The last stage: three layers and the head, which multiplies by the table.
    assert dots(last.forward) == 4
    assert dots(last.backward) == 4 + repeated  # recomputes the layers; the head is not needed for that
    assert dots(last.weights) == 4
    # The first: the table and three layers. It receives nothing, so its whole backward pass is for weight gradients.
    assert dots(first.forward) == 4
    assert dots(first.backward) == 0
    assert dots(first.weights) == 4 + 3 + (4 if recompute else 0)


@pytest.mark.sampled
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("remat", "repeated"), [(False, 0), (True, 4)])
def test_a_scan_over_layers_is_split_into_b_and_w(remat, repeated, reverse):
    def loss(leaves, x):
        def layer(h, w):
            h = jnp.tanh(h @ w)
            return h, h.sum()

        layer = jax.checkpoint(layer) if remat else layer
        h, sums = jax.lax.scan(layer, jnp.tanh(x @ leaves[0]), leaves[1], reverse=reverse)
        return h.sum() + sums.sum(), x.sum()

    rng = np.random.default_rng(0)
    values = [rng.normal(size=s).astype(np.float32) for s in ((WIDTH, WIDTH), (4, WIDTH, WIDTH), (ROWS, WIDTH))]
    program, _ = trace(loss, values[:2], values[2])
    ranks = dict(zip(program.inputs, [0, 1, DATA], strict=True))
    model = Traced(Net((0, 1), ()), program, ranks, values)
    last = differentiated(model, 2)[1]
    assert last.backward is not None and last.weights is not None
    assert [dots(part) for part in (last.forward, last.backward, last.weights)] == [4, 4 + repeated, 4]


def test_frozen_leaves_get_no_gradient():
    model = traced(Net((0, 1), (("matmul",), ("matmul",))))
    parts = [differentiate(stage, [1], split=True) for stage in staged(model, 2)[2]]
    assert [part.trained for part in parts] == [(), (1,)]
    assert dots(parts[0].backward) == dots(parts[0].weights) == 0
    assert dots(parts[1].weights) == 1


def test_custom_jvp_rules_are_linear_and_may_be_repeated_and_custom_vjp_rules_run_once():
    for fn in (jax.nn.relu, jax.nn.silu, jax.nn.logsumexp):
        program, _ = trace(fn, jnp.ones(8))
        assert not any(assign.is_expensive(eqn) for eqn in program.eqns)
    for feature, fn in RULES.values():
        program, _ = trace(fn, jnp.ones(8))
        assert feature != "nonlinear_rule" or any(assign.is_expensive(eqn) for eqn in program.eqns)
    product = jax.custom_jvp(lambda x: x @ x)
    product.defjvp(lambda primals, tangents: (product(*primals), tangents[0]))
    program, _ = trace(product, jnp.ones((8, 8)))
    assert all(assign.is_expensive(eqn) for eqn in program.eqns)
