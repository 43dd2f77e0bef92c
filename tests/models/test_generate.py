"""Generation with a cache: the tokens and log-probabilities of the training forward pass, on every mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.context import in_mesh
from flax_mesh.models import DecoderConfig, Sampling, generate, make_decoder
from flax_mesh.models.cache import row_multiple, slot_multiple
from flax_mesh.models.generation.generate import Programs
from flax_mesh.models.ops.sampling import choose_tokens
from tests.models.reference import SMALL, small

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = dataclasses.replace(SMALL, vocab_size=48)
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
DELTA = {"layer_pattern": "delta,global", "attention_gate": True, "delta_key_heads": 2, "delta_value_heads": 4}
DELTA |= {"delta_key_dim": 8, "delta_value_dim": 4, "delta_conv": 3}
MESHES = {"dp and tp": (2, 1, 1, 2, 1), "sp": (1, 2, 1, 1, 2), "ep": (1, 2, 2, 2, 1)}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [3, 3], [40, 30, 20, 10, 0]]
RANDOM = Sampling(temperature=1.2, top_k=20, top_p=0.95)


def model_on(config: DecoderConfig, shape=None, axis_types="auto"):
    make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
    if shape is None:
        return make()
    mesh = fm.create_mesh(shape, devices=jax.devices()[: int(np.prod(shape))], axis_types=axis_types)
    model = fm.init_model(make, fm.abstract_state(make, mesh))
    state = nnx.state(make())  # the values of one device, whatever the initialization does on this mesh
    nnx.update(model, jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), state, nnx.state(model)))
    return model


def tokens_of(found) -> list[list[int]]:
    return [one.tokens.tolist() for one in found]


def check_with_forward(config: DecoderConfig, found, *, greedy: bool) -> None:
    """Log-probabilities agree with the training forward pass on one device, greedy tokens with its largest logits."""
    model = make_decoder(config, nnx.Rngs(0))
    length = max(map(len, PROMPTS)) + len(found[0].tokens)
    rows = np.zeros((len(PROMPTS), length), np.int32)
    for row, prompt, one in zip(rows, PROMPTS, found, strict=True):
        row[: len(prompt) + len(one.tokens)] = [*prompt, *one.tokens]
    scores = np.asarray(jax.nn.log_softmax(jax.jit(lambda model, rows: model(rows))(model, rows)))
    for each, prompt, one in zip(scores, PROMPTS, found, strict=True):
        each = each[len(prompt) - 1 :][: len(one.tokens)]
        np.testing.assert_allclose(one.log_probs, each[np.arange(len(each)), one.tokens], atol=1e-5)
        if greedy:
            assert (each.argmax(axis=-1) == one.tokens).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:model.num_kv_heads=. is not divisible by tp=2")
@pytest.mark.parametrize(
    ("change", "mesh", "axis_types"),
    [
        ({}, "dp and tp", "explicit"),
        ({"sliding_window": 4}, "dp and tp", "auto"),
        ({"scan": True, "sliding_window": 4}, "sp", "explicit"),
        ({"scan": True, "tied": False}, "sp", "auto"),
        (EXPERTS, "sp", "auto"),
        ({**EXPERTS, "scan": True}, "ep", "auto"),
        ({**EXPERTS, "scan": True, "sliding_window": 4}, "ep", "explicit"),
        ({"qkv_bias": True, "qk_norm": True, "tied": False}, "dp and tp", "auto"),
        ({"num_heads": 6, "num_kv_heads": 3}, "dp and tp", "explicit"),  # copied to the devices of tp
        ({"num_kv_heads": 1, "scan": True}, "dp and tp", "auto"),
        (DELTA, "dp and tp", "explicit"),
    ],
)
def test_tokens_and_log_probabilities_equal_the_training_forward_pass_on_every_mesh(change, mesh, axis_types):
    config = dataclasses.replace(CONFIG, **change)
    one, other = model_on(config), model_on(config, MESHES[mesh], axis_types)
    for sampling in (Sampling(), RANDOM):
        expected = generate(one, PROMPTS, max_tokens=12, sampling=sampling, batch_size=3)
        found = generate(other, PROMPTS, max_tokens=12, sampling=sampling, batch_size=3)
        assert len({token for one in found for token in one.tokens}) > 3
        check_with_forward(config, expected, greedy=sampling == Sampling())
        assert tokens_of(found) == tokens_of(expected)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)


@pytest.fixture(scope="module")
def plain():
    return small(CONFIG, num_layers=1)


@pytest.mark.slow
def test_the_other_prompts_and_the_size_of_the_cache_do_not_change_a_continuation(plain):
    expected = generate(plain, PROMPTS, max_tokens=6, sampling=RANDOM)
    for size, length in ((2, 40), (8, 19)):
        found = generate(plain, PROMPTS, max_tokens=6, sampling=RANDOM, batch_size=size, cache_length=length)
        assert tokens_of(found) == tokens_of(expected)
    longer = generate(plain, PROMPTS, max_tokens=9, sampling=RANDOM, cache_length=19 + 3)
    assert [row[:6] for row in tokens_of(longer)] == tokens_of(expected)


def test_samples_depend_on_the_seed_and_on_the_number_of_the_prompt(plain):
    assert generate(plain, []) == []
    draw = lambda **options: tokens_of(generate(plain, [[1, 2]] * 5, max_tokens=12, **options))  # noqa: E731
    first, again, other = (draw(sampling=Sampling(2.0), seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(map(tuple, first))) == 5
    assert len(set(map(tuple, draw()))) == 1  # greedy


@pytest.mark.slow
def test_generation_runs_inside_the_context_of_a_mesh(plain):
    """Of a model on this mesh, and of one without a mesh."""
    mesh = fm.create_mesh(MESHES["dp and tp"], devices=jax.devices()[:4])
    for model in (model_on(CONFIG, MESHES["dp and tp"]), plain):
        expected = tokens_of(generate(model, PROMPTS[:3], max_tokens=4))
        with in_mesh(mesh):
            assert tokens_of(generate(model, PROMPTS[:3], max_tokens=4)) == expected


def test_results_are_reported_after_each_batch(plain):
    """The rows and the slots are as in the other tests, so that the programs are too."""
    seen: list[tuple[str, int]] = []
    found = generate(
        plain,
        PROMPTS + PROMPTS[:2],
        max_tokens=2,
        batch_size=5,
        cache_length=28,
        on_token=lambda prompt, token: seen.append(("token", prompt)),
        on_result=lambda prompt, one: seen.append((str(one.tokens), prompt)),
    )
    tokens = lambda *prompts: [("token", n) for n in prompts * 2]  # noqa: E731
    results = [(str(one.tokens), n) for n, one in enumerate(found)]
    assert seen == [*tokens(*range(5)), *results[:5], *tokens(5, 6), *results[5:]]


def test_a_stop_token_is_the_last_one(plain):
    """Arguments may be numpy scalars and iterators."""
    whole = generate(plain, PROMPTS, max_tokens=12, sampling=RANDOM)
    stop = int(whole[2].tokens[4])
    seen: list[tuple[int, int]] = []
    scalars: Any = np.float32(1.2), np.int64(20), np.float64(0.95)
    sampling = Sampling(*scalars)
    options: dict[str, Any] = {"max_tokens": np.int64(12), "stop_tokens": iter([stop])}
    found = generate(plain, PROMPTS, sampling=sampling, on_token=lambda *each: seen.append(each), **options)
    for n, (one, before) in enumerate(zip(found, whole, strict=True)):
        ids = before.tokens.tolist()
        end = ids.index(stop) + 1 if stop in ids else 12
        assert one.tokens.tolist() == ids[:end] and one.stopped == (stop in ids)
        assert [token for row, token in seen if row == n] == ids[:end]
    assert found[2].stopped and not any(one.stopped for one in whole)
    ended = generate(plain, PROMPTS, max_tokens=12, sampling=RANDOM, on_token=lambda *each: each[1] == stop)
    assert tokens_of(ended) == tokens_of(found) and not any(one.stopped for one in ended)


@pytest.mark.slow
def test_one_compilation_of_each_program_serves_all_prompts_of_a_bucket(compilations):
    model = model_on(dataclasses.replace(CONFIG, mlp_size=40))  # which no other test has compiled
    generate(model, [[1, 2, 3], [4]], max_tokens=4, cache_length=32)
    programs = len(compilations)
    assert programs >= 2
    for prompt, sampling, seed in (([5] * 13, Sampling(), 1), ([6], RANDOM, 0), ([7, 8] * 8, Sampling(0.5, 3), 2)):
        generate(model, [prompt, [9, 9]], max_tokens=4, cache_length=32, sampling=sampling, seed=seed)
    assert len(compilations) == programs
    generate(model, [[1] * 20, [2]], max_tokens=4, cache_length=32)  # the next bucket
    assert len(compilations) > programs


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_generated_token_costs_the_same(scan):
    """It costs one token of the forward pass, and attention to the slots of the cache."""
    config = dataclasses.replace(CONFIG, scan=scan, num_layers=4)
    model, slots, rows = small(config), 64, 2
    graphdef, state = nnx.split(model)
    tokens: Any = np.zeros((rows, 16), np.int32)
    prefill = jax.jit(lambda state: nnx.merge(graphdef, state).prefill(tokens, jnp.asarray([3, 16]), slots))
    _, cache = prefill(state)
    decode = jax.jit(lambda state, tokens, cache: nnx.merge(graphdef, state).decode(tokens, cache), donate_argnums=2)
    program = decode.lower(state, tokens[:, 0], cache).compile()
    for step in range(3):  # the same program, whose costs are static
        logits, cache = program(state, tokens[:, 0], cache)
        assert int(cache.used) == 16 + step + 1 and logits.shape == (rows, 48)
    memory: Any = program.memory_analysis()
    stored = sum(x.nbytes for x in jax.tree.leaves((cache.keys, cache.values)))
    assert memory.alias_size_in_bytes >= stored  # the cache is updated in place
    layer = stored // config.num_layers
    assert memory.temp_size_in_bytes < 3 * layer  # no second cache
    if not scan:  # cost_analysis counts the body of a loop once
        parameters = sum(x.size for x in jax.tree.leaves(state))
        attention = 4 * config.num_layers * slots * config.num_heads * config.head_dim
        costs: Any = program.cost_analysis()
        assert costs["flops"] < 1.5 * rows * (2 * parameters + attention)


@pytest.mark.slow
def test_the_cache_is_placed_by_the_generation_axes():
    axes = fm.PartitionAxis(hidden_state_axis=None, generation_batch_axis="dp")
    config = dataclasses.replace(CONFIG, axes=axes)
    model = model_on(config, (2, 1, 1, 2, 2))
    programs = Programs(model, 0, Sampling())
    assert programs.rows == row_multiple(axes, programs.mesh) == 2
    assert programs.slots == slot_multiple(axes, programs.mesh) == 2
    tokens, ids = np.zeros((4, 16), np.int32), np.arange(4)
    *_, cache = programs.prefill(tokens, np.full(4, 2), ids, 32)
    *_, after = programs.decode(jnp.zeros(4, jnp.int32), cache, ids)
    for x in jax.tree.leaves((after.keys, after.values)):
        assert x.shape == (4, 2, 8, 32)
        assert x.sharding.shard_shape(x.shape) == (2, 1, 8, 16)  # batch over dp, slots over sp, heads over tp


def reference_choice(logits, sampling: Sampling) -> set[int]:
    """The tokens that top_k and then top_p leave, by a loop over the sorted tokens."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    order = order[: sampling.top_k or len(order)]
    weights = np.exp(np.float64(logits[order]) / sampling.temperature)
    kept, total = set(), 0.0
    for token, weight in zip(order, weights / weights.sum(), strict=True):
        if total >= sampling.top_p:
            break
        kept.add(int(token))
        total += weight
    return kept


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(1.0, top_k=3), Sampling(0.7, top_p=0.8), Sampling(1.5, 5, 0.6), Sampling(1.0, top_p=1e-9)],
)
@pytest.mark.parametrize("has_ties", [False, True])
def test_only_the_tokens_of_top_k_and_top_p_are_drawn_with_their_probabilities(sampling, has_ties):
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32) * 1.5
    logits = np.array([0, 0.5, 0.5, -1] * 3, np.float32) if has_ties else logits
    draws = 4000
    keys = jax.random.split(jax.random.key(0), draws)
    drawn = np.asarray(
        jax.jit(lambda x, keys: choose_tokens(x, keys, *dataclasses.astuple(sampling)))(
            np.tile(logits, (draws, 1)), keys
        )
    )
    allowed = sorted(reference_choice(logits, sampling))
    assert sorted(set(drawn.tolist())) == allowed
    weights = np.exp(logits[allowed] / sampling.temperature)
    shares = np.bincount(drawn, minlength=12)[allowed] / draws
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, r"^max_tokens must be an integer from 1 to \d+, got 0$"),
        ({"batch_size": 2.0}, r"^batch_size must be an integer from 1 to \d+, got 2.0$"),
        ({"seed": -1}, r"^seed must be an integer from 0 to 4294967295, got -1$"),
        ({"sampling": Sampling(-1.0)}, r"^temperature must be at least 0, got -1.0$"),
        ({"sampling": Sampling(float("nan"))}, "temperature must be .*, got nan$"),
        ({"sampling": Sampling(1.0, top_k=-2)}, r"^top_k must be at least 0, got -2$"),
        ({"sampling": Sampling(1.0, top_p=0)}, r"^top_p must be above 0, got 0$"),
        ({"stop_tokens": [48]}, r"^stop token 48: the ids of this model are 0 to 47$"),
        ({"prompts": [[1], []]}, r"^prompt 1 is empty; it must have at least one token$"),
        ({"prompts": [[1, 48, -3]]}, r"^prompt 0 has the token 48; the ids of this model are 0 to 47$"),
        ({"sampling": Sampling(0, top_k=5)}, r"^top_k has no effect with temperature 0 \(greedy\); set a temperature"),
        ({"sampling": Sampling(0.0, top_p=0.5)}, r"^top_p has no effect with temperature 0"),
        ({"prompts": [[1, [2]]]}, r"^prompt 0 must be a list of token ids, got an array object\[2\]$"),
        ({"prompts": [[1.5]]}, r"^prompt 0 must be a list of token ids, got an array float64\[1\]$"),
        (
            {"prompts": [[1] * 5, [1] * 9], "max_tokens": 8, "cache_length": 16},
            r"^prompt 1 has 9 tokens and needs a cache_length of 17 with max_tokens=8, got 16$",
        ),
    ],
)
def test_wrong_arguments_are_one_line(options, message, plain):
    with pytest.raises(ConfigError, match=message) as error:
        generate(plain, options.pop("prompts", [[1, 2]]), **options)
    assert len(error.value.problems) == 1


def test_all_mistakes_are_listed_together(plain):
    with pytest.raises(ConfigError) as error:
        generate(plain, [[], [99]], max_tokens=0, sampling=Sampling(-1.0, -1, 2.0), stop_tokens=[99])
    assert len(error.value.problems) == 7


def test_models_without_prefill_and_pipelined_models_cannot_generate():
    linear: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"the methods prefill and decode, .* got Linear without prefill and decode$"):
        generate(linear, [[1]])
    model = small(CONFIG)
    devices = jax.devices()
    for n, layer in enumerate(model.layers):
        mesh = fm.create_mesh((1, 2, 1, 1, 1), devices=devices[2 * n : 2 * n + 2])
        place = jax.sharding.NamedSharding(mesh, jax.P())
        nnx.update(layer, jax.tree.map(lambda x, place=place: jax.device_put(x, place), nnx.state(layer)))
    with pytest.raises(ConfigError, match=r"all on one mesh, .*use pipeline.model\(state\)"):
        generate(model, [[1]])
