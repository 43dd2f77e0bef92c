"""Saving and loading a decoder as safetensors, compared with raw files of the same bytes and the reference package.

Writes are synced to disk; reads are served from the page cache.

    python -m tests.benchmarks safetensors [--layers 4] [--rounds 3]
"""

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.checkpoint.hf.convert import load_safetensors, save_safetensors
from flax_mesh.checkpoint.hf.decoders import DECODER_NAMES
from flax_mesh.checkpoint.hf.safetensors import SINGLE_FILE
from flax_mesh.models import DecoderConfig, make_decoder
from tests.benchmarks.common.report import options, report, use_cpu

SIZES: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
NAMES = DECODER_NAMES["llama"]


def seconds(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - began


def write_seconds(path: Path, data: np.ndarray) -> float:
    def write() -> None:
        data.tofile(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    return seconds(write)


def measure(state: nnx.State, folder: Path) -> dict[str, float]:
    """Seconds of every operation, measured in sequence."""
    found = {"save": seconds(lambda: save_safetensors(folder / "out", state, NAMES))}
    file = folder / "out" / SINGLE_FILE
    found["write"] = write_seconds(folder / "raw", np.fromfile(file, np.uint8))
    found["load"] = seconds(lambda: load_safetensors(folder / "out", state, NAMES))
    found["read"] = seconds(lambda: np.fromfile(file, np.uint8))
    if importlib.util.find_spec("safetensors"):
        from safetensors.numpy import load_file  # pyright: ignore[reportMissingImports]

        found["package"] = seconds(lambda: load_file(file))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("safetensors", arguments, layers=4, rounds=3)
    use_cpu()
    config = DecoderConfig(**SIZES, mlp_size=8192, num_layers=given.layers, tied=False, param_dtype="bfloat16")
    abstract = abstract_state(lambda: make_decoder(config, nnx.Rngs(0)), create_mesh((1, 4, 1, 2, 1)))
    draw = np.random.default_rng(0)
    numbers = lambda leaf: draw.integers(0, 2**14, leaf.shape, np.uint16).view(leaf.dtype)  # noqa: E731
    state = jax.tree.map(lambda leaf: jax.device_put(numbers(leaf), leaf.sharding), abstract)
    gib = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**30
    best: dict[str, float] = {}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(state, Path(folder))
        best = {name: min(time, best.get(name, time)) for name, time in row.items()}
    compared = {"save": "write", "load": "read", "package": "read"}
    rows = [
        {"work": name, "s": best[name], "GiB/s": gib / best[name], "against": raw, "ratio": best[name] / best[raw]}
        for name, raw in compared.items()
        if name in best
    ]
    print(f"{gib:.2f} GiB, best of {given.rounds}")
    return report("safetensors", arguments, rows, gib=gib)
