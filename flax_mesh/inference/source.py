"""The content of a folder: the checkpoint of a decoder, or a decoder in Hugging Face's format.

Everything in it is untrusted: settings are read as text, and the recipe that a checkpoint names is never executed.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flax_mesh.checkpoint.find import check_committed, find_valid, of_newest, step_number
from flax_mesh.checkpoint.hf.decoders import DecoderFolder, open_decoder, read_config, text_config
from flax_mesh.checkpoint.hf.kept import KEPT, LENGTH, is_huggingface
from flax_mesh.checkpoint.read import Record, plain, read_record
from flax_mesh.errors import ConfigError
from flax_mesh.lora.config import LoraConfig
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.config import MeshConfig, TrainConfig
from flax_mesh.recipe.overrides import flat_fields, read_overrides, setting_of
from flax_mesh.recipe.saved import is_trained_on_text, saved_record, sequence_length
from flax_mesh.recipe.target import axis_sizes
from flax_mesh.store import model_folder, on_this_machine, stored_path_problem
from flax_mesh.text import at_most

EVALUATION_LENGTH = 1024  # of sequences, unless the training run had, or config.json allows, others
DECODER = "flax_mesh.models.Decoder"
# Fields of DecoderConfig that every version has saved; later ones have defaults.
SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size")


@dataclass(frozen=True)
class Source:
    """A decoder on disk.

    Attributes:
        path: The folder of a step, whose files have been verified, or a Hugging Face folder.
        model: The decoder's config, as saved.
        files: The folder that contains the tokenizer and the configs of Hugging Face, if there are any.
        is_text: Whether the decoder was trained on text, one token per byte.
        sequence_length: Of the training run, or the longest that config.json allows; None if it is not known.
        record: The metadata of a checkpoint; {} for a Hugging Face folder.
        decoder: Of a Hugging Face folder.
        lora: The adapters of the checkpoint, as saved.
        damaged: Newer steps that were skipped because they are damaged.
        asked: The folder and the number of the step, as the user gave them.
    """

    path: Path
    model: DecoderConfig
    files: Path
    is_text: bool = False
    sequence_length: int | None = None
    record: Record = field(default_factory=dict[str, object])
    decoder: DecoderFolder | None = None
    lora: LoraConfig = LoraConfig()  # noqa: RUF009 (a frozen value)
    damaged: tuple[Path, ...] = ()
    asked: tuple[str | Path, int | None] = ("", None)

    @property
    def step(self) -> int | None:
        return None if self.decoder else step_number(self.path)

    @property
    def evaluation_length(self) -> int:
        """Tokens per window of an evaluation: as in the training run, or at most EVALUATION_LENGTH."""
        if self.sequence_length is None:
            return EVALUATION_LENGTH
        return self.sequence_length if self.decoder is None else min(self.sequence_length, EVALUATION_LENGTH)


class Settings(NamedTuple):
    """The config of a decoder with the settings of the user; `has_mesh` if they contain mesh.shape."""

    config: TrainConfig
    has_mesh: bool


def find_source(folder: str | Path, step: int | None = None) -> Source:
    """Find the newest valid step of a run, or `step`, or the decoder of a Hugging Face folder.

    Reads every byte of the step, to compare it with its checksum. Raises ConfigError if the folder has no decoder
    of flax_mesh, and CheckpointCorruptedError if the step, or every step, is damaged.
    """
    if problem := stored_path_problem(str(folder)) or ("" if str(folder) else "is empty"):
        raise ConfigError(f"{str(folder)[:80]!r}: this text {problem}")
    path = model_folder(folder)
    if is_huggingface(str(folder), parameters=False):
        if step is not None:
            raise ConfigError(f"{folder} is a Hugging Face folder, which has no steps; leave out --step {step}")
        return _huggingface(path)
    return of_newest(lambda: _checkpoint(folder, step), folder, step=step)


def _checkpoint(folder: str | Path, step: int | None) -> Source:
    checkpoint, damaged = find_valid(folder, step)
    check_committed(checkpoint)
    record = saved_record(checkpoint)
    length = sequence_length(read_record(checkpoint))
    saved = _saved_model(checkpoint, record["config"])
    return Source(
        checkpoint,
        saved.model,
        on_this_machine(checkpoint.parent / KEPT),
        is_text=is_trained_on_text(record),
        sequence_length=length,
        record=record,
        lora=saved.lora,
        damaged=tuple(damaged),
        asked=(folder, step),
    )


def _huggingface(path: Path) -> Source:
    try:
        decoder = open_decoder(path)
        model = DecoderConfig(**decoder.settings)
        if problems := [*model.problems(), *decoder.problems()]:
            raise ConfigError(problems)
    except ConfigError as error:
        if not error.can_ignore:
            raise
        hint = "  To ignore them: flax-mesh checkpoint import FOLDER OUT --ignore NAME, and then pass OUT"
        raise type(error)([*error.lines, hint]) from error
    longest = text_config(read_config(path)).get(LENGTH)
    longest = longest if isinstance(longest, int) and not isinstance(longest, bool) and 0 < longest < 2**31 else None
    return Source(path, model, path, sequence_length=longest, decoder=decoder)


def _saved_model(step: Path, saved: Record) -> TrainConfig:
    """The settings model.* and lora.* of a checkpoint. ConfigError if they belong to another model."""
    config = TrainConfig(make_decoder, next_token_loss, DecoderConfig())
    texts = {key: value for key, value in saved.items() if key.startswith(("model.", "lora."))}
    with is_decoder(step):
        if not any(key.startswith("model.") for key in texts):
            raise ConfigError("its metadata has no settings of a model, which runs and imports save")
        missing = [f"model.{name}" for name in SIZES if f"model.{name}" not in texts]
        others = sorted(texts.keys() - flat_fields(config).keys())
        if missing or others:
            parts = [f"lack {', '.join(missing)}"] if missing else []
            parts += [f"contain {', '.join(at_most(others, 4))}"] if others else []
            raise ConfigError(f"its settings {' and '.join(parts)}")
        config, problems = read_overrides(config, [f"{key}={value}" for key, value in texts.items()])
        if problems := problems or config.model.problems():
            raise ConfigError(problems)
    return config


@contextmanager
def is_decoder(step: Path) -> Generator[None]:
    """Add to errors that `step` is then no checkpoint of a Decoder."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            [f"{step} is not a checkpoint of {DECODER}: {plain(problem)}" for problem in error.lines]
        ) from error


