"""recipes/grpo.py: its loss against float64, mistakes of users, and runs that learn a reward and resume bit for bit."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh.checkpoint import DECODER_NAMES, huggingface_config, save_safetensors
from flax_mesh.data import chats
from flax_mesh.data.prompts import read_prompts
from flax_mesh.errors import ConfigError
from flax_mesh.inference import for_generation
from flax_mesh.lora import add_lora
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.model import with_constants
from flax_mesh.train import Rollouts, TrainConfig, apply_overrides, load_recipe
from tests.data.chat_files import write_rows
from tests.data.chat_tokenizers import VOCABULARY, StandIn
from tests.train.support.runs import rows_of, run, state_of

pytest.importorskip("jinja2", reason="of the extra finetune")

RECIPE = str(Path(__file__).parents[2] / "recipes" / "grpo.py")
SIZES: Any = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 24}
SMALL = DecoderConfig(vocab_size=len(VOCABULARY) + 1, **SIZES)  # divisible by 2
REWARDS = """
def share(prompts, completions, rows):
    return [text.count(row["letter"]) / max(len(text), 1) for text, row in zip(completions, rows, strict=True)]

def length(prompts, completions, rows):
    return [len(text) for text in completions]

def too_few(prompts, completions, rows):
    return [1.0]

def not_finite(prompts, completions, rows):
    return [float("nan") for text in completions]

def texts(prompts, completions, rows):
    return ["1" for text in completions]

def fails(prompts, completions, rows):
    return rows[0]["missing"]

def no_rows(prompts, completions):
    return completions
