"""A small decoder on text: the config of its runs, and batches of random tokens for single steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss, sample
from flax_mesh.recipe.program import TrainProgram, batch_sharding
from flax_mesh.train import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig, apply_overrides


def config_of(folder: Path | str, text: Path | str, *settings: str, **kinds: Any) -> TrainConfig:
    """The config of a run of two steps; `kinds` are fields of the model."""
    sizes = DecoderConfig(
        vocab_size=256, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=32
    )
    config = TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        sample=sample,
        model=replace(sizes, **kinds),
        data=DataConfig(source=str(text), sequence_length=16, batch_size=16, held_out=0.2, eval_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=10),
        checkpoint=CheckpointConfig(every=2),
        run=RunConfig(steps=2, folder=str(folder), platform="cpu", eval_every=2, sample_tokens=0),
    )
    return apply_overrides(config, ["pipeline.num_microbatches=4", *settings])


def batch_of(program: TrainProgram, seed: int = 0) -> dict[str, jax.Array]:
    rows, length = program.recipe.data.batch_size, program.recipe.data.sequence_length
    tokens = np.random.default_rng(seed).integers(0, program.recipe.model.vocab_size, (rows, length + 1), np.int32)
    there = batch_sharding(program.mesh, program.rules.axes)
    return {"inputs": jax.device_put(tokens[:, :-1], there), "targets": jax.device_put(tokens[:, 1:], there)}
