"""The files of a Hugging Face folder that are not parameters: config.json, the tokenizer files, and others.

The folder of the checkpoints of an imported model keeps them below `huggingface`, and an export writes them again. They
are not part of a step and have no checksums: a tokenizer may be changed there.
"""

import json
import shutil
from pathlib import Path
from typing import cast

from flax_mesh.checkpoint.hf.decoders import (
    OTHER_NAME,
    QUANTIZATION,
    decoder_config_from_hf,
    has_images,
    huggingface_config,
    text_config,
)
from flax_mesh.checkpoint.hf.family import Json
from flax_mesh.checkpoint.hf.safetensors import read_json
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.store import SETTINGS, StorePath, model_folder, on_this_machine, stored_path

KEPT = "huggingface"
CONFIG, GENERATION, STOP = "config.json", "generation_config.json", "eos_token_id"
# Suffixes of files of parameters, and of archives of them; "model.safetensors.index.json" is one of a table of them.
PARAMETERS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"}
PARAMETERS |= {".gguf", ".onnx", ".npz", ".tar", ".gz"}
INDEX = ".index.json"
# Files of tokenizers, the one that `inference` reads first; each shows that the ids of a model are not bytes.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
LENGTH = "max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


def other_files(folder: Path) -> list[Path]:
    """The visible files directly in `folder` that contain no parameters; none if the folder does not exist.

    They are copied, so links must not lead out of the folder, but in a cache of the Hugging Face hub, whose
    `snapshots/REVISION` contains links to `blobs`. ConfigError for all others.
    """
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [
        file
        for file in entries
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix not in PARAMETERS
        and not file.name.endswith(INDEX)
    ]
    top = folder.resolve()
    roots = (top, top.parent.parent / "blobs") if top.parent.name == "snapshots" else (top,)
    if outside := [file for file in files if not any(file.resolve().is_relative_to(root) for root in roots)]:
        raise ConfigError(
            [
                f"{file} is a link to {file.resolve()}, outside of {folder}; links must stay inside. Replace it by a "
                "copy, or remove it"
                for file in outside
            ]
        )
    return files


def tokenizer_file(folder: Path) -> Path | None:
    """The file of the tokenizer in a Hugging Face folder, or in the folder of the kept files."""
    return next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; one line if it contains anything else."""
    try:
        data = read_json(path)
    except CheckpointCorruptedError as error:
        raise ConfigError(f"{path} is {error.problems[0]}; replace it by that of the model") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a JSON object; replace it by that of the model")
    return data


def end_tokens(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text, eos_token_id of generation_config.json or else of config.json.

    Raises ConfigError if they are not ids of the model.
    """
    for path in (folder / GENERATION, folder / CONFIG):
        stop = read_object(path).get(STOP) if path.is_file() else None
        if stop is None:
            continue
        ids = stop if isinstance(stop, list) else [stop]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            what = f"must be an id or a list of ids from 0 to {vocab_size - 1}, got {str(stop)[:80]}"
            raise ConfigError(f"{path}: {STOP} {what}; repair it")
        return tuple(cast(list[int], ids))
    return ()


def keep_files(folder: Path, checkpoints: Path) -> None:
    """Copy the files beside the parameters in `folder` to the folder of checkpoints, in place of earlier ones."""
    if not (files := other_files(folder)):
        return
    kept = checkpoints / KEPT
    if isinstance(kept, StorePath):
        kept.remove(last=CONFIG)
    else:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
    for file in files:
        content = file.read_bytes()
        if file.name == CONFIG and has_images(config := read_object(file)):
            content = json.dumps(text_config(config), indent=2).encode()  # all that the checkpoints contain
        (kept / file.name).write_bytes(content)


def read_kept_config(checkpoints: Path) -> Json:
    """The config.json that the checkpoints of a folder keep, {} if they keep none."""
    file = on_this_machine(checkpoints / KEPT) / CONFIG
    config = read_json(file) if file.is_file() else {}
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must be a JSON object; repair it, or remove {file.parent}")
    return config


def updated_config(kept: Json, settings: Json) -> dict[str, object]:
    """`kept`, a config.json, with the keys that the `settings` of the decoder change; all others stay as they are.

    Without a `kept` of the same family: `huggingface_config(settings)`.
    """
    model_type = kept.get("model_type")
    after = huggingface_config(settings, model_type=model_type)
    if model_type != after["model_type"]:
        return after
    try:
        before = huggingface_config(_settings_of(kept), model_type=model_type)
    except ConfigError:  # a key that the import ignored
        before = {}
    for config in (before, after):
        if LENGTH in kept:  # a derived value in both
            config.pop(LENGTH, None)
    updated = {key: value for key, value in kept.items() if key in after or key not in before}
    updated.pop(QUANTIZATION, None)  # the export is not quantized
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    if changed.keys() & {*ROPE} or any(key in before and key not in after for key in ROPE):
        updated.pop("rope_parameters", None)  # the name of both since transformers 5
        changed |= {key: after[key] for key in ROPE if key in after}
    for key in changed.keys() & OTHER_NAME.keys():
        updated.pop(OTHER_NAME[key], None)
    if "torch_dtype" in changed and "dtype" in kept:
        changed["dtype"] = changed.pop("torch_dtype")
        updated.pop("torch_dtype", None)
    return updated | changed


def _settings_of(kept: Json) -> Json:
    """The settings in a config.json with keys that the import ignored."""
    try:
        return decoder_config_from_hf(kept)
    except ConfigError as error:
        unknown = {problem.setting for problem in error.problems if problem.can_ignore}
        return decoder_config_from_hf(kept, ignore=unknown)


def is_huggingface(folder: str, *, parameters: bool = True) -> bool:
    """Whether `folder` is the id of a model of the hub, or a folder of this machine with safetensors.

    `parameters=False`: or with config.json alone, which is enough for a plan.
    """
    path = model_folder(folder, SETTINGS)
    if isinstance(path, StorePath):
        return False
    is_model = path != stored_path(folder) or any(path.glob("*.safetensors"))
    return path.is_dir() and (is_model or (not parameters and (path / CONFIG).is_file()))
