"""A small decoder on the tokens of a text, formed into batches by the recipe itself in several ways."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flax_mesh.data.batches import batch_rows
from flax_mesh.data.corpus import load_corpus
from flax_mesh.recipe.config import data_seed
from flax_mesh.train import TrainConfig, apply_overrides
from tests.train import bigram
from tests.train.support import decoder

MESHES = {"plain": ("mesh.shape=dp:2",), "pp": ("mesh.shape=pp:2,dp:2", "pipeline.num_microbatches=2")}
PLAIN = MESHES["plain"]


def recipe() -> TrainConfig:
    """The built-in batches of tokens."""
    same = ("data.batch_size=8", "run.steps=7", "run.eval_every=0", "run.platform=auto", "pipeline.num_microbatches=1")
    return replace(apply_overrides(decoder.config_of("runs/default", "stdlib"), same), sample=None)


def config_of(folder: Path, text: Path, make: Any, *settings: str, **functions: Any) -> TrainConfig:
    words = [f"run.folder={folder}", f"data.source={text}", *settings]
    return apply_overrides(replace(recipe(), make_batches=make, **functions), words)


def bigram_config(folder: Path, text: Path, make: Any, *settings: str, **functions: Any) -> TrainConfig:
    """The config of a run of seven steps, of a model that compiles fast."""
    common = [f"run.folder={folder}", f"data.source={text}", "run.steps=7", "run.eval_every=0"]
    recipe = replace(bigram.recipe(), make_batches=make, sample=None, **functions)
    return apply_overrides(apply_overrides(recipe, common), settings)


def token_batches(config: TrainConfig) -> Callable[[int], Any]:
    """The built-in batches as a function of the step."""
    corpus = load_corpus(config.data)
    return lambda step: batch_rows(corpus.train, data_seed(config.data, config.run), config.data, step)


class Windows:
    """Random windows of the text. It saves the state of the random generator: two integers of 128 bits."""

    def __init__(self, config: TrainConfig):
        self.tokens = np.frombuffer(Path(config.data.source).read_bytes(), np.uint8).astype(np.int32)
        self.shape = config.data.batch_size, config.data.sequence_length
        self.random = np.random.default_rng(config.run.seed)

    def __next__(self) -> dict[str, np.ndarray]:
        rows, length = self.shape
        starts = self.random.integers(0, len(self.tokens) - length - 1, rows)
        windows = np.stack([self.tokens[start : start + length + 1] for start in starts])
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    def get_state(self) -> Any:
        return self.random.bit_generator.state

    def set_state(self, state: Any) -> None:
        self.random.bit_generator.state = state


class BytesWindows(Windows):
    """The same windows; the state is bytes."""

    def get_state(self) -> bytes:
        return repr(super().get_state()).encode()

    def set_state(self, state: bytes) -> None:
        super().set_state(ast.literal_eval(state.decode()))


def grain_batches(config: TrainConfig) -> Any:
    import grain

    tokens = Windows(config)
    length = config.data.sequence_length
    starts = grain.MapDataset.range(0, len(tokens.tokens) - length - 1).seed(config.run.seed).shuffle().repeat()
    windows = starts.map(lambda start: tokens.tokens[start : start + length + 1])
    pairs = windows.map(lambda window: {"inputs": window[:-1], "targets": window[1:]})
    return iter(pairs.to_iter_dataset().batch(config.data.batch_size))


MAKERS = {"function": token_batches, "iterator": Windows, "bytes": BytesWindows, "grain": grain_batches}
