"""B and W together have the matrix products of the unsplit backward pass, each a part of them."""

from dataclasses import replace

import pytest
from flax import nnx

from flax_mesh.models import make_decoder, next_token_loss
from flax_mesh.mpmd import split_stages
from flax_mesh.mpmd.split.backward import differentiate
from flax_mesh.mpmd.split.jaxpr import bodies, flops
from tests.mpmd.runtime.pipelines import CONFIG, decoder_batch


def matmul_flops(part):
    """FLOPs of the matrix products of a slice. Scans count once per iteration."""

    def count(eqns):
        own = sum(flops(e) for e in eqns if e.primitive.name == "dot_general")
        times = [(e.params["length"] if e.primitive.name == "scan" else 1, b) for e in eqns for b in bodies(e)]
        return own + sum(n * count(b.eqns) for n, b in times)

    return count(part.eqns)


def stages(**kinds):
    batch = decoder_batch(2)
    make = lambda: make_decoder(replace(CONFIG, **kinds), nnx.Rngs(0))  # noqa: E731
    staged = split_stages(next_token_loss, make, batch, num_stages=2)
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