"""


# --- the loss ---


def by_hand(params: Any, batch: dict[str, np.ndarray], loss_fn: Any) -> jax.Array:
    """The mean over all tokens of the formula in float64, of a model whose logits are `table[input]`."""
    losses: list[Any] = []
    for row, column in np.argwhere(batch["targets"] >= 0):
        logits = params[batch["inputs"][row, column]]
        log_prob = logits[batch["targets"][row, column]] - jnp.log(jnp.sum(jnp.exp(logits)))
        ratio = jnp.exp(log_prob - batch["old"][row, column])
        advantage = batch["advantages"][row]
        if advantage > 0:
            gain = jnp.where(ratio > 1 + loss_fn.clip_high, 1 + loss_fn.clip_high, ratio) * advantage
        else:
            gain = jnp.where(ratio < 1 - loss_fn.clip_low, 1 - loss_fn.clip_low, ratio) * advantage
        r = jnp.exp(batch["reference"][row, column] - log_prob)
        losses.append(-gain + loss_fn.beta * (r - jnp.log(r) - 1))
    return jnp.mean(jnp.stack(losses))


class Table(nnx.Module):
    """A decoder whose logits depend on the last token alone, for `token_log_probs`."""

    def __init__(self, size: int):
        self.config, self.axes = replace(SMALL, vocab_size=size, hidden_size=size), SMALL.axes
        self.table = nnx.Param(jax.random.normal(jax.random.key(0), (size, size)))

    def hidden(self, tokens_BS: jax.Array, **options: Any) -> Any:
        return self.table[...][tokens_BS], jnp.eye(self.config.vocab_size), {}


def test_the_gradient_equals_the_formula_in_float64():
    rng, size = np.random.default_rng(0), 7
    recipe: Any = load_recipe(RECIPE)
    model, loss_fn = Table(size), replace(recipe.loss_fn, beta=0.3, clip_high=0.3)
    inputs, targets = rng.integers(0, size, (2, 4, 6)).astype(np.int32)
    targets[:, :2], targets[1, 4:] = -1, -1
    old, reference = rng.normal(-2, 0.5, (2, 4, 6))
    advantages = np.array([1.5, -1.0, 0.5, -0.5])
    batch = {"inputs": inputs, "targets": targets, "old": old, "reference": reference, "advantages": advantages}
    on_device = {name: jnp.asarray(x) for name, x in batch.items()} | {"metrics": {}}

    def mean(model: Any, batch: Any) -> jax.Array:
        loss, weight, _ = loss_fn(model, batch)
        return loss / weight

    found, gradient = nnx.jit(nnx.value_and_grad(mean))(model, on_device)
    with jax.enable_x64(True):
        table = np.asarray(model.table[...]).astype(np.float64)
        expected, by_formula = jax.value_and_grad(by_hand)(jnp.asarray(table), batch, loss_fn)
        swapped = batch | {"advantages": advantages[::-1]}
        mistaken = jax.grad(by_hand)(jnp.asarray(table), swapped, loss_fn)
        by_formula, mistaken = np.asarray(by_formula), np.asarray(mistaken)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient["table"][...], by_formula, rtol=1e-4, atol=1e-6)
    assert np.abs(mistaken - by_formula).max() > 0.01
    _, _, metrics = loss_fn(model, on_device)
    assert 0 < float(metrics["clip_share"]) < np.sum(targets >= 0) and float(metrics["kl"]) > 0


# --- rollouts ---


def test_the_state_between_two_updates_has_the_batch_unless_its_shapes_have_changed():
    made: list[int] = []

    def of_size(size: int) -> Rollouts:
        def make(model: Any, number: int) -> Any:
            made.append(number)
            return {"x": np.full(size, number, np.float32)}

        return Rollouts(make, {"x": jax.ShapeDtypeStruct((size,), np.float32)}, updates=3)

    model, first = lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0)), of_size(2)
    assert [first(step, model)["x"][0] for step in range(5)] == [0, 0, 0, 1, 1] and made == [0, 1]
    state = first.state(5)
    assert first.state(3) == first.state(6) == b"" != state
    resumed, other, late = of_size(2), of_size(4), of_size(2)
    for rollouts, step in ((resumed, 5), (other, 5), (late, 6)):
        rollouts.resume(step, state)
    assert resumed(5, model)["x"].tolist() == [1, 1] and made == [0, 1]
    assert len(other(5, model)["x"]) == 4 and late(6, model)["x"][0] == 2 and made == [0, 1, 1, 2]


def test_rollouts_ahead_are_of_the_parameters_before_the_step_and_finished_beside_it_and_resume_with_their_bits():
    """Parameters are the steps computed; a batch has its number and the parameters that generated it."""
    begun, may_finish = list[tuple[int, int]](), [Event() for _ in range(9)]

    def of_run() -> Rollouts:
        def make(model: Any, number: int) -> Any:
            begun.append((number, model))

            def finish() -> Any:
                may_finish[number].wait()
                return {"x": np.array([number, model], np.int32)}

            return finish

        return Rollouts(make, {"x": jax.ShapeDtypeStruct((2,), np.int32)}, updates=2, ahead=True)

    def batch(rollouts: Rollouts, step: int) -> list[int]:
        return rollouts(step, lambda: cast(Any, step))["x"].tolist()

    whole = of_run()
    may_finish[0].set()
    assert batch(whole, 0) == [0, 0] and begun == [(0, 0), (1, 0)], "batch 1 is generated, and is not finished yet"
    for event in may_finish:
        event.set()
    states = {step: whole.state(step) for step in [1]}
    expected = [[0, 0], [1, 0], [1, 0], [2, 2], [2, 2], [3, 4], [3, 4]]
    for step, values in enumerate(expected, 1):
        assert batch(whole, step) == values
        states[step + 1] = whole.state(step + 1)
    for step in (1, 2, 3, 4):
        begun.clear()
        resumed = of_run()
        resumed.resume(step, states[step])
        assert [batch(resumed, at) for at in range(step, 8)] == expected[step - 1 :]
        assert begun[0] == (2 + step // 3, 2 + step // 3 * 2), "a resumed run generates no saved rollout again"


def test_a_rollout_ahead_that_fails_raises_at_its_step_and_is_not_in_the_state():
    def make(model: Any, number: int) -> Any:
        return lambda: {"x": np.zeros(1 // (1 - number))}

    rollouts = Rollouts(make, {"x": jax.ShapeDtypeStruct((1,), float)}, ahead=True)
    rollouts(0, lambda: cast(Any, None))
    assert rollouts.state(1) == b""
    with pytest.raises(ZeroDivisionError):
        rollouts(1, lambda: cast(Any, None))


def test_the_end_tokens_of_prompts_are_those_of_the_tokenizer_and_of_the_model(tmp_path):
    config = config_of(tmp_path, "a")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    prompts = read_prompts(cast(Any, config.data), str(tmp_path / "hf"), SMALL.vocab_size, max_tokens=8)
    assert prompts.end_tokens == sorted({3, 7, StandIn.eos_token_id})


@pytest.mark.slow
def test_completions_end_with_any_end_token_of_the_model_and_are_trained_up_to_it(tmp_path):
    config = config_of(tmp_path, "a", "mesh.shape=fsdp:2", "loss_fn.beta=0")
    ends = [*range(40, 100)]
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    rollouts: Any = cast(Any, config.make_batches)(config)
    make = lambda: make_decoder(SMALL, nnx.Rngs(0))  # noqa: E731
    model = fm.init_model(make, fm.abstract_state(make, fm.create_mesh("dp:1,fsdp:4,ep:1,tp:2,sp:1")))
    batch = rollouts(0, lambda: model)
    last = {*ends, StandIn.eos_token_id}
    completions = [row[row >= 0].tolist() for row in batch["targets"]]
    ended = [row for row in completions if row[-1] in last]
    assert ended and all(len(row) == 8 for row in completions if row[-1] not in last)
    assert not any(last & {*row[:-1]} for row in completions) and {row[-1] for row in ended} & {*ends}
    assert batch["metrics"]["completions/cut_off"].astype(bool).tolist() == [row[-1] not in last for row in completions]
    lengths = np.sum(batch["segment_ids"], axis=1)
    assert (np.argmax(np.cumsum(batch["targets"] >= 0, axis=1), axis=1) + 1 == lengths).all(), "nothing after the end"


# --- the layout for generation ---


def test_a_model_for_generation_has_merged_adapters_and_shares_equal_arrays_and_the_model_keeps_its_adapters():
    tokens = {name: jax.ShapeDtypeStruct((4, 8), np.int32) for name in ("inputs", "targets")}
    make = add_lora(lambda: make_decoder(SMALL, nnx.Rngs(0)), next_token_loss, tokens, rank=2, modules="/q/")
    teacher = lambda: make_decoder(replace(SMALL, num_layers=1), nnx.Rngs(0))  # noqa: E731
    make = partial(with_constants, make, {"teacher": teacher})
    model = fm.init_model(make, fm.abstract_state(make, fm.create_mesh("dp:1,fsdp:4,ep:1,tp:2,sp:1")))
    before = dict(fm.named_leaves(nnx.state(model)))
    generating = dict(fm.named_leaves(nnx.state(for_generation(model))))
    assert all(x is before[path] for path, x in fm.named_leaves(nnx.state(model))) and len(before) > len(generating)
    assert any(path.startswith("teacher/") for path in before) and not any("teacher" in path for path in generating)
    first = {path: x.addressable_shards[0].data.unsafe_buffer_pointer() for path, x in before.items()}
    copied = {
        path for path, x in generating.items() if x.addressable_shards[0].data.unsafe_buffer_pointer() != first[path]
    }
    assert copied == {path for path in generating if "/q/" in path}


# --- runs ---


def config_of(tmp_path: Path, name: str, *words: str, rows: Any = None) -> TrainConfig:
    folder, rewards = tmp_path / "hf", tmp_path / "rewards.py"
    if not folder.exists():
        parameters = nnx.state(make_decoder(SMALL, nnx.Rngs(0)))
        save_safetensors(folder, parameters, DECODER_NAMES["llama"], config=huggingface_config(vars(SMALL)))
    rewards.write_text(REWARDS)
    rows = rows or [{"prompt": "ab"[i % 2] * (1 + i % 5), "letter": "e"} for i in range(20)]
    given = {
        **{"data.source": write_rows(tmp_path / "prompts.jsonl", rows), "data.rewards": f"{rewards}:share,length*0.01"},
        **{"data.sequence_length": 16, "data.max_tokens": 8, "data.batch_size": 16, "data.group_size": 8},
        **{"run.steps": 5, "checkpoint.every": 3, "model.dtype": "float32", "model.remat": "none"},
        **{"model.scan": "false", "run.platform": "auto", "optimizer.learning_rate": 0.01},
        **{"checkpoint.start_from": folder, "run.folder": tmp_path / name},
    }
    given |= dict(word.split("=", 1) for word in words)
    return apply_overrides(load_recipe(RECIPE), [f"{key}={value}" for key, value in given.items()])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(chats, "open_tokenizer", lambda folder, vocab_size: StandIn(path=Path(folder)))


def problems(config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        run(config)
    return str(caught.value)


def test_mistakes_of_rewards_are_found_before_the_run(tmp_path):
    file = tmp_path / "rewards.py"
    text = problems(config_of(tmp_path, "a", f"data.rewards={file}:too_few,not_finite,texts,share"))
    for line in (
        "reward too_few must return a list of 16 floats, got 1 of them",
        "reward not_finite must return finite floats, got nan for '', and 15 more that are not",
        "reward texts must return a list of 16 floats, got ['1', '1'",
    ):
        assert line in text
    text = problems(config_of(tmp_path, "a", f"data.rewards={file}:none*1,share*x,no_rows"))
    assert "has no function 'none'; it has share, length" in text
    assert "the weight of share must be a finite number, got 'x'" in text and "no_rows: " in text
    assert "KeyError: 'missing'" in problems(config_of(tmp_path, "a", f"data.rewards={file}:fails"))
    assert "data.rewards=share must be FILE.py:NAME*WEIGHT" in problems(config_of(tmp_path, "a", "data.rewards=share"))
    assert not (tmp_path / "a").exists()


def test_mistakes_of_prompts_and_settings_are_found_before_the_run(tmp_path):
    rows = [{"prompt": "a" * 20}, {"prompt": "a"}, {"prompt": [{"role": "user"}]}, {"letter": "a"}, {"prompt": "b" * 9}]
    text = problems(config_of(tmp_path, "a", rows=rows))
    assert "row 1: has 21 tokens; a prompt must have 1 to 9, so that data.max_tokens=8 fit after it" in text
    assert "row 3: 'role' and 'content' of message 1 must be text" in text
    assert "row 4: has no 'prompt'" in text and "row 5: has 10 tokens" in text and "row 2" not in text
    text = problems(config_of(tmp_path, "a", "data.group_size=5", "data.packing=false", "data.held_out=0.1"))
    assert "data.batch_size=16 must be a multiple of data.group_size=5" in text
    assert "data.packing has no effect on prompts" in text and "data.held_out has no effect" in text
    assert "data.batch_size=16 takes 2 prompts, got 1" in problems(config_of(tmp_path, "a", rows=rows[1:2]))
    assert "data.max_tokens=17 must be at most data.sequence_length=16" in problems(
        config_of(tmp_path, "a", "data.max_tokens=17")
    )


@pytest.mark.slow
def test_a_run_learns_a_reward(tmp_path):
    words = "run.steps=60", "data.batch_size=32", "loss_fn.beta=0", "mesh.shape=fsdp:1", "optimizer.learning_rate=0.02"
    rewards = f"data.rewards={tmp_path / 'rewards.py'}:share"
    rows = run(config_of(tmp_path, "a", *words, rewards)).rows
    assert rows[0]["reward"] < 0.1 and np.mean([row["reward"] for row in rows[-5:]]) > 0.8
    assert "kl" not in rows[0]


@pytest.mark.slow
def test_runs_agree_on_meshes_and_resume_bit_for_bit_between_the_updates_of_a_batch(tmp_path):
    words = "data.updates=2", "mesh.shape=fsdp:2,tp:2"
    whole = run(config_of(tmp_path, "whole", *words)).rows
    run(config_of(tmp_path, "killed", *words), kill_at=4)
    lines = run(config_of(tmp_path, "killed", *words)).lines
    assert any("at step 3; resuming" in line for line in lines)
    known = [{name: x for name, x in row.items() if "_per_s" not in name and "seconds" not in name} for row in whole]
    again = [{name: row.get(name) for name in known[0]} for row in rows_of(tmp_path / "killed")]
    assert again == [{name: row[name] for name in known[0]} for row in rows_of(tmp_path / "whole")]
    assert state_of(tmp_path / "killed", 5) == state_of(tmp_path / "whole", 5)
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-6) and whole[1]["kl"] > 1e-3 and whole[2]["kl"] > 1e-3
    assert [row["reward"] for row in whole[:4:2]] == [row["reward"] for row in whole[1:4:2]]
    others = {"one": "mesh.shape=fsdp:1", "pipeline": "mesh.shape=pp:2,fsdp:2"}
    for name, mesh in others.items():
        rows = run(config_of(tmp_path, name, "data.updates=2", "run.steps=3", "pipeline.num_microbatches=2", mesh)).rows
        for row, other in zip(whole, rows, strict=False):
            for metric in ("loss", "kl", "reward", "clip_share", "completions/length", "rewards/share"):
                assert other[metric] == pytest.approx(row[metric], rel=1e-4, abs=1e-5), (name, metric)


@pytest.mark.slow
def test_a_run_ahead_learns_and_resumes_bit_for_bit_and_differs_from_one_that_is_not(tmp_path):
    words = "data.ahead=true", "mesh.shape=fsdp:2", "data.updates=2"
    whole, plain = (run(config_of(tmp_path, name, *words[name == "off" :])).rows for name in ("whole", "off"))
    run(config_of(tmp_path, "killed", *words), kill_at=4)
    assert any("at step 3; resuming" in line for line in run(config_of(tmp_path, "killed", *words)).lines)
    assert state_of(tmp_path / "killed", 5) == state_of(tmp_path / "whole", 5)
    assert [row["reward"] for row in rows_of(tmp_path / "killed")] == [row["reward"] for row in whole]
    assert [row["reward"] for row in whole[:2]] == [row["reward"] for row in plain[:2]]
    assert whole[2]["reward"] != plain[2]["reward"] and abs(whole[2]["kl"] - plain[2]["kl"]) < 0.1
    words = "run.steps=70", "data.batch_size=32", "loss_fn.beta=0", "mesh.shape=fsdp:1", "optimizer.learning_rate=0.02"
    rewards = f"data.rewards={tmp_path / 'rewards.py'}:share"
    rows = run(config_of(tmp_path, "learns", "data.ahead=true", *words, rewards)).rows
    assert rows[0]["reward"] < 0.1 and np.mean([row["reward"] for row in rows[-5:]]) > 0.8


@pytest.mark.slow
def test_the_reference_of_adapters_is_the_model_without_them(tmp_path):
    words = "data.updates=2", "mesh.shape=fsdp:2", "lora.rank=2", "run.steps=3", "optimizer.learning_rate=0.05"
    rows = run(config_of(tmp_path, "a", *words)).rows
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-3 and rows[2]["kl"] > 1e-3
    assert rows[2]["clip_share"] == 0  # a new batch, by the model with adapters
    assert json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[0])["reward"] == rows[0]["reward"]
