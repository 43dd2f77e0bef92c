"""Initialize the parameters of a new run from a checkpoint or from a folder in the Hugging Face format."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.base import Base, frozen_on_disk, make_base
from flax_mesh.checkpoint.checkpointer import load_parameters
from flax_mesh.checkpoint.checksums import noticing_deletion
from flax_mesh.checkpoint.find import find_valid, of_newest, step_number
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.hf.kept import KEPT, TOKENIZERS, is_huggingface, keep_files, other_files, tokenizer_file
from flax_mesh.checkpoint.read import read_record
from flax_mesh.data.run_data import TEXT, TOKENS
from flax_mesh.errors import ConfigError, labelled
from flax_mesh.processes import broadcast_from_process_0
from flax_mesh.recipe.checks import MAY_DIFFER
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.overrides import Change, changes, default_texts
from flax_mesh.recipe.saved import is_trained_on_text
from flax_mesh.step.state import TrainState
from flax_mesh.store import model_folder, on_this_machine, stored_path

KINDS = {TEXT: "bytes of text", TOKENS: "ids in token files"}


class Start(NamedTuple):
    """A folder to start from: safetensors (`step` is None), or its newest valid step and the damaged newer ones."""

    folder: str
    step: Path | None = None
    damaged: tuple[str, ...] = ()

    @property
    def files(self) -> Path:
        """The folder of the tokenizer and of the other files that came with the parameters."""
        return model_folder(self.folder) if self.step is None else on_this_machine(self.step.parent / KEPT)


def find_start(folder: str) -> Start:
    """Find the kind and the content of `folder`. Only process 0 reads the files to verify them."""
    if is_huggingface(folder):
        other_files(model_folder(folder))  # checks the links
        return Start(folder)

    def look() -> str:
        step, damaged = find_valid(folder)
        return json.dumps([str(step), [str(path) for path in damaged]])

    step, damaged = json.loads(broadcast_from_process_0("start_from", look))
    return Start(folder, stored_path(step), tuple(damaged))


def check_start_settings(start: Start, config: TrainConfig, kind: str, *, allow_changes: bool) -> list[Change]:
    """List the settings of the model, and the kind of the data, that differ from those saved with the checkpoint.

    Raises ConfigError if one of them changes the result, unless `allow_changes` or it is in MAY_DIFFER. Nothing is
    compared with a checkpoint without settings; `check_config` compares the settings of config.json.
    """
    if start.step is None:
        return []
    step, record = start.step.name, read_record(start.step)
    saved, changed = record["config"], _change_of_kind(record, kind)
    if any(key.startswith("model.") for key in saved):
        compared = changes(default_texts(config, "model") | saved, config)
        changed += [change for change in compared if change.key.startswith("model.")]
    refused = [
        change for change in changed if change.changes_result and change.key.removeprefix("model.") not in MAY_DIFFER
    ]
    if refused and not allow_changes:
        raise ConfigError(
            list(map(str, refused)),
            head=f"checkpoint.start_from={start.folder}: step {step} was saved with other settings:",
            repair="Use the saved settings, or start with these by --allow-changes.",
        )
    return changed


def _change_of_kind(record: Mapping[str, Any], kind: str) -> list[Change]:
    """One change if the ids of the model were bytes of text and now belong to a tokenizer, or the reverse."""
    before = TEXT if is_trained_on_text(record) else record.get("data", {}).get("kind")
    if before not in KINDS or kind not in KINDS or before == kind:
        return []
    return [Change("tokens of data.source", KINDS[before], KINDS[kind], True)]


def check_text(kind: str, source: str, files: Path) -> None:
    """Raise ConfigError if the data are text, whose tokens are bytes, and a tokenizer came with the model.

    `files` is the folder of the tokenizer, which need not exist.
    """
    if kind != TEXT or (tokenizer := tokenizer_file(files)) is None:
        return
    text = Path(source) if Path(source).is_file() else Path("TEXT.txt")
    tokens, read = text.with_suffix(".npy"), f"Path({str(text)!r}).read_text('utf-8')"
    if tokenizer.name == TOKENIZERS[0]:
        package, ids = "tokenizers import Tokenizer", f"Tokenizer.from_file({str(tokenizer)!r}).encode({read}).ids"
    else:
        package = "transformers import AutoTokenizer"
        ids = f"AutoTokenizer.from_pretrained({str(files)!r}).encode({read})"
    raise ConfigError(
        [
            f"data.source={source} is text, whose tokens are bytes, but the ids of the model belong to {tokenizer}; "
            f"encode the text, and set data.source={tokens}:",
            f"  import numpy as np; from pathlib import Path; from {package}",
            f"  np.save({str(tokens)!r}, np.array({ids}, np.uint32))",
            f"If the ids of the model are bytes, remove {tokenizer}.",
        ]
    )


def start_from(
    start: Start, state: TrainState, layers: Sequence[str], checkpointer: Checkpointer | None = None
) -> tuple[TrainState, str]:
    """Return `state` with the parameters from `start`, and a text that lists the restored and the missing arrays.

    The checkpoints of a `checkpointer` leave out those parameters from then on that are not trained.
    """
    if start.step is None or jax.process_count() > 1:  # all processes read the same step
        return _start_from(start, state, layers, checkpointer)
    given = [start]

    def read() -> tuple[TrainState, str]:
        return _start_from(given.pop() if given else find_start(start.folder), state, layers, checkpointer)

    return of_newest(read, start.folder)


def _start_from(
    start: Start, state: TrainState, layers: Sequence[str], checkpointer: Checkpointer | None
) -> tuple[TrainState, str]:
    path = start.step or model_folder(start.folder)
    with nullcontext() if start.step is None else noticing_deletion(path):
        state, report = load_parameters(path, state, layers or None)
        if checkpointer is not None:
            arrays = frozen_on_disk(state, layers or None, report.restored)
            base = broadcast_from_process_0("base", lambda: json.dumps(make_base(start.step or start.folder, arrays)))
            checkpointer.set_base(Base(*json.loads(base)), state)
    if start.step is None:
        return state, f"restored all {len(report.restored)} arrays of the model"
    skipped = "".join(f"{path} is damaged and was skipped; " for path in start.damaged)
    return state, f"{skipped}step {step_number(path)}, {report}"


def load_constants(folders: Mapping[str, str], state: TrainState) -> TrainState:
    """`state` with the parameters of the constants of a recipe, name -> folder.

    Arrays that they replace are deleted first, so that a device never has both.
    """
    for name, folder in folders.items():
        tree = state.to_nnx()
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree["model"][name]
        )
        for x in jax.tree.leaves(tree["model"][name]):
            if isinstance(x, jax.Array):
                x.delete()
        with labelled(f"constants[{name!r}]"):
            loaded = open_decoder(model_folder(folder)).load(abstract)
        model = nnx.State({**tree["model"].raw_mapping, name: loaded})
        state = state.with_state(nnx.State({**tree.raw_mapping, "model": model}))
    return state


def keep_other_files(start: Start, checkpoints: Path) -> None:
    """Keep the tokenizer and the other files that came with the parameters, for an export of the run's checkpoints."""
    try:
        keep_files(start.files, checkpoints)
    except OSError as error:
        raise ConfigError(f"the files of {start.files} cannot be copied to {checkpoints / KEPT}: {error}") from error
