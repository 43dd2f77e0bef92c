"""The switches of other families: lists and scanned stacks, meshes, pipelines, chunks and caches compute the same.

Their values are compared with transformers in tests/checkpoint/hf.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import abstract_state
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.models import DecoderConfig, generate, make_decoder, next_token_loss
from flax_mesh.models.ops.kernels import choose, misfits
from flax_mesh.models.ops.rotary import Rope, RopeScaling, rotate
from flax_mesh.models.ops.router import Routing, route
from flax_mesh.models.settings.pattern import LayerKind, parse_pattern
from flax_mesh.mpmd import split_stages
from flax_mesh.tree import named_leaves, num_bytes
from tests.models.reference import NATURAL, SMALL, make_mesh, small, tokens_of
from tests.mpmd.runtime.pipelines import build, decoder_batch, plain
from tests.mpmd.zoo.base import groups, merged_leaves

pytestmark = pytest.mark.usefixtures("quick_compilation")
GEMMA: dict[str, Any] = {
    **{"norms": "both", "zero_centered": True, "qk_norm": True, "attention_scale": 0.3, "embedding_scale": 5.0},
    **{"attention_softcap": 2.0, "logit_softcap": 3.0, "activation": "gelu_tanh", "num_layers": 4},
    **{"layer_pattern": "local,global", "sliding_window": 5, "local_rope_theta": 100.0, "rope_factor": 2.0},
}
GPT_OSS: dict[str, Any] = {
    **{"num_experts": 4, "attention_sinks": True, "swiglu_limit": 1.0, "mlp_bias": True, "qkv_bias": True},
    **{"output_bias": True, "layer_pattern": "local,global", "sliding_window": 5, "num_layers": 4, "tied": False},
    **{"rope_kind": "yarn", "rope_factor": 4.0, "rope_original_length": 16, "axes": NATURAL},
}
OLMO: dict[str, Any] = {
    **{"norms": "after", "qk_norm": True, "qk_norm_all_heads": True, "rotary_dims": 4, "rope_interleaved": True},
    **{"residual_scale": 0.5, "logits_scaling": 2.0, "mlp_bias": True, "activation": "relu2", "num_layers": 5},
    "layer_pattern": "global:2,global_nope",
}
SHARED: dict[str, Any] = {
    **{"num_experts": 4, "router_scores": "sigmoid", "normalize_router": False, "shared_expert_size": 24},
    **{"shared_expert_gate": True, "axes": NATURAL},
}
LATENT: dict[str, Any] = {
    **{"latent_size": 16, "query_latent_size": 12, "head_dim": 12, "rotary_dims": 4, "value_head_dim": 8},
    **{"rope_kind": "yarn", "rope_factor": 4.0, "rope_original_length": 16, "rope_mscale": 0.7},
    **{"rope_mscale_all_dims": 1.1, "prediction_layers": 1},
}
DEEPSEEK: dict[str, Any] = LATENT | {
    **{"num_experts": 4, "router_scores": "sigmoid", "router_groups": 2, "router_balance": True, "router_scale": 1.5},
    **{"shared_expert_size": 24, "dense_layers": 1, "dense_mlp_size": 40, "num_layers": 3, "axes": NATURAL},
}
ALL = {"gemma": GEMMA, "gpt-oss": GPT_OSS, "olmo": OLMO, "shared expert": SHARED, "deepseek": DEEPSEEK}
every = pytest.mark.parametrize("name", ALL)


def batch_of(rows=4):
    return {"inputs": tokens_of(rows), "targets": tokens_of(rows, seed=1)}


@nnx.jit
def loss_and_gradients(model, batch):
    return nnx.value_and_grad(lambda model: next_token_loss(model, batch)[0])(model)


def unstacked(gradients) -> dict[str, np.ndarray]:
    found = {}
    for path, leaf in named_leaves(gradients):
        stack, _, rest = path.partition("/")
        if not stack.endswith("layers") or rest.split("/")[0].isdecimal():
            found[path] = np.asarray(leaf)
        else:
            found |= {f"{stack}/{i}/{rest}": x for i, x in enumerate(np.asarray(leaf))}
    return found


def assert_same(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for path, want in expected.items():
        difference = np.abs(found[path] - want).max() / max(np.abs(want).max(), 1e-6)
        assert difference < tolerance, (path, difference)


def listed_and_scanned(name, **change):
    """The same parameters as a list and as a stack."""
    one, other = small(**ALL[name], **change), small(**ALL[name], **change, scan=True)
    for name in ("dense_layers", "layers"):
        if stacked := [nnx.state(layer) for layer in getattr(one, name)]:
            nnx.update(getattr(other, name), jax.tree.map(lambda *leaves: jnp.stack(leaves), *stacked))
    for part in ("embed", "norm", "predictions", *(() if one.config.tied else ("head",))):
        nnx.update(getattr(other, part), nnx.state(getattr(one, part)))
    return one, other


@pytest.mark.slow
@every
def test_a_scanned_stack_has_the_loss_and_gradients_of_the_list(name):
    remat = {"gemma": "full:2,none", "deepseek": "q+attention:1,full:1,none"}.get(name, "none")
    models = listed_and_scanned(name, remat=remat)
    (loss, want), (scanned, found) = (loss_and_gradients(model, batch_of()) for model in models)
    np.testing.assert_allclose(scanned, loss, rtol=1e-5)
    assert_same(unstacked(found), unstacked(want))


def test_a_token_that_reads_the_cache_of_latents_has_the_logits_of_the_forward_pass():
    model, tokens = small(**LATENT, num_layers=1), tokens_of(2, 6)
    decoded = lambda model, x: model.decode(x[:, 5], model.prefill(x[:, :5], jnp.full(2, 5), 8)[1])[0]  # noqa: E731
    found, want = nnx.jit(lambda model, x: (decoded(model, x), model(x)[:, 5]))(model, tokens)
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.slow
@every
def test_a_scanned_stack_generates_the_tokens_of_the_list(name):
    prompts = [[1, 2, 3], [4], list(range(5, 18))]
    found = [generate(model, prompts, max_tokens=12) for model in listed_and_scanned(name)]
    for one, other in zip(*found, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


@every
def test_lists_and_stacks_have_equal_shapes_and_every_leaf_has_a_rule(name):
    configs = [dataclasses.replace(SMALL, **ALL[name], scan=scan) for scan in (False, True)]
    models = [nnx.eval_shape(lambda c=c: make_decoder(c, nnx.Rngs(0))) for c in configs]
    one, other = (dict(named_leaves(nnx.state(model))) for model in models)
    assert {path.replace("layers/0/", "layers/") for path in one if not path.startswith("layers/1")} >= other.keys()
    mesh = make_mesh(fsdp=2, tp=2)
    state = abstract_state(lambda: make_decoder(configs[1], nnx.Rngs(0)), mesh)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@every
def test_loss_and_gradients_on_a_mesh_equal_one_device(name, scan):
    model = small(**ALL[name], scan=scan)
    loss, want = loss_and_gradients(model, batch_of())
    mesh = make_mesh(fsdp=2, tp=2, ep=2 if model.config.num_experts else 1)
    abstract = abstract_state(lambda: make_decoder(model.config, nnx.Rngs(0)), mesh)
    placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), nnx.state(model), abstract)
    model = nnx.merge(nnx.graphdef(model), placed)
    with jax.set_mesh(mesh):
        found, gradients = loss_and_gradients(model, batch_of())
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_same(unstacked(gradients), unstacked(want))


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
def test_the_balancing_bias_rises_for_experts_with_few_tokens_and_has_no_gradient(scan):
    experts = {"num_experts": 4, "router_balance": True, "router_balance_rate": 0.25, "prediction_layers": 1}
    model = small(**experts, dense_layers=1, dense_mlp_size=8, num_layers=3, scan=scan)
    chosen = np.array([[1, 0, 0, 1], [0, 1, 1, 0]], np.float32)  # other experts in each layer
    for layer, bias in [(model.layers, chosen)] if scan else zip(model.layers, chosen, strict=True):
        layer.moe.balance[...] = bias
    of_gradients: list[str] = []

    @nnx.jit  # without results, the gradients themselves are not compiled
    def step(model, batch):
        tokens = model.forward(batch["inputs"])[1]["expert_tokens"]
        _, gradients = nnx.value_and_grad(lambda model: next_token_loss(model, batch)[0])(model)
        of_gradients.extend(path for path, _ in named_leaves(gradients))
        return tokens

    before = unstacked(nnx.state(model))
    tokens = np.asarray(step(model, batch_of()))
    after = unstacked(nnx.state(model))
    want = 0.25 * np.sign(tokens.mean(axis=-1, keepdims=True) - tokens)
    assert np.array_equal(np.sign(want), 1 - 2 * chosen)
    for i in range(2):
        np.testing.assert_allclose(after.pop(f"layers/{i}/moe/balance"), before[f"layers/{i}/moe/balance"] + want[i])
    path = "predictions/0/layer/moe/balance"
    assert {0.25} <= {*np.abs(after.pop(path) - before[path]).round(6).tolist()} <= {0.0, 0.25}
    assert all(np.array_equal(value, before[path]) for path, value in after.items())
    assert of_gradients and not any("balance" in path for path in of_gradients)


def pipeline_of(name, **change):
    config = dataclasses.replace(SMALL, **ALL[name] | {"axes": SMALL.axes, **change})
    make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
    return make, build(make, next_token_loss, decoder_batch(4), 2, optax.sgd(0.1), mesh=groups(pp=2))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["list", "scan"])
@every
def test_a_pipeline_has_the_loss_gradients_and_balancing_biases_of_the_plain_step(name, scan, tmp_path):
    changes = {"router_groups": 1, "router_balance_rate": 0.001} if name == "deepseek" else {}
    make, pipeline = pipeline_of(name, scan=scan, **changes)
    state, step = plain(make, next_token_loss, optax.sgd(0.1), 2)
    split, found = pipeline.step(pipeline.init_state(), decoder_batch(4))
    whole, expected = step(state, decoder_batch(4))
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5)
    with Checkpointer(tmp_path, layers=("dense_layers", "layers")) as checkpointer:
        checkpointer.save(1, split)
        resumed = checkpointer.restore(jax.tree.map(jnp.zeros_like, whole))
    biases = [
        {path: x.tolist() for path, x in merged_leaves(state).items() if "balance" in path}
        for state in (split, whole, resumed)
    ]
    assert biases[0] == biases[1] == biases[2] and any(np.any(x) for x in biases[0].values()) == bool(changes)


def test_a_scanned_stack_has_the_stages_of_the_list():
    """Of three layers, within its period of four."""
    found = []
    for scan in (False, True):
        config = dataclasses.replace(SMALL, **GEMMA | {"num_layers": 6, "layer_pattern": "local:3,global"}, scan=scan)
        make = lambda config=config: make_decoder(config, nnx.Rngs(0))  # noqa: E731
        staged = split_stages(next_token_loss, make, decoder_batch(2), num_stages=2)
        received = [v.aval.str_short() for v in staged.cut(staged.example).stages[1].received]
        state = [0, 0]  # bytes of layers by stage
        for leaf, users in zip(staged.leaves, staged.users, strict=True):
            state[users[0]] += num_bytes(leaf) if leaf.layer else 0
            assert len(users) == 1 or not leaf.layer, leaf.path
        found.append((staged.bounds, received, state))
    assert found[0] == found[1] and found[0][0] == (0, 3, 6) and len(set(found[0][2])) == 1


@pytest.mark.slow
def test_chunks_of_the_loss_have_the_soft_cap_and_its_gradients():
    (loss, want), (chunked, found) = (loss_and_gradients(small(**GEMMA, loss_chunk=n), batch_of()) for n in (0, 7))
    np.testing.assert_allclose(chunked, loss, rtol=1e-5)
    assert_same(unstacked(found), unstacked(want))


def test_kernels_refuse_scores_that_they_do_not_compute():
    changes: dict[str, Any] = {"attention_softcap": 1.0, "attention_sinks": True}
    for name, value in changes.items():
        for kernel in ("cudnn", "splash"):
            config = DecoderConfig(attention=kernel, dtype="bfloat16", head_dim=64, **{name: value})
            needs = f"needs scores without caps and sinks, got model.{name}; use model.attention=xla"
            assert config.problems() == [f"model.attention={kernel} {needs}"]
    for platform in ("gpu", "tpu"):
        call = DecoderConfig(dtype="bfloat16", head_dim=64, attention_sinks=True)._call(platform=platform)
        assert choose(call)[0] == "xla" and "attention_sinks" in choose(call)[1]
        assert not misfits("xla", call)


def test_patterns_repeat():
    local, whole, nope = LayerKind(True), LayerKind(False), LayerKind(False, False)
    assert parse_pattern("local:2,global") == (local, local, whole)
    assert parse_pattern("global, global_nope") == (whole, nope)
    assert DecoderConfig().kinds == (whole,) and DecoderConfig(sliding_window=3).kinds == (local,)
    config = DecoderConfig(sliding_window=3, layer_pattern="local,global", local_rope_theta=7.0, rope_factor=2.0)
    assert [config.window(kind) for kind in config.kinds] == [3, 0]
    assert config.rope(local) == Rope(7.0) and config.rope(whole) == Rope(10_000.0, config.rope_scaling)
    assert config.rope(nope) is None


def test_weights_of_a_router_by_hand():
    routed = jax.jit(route, static_argnums=(2, 3))
    x, router = np.eye(1, 3, dtype=np.float32), np.array([[2.0, -1.0, 1.0], [0.0] * 3, [0.0] * 3], np.float32)
    scores = np.exp([2.0, -1.0, 1.0]) / np.exp([2.0, -1.0, 1.0]).sum()
    sigmoid = 1 / (1 + np.exp([-2.0, 1.0, -1.0]))
    for routing, want in [
        (Routing(), scores[[0, 2]] / scores[[0, 2]].sum()),
        (Routing(normalize=False), scores[[0, 2]]),
        (Routing("sigmoid"), sigmoid[[0, 2]] / sigmoid[[0, 2]].sum()),
        (Routing("sigmoid", normalize=False), sigmoid[[0, 2]]),
    ]:
        weights, experts, _ = routed(x, router, 2, routing)
        assert experts.tolist() == [[0, 2]]
        np.testing.assert_allclose(weights[0], want, rtol=1e-6)
    assert routed(x, router, 1, Routing(), np.array([0.0, 9.0, 0.0], np.float32))[1].tolist() == [[1]]  # with a bias


def test_rotary_positions_by_hand():
    turn = jax.jit(rotate, static_argnames=("rope", "length"))
    x = np.random.default_rng(0).normal(size=(1, 3, 1, 8)).astype(np.float32)
    pairs = np.asarray(x)[0, :, 0, :4].reshape(3, 2, 2)  # the first 4 dims, interleaved
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * np.arange(3)[:, None] * np.array([1, 0.1]))
    want = np.stack([turned.real, turned.imag], -1).reshape(3, 4)
    found = np.asarray(turn(x, Rope(100.0, dims=4, interleaved=True)))[0, :, 0]
    np.testing.assert_allclose(found[:, :4], want, atol=1e-6)
    np.testing.assert_array_equal(found[:, 4:], np.asarray(x)[0, :, 0, 4:])
    scaling = RopeScaling(4.0, original_length=2, kind="longrope", short_factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    same, long = (turn(x, Rope(100.0, scaling), length=length) for length in (2, 3))
    for found, rope in ((same, Rope(100.0)), (long, Rope(100.0, RopeScaling(2.0, kind="linear")))):
        np.testing.assert_allclose(found, turn(x, rope) * scaling.multiplier(), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_pattern": "local"}, "layer_pattern=local has local layers, which need a model.sliding_window above 0"),
        ({"layer_pattern": "global:0"}, "layer_pattern must be kinds of layers"),
        ({"layer_pattern": "window"}, r"layer_pattern must be kinds of layers \(local, .*got 'window'"),
        ({"rotary_dims": 10}, "rotary_dims=10 must be even and at most model.head_dim=8"),
        ({"norms": "none"}, "norms must be one of before, after, both"),
        ({"qk_norm_all_heads": True}, "qk_norm_all_heads has no effect without model.qk_norm"),
        ({"shared_expert_size": 8}, "shared_expert_size has no effect without model.num_experts"),
        ({"router_scores": "sigmoid"}, "router_scores has no effect without model.num_experts"),
        ({"rope_kind": "longrope"}, "rope_short_factors must be 4 numbers above 0"),
        ({"rope_long_factors": (1.0,) * 4}, "rope_long_factors needs model.rope_kind=longrope"),
        ({"swiglu_limit": 1.0, "activation": "gelu"}, "swiglu_limit needs model.activation=silu"),
        ({"residual_scale": 0.0}, "residual_scale must be above 0"),
        ({"dense_layers": 1}, "dense_layers has no effect without model.num_experts"),
        ({"num_experts": 4, "dense_layers": 1}, "dense_mlp_size must be above 0 with model.dense_layers"),
        ({"num_experts": 4, "dense_layers": 2, "dense_mlp_size": 8}, "dense_layers=2 must be below model.num_layers=2"),
        ({"num_experts": 4, "router_groups": 3}, "router_groups=3 must divide model.num_experts=4"),
        ({"num_experts": 4, "router_groups": 2, "router_top_groups": 3}, "router_top_groups=3 must be from 1 to"),
        ({"num_experts": 4, "router_groups": 4}, "router_groups=4 must leave 1 experts in a group, and model.exp"),
        ({"num_experts": 4, "router_balance_rate": 0.1}, "router_balance_rate has no effect without model.router_bal"),
        ({"query_latent_size": 8}, "query_latent_size has no effect without model.latent_size"),
        ({"latent_size": 8, "qk_norm": True}, "qk_norm has no meaning in latent attention"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_invalid_switches_are_refused(change, message):
    problems = "\n".join(dataclasses.replace(SMALL, **change).problems())
    assert re.search(message, problems), problems
