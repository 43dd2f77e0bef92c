"""Initialize the parameters of a new run from a checkpoint or from a folder in the Hugging Face format."""

import json
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.find import find_valid, step_number
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.processes import broadcast_from_process_0
from flax_mesh.step.state import TrainState
from flax_mesh.tree import named_leaves


def start_from(folder: str, state: TrainState, layers: Sequence[str]) -> tuple[TrainState, str]:
    """Return `state` with the parameters from `folder`, and a text that lists what was and was not restored."""
    if is_huggingface(folder):
        tree = state.to_nnx()
        model = open_decoder(folder).load(tree["model"])
        text = f"restored all {len(named_leaves(model))} arrays of the model"
        return state.with_state(nnx.State({**tree.raw_mapping, "model": model})), text
    step, damaged = _valid_step(folder)
    with Checkpointer(step.parent, layers=layers or None) as checkpointer:
        # `_valid_step` has verified it.
        state, report = checkpointer.restore_partial(state, step_number(step), include="model/", verify=False)
    skipped = "".join(f"{path} is damaged and was skipped; " for path in damaged)
    return state, f"{skipped}step {step_number(step)}, {report}"


def _valid_step(folder: str) -> tuple[Path, list[str]]:
    """The newest valid step and the damaged newer ones. Only process 0 reads the files to verify them."""

    def look() -> str:
        step, damaged = find_valid(folder)
        return json.dumps([str(step), [str(path) for path in damaged]])

    step, damaged = json.loads(broadcast_from_process_0("start_from", look))
    return Path(step), damaged


def is_huggingface(folder: str) -> bool:
    path = Path(folder).expanduser()
    return path.is_dir() and any(path.glob("*.safetensors"))
