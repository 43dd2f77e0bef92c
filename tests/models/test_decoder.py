"""The dense decoder against an independent implementation in numpy; scan, remat and dtype do not change its results."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.errors import ConfigError
from flax_mesh.models import Decoder, DecoderConfig, flops_per_token, make_decoder, next_token_loss, sample
from flax_mesh.models.rotary import RopeScaling, rotate
from flax_mesh.tree import named_leaves

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = DecoderConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48)
# The wavelengths of a head are 6, 20, 63 and 199 positions: the first is unchanged, the second interpolated, the last
# two are scaled.
SCALING = RopeScaling(factor=8.0, original_length=40)
SCALED = {"rope_theta": 100.0, "rope_factor": 8.0, "rope_original_length": 40}


def with_random_parameters(make):
    """The module of `make()` with normal parameters, without compiling an initializer."""
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(normal, abstract))


def normal(leaf):
    return jnp.asarray(np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32) * 0.2)


def small(**change):
    return with_random_parameters(lambda: make_decoder(dataclasses.replace(SMALL, **change), nnx.Rngs(0)))


def tokens_of(batch=2, seq=12, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, (batch, seq)).astype(np.int32)


logits_of = jax.jit(lambda model, tokens: model(tokens))
loss_of = jax.jit(next_token_loss)


def numpy_decoder(model, tokens):
    """Logits in float64, one sequence, one head and one pair of positions at a time."""
    config = model.config
    p = {path: np.asarray(leaf, np.float64) for path, leaf in named_leaves(nnx.state(model))}

    def norm(x, path):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_epsilon) * p[f"{path}/scale"]

    def scaled(length):  # a wavelength in positions
        scaling = config.rope_scaling
        longest = scaling.original_length / scaling.low_frequency_factor
        shortest = scaling.original_length / scaling.high_frequency_factor
        if length <= shortest:
            return length
        if length >= longest:
            return length * scaling.factor
        share = (scaling.original_length / length - scaling.low_frequency_factor) / (
            scaling.high_frequency_factor - scaling.low_frequency_factor
        )
        return 1 / (share / length + (1 - share) / (scaling.factor * length))

    def rotated(x, position):  # pairs (i, i + C/2) as complex numbers, rotated by position * theta^(-2i/C)
        half = len(x) // 2
        lengths = 2 * np.pi * config.rope_theta ** (2 * np.arange(half) / len(x))
        turn = np.exp(2j * np.pi * position / np.array([scaled(length) for length in lengths]))
        z = (x[:half] + 1j * x[half:]) * turn
        return np.concatenate([z.real, z.imag])

    def project(x, path, head):
        y = x @ p[f"{path}/kernel"][:, head]
        if config.qkv_bias:
            y = y + p[f"{path}/bias"][head]
        return norm(y, f"{path}_norm") if config.qk_norm and not path.endswith("v") else y

    def attention(x, path):
        out = np.zeros_like(x)
        for h in range(config.num_heads):
            group = h // (config.num_heads // config.num_kv_heads)
            q, k, v = project(x, f"{path}/q", h), *(project(x, f"{path}/{n}", group) for n in "kv")
            for i in range(len(x)):
                first = max(0, i + 1 - config.sliding_window) if config.sliding_window else 0
                scores = [rotated(q[i], i) @ rotated(k[j], j) / np.sqrt(config.head_dim) for j in range(first, i + 1)]
                weights = np.exp(scores) / np.sum(np.exp(scores))
                out[i] += weights @ v[first : i + 1] @ p[f"{path}/o/kernel"][h]
        return out

    logits = []
    for row in tokens:
        x = p["embed/embedding"][row]
        for i in range(config.num_layers):
            layer = f"layers/{i}"
            x = x + attention(norm(x, f"{layer}/attention_norm"), f"{layer}/attention")
            h = norm(x, f"{layer}/mlp_norm")
            gate, up = (h @ p[f"{layer}/mlp/{n}/kernel"] for n in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p[f"{layer}/mlp/down/kernel"]
        head = p["embed/embedding"].T if config.tied else p["head/kernel"]
        logits.append(norm(x, "norm") @ head)
    return np.array(logits)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied": False, "num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"qkv_bias": True},
        {"qk_norm": True},
        SCALED,
        {"sliding_window": 5},
        {"qkv_bias": True, "qk_norm": True} | SCALED,
    ],
    ids=lambda change: ",".join(change) or "plain",
)
def test_logits_equal_those_of_numpy(change):
    model, tokens = small(**change), tokens_of()
    logits = logits_of(model, tokens)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 12, 64)
    np.testing.assert_allclose(logits, numpy_decoder(model, tokens), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [{"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 5}, SCALED],
    ids=lambda change: ",".join(change),
)
def test_biases_norms_windows_and_scaling_each_change_the_logits(change):
    plain = {key: value for key, value in change.items() if key == "rope_theta"}
    a, b = (np.asarray(logits_of(small(**settings), tokens_of())) for settings in (change, plain))
    assert np.abs(a - b).max() > 1e-3  # far above the tolerance of the comparison with numpy


def test_a_rope_factor_of_one_does_not_scale():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 10, 2, 8)).astype(np.float32))
    scaled = rotate(x, 100.0, SCALING._replace(factor=1.0))
    assert (np.asarray(scaled) == np.asarray(rotate(x, 100.0))).all()
    assert (np.asarray(rotate(x, 100.0, SCALING)) != np.asarray(scaled)).any()


def test_attention_is_causal():
    model, tokens = small(), tokens_of()
    changed = tokens.copy()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    a, b = logits_of(model, tokens), logits_of(model, changed)
    assert (a[:, :7] == b[:, :7]).all()
    assert (abs(a[:, 7:] - b[:, 7:]).max(axis=-1) > 1e-3).all()


def test_bfloat16_computation_keeps_float32_parameters():
    model = small(dtype="bfloat16")
    assert {leaf.dtype for _, leaf in named_leaves(nnx.state(model))} == {jnp.dtype("float32")}
    logits, exact = logits_of(model, tokens_of()), logits_of(small(), tokens_of())
    assert logits.dtype == jnp.float32
    difference = np.max(np.abs(logits - exact)) / np.std(exact)
    assert 1e-3 < difference < 0.2


@pytest.mark.slow
def test_scanned_layers_have_the_initial_values_and_the_logits_of_the_list():
    made = jax.jit(
        lambda: [nnx.state(make_decoder(dataclasses.replace(SMALL, scan=s), nnx.Rngs(0))) for s in (False, True)]
    )()
    listed, stacked = (dict(named_leaves(state)) for state in made)
    for path, leaf in stacked.items():
        if path.startswith("layers/"):
            rest = path.removeprefix("layers/")
            leaf, other = np.asarray(leaf), np.stack([listed[f"layers/{i}/{rest}"] for i in range(2)])
            assert not path.endswith("kernel") or not (leaf[0] == leaf[1]).all(), "two layers are equal"
        else:
            other = listed[path]
        assert (leaf == other).all(), path
    models = [
        nnx.merge(
            nnx.graphdef(nnx.eval_shape(lambda s=s: Decoder(dataclasses.replace(SMALL, scan=s), rngs=nnx.Rngs(0)))),
            state,
        )
        for s, state in zip((False, True), made, strict=True)
    ]
    a, b = (logits_of(model, tokens_of()) for model in models)
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_remat_saves_fewer_residuals_and_computes_equal_gradients():
    def of(remat):
        graphdef, state = nnx.split(small(remat=remat))
        batch: Any = {"inputs": tokens_of(), "targets": tokens_of(seed=1)}
        loss = lambda state: next_token_loss(nnx.merge(graphdef, state), batch)[0]  # noqa: E731
        residuals = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda s: jax.vjp(loss, s)[1], state)))
        return jax.jit(jax.grad(loss))(state), residuals

    found = {remat: of(remat) for remat in ("none", "dots_saveable", "full")}
    for remat in ("dots_saveable", "full"):
        for (path, a), (_, b) in zip(named_leaves(found["none"][0]), named_leaves(found[remat][0]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4, err_msg=f"{remat} {path}")
    assert found["none"][1] > found["dots_saveable"][1] > found["full"][1]


def test_rotary_positions_are_relative_and_preserve_norms():
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 8)).astype(np.float32)
    y = np.asarray(rotate(jnp.asarray(np.repeat(x, 10, axis=1)), 100.0))[0, :, 0]
    np.testing.assert_allclose(y[0], x[0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x), rtol=1e-5)
    products = y @ y.T
    for distance in range(1, 9):
        np.testing.assert_allclose(np.diag(products, distance), products[0, distance], atol=1e-5)
    assert np.std(products[0]) > 0.1


def test_loss_is_the_cross_entropy_of_the_targets_that_are_not_negative():
    model, batch = small(), {"inputs": tokens_of(), "targets": tokens_of(seed=1)}
    batch["targets"][0, 3:] = -1
    logits = numpy_decoder(model, batch["inputs"])
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    by_hand = -sum(np.log(p[i, j, t]) for (i, j), t in np.ndenumerate(batch["targets"]) if t >= 0)
    loss, weight = loss_of(model, batch)
    assert weight == 3 + 12
    np.testing.assert_allclose(loss, by_hand, rtol=1e-5)
    loss, weight = loss_of(model, batch | {"targets": np.full_like(batch["targets"], -1)})
    assert loss == weight == 0


def test_samples_depend_on_the_key_and_start_with_the_prompt():
    model, prompt = small(), jnp.asarray(tokens_of(1, 5)[0])
    draw = jax.jit(sample, static_argnums=2)
    a, again, other = (draw(model, prompt, 20, jax.random.key(seed)) for seed in (0, 0, 1))
    assert a.shape == (25,) and (a == again).all() and not (a == other).all()
    for drawn in (a, other):
        assert (drawn[:5] == prompt).all() and (drawn >= 0).all() and (drawn < SMALL.vocab_size).all()


@pytest.mark.slow
def test_a_sample_of_temperature_0_or_almost_0_is_greedy():
    model, prompt = small(), tokens_of(1, 5)[0]
    draw = jax.jit(sample, static_argnums=2)
    drawn = np.asarray(draw(model, jnp.asarray(prompt), 4, jax.random.key(0), 1e-6))
    for i in range(5, 9):
        assert drawn[i] == np.argmax(numpy_decoder(model, drawn[None, :i])[0, -1])
    assert len({*drawn[5:]} - {0}) > 1
    for temperature in (0.0, 0, 1e-45):
        assert (draw(model, jnp.asarray(prompt), 4, jax.random.key(1), temperature) == drawn).all()
    model.norm.scale[...] *= 1000  # several logits divided by the temperature are infinite
    greedy, cold = (draw(model, jnp.asarray(prompt), 4, jax.random.key(1), at) for at in (0.0, 2e-38))
    assert (greedy == cold).all()
    model.norm.scale[...] /= 1000
    constant = jax.jit(functools.partial(sample, temperature=0.0), static_argnums=2)
    assert (constant(model, jnp.asarray(prompt), 4, jax.random.key(1)) == drawn).all()


@pytest.mark.slow
def test_a_sample_of_any_other_temperature_divides_the_logits():
    model, prompt, key = small(), tokens_of(1, 5)[0], jax.random.key(0)
    for temperature in (0.8, 3.0, float("inf")):
        drawn = np.asarray(sample(model, jnp.asarray(prompt), 1, key, temperature))
        logits = numpy_decoder(model, drawn[None, :5])[0, -1] / temperature
        assert drawn[5] == jax.random.categorical(jax.random.fold_in(key, 5), logits)


@pytest.mark.parametrize("temperature", [-1.0, -0.001, float("nan"), np.float32("nan"), float("-inf")])
def test_a_negative_temperature_or_nan_is_refused(temperature):
    model, prompt, key = small(), jnp.asarray(tokens_of(1, 5)[0]), jax.random.key(0)
    with pytest.raises(ConfigError, match=f"temperature must be at least 0 .0: greedy., got {temperature}"):
        sample(model, prompt, 2, key, temperature)
    drawn = jax.jit(sample, static_argnums=2)(model, prompt, 2, key, temperature)
    assert (drawn == jnp.asarray([*prompt, -1, -1])).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: 0}, f"model.{name} must be at least 1, got 0")
            for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size")
        ),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 must be a multiple of model.num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"rope_factor": 0.5}, "rope_factor must be at least 1, got 0.5"),
        (
            {"rope_low_frequency_factor": 4.0},
            "rope_low_frequency_factor=4.0 must be below model.rope_high_frequency_factor=4.0",
        ),
        ({"rope_original_length": 0}, "rope_original_length must be at least 1, got 0"),
        ({"num_experts": -1}, "num_experts must be at least 0, got -1"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5 must be at most model.num_experts=4"),
        ({"num_experts": 4, "experts_per_token": 0}, "experts_per_token must be at least 1, got 0"),
        ({"load_balance_loss": -0.1}, "load_balance_loss must be at least 0, got -0.1"),
        ({"router_z_loss": float("nan")}, "router_z_loss must be at least 0 and finite, got nan"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, got 'float64'"),
        ({"param_dtype": "int8"}, "param_dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"attention": "flash"}, "attention must be one of auto, xla, cudnn, splash, got 'flash'"),
        ({"attention": "cudnn"}, "attention=cudnn needs model.dtype bfloat16 or float16, got float32"),
        ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 12}, "a multiple of 8, at most 256, got 12"),
        ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 512}, "a multiple of 8, at most 256, got 512"),
        ({"loss_chunk": -1}, "loss_chunk must be at least 0, got -1"),
        *(
            ({name: value}, f"model.{name} must be .*got {value}")
            for name, values in {
                "rope_theta": (float("nan"), 0.0, -1.0, float("inf")),
                "norm_epsilon": (float("nan"), -1.0, float("inf")),
                "vocab_size": (2**31, 2.5, True),
                "rope_factor": (float("inf"), float("nan")),
            }.items()
            for value in values
        ),
        ({"remat": "save_only_these_names"}, "remat must be none, full or a policy"),
        ({"remat": "__class__"}, "remat must be none, full or a policy"),
        ({"remat": "some"}, r"remat must be none, full or a policy of JAX \(.*dots_saveable.*\), got 'some'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_invalid_configs_are_refused(change, message):
    config = dataclasses.replace(SMALL, **change)
    with pytest.raises(ConfigError, match=message):
        Decoder(config, rngs=nnx.Rngs(0))
    assert not SMALL.problems()


def test_cudnn_attention_is_refused_where_it_cannot_run():
    config = dataclasses.replace(SMALL, attention="cudnn", dtype="bfloat16")
    assert not config.problems()
    on_gpus = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tp"))  # of unknown platform
    assert config.problems_on(on_gpus) == []
    cpu = create_mesh((2, 1, 1, 2, 2))
    assert config.problems_on(cpu) == [
        "model.attention=cudnn needs GPUs, got cpu; use model.attention=xla",
        "model.attention=cudnn needs complete sequences, got sequences split over sp=2; use model.attention=xla, or "
        "another mesh.shape",
    ]
    assert SMALL.problems_on(cpu) == []
    with pytest.raises(ConfigError, match=r"model.attention=cudnn cannot be traced here: .*Use model.attention=xla"):
        jax.eval_shape(lambda: make_decoder(config, nnx.Rngs(0))(jnp.asarray(tokens_of())))


def test_one_error_lists_all_problems():
    with pytest.raises(ConfigError, match=r"(?s)num_layers must.*model.dtype must.*head_dim must"):
        Decoder(dataclasses.replace(SMALL, num_layers=0, head_dim=3, dtype="?"), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("change", [{}, {"tied": False}, {"num_experts": 4, "experts_per_token": 1}], ids=str)
def test_flops_equal_a_count_by_hand(change):
    config = dataclasses.replace(SMALL, **change)
    model = nnx.eval_shape(lambda: make_decoder(config, nnx.Rngs(0)))
    num_parameters = sum(leaf.size for _, leaf in named_leaves(nnx.state(model)))
    projections = 32 * (4 * 8) * 2 + 32 * (2 * 8) * 2  # q and o, k and v
    mlp = 3 * 32 * 48 * config.experts_per_token + 32 * 4 if config.num_experts else 3 * 32 * 48  # and the router
    used = 2 * (projections + mlp + 2 * 32) + 32 + 32 * 64  # layers with two norms, a norm, the output head
    # Scores and weighted values: (S + 1) / 2 keys per query, about S / 2; 2 FLOPs per product; backward twice that.
    attention = 3 * 2 * (2 * 2 * (4 * 8) * 100 / 2)
    assert flops_per_token(config, num_parameters, 100) == 6 * used + attention
