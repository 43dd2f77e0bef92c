"""A run that starts from the parameters of another model: a checkpoint, or a folder in Hugging Face's format."""

from collections.abc import Sequence
from pathlib import Path

import jax

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import find_checkpoints
from flax_mesh.errors import ConfigError
from flax_mesh.state import TrainState


def check_start(folder: str) -> list[str]:
    """What is wrong with `checkpoint.start_from`, before anything is read or compiled."""
    if not folder or _is_safetensors(folder):
        return []
    try:
        find_checkpoints(folder)
    except ConfigError as error:
        return [f"checkpoint.start_from: {problem}, or a folder of safetensors" for problem in error.problems]
    return []


def start_from(folder: str, state: TrainState, layers: Sequence[str]) -> tuple[TrainState, str]:
    """`state` with the parameters in `folder`, and a text that says what was and was not filled."""
    tree = state.to_nnx()
    checkpoints, step = find_checkpoints(folder)
    with Checkpointer(checkpoints, layers=layers) as checkpointer:
        tree, filled = checkpointer.fill(tree, step, include="model/")
    return TrainState(tuple(jax.tree.leaves(tree)), state.definition), str(filled)


def _is_safetensors(folder: str) -> bool:
    path = Path(folder).expanduser()
    return path.is_dir() and any(path.glob("*.safetensors"))
