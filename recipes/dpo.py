"""Train a model on preferences: pairs of a chosen and a rejected completion of a prompt. See docs/finetune.md.

flax-mesh train recipes/dpo.py checkpoint.start_from=FOLDER data.source=PAIRS.jsonl
"""

from dataclasses import dataclass, field, fields
from functools import cache, partial

import jax
import jax.numpy as jnp

from flax_mesh.inference import open_trained
from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder, pretrained_config, token_log_probs
from flax_mesh.train import (
    ChatConfig,
    CheckpointConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    map_rows,
    read_preferences,
)

COMPUTED_AS = ("dtype", "param_dtype", "attention", "scan", "loss_chunk")  # settings of the reference


@dataclass(frozen=True)
class PreferenceLoss:
    """Direct preference optimization (Rafailov et al. 2023), or IPO (Azar et al. 2023); its fields are settings.

    Attributes:
        beta: How far the model may move from the reference; larger values keep it closer. The tau of IPO.
        type: "sigmoid", or "ipo" with the mean log-ratio of the tokens of a completion.
        label_smoothing: The share of pairs whose preference is expected to be wrong, of "sigmoid".
    """

    beta: float = field(default=0.1, metadata={"above": 0})
    type: str = field(default="sigmoid", metadata={"one_of": ("sigmoid", "ipo")})
    label_smoothing: float = field(default=0.0, metadata={"at_least": 0, "below": 0.5})

    def __post_init__(self):
        if self.type == "ipo" and self.label_smoothing:
            raise ValueError("the loss ipo has no label smoothing; set loss_fn.label_smoothing=0")

    def __call__(self, model, batch):
        """Sums over pairs: the loss, the number of pairs, and metrics."""
        log_probs, is_pair = of_documents(token_log_probs(model, batch), batch)
        reference, _ = of_documents(batch["reference"], batch)
        ratios = log_probs - reference
        if self.type == "ipo":
            counts, _ = of_documents(batch["targets"] >= 0, batch)
            means = ratios / jnp.maximum(counts, 1)
            losses = jnp.square(means[..., 0] - means[..., 1] - 1 / (2 * self.beta))
        else:
            margins = self.beta * (ratios[..., 0] - ratios[..., 1])
            smoothing = self.label_smoothing
            losses = -(1 - smoothing) * jax.nn.log_sigmoid(margins) - smoothing * jax.nn.log_sigmoid(-margins)
        total = partial(jnp.sum, where=is_pair, dtype=jnp.float32)
        chosen, rejected = jnp.moveaxis(self.beta * ratios, -1, 0)
        rewards = {
            "chosen": chosen,
            "rejected": rejected,
            "margins": chosen - rejected,
            "accuracies": chosen > rejected,
        }
        logps = {"chosen": log_probs[..., 0], "rejected": log_probs[..., 1]}
        metrics = {"rewards": rewards, "logps": logps}
        return total(losses), total(jnp.ones_like(losses)), jax.tree.map(total, metrics)


def of_documents(tokens_BS, batch):
    """Sums over the tokens of each document, (B, P, 2): chosen and rejected of P pairs; and whether there is a pair."""
    segments_BS = batch["segment_ids"]
    most = segments_BS.shape[1] // 2  # pairs in a row
    is_in_BNS = segments_BS[:, None] == jnp.arange(1, 2 * most + 1)[:, None]  # a part of the sum, not in memory
    sums_BN = jnp.sum(tokens_BS[:, None], axis=2, where=is_in_BNS, dtype=jnp.float32)
    return sums_BN.reshape(-1, most, 2), jnp.arange(most) < jnp.max(segments_BS, axis=1, keepdims=True) // 2


def open_reference(config):
    """A function that computes log-probabilities with the parameters that the run starts from."""
    settings = [f"model.{name}={getattr(config.model, name)}" for name in COMPUTED_AS]
    shape = [] if "pp" in config.mesh.shape else [f"mesh.shape={config.mesh.shape}"]  # without: as many as possible
    trained = open_trained(config.checkpoint.start_from, [*settings, *shape], average=False)
    if trained.source.lora.rank and trained.source.lora != config.lora:
        raise ValueError(
            "checkpoint.start_from has adapters, which a run with other settings lora.* leaves out; set the same ones, "
            "or start from its export: flax-mesh checkpoint export"
        )
    options = {"axes": config.model.axes, "parts": config.pipeline.num_microbatches}
    return lambda batch: map_rows(token_log_probs, trained.model, batch, **options)


@cache  # for both functions of the recipe
def read(config):
    model, start = config.model, config.checkpoint.start_from
    key = {x.name: getattr(model, x.name) for x in fields(model) if x.metadata.get("changes_result", True)}
    options = {"log_probs": partial(open_reference, config), "keep_in": config.run.folder, "key": repr(key)}
    return read_preferences(config.data, start, model.vocab_size, **options)


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=PreferenceLoss(),
        flops_per_token=flops_per_token,
        model=DecoderConfig(dtype="bfloat16", remat="full", scan=True, loss_chunk=2048),  # the folder has the sizes
        model_from=pretrained_config,
        data=ChatConfig(source="pairs.jsonl", sequence_length=2048, batch_size=16),
        make_batches=lambda config: read(config).batches(config.run.seed),
        eval_fns={"held_out": lambda config, evaluate: read(config).metrics(evaluate)},
        optimizer=OptimizerConfig(
            learning_rate=1e-6, end_learning_rate=1e-7, warmup_steps=20, decay_steps=1000, weight_decay=0.0
        ),
        checkpoint=CheckpointConfig(every=200),
        run=RunConfig(steps=1000, folder="runs/dpo", eval_every=100),
    )
