"""Checkpoints of a small decoder as a run on text saves them, in any layout, and a tokenizer.json."""

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh import named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.models import Decoder, DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.recipe.saved import FORMAT
from flax_mesh.train import DataConfig, MeshConfig, RunConfig, TrainConfig, apply_overrides, build_program
from flax_mesh.train.metadata import layout_of, layout_record

RECIPE = __file__
TEXT = "squares.txt: 1 file, 18,780 bytes; trains on the first 17,841, holds out the last 939"
TOKENS = "tokens.npy: 1 file, 18,780 tokens; trains on the first 17,841, holds out the last 939"


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(
            hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=32, tied=False
        ),
        mesh=MeshConfig(shape="fsdp:2,tp:2"),
        data=DataConfig(sequence_length=16, batch_size=8),
        run=RunConfig(steps=12),
    )


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """The folder of a run, for the conftest.py of folders with tests."""
    save_run(folder := tmp_path_factory.mktemp("run"))
    return folder


def save_run(folder: Path, *settings: str, description: str = TEXT, **record: Any) -> Any:
    """Save step 3 of a run with these settings and random values in every array; returns the state."""
    config, program, state = made(settings)
    saved = {
        "format": FORMAT,
        "step": 3,
        "recipe": RECIPE,
        "config": to_texts(config),
        "data": {"description": description},
        "metrics": {},
        **layout_record(program.mesh.shape, program.rules, layout_of(program.layout.to_nnx(), program.rules.layers)),
    }
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, state, saved | record)
    return state


@cache
def made(settings: tuple[str, ...]) -> tuple[TrainConfig, Any, Any]:
    """Config, program and state of a run with these settings."""
    config = apply_overrides(recipe(), settings)
    program = build_program(config)
    return config, program, random_state(program.layout)


def random_state(layout: Any) -> Any:
    """A state so large that greedy ids differ from token to token; counts of steps are 3. Compiles no program."""
    draw = np.random.default_rng(0)

    def value(path: str, x: Any) -> Any:
        mean = 1 if path.endswith("scale") else 0
        found = mean + 0.4 * draw.standard_normal(x.shape) if x.ndim else np.full((), 3)
        return jax.device_put(np.asarray(found, x.dtype), x.sharding)

    tree = layout.to_nnx()
    leaves = [value(path, x) for path, x in named_leaves(tree)]
    return layout.with_state(jax.tree.unflatten(jax.tree.structure(tree), leaves))


def plain_log_probs(model: Decoder, tokens: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """(tokens - 1, ids), float64: by NumPy from the logits of one text, whose inputs are padded to `length`."""
    inputs = np.pad(tokens[:-1], (0, length - len(tokens) + 1))[None].astype(np.int32)
    logits = np.asarray(_forward(*nnx.split(model, graph=True), inputs), np.float64)[0, : len(tokens) - 1]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@partial(jax.jit, static_argnums=0)
def _forward(graphdef: Any, state: Any, tokens_BS: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(tokens_BS)


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """A tokenizer.json of 48 ids at most with the letters of "hello world", "<s>" before every text, and "</s>"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made: Any = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    options: dict[str, Any] = {"vocab_size": 48, "special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
    made.train_from_iterator(["hello world héllo wörld 中 held low"] * 3, trainers.BpeTrainer(**options))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "generation_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def write_byte_tokenizer(folder: Path) -> Path:
    """A tokenizer.json as in Llama 2: characters it does not have are tokens of bytes, <0x00> to <0xFF>."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581world", "\u2581hello"]
    ids = {word: number for number, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    made: Any = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(words[:3])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
