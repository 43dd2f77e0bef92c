"""Train a model on rewards of its own completions, compared in groups (GRPO). See docs/finetune.md.

flax-mesh train recipes/grpo.py checkpoint.start_from=FOLDER data.source=PROMPTS.jsonl data.rewards=REWARDS.py:NAME
"""

from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import flax_mesh as fm
from flax_mesh.inference import for_generation, open_trained
from flax_mesh.lora import with_lora
from flax_mesh.models import (
    DecoderConfig,
    Generated,
    Sampling,
    flops_per_token,
    generate,
    make_decoder,
    pretrained_config,
    token_log_probs,
)
from flax_mesh.train import (
    ChatConfig,
    OptimizerConfig,
    Rollouts,
    RunConfig,
    TrainConfig,
    array_batches,
    map_rows,
    read_prompts,
    read_rewards,
)

AT_LEAST_1 = {"at_least": 1, "at_most": 2**31 - 1}
UNUSED = ("train_on", "packing", "on_long_row", "held_out", "eval_batches", "bin_dtype", "resumable")
COMPUTED_AS = ("dtype", "param_dtype", "attention", "scan", "loss_chunk")  # settings of the reference
ADAPTED = with_lora(token_log_probs)


@dataclass(frozen=True)
class RolloutConfig(ChatConfig):
    """The section `data`: prompts, their completions and rewards. A batch has `batch_size` completions.

    Attributes:
        rewards: Functions of a Python file and their weights, "rewards.py:correct*1,short*0.2". Each is called as
            `function(prompts, completions, rows)` with lists, and must return a finite float for every completion.
        group_size: Completions of a prompt. Rewards are compared in this group.
        max_tokens: The most tokens of a completion, with the end token.
        updates: Steps that train on each batch of completions.
        ahead: Whether each batch is generated before the steps on the one before it, and its rewards during these.
        scale: Whether advantages are divided by the standard deviation of the group.
        temperature: Of the sampling. The log-probabilities of the loss are the model's own, as at temperature 1.
        rows_at_once: Completions that are generated together, whose keys and values are in memory.
        generation_mesh: The mesh for generation, such as "fsdp:2,tp:4". "": as `flax_mesh.inference.for_generation`.
    """

    rewards: str = ""
    group_size: int = field(default=8, metadata={"at_least": 2, "at_most": 2**31 - 1})
    max_tokens: int = field(default=256, metadata=AT_LEAST_1)
    updates: int = field(default=1, metadata=AT_LEAST_1)
    ahead: bool = False
    scale: bool = True
    temperature: float = field(default=1.0, metadata={"above": 0})
    rows_at_once: int = field(default=64, metadata=AT_LEAST_1)
    generation_mesh: str = ""


@dataclass(frozen=True)
class PolicyLoss:
    """Group relative policy optimization (Shao et al. 2024), as the mean over all tokens of the batch.

    Attributes:
        beta: The weight of the KL divergence from the reference, estimated as k3. 0: there is no reference.
        clip_low: A token whose probability falls below 1 - clip_low times the one of its rollout has no gradient if its
            advantage is negative.
        clip_high: Likewise for one that rises above 1 + clip_high times, if its advantage is positive.
    """

    beta: float = field(default=0.04, metadata={"at_least": 0})
    clip_low: float = field(default=0.2, metadata={"above": 0, "below": 1})
    clip_high: float = field(default=0.2, metadata={"above": 0})

    def __call__(self, model, batch):
        """Sums over tokens of completions: the loss, the number of tokens, and metrics."""
        log_probs, advantages = token_log_probs(model, batch), batch["advantages"][:, None]
        total = partial(jnp.sum, where=batch["targets"] >= 0, dtype=jnp.float32)
        ratios = jnp.exp(log_probs - batch["old"])
        clipped = jnp.clip(ratios, 1 - self.clip_low, 1 + self.clip_high)
        losses = -jnp.minimum(ratios * advantages, clipped * advantages)
        metrics = {name: jnp.sum(values) for name, values in batch["metrics"].items()}
        metrics["clip_share"] = total(clipped * advantages < ratios * advantages)
        if self.beta:
            difference = batch["reference"] - log_probs
            divergence = jnp.exp(difference) - difference - 1
            losses, metrics["kl"] = losses + self.beta * divergence, total(divergence)
        return total(losses), total(jnp.ones_like(losses)), metrics


