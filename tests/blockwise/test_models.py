"""Attention in blocks of the unmodified models of tests/mpmd/zoo and tests/sharding/foreign: all of it is found, and
nothing else is changed.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mesh.blockwise import transform
from flax_mesh.blockwise.traced import find
from flax_mesh.models import next_token_loss
from tests.blockwise.compare import difference
from tests.models.reference import small, tokens_of
from tests.mpmd.zoo.models import BY_NAME
from tests.sharding.foreign.styles import BY_NAME as STYLES
from tests.sharding.foreign.styles import context_of, mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
# The number of attentions of a model; the last two have other softmaxes.
ATTENTIONS = dict.fromkeys(("decoder", "decoder_scanned", "decoder_remat", "decoder_experts_scanned"), 4)
ATTENTIONS |= dict.fromkeys(("dropout", "one_random_stream", "decoder_untied", "first_layer_bias"), 4)
ATTENTIONS |= {
    "vision_transformer": 4,
    "caching_decoder": 5,
    "encoder_decoder": 9,
    "position_tables": 0,
    "two_towers": 0,
}
# Of two layers each; the routers of EasyDeL and the losses have other softmaxes.
FOREIGN = dict.fromkeys(("maxtext_scanned", "maxtext_listed", "tunix", "easydel", "llm_examples", "llm_explicit"), 2)
LATENT: dict[str, Any] = {"latent_size": 16, "head_dim": 12, "rotary_dims": 4, "value_head_dim": 8, "num_layers": 3}
GATED: dict[str, Any] = {"layer_pattern": "delta:2,global", "attention_gate": True, "num_layers": 3}
GATED |= {"delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 8, "delta_value_dim": 4, "delta_conv": 3}
LATENT |= {"num_experts": 4, "dense_layers": 1, "dense_mlp_size": 40}
CASES = BY_NAME | {name: style.case for name, style in STYLES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS | FOREIGN)
def test_all_attention_of_a_model_is_found_and_nothing_else(name, monkeypatch):
    with contextlib.ExitStack() as stack:
        if name in FOREIGN:
            stack.enter_context(context_of(STYLES[name]))
            stack.enter_context(jax.set_mesh(mesh_of(STYLES[name])))
        compare(name, monkeypatch)


def compare(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(find, "FEWEST", 2)
    batch = jax.tree.map(jnp.asarray, case.batch(4))
    graphdef, params, others = nnx.split(case.make(), case.wrt, ...)
    lines = []

    def loss(params):
        model = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, others))
        result = case.loss_fn(model, batch)
        return result[0] if isinstance(result, tuple) else result

    blockwise = transform.blockwise_attention(loss, block=4, say=lines.append)
    assert difference(loss, blockwise, [params]) < 2e-5
    found = [int(line.split()[0]) for line in dict.fromkeys(lines) if "stays: " not in line]
    assert sum(found) == (ATTENTIONS | FOREIGN)[name], lines


@pytest.mark.slow
@pytest.mark.parametrize(("change", "count"), [(LATENT, 3), (GATED, 1)], ids=["latent", "gated beside delta nets"])
def test_attention_of_other_forms_is_found_in_every_layer_that_has_it(change, count, monkeypatch):
    """Latent: keys and values have different head dims, and all heads share the rotated part of a key."""
    monkeypatch.setattr(find, "FEWEST", 2)
    graphdef, params, others = nnx.split(small(**change), nnx.Param, ...)
    batch = {"inputs": jnp.asarray(tokens_of(4)), "targets": jnp.asarray(tokens_of(4, seed=1))}
    lines = []

    def loss(params):
        model = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, others))
        return next_token_loss(model, batch)[0]

    blockwise = transform.blockwise_attention(loss, block=4, say=lines.append)
    assert difference(loss, blockwise, [params]) < 2e-5
    assert sum(int(line.split()[0]) for line in dict.fromkeys(lines) if "stays: " not in line) == count, lines
