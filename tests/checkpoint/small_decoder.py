"""The recipe of the tests of `flax-mesh checkpoint`, a small decoder on eight devices, with its program and a change to
its state."""

from functools import cache
from pathlib import Path

import jax
import numpy as np

from flax_mesh import named_leaves
from flax_mesh.models import make_decoder, next_token_loss
from flax_mesh.recipe.program import build_program
from flax_mesh.train import DataConfig, MeshConfig, RunConfig, TrainConfig, apply_overrides, load_recipe
from tests.checkpoint.states import SMALL

RECIPE = __file__
QWEN = Path(__file__).parent / "hf" / "data" / "qwen2"  # a folder of Hugging Face
CHANGED = "model/layers/1/mlp/up/kernel"
DELTA = 0.5


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=SMALL,
        mesh=MeshConfig(shape="dp:2,fsdp:2,tp:2"),
        data=DataConfig(sequence_length=32, batch_size=8),
        run=RunConfig(steps=12, platform="cpu:8"),
    )


@cache
def program_of(*settings):
    return build_program(apply_overrides(load_recipe(RECIPE), settings), print)


def changed(state):
    """`state` with another value in one element of one array."""
    leaves = dict(named_leaves(state))
    value = np.array(leaves[CHANGED])
    value.flat[7] += DELTA
    return jax.tree.unflatten(jax.tree.structure(state), [*(leaves | {CHANGED: jax.device_put(value)}).values()])
