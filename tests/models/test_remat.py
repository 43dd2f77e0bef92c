"""`model.remat` by kind, by name and for runs of layers: the grammar, saved arrays, and results that do not change."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.models import Decoder, DecoderConfig, next_token_loss
from flax_mesh.models.settings.remat import RematRun, names_of, parse_remat, split_stack
from flax_mesh.plan import plan
from flax_mesh.tree import named_leaves
from tests.models.reference import SMALL, small, tokens_of
from tests.train.support.decoder import config_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = dataclasses.replace(SMALL, hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=1, mlp_size=40, scan=True)
EXPERTS = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2)
ALL_NAMES = "layer_input+q+k+v+attention+attention_out+mlp_gate+mlp_up"


def loss_and_state(config: DecoderConfig) -> tuple[Any, Any]:
    """The loss as a function of the state, and the shapes of a state."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    batch: Any = {"inputs": tokens_of(), "targets": tokens_of(seed=1)}
    return lambda state: next_token_loss(nnx.merge(graphdef, state), batch)[0], state


def num_saved(config: DecoderConfig) -> int:
    """Bytes that the forward pass passes to the backward pass."""
    loss, state = loss_and_state(config)
    residuals = jax.tree.leaves(jax.eval_shape(lambda state: jax.vjp(loss, state)[1], state))
    return sum(x.size * x.dtype.itemsize for x in residuals)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["list", "stack"])
@pytest.mark.parametrize(
    "remat", ["full:2,none", "none:1,full:2,dots_saveable", "attention+mlp_up@host", ALL_NAMES, "full:2,attention_out"]
)
def test_gradients_do_not_change(remat, scan):
    config = dataclasses.replace(EXPERTS if remat.endswith("attention_out") else CONFIG, scan=scan)
    changed = dataclasses.replace(config, remat=remat)
    found = []
    for each in (config, changed):
        loss, _ = loss_and_state(each)
        found.append(named_leaves(jax.jit(jax.grad(loss))(nnx.state(Decoder(each, rngs=nnx.Rngs(0))))))
    for (path, a), (_, b) in zip(*found, strict=True):
        # jax 0.12 rounds recomputed values otherwise: the largest difference is 1.7e-6 of the largest gradient.
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=5e-6 * np.abs(a).max(), err_msg=path)
    assert num_saved(changed) < num_saved(config)


@pytest.mark.sampled
@pytest.mark.parametrize("scan", [True, False], ids=["stack", "list"])
def test_every_name_and_every_layer_of_a_run_saves_its_bytes(scan):
    def saved(remat: str, config: DecoderConfig = CONFIG) -> int:
        return num_saved(dataclasses.replace(config, remat=remat, scan=scan))

    least, rows = saved("full"), 4 * 2 * 12  # layers, batch, sequence
    sizes = dict.fromkeys(("q", "attention", "attention_out"), 16) | {"k": 8, "v": 8}
    sizes |= {"mlp_gate": 40, "mlp_up": 40, "layer_input": 0}  # the input is saved in any case
    assert set(sizes) == set(CONFIG.remat_names())
    assert saved("+".join(sizes)) - least == rows * sum(sizes.values()) * 4
    for one, other in (("mlp_gate", "v"), ("mlp_gate", "attention")):  # exchanged names have other sizes
        assert saved(f"{one}+{other}") - least == rows * (sizes[one] + sizes[other]) * 4, (one, other)
    assert saved("q:3,full") - least == 3 * rows // 4 * 16 * 4
    most = saved("none")
    steps = [saved(f"full:{count},none") for count in (1, 2, 3)]
    assert most > steps[0] > steps[1] > steps[2] > least
    assert steps[0] - steps[1] == steps[1] - steps[2]  # the same bytes for every layer
    for name in ("attention_out", "q"):
        assert saved(f"full:2,{name}", EXPERTS) - saved("full", EXPERTS) == rows // 2 * 16 * 4
    assert "mlp_up" not in EXPERTS.remat_names()


