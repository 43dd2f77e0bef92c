"""The dense decoder against an independent implementation in numpy, its samples, and the configs that it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_mesh import abstract_state
from flax_mesh.errors import ConfigError
from flax_mesh.models import Decoder, flops_per_token, make_decoder, next_token_loss, sample
from flax_mesh.train import abstract_train_state, make_train_step
from flax_mesh.tree import named_leaves
from tests.models.reference import EXPERTS, SMALL, make_mesh, numpy_decoder, small, tokens_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The wavelengths of a head are 6, 20, 63 and 199 positions: the first is unchanged, the second interpolated, the last
# two are scaled.
SCALED = {"rope_theta": 100.0, "rope_factor": 8.0, "rope_original_length": 40}
OPTIONS = {"qkv_bias": True, "qk_norm": True, "sliding_window": 5, **SCALED}

logits_of = jax.jit(lambda model, tokens: model(tokens))
loss_of = jax.jit(next_token_loss)
draw = jax.jit(sample, static_argnums=2)


@pytest.mark.parametrize("change", [{}, {"tied": False, "num_kv_heads": 1, **OPTIONS}], ids=["plain", "all options"])
def test_logits_equal_numpy(change):
    model, tokens = small(**change), tokens_of()
    logits = logits_of(model, tokens)
    assert logits.dtype == jnp.float32 and logits.shape == (2, 12, 64)
    np.testing.assert_allclose(logits, numpy_decoder(model, tokens), atol=2e-5, rtol=1e-4)


def test_every_option_changes_the_logits_of_numpy():
    """Far above the tolerance of the comparison, so that it would find an option without effect."""
    model, tokens = small(**OPTIONS), tokens_of(1)
    logits = numpy_decoder(model, tokens)
    for name in ("qkv_bias", "qk_norm", "sliding_window", "rope_factor", "rope_original_length"):
        without = numpy_decoder(model, tokens, **{name: getattr(SMALL, name)})
        assert np.abs(logits - without).max() > 1e-3, name


def test_bfloat16_computation_keeps_float32_parameters():
    model = small(dtype="bfloat16")
    assert {leaf.dtype for _, leaf in named_leaves(nnx.state(model))} == {jnp.dtype("float32")}
    logits, exact = logits_of(model, tokens_of()), logits_of(small(), tokens_of())
    assert logits.dtype == jnp.float32
    difference = np.max(np.abs(logits - exact)) / np.std(exact)
    assert 1e-3 < difference < 0.2


def test_the_gradient_of_a_frequent_token_is_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    tokens = jnp.repeat(jnp.arange(2), np.array([600, 3]))[None]
    embedded = lambda model, tokens: model._embed(tokens, "train")[0].astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(embedded))(small(dtype="bfloat16", num_layers=1), tokens).embed.embedding[...]
    np.testing.assert_array_equal(gradient[:3, 0], [600, 3, 0])


@pytest.mark.slow
def test_scanned_layers_have_the_initial_values_and_the_logits_of_the_list():
    configs = [dataclasses.replace(SMALL, scan=scan) for scan in (False, True)]
    made = jax.jit(lambda: [nnx.state(make_decoder(config, nnx.Rngs(0))) for config in configs])()
    listed, stacked = (dict(named_leaves(state)) for state in made)
    for path, leaf in stacked.items():
        if path.startswith("layers/"):
            rest = path.removeprefix("layers/")
            leaf, other = np.asarray(leaf), np.stack([listed[f"layers/{i}/{rest}"] for i in range(2)])
            assert not path.endswith("kernel") or not (leaf[0] == leaf[1]).all(), "two layers are equal"
        else:
            other = listed[path]
        assert (leaf == other).all(), path
    models = [small(config) for config in configs]
    nnx.update(models[0], made[0])
    nnx.update(models[1], made[1])
    np.testing.assert_allclose(*(logits_of(model, tokens_of()) for model in models), atol=1e-5)


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
    model, prompt = small(num_layers=1), tokens_of(1, 5)[0]
    a, again, other = (draw(model, prompt, 20, jax.random.key(seed), np.float32(0.8)) for seed in (0, 0, 1))
    assert a.shape == (25,) and (a == again).all() and not (a == other).all()
    for drawn in (a, other):
        assert (drawn[:5] == prompt).all() and (drawn >= 0).all() and (drawn < SMALL.vocab_size).all()


@pytest.mark.slow
def test_a_sample_divides_the_logits_by_the_temperature_and_is_greedy_at_0_or_almost_0():
    model, prompt = small(), jnp.asarray(tokens_of(1, 5)[0])
    drawn = np.asarray(draw(model, prompt, 4, jax.random.key(0), 1e-6))
    for i in range(5, 9):
        assert drawn[i] == np.argmax(numpy_decoder(model, drawn[None, :i])[0, -1])
    assert len({*drawn[5:]} - {0}) > 1
    for temperature in (0.0, 0, 1e-45):
        assert (draw(model, prompt, 4, jax.random.key(1), temperature) == drawn).all()
    constant = jax.jit(functools.partial(sample, temperature=0.0), static_argnums=2)
    assert (constant(model, prompt, 4, jax.random.key(1)) == drawn).all()
    key, logits = jax.random.key(0), numpy_decoder(model, drawn[None, :5])[0, -1]
    for temperature in (0.8, 3.0, float("inf")):
        expected = jax.random.categorical(jax.random.fold_in(key, 5), logits / temperature)
        assert draw(model, prompt, 4, key, temperature)[5] == expected
    model.norm.scale[...] *= 1000  # several logits divided by the temperature are infinite
    greedy, cold = (draw(model, prompt, 4, jax.random.key(1), at) for at in (0.0, 2e-38))
    assert (greedy == cold).all()


def test_a_negative_temperature_or_nan_is_refused():
    model, prompt, key = small(num_layers=1), tokens_of(1, 5)[0], jax.random.key(0)
    for temperature in (-1.0, -0.001, float("nan"), np.float32("nan"), float("-inf")):
        with pytest.raises(ConfigError, match=f"temperature must be at least 0 .0: greedy., got {temperature}"):
            sample(model, prompt, 20, key, temperature)
        drawn = draw(model, prompt, 20, key, np.float32(temperature))
        assert drawn.tolist() == [*prompt, *[-1] * 20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "model.vocab_size must be at least 1, got 0"),
        ({"vocab_size": 2**31}, "model.vocab_size must be .*got 2147483648"),
        ({"vocab_size": 2.5}, "model.vocab_size must be .*got 2.5"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 must be a multiple of model.num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"rope_factor": 0.5}, "rope_factor must be at least 1, got 0.5"),
        ({"rope_low_frequency_factor": 4.0}, "low_frequency_factor=4.0 must be below model.rope_high_frequency_fac"),
        ({"rope_original_length": 0}, "rope_original_length must be at least 1, got 0"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5 must be at most model.num_experts=4"),
        ({"num_experts": 4, "experts_per_token": 0}, "experts_per_token must be at least 1, got 0"),
        ({"router_z_loss": float("nan")}, "router_z_loss must be at least 0 and finite, got nan"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, got 'float64'"),
        ({"num_layers": 0, "head_dim": 3, "dtype": "?"}, r"(?s)num_layers must.*model.dtype must.*head_dim must"),
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


# --- options of JAX that refuse programs or change their results ---
# Steps run under a guard against implicit transfers in tests/step/net.py, generation in tests/cli/test_trained.py.


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