def rollouts(config) -> Rollouts:
    """Completions of the prompts by the model of the run, with rewards and log-probabilities."""
    data, size = config.data, config.data.group_size
    seed = config.run.seed if data.seed is None else data.seed
    changed = [name for name in UNUSED if getattr(data, name) != getattr(ChatConfig, name)]
    problems = [f"data.{name} has no effect on prompts; leave it out" for name in changed]
    if data.batch_size % size:
        problems.append(f"data.batch_size={data.batch_size} must be a multiple of data.group_size={size}")
    if problems:
        raise fm.ConfigError(problems)
    rewards = read_rewards(data.rewards)
    prompts = read_prompts(data, config.checkpoint.start_from, config.model.vocab_size, max_tokens=data.max_tokens)
    if len(prompts.rows) < (count := data.batch_size // size):
        raise fm.ConfigError(f"data.batch_size={data.batch_size} takes {count} prompts, got {len(prompts.rows)}")
    choose = array_batches({"row": np.arange(len(prompts.rows))}, batch_size=count, seed=seed)
    options = {"axes": config.model.axes, "parts": config.pipeline.num_microbatches}
    sizes = {"max_tokens": data.max_tokens, "sampling": Sampling(data.temperature), "stop_tokens": prompts.end_tokens}
    sizes |= {"batch_size": min(data.rows_at_once, data.batch_size), "cache_length": data.sequence_length + 1}
    reference = cache(partial(open_reference, config))

    def scored(ids, completions, arrays):
        rows = [prompts.rows[i] for i in ids]
        texts = [prompts.decode(x.tokens[: len(x.tokens) - x.stopped].tolist()) for x in completions]
        values = rewards([row["prompt"] for row in rows], texts, rows)
        return arrays | compared(data, completions, values, rewards.weights)

    def make(model, number):
        ids = np.repeat(choose(number)["row"], size)
        random = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        given = [prompts.tokens[i] for i in ids]
        completions = generate(for_generation(model, data.generation_mesh), given, seed=random, **sizes)
        tokens = tokens_of(given, completions, data.sequence_length)
        computed = {"old": map_rows(ADAPTED, model, tokens, **options)}
        if config.loss_fn.beta:  # with adapters, the reference is the model without them
            frozen = model if config.lora.rank else reference()
            computed["reference"] = map_rows(token_log_probs, frozen, tokens, **options)
        return partial(scored, ids, completions, tokens | computed)

    # A first call of the rewards, with empty completions, finds their mistakes before the run starts.
    ids = np.repeat(choose(0)["row"], size)
    empty = [Generated(np.zeros(1, np.int32), np.zeros(1, np.float32), True)] * len(ids)
    tokens = tokens_of([prompts.tokens[i] for i in ids], empty, data.sequence_length)
    floats = dict.fromkeys(("old", "reference")[: 1 + bool(config.loss_fn.beta)], tokens["inputs"].astype(np.float32))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scored(ids, empty, tokens | floats))
    order = {"updates": data.updates, "ahead": data.ahead}
    return Rollouts(make, shapes, rows=prompts.hashes, description=prompts.description, **order)


def tokens_of(prompts, completions, length) -> dict:
    """The inputs, targets and segments of completions, (N, S). Targets are the tokens of completions, with the end."""
    shape = len(prompts), length
    inputs, targets, segments = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first, size = len(prompt) - 1, len(completion.tokens)
        inputs[row, : first + size] = [*prompt, *completion.tokens[:-1]]
        targets[row, first : first + size] = completion.tokens
        segments[row, : first + size] = 1
    return {"inputs": inputs, "targets": targets, "segment_ids": segments}


def compared(config: RolloutConfig, completions, rewards, weights) -> dict:
    """Advantages, (N,), and metrics, whose sums a run divides by all tokens. Rows n G to n G + G - 1 are a group."""
    group, lengths = (-1, config.group_size), np.array([len(x.tokens) for x in completions])
    reward = np.sum([weights[name] * values for name, values in rewards.items()], axis=0)
    deviations = reward.reshape(group).std(axis=1, ddof=1, keepdims=True)
    advantages = reward.reshape(group) - reward.reshape(group).mean(axis=1, keepdims=True)
    advantages = advantages / (deviations + 1e-4) if config.scale else advantages
    metrics = {f"rewards/{name}": values for name, values in rewards.items()}
    metrics |= {"reward": reward, "reward_std": np.repeat(deviations, config.group_size)}
    cut_off = np.array([not x.stopped for x in completions])
    metrics |= {"completions/length": lengths, "completions/cut_off": cut_off}
    metrics = {name: (values * lengths.mean()).astype(np.float32) for name, values in metrics.items()}
    return {"advantages": advantages.reshape(-1).astype(np.float32), "metrics": metrics}


def open_reference(config):
    """The model that the run starts from."""
    settings = [f"model.{name}={getattr(config.model, name)}" for name in COMPUTED_AS]
    shape = [] if "pp" in config.mesh.shape else [f"mesh.shape={config.mesh.shape}"]  # without: as many as possible
    trained = open_trained(config.checkpoint.start_from, [*settings, *shape], average=False)
    if trained.source.lora.rank:
        raise fm.ConfigError("checkpoint.start_from has adapters, which a run without lora.rank leaves out; export it")
    return trained.model


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=PolicyLoss(),
        flops_per_token=flops_per_token,
        model=DecoderConfig(dtype="bfloat16", remat="full", scan=True, loss_chunk=2048),  # the folder has the sizes
        model_from=pretrained_config,
        data=RolloutConfig(source="prompts.jsonl", sequence_length=1024, batch_size=64),
        make_batches=rollouts,
        optimizer=OptimizerConfig(schedule="constant", learning_rate=1e-6, warmup_steps=0, weight_decay=0.0),
        run=RunConfig(steps=1000, folder="runs/grpo", eval_every=0),
    )
