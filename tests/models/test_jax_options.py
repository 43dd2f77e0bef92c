"""Options of JAX that refuse programs or change their results: decoders train and generate with all of them.

Steps run under a guard against implicit transfers in tests/step/net.py, generation in tests/cli/test_trained.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import abstract_state
from flax_mesh.models import make_decoder, next_token_loss, sample
from flax_mesh.train import abstract_train_state, make_train_step
from tests.models.reference import EXPERTS, SMALL, make_mesh, small, tokens_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

ALL = dataclasses.replace(
    SMALL, num_layers=1, loss_chunk=7, sliding_window=5, attention_softcap=2.0, dtype="bfloat16", remat="full"
)
BATCH = {"inputs": tokens_of(4), "targets": tokens_of(4, seed=1), "segment_ids": np.ones((4, 12), np.int32)}


def make(config):
    model = make_decoder(config, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


@pytest.mark.parametrize("is_strict", [False, True], ids=["64-bit types", "strict promotion"])
@pytest.mark.parametrize("config", [ALL, dataclasses.replace(EXPERTS, num_layers=1)], ids=["all", "experts"])
def test_a_step_and_generation_trace_with_every_option(config, is_strict):
    made = lambda: make(config)  # noqa: E731
    state = abstract_train_state(made, abstract_state(made, make_mesh(fsdp=2)))
    model = small(config)
    ranks, dtypes = ("raise", "strict") if is_strict else ("allow", "standard")
    with jax.enable_x64(not is_strict), jax.numpy_rank_promotion(ranks), jax.numpy_dtype_promotion(dtypes):
        step = make_train_step(next_token_loss, state, num_microbatches=2)
        _, metrics = jax.eval_shape(step._jitted, state, BATCH)
        ids = jax.eval_shape(lambda model: sample(model, jnp.zeros(4, jnp.int32), 3, jax.random.key(0)), model)
    assert metrics["loss"].shape == () and ids.shape == (7,)