def test_the_names_of_latent_attention_save_their_bytes():
    latent = dataclasses.replace(CONFIG, num_kv_heads=2, latent_size=6, head_dim=10, rotary_dims=4, value_head_dim=12)
    sizes = {"q": 2 * 10, "k": 2 * 10, "v": 2 * 12, "attention": 2 * 12}

    def saved(remat: str) -> int:
        return num_saved(dataclasses.replace(latent, remat=remat))

    least = saved("full")
    assert {name: saved(name) - least for name in sizes} == {
        name: 4 * 2 * 12 * size * 4 for name, size in sizes.items()
    }


def test_names_on_the_host_are_saved_there():
    loss, state = loss_and_state(dataclasses.replace(CONFIG, remat="attention+mlp_up@host+layer_input@host"))
    residuals = jax.make_jaxpr(lambda state: jax.tree.leaves(jax.vjp(loss, state)[1]))(state).out_avals
    on_host = [x.shape for x in residuals if x.memory_space == jax.memory.Space.Host]
    assert sorted(on_host) == [(4, 2, 12, 16), (4, 2, 12, 40)]  # of the stack
    on_device = [x.shape for x in residuals if x.memory_space != jax.memory.Space.Host]
    assert (4, 2, 12, 2, 8) in on_device and (4, 2, 12, 16) not in on_device


def test_runs_are_parsed():
    assert parse_remat("full:16, none") == (RematRun("full", 16), RematRun("none", None))
    assert parse_remat("attention+mlp_up@host") == (RematRun("attention+mlp_up@host", None),)
    assert names_of("full:2,dots_saveable:3,attention+mlp_up@host") == {"attention", "mlp_up"}


def test_a_stack_is_split_into_consecutive_layers():
    stack = small(CONFIG).layers
    parts = split_stack(stack, [1, 3])
    for whole, *pieces in zip(*(jax.tree.leaves(x) for x in (stack, *parts)), strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(pieces))
        assert [len(piece) for piece in pieces] == [1, 3]


@pytest.mark.parametrize(
    ("remat", "problem"),
    [
        ("full:5", r"model\.remat=full:5 is for 5 layers, model\.num_layers=4; remove some"),
        ("full:3", r"model\.remat=full:3 is for 3 layers, model\.num_layers=4; add a run for the others, such as none"),
        ("full:4,none", r"model\.remat=full:4,none: no layer is left for the run without a number; remove it"),
        ("full,none", "only one run may be without a number of layers, such as full:2,none"),
        ("full:0,none", r"model\.remat: 'full:0' must have a number of layers after the colon, such as full:2"),
        ("full:x", "'full:x' must have a number of layers after the colon"),
        ("full:\N{SUPERSCRIPT TWO},none", "must have a number of layers after the colon"),
        ("", "must be none, full or a policy of JAX .*, got ''"),
        ("full:2,", "must be none, full or a policy of JAX .*, got ''"),
        ("attention+heads", r"or names joined by \+ \(layer_input, q, .*\), got 'attention\+heads'"),
        ("attention+attention@host", r"model\.remat: 'attention\+attention@host' has attention twice"),
        ("full+attention", r"got 'full\+attention'"),
        ("full@host", "got 'full@host'"),
    ],
)
def test_wrong_texts_are_one_line(remat, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        Decoder(dataclasses.replace(CONFIG, remat=remat), rngs=nnx.Rngs(0))
    assert len(error.value.problems) == 1
    (line,) = dataclasses.replace(EXPERTS, remat="mlp_up").problems()  # which experts do not have
    assert line.endswith("(layer_input, q, k, v, attention, attention_out), got 'mlp_up'")


@pytest.mark.slow
@pytest.mark.parametrize("scan", ["false", "true"])
def test_a_stage_computes_and_stores_only_its_own_layers(scan, tmp_path):
    """With runs that do not end where a stage does: residuals fall on the groups whose layers are recomputed."""

    def peaks(remat: str) -> tuple[int, ...]:
        settings = "mesh.shape=pp:2,fsdp:2", f"model.scan={scan}", f"model.remat={remat}", "model.num_layers=4"
        settings = *settings, "data.sequence_length=64", "model.vocab_size=256"
        return plan(config_of(tmp_path, tmp_path, *settings), "v5e:1x4").memory.groups

    none, first, three, full = (peaks(remat) for remat in ("none", "full:2,none", "full:3,none", "full"))
    assert first[0] < none[0] and first[1] == none[1]
    assert three[0] == first[0] and three[1] < none[1]
    assert full[0] == three[0] and full[1] < three[1]
