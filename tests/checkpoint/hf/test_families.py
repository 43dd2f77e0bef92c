"""Losses and gradients of every family against transformers; published configurations; random ones; meshes."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.checkpoint.hf.decoders import decoder_config_from_hf, huggingface_config
from flax_mesh.checkpoint.hf.families import FAMILIES, OF_FAMILY, WITHOUT_EFFECT
from flax_mesh.models import DecoderConfig, load_decoder, make_decoder, next_token_loss
from flax_mesh.tree import named_leaves
from tests.checkpoint.hf.make_reference import CASES, SMALL, randomize, tokens_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOLERANCE = 1e-5  # of the largest value of a leaf, in float32
PUBLISHED = json.loads((Path(__file__).parent / "hub" / "published.json").read_text())
ONE, MESH = (1, 1, 1, 1, 1), (1, 2, 1, 2, 1)
NO_ROUTER_LOSSES = {"load_balance_loss": 0.0, "router_z_loss": 0.0}


def write_gradients(config: dict[str, Any], folder, seed=3):
    """Write a model of transformers and a second one whose parameters are its gradients; the loss, the tokens."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    rng = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    randomize(model, rng, scale=0.5)
    model.save_pretrained(folder / "model")
    tokens = np.maximum(tokens_of(rng), 2)  # torch has no gradient of the embedding of pad_token_id, 0 or 1
    ids = torch.from_numpy(tokens).long()
    logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    return tokens, logits.detach().numpy(), loss.item()


@nnx.jit
def mean_loss_and_gradients(model, batch):
    def mean(model):
        loss, weight, *_ = next_token_loss(model, batch)
        return loss / weight

    return nnx.value_and_grad(mean)(model)


logits_of = nnx.jit(lambda model, tokens: model(tokens))


def check(config, folder, shape=ONE, **change):
    tokens, logits, loss = write_gradients(config, folder)
    mesh = create_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])
    model, _ = load_decoder(folder / "model", mesh, dtype="float32", **NO_ROUTER_LOSSES, **change)
    with jax.set_mesh(mesh):
        ours = np.asarray(logits_of(model, tokens[:, :-1]))
        found, gradients = mean_loss_and_gradients(model, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    assert np.abs(ours - logits).max() < TOLERANCE * np.abs(logits).max()
    assert abs(float(found) - loss) < TOLERANCE * loss
    expected, _ = load_decoder(folder / "gradients", mesh, dtype="float32", **change)
    expected = dict(named_leaves(nnx.state(expected)))
    assert expected.keys() == dict(named_leaves(gradients)).keys()
    for path, value in named_leaves(gradients):
        want = np.asarray(expected[path])
        difference = np.abs(np.asarray(value) - want).max() / max(np.abs(want).max(), 1e-6)
        assert difference < TOLERANCE, (path, difference)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_transformers(case, scan, tmp_path):
    pytest.importorskip("torch", reason="comes with the extra hf")
    pytest.importorskip("transformers", reason="comes with the extra hf")
    check({**SMALL, **CASES[case]}, tmp_path, scan=scan)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_accepted(name):
    """Sizes and keys of hub/published.json were written down from the files of these models, without a download; the
    factors of longrope are invented. The number of parameters is that of the model's card."""
    config, billions = PUBLISHED[name]["config"], PUBLISHED[name]["billions"]
    settings = DecoderConfig(**decoder_config_from_hf(config), scan=True)
    assert not settings.problems()
    state = nnx.state(nnx.eval_shape(lambda: make_decoder(settings, nnx.Rngs(0))))
    count = sum(leaf.size for _, leaf in named_leaves(state))
    assert abs(count / 1e9 - billions) < 0.03 * billions
    written = huggingface_config(vars(settings), model_type=config["model_type"])
    assert decoder_config_from_hf(written) == decoder_config_from_hf(config)


def test_every_family_is_in_the_docs_and_has_a_published_configuration():
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    section = text.partition("### Families")[2].partition("A quantized folder")[0]
    documented = re.findall(r"(?m)^\| `(\w+)` \|", section)
    assert documented == [*FAMILIES]
    assert {one["config"]["model_type"] for one in PUBLISHED.values()} == {*FAMILIES}


def test_every_key_without_effect_has_a_reason():
    assert OF_FAMILY.keys() <= FAMILIES.keys()
    for reasons in (WITHOUT_EFFECT, *OF_FAMILY.values()):
        assert all(len(reason.split()) > 1 for reason in reasons.values())