def read_settings(source: Source, overrides: Sequence[str]) -> Settings:
    """Apply the settings of the user: the settings of the model, of the mesh, and run.platform.

    Raises one ConfigError with a line for every mistake that can be found without devices.
    """
    base = TrainConfig(make_decoder, next_token_loss, source.model, lora=source.lora)
    fields, keys = flat_fields(base), [setting_of(text) for text in overrides]
    problems = [
        f"{key} has no effect here; the settings are model.*, mesh.* and run.platform"
        for key in keys
        if key in fields and not _is_used(key)
    ]
    used = [text for text, key in zip(overrides, keys, strict=True) if key not in fields or _is_used(key)]
    config, wrong = read_overrides(base, used)
    if problem := _pipeline_problem(config.mesh):
        problems.append(problem)
        config = replace(config, mesh=replace(config.mesh, shape=MeshConfig.shape))
    if problems := [*problems, *wrong, *check_config(config)]:
        raise ConfigError(problems)
    return Settings(config, "mesh.shape" in keys)


def _is_used(key: str) -> bool:
    return key.startswith(("model.", "mesh.")) or key == "run.platform"


def _pipeline_problem(mesh: MeshConfig) -> str:
    try:
        groups = axis_sizes(mesh)["pp"]
    except ValueError:
        return ""  # check_config reports it
    if groups == 1:
        return ""
    return f"mesh.shape={mesh.shape}: generation and evaluation have no pipeline; leave out pp"
