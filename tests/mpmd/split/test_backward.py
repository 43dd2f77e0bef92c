"""B and W together have the matrix products of the unsplit backward pass, each a part of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.mpmd import split_stages
from flax_mesh.mpmd.split.assign import is_expensive
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.mpmd.split.jaxpr import bodies, flops, trace

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def matmul_flops(part):
    """FLOPs of the matrix products of a slice. Scans count once per iteration."""

    def count(eqns):
        own = sum(flops(e) for e in eqns if e.primitive.name == "dot_general")
        times = [(e.params["length"] if e.primitive.name == "scan" else 1, b) for e in eqns for b in bodies(e)]
        return own + sum(n * count(b.eqns) for n, b in times)

    return count(part.eqns)


def stages(**kinds):
    config = DecoderConfig(**SIZES, mlp_size=64, **kinds)
    batch = dict.fromkeys(("inputs", "targets"), np.zeros((2, 16), np.int32))
    staged = split_stages(next_token_loss, lambda: make_decoder(config, nnx.Rngs(0)), batch, num_stages=2)
    trained = [at for at, leaf in enumerate(staged.leaves) if leaf.trained]
    return [(stage, trained) for stage in staged.cut(batch).stages]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kinds",
    [{}, {"scan": True}, {"remat": "full"}, {"scan": True, "remat": "full"}],
    ids=["list", "scan", "remat", "scan-remat"],
)
def test_b_and_w_sum_to_the_unsplit_backward_pass(kinds):
    for number, stage in enumerate(stages(**kinds)):
        whole, split = differentiate(*stage), differentiate(*stage, split=True)
        assert matmul_flops(split.forward) == matmul_flops(whole.forward)
        b, w = matmul_flops(split.backward), matmul_flops(split.weights)
        assert b + w == matmul_flops(whole.backward)
        assert (b > 0) == (number > 0)  # the first stage has no inputs to differentiate
        assert w >= 0.9 * matmul_flops(whole.forward)  # W has one product for every product of F with a weight


def test_recomputation_is_part_of_b():
    stage = stages()[1]
    stored, recomputed = differentiate(*stage, split=True), differentiate(*stage, split=True, remat="full")
    assert not recomputed.arguments[3] and stored.arguments[3]  # residuals
    assert matmul_flops(recomputed.weights) == matmul_flops(stored.weights)
    assert matmul_flops(recomputed.backward) > matmul_flops(stored.backward)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def conv(x, kernel, **kinds):
    return jax.lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), **kinds)


def ragged(mode):
    """`lax.ragged_dot` of all rows in one group: XLA on CPU multiplies every row with the matrices of all groups."""
    contracted, ragged_dim, groups = {"rows": (([1], [1]), [0], [0]), "contracted rows": (([0], [0]), [0], [])}[mode]
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ([], [])), lhs_ragged_dimensions=ragged_dim, rhs_group_dimensions=groups
    )
    return lambda x, w: jax.lax.ragged_dot_general(x, w, jnp.full(1, x.shape[0], jnp.int32), dims)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (jnp.matmul, (f32(24, 64), f32(64, 32))),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (f32(3, 16, 64), f32(3, 24, 64))),
        (conv, (f32(2, 40, 16), f32(5, 16, 24))),
        (lambda x, k: conv(x, k, feature_group_count=4), (f32(2, 40, 16), f32(5, 4, 24))),
        (lambda x, k: conv(x, k, rhs_dilation=(2,)), (f32(2, 40, 16), f32(5, 16, 24))),
        (ragged("rows"), (f32(24, 64), f32(1, 64, 32))),
        (ragged("contracted rows"), (f32(64, 128), f32(64, 128))),
    ],
    ids=["matmul", "batched", "conv", "grouped conv", "dilated conv", "ragged rows", "ragged contraction"],
)
def test_flops_of_contractions_are_those_of_xla(fn, shapes):
    eqns = trace(fn, *shapes)[0].eqns
    analysis: Any = jax.jit(fn).lower(*shapes).cost_analysis()
    assert sum(map(flops, eqns)) == pytest.approx(analysis["flops"], rel=0.06)
    assert any(is_expensive(eqn) for eqn in eqns)


def test_flops_of_a_ragged_product_do_not_depend_on_the_number_of_groups():
    counts = [
        sum(
            map(
                flops,
                trace(jax.lax.ragged_dot, f32(24, 64), f32(g, 64, 32), jax.ShapeDtypeStruct((g,), "int32"))[0].eqns,
            )
        )
        for g in (1, 4)
    ]
    assert counts == [2 * 24 * 64 * 32] * 2


@pytest.mark.slow
def test_xla_counts_equal_flops():
    stage = stages()[1]
    whole, split = differentiate(*stage), differentiate(*stage, split=True)

    def count(part):
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in part.inputs]
        analysis: Any = jax.jit(part.call).lower(*shapes).compile().cost_analysis()
        return analysis["flops"]

    assert count(split.backward) + count(split.weights) == pytest.approx(count(whole.backward), rel=0.02)
