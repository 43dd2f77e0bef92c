"""The recipe of the tests of `flax-mesh checkpoint`, a small decoder on eight devices, with its program and a change to
its state."""

from pathlib import Path

import jax
import numpy as np

from flax_mesh import named_leaves
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import DataConfig, MeshConfig, RunConfig, TrainConfig, apply_overrides, load_recipe
from flax_mesh.train.build import build_program

RECIPE = __file__
QWEN = Path(__file__).parent / "hf" / "data" / "qwen2"  # a folder of Hugging Face
CHANGED = "model/layers/1/mlp/up/kernel"
DELTA = 0.5


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(
            vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, mlp_size=32
        ),
        mesh=MeshConfig(shape="dp:2,fsdp:2,tp:2"),
        data=DataConfig(sequence_length=32, batch_size=8),
        run=RunConfig(steps=12, platform="cpu:8"),
    )


def program_of(*settings):
    return build_program(apply_overrides(load_recipe(RECIPE), settings), print)


def changed(state):
    """`state` with another value in one element of one array."""
    leaves = [
        x if path != CHANGED else jax.device_put(np.asarray(x) + DELTA * (np.arange(x.size) == 7).reshape(x.shape))
        for path, x in named_leaves(state)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)
