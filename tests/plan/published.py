"""Published training runs: settings and step times, from the MaxText and tpu-recipes repositories.

`SOURCE` of a row is a commit of tpu-recipes or of maxtext. TFLOP/s are per chip, without recomputation, by the formula
that was current then; see `docs/plan.md`.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flax_mesh.text import grouped
from flax_mesh.train import DataConfig, MeshConfig, TrainConfig
from tests.plan.shapes import Shape, loss_fn, make_model

LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Shape(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Shape(126, 16384, 128, 8, 128, 53248, 128256)
LLAMA2_70B = replace(LLAMA_70B, vocab=32000)
GPT3 = Shape(96, 12288, 96, 96, 128, 49152, 50304, gated=False, tied=True)
MIXTRAL = Shape(32, 4096, 32, 8, 128, 14336, 32000, experts=8, top_k=2, capacity=1.25)
GEMMA3_12B = Shape(48, 3840, 16, 8, 256, 15360, 262144, tied=True, window=1024, period=6)
SCOUT = Shape(48, 5120, 40, 8, 128, 8192, 202048, experts=16, top_k=1, shared=8192)
DEEPSEEK3 = Shape(61, 7168, 128, 128, 160, 2048, 129280, experts=256, top_k=8, shared=2048, lora=(1536, 512))
GEMMA4_26B = Shape(30, 2816, 16, 8, 256, 704, 262144, tied=True, window=1024, period=6)
GEMMA4_26B = replace(GEMMA4_26B, experts=128, top_k=8, shared=2112)
GEMMA4_31B = Shape(60, 5376, 32, 16, 256, 21504, 262144, window=1024, period=6)
GPT_OSS = Shape(36, 2880, 64, 8, 64, 2880, 201088, window=128, period=2, experts=128, top_k=4)
QWEN3_235B = Shape(94, 4096, 64, 4, 128, 1536, 151936, experts=128, top_k=8)


def _old(layers: int, hidden: int, heads: int, mlp: int) -> Shape:
    return Shape(layers, hidden, heads, heads, 256, mlp, 32768, gated=False)


class Run(NamedTuple):
    id: str
    topology: str
    model: Shape
    sequence: int
    batch: int  # sequences of all devices
    mesh: str
    seconds: float  # per step
    no_bar: str = ""  # why its prediction has no bar

    def config(self) -> TrainConfig:
        data = DataConfig(sequence_length=self.sequence, batch_size=self.batch)
        return TrainConfig(make_model, loss_fn, self.model, mesh=MeshConfig(self.mesh), data=data)


QKV = ("q", "k", "v")
NEW = [
    Run("6-8B-8", "v6e:2x4", replace(LLAMA_8B, keep=("o", *QKV)), 8192, 24, "fsdp:8", 3.443),
    Run("6-8B-32", "v6e:4x8", replace(LLAMA_8B, keep=("o", *QKV)), 8192, 96, "fsdp:32", 3.495),
    Run("6-8B-256", "v6e:16x16", replace(LLAMA_8B, keep=("o", *QKV)), 8192, 1024, "fsdp:256", 4.546),
    Run("6-70B-32", "v6e:4x8", replace(LLAMA_70B, keep=QKV, param_dtype="bfloat16"), 8192, 64, "fsdp:32", 17.79),
    Run("6-70B-256", "v6e:16x16", replace(LLAMA_70B, keep=QKV), 8192, 1280, "fsdp:256", 42.656),
    Run("6-405B-2x256", "v6e:16x16*2", LLAMA_405B, 8192, 512, "fsdp:512", 54.803),
    Run("6-L2-256", "v6e:16x16", replace(LLAMA2_70B, keep=QKV), 4096, 512, "fsdp:256", 9.052),
    Run("6-GPT3-256", "v6e:16x16", GPT3, 2048, 768, "fsdp:256", 17.182),
    Run("6-Mx7-256", "v6e:16x16", replace(MIXTRAL, keep=("o", *QKV)), 4096, 3072, "fsdp:256", 13.484, "experts"),
    Run("6-G3-1x256", "v6e:16x16", GEMMA3_12B, 32768, 256, "fsdp:256", 7.318, "windows"),
    Run("6-G3-4x256", "v6e:16x16*4", GEMMA3_12B, 32768, 1024, "dp:4,fsdp:256", 8.39, "windows"),
    Run("5p-405B-512", "v5p:8x8x8", replace(LLAMA_405B, keep=("ctx", "mlpwo")), 8192, 1024, "fsdp:512", 131.474),
    Run("5p-Scout-512", "v5p:8x8x8", SCOUT, 8192, 4096, "fsdp:512", 31.652, "experts"),
    Run("5p-GPT3-512-i8", "v5p:8x8x8", GPT3, 2048, 2048, "fsdp:64,tp:8", 22.197, "int8"),
    Run("7-DS3-128", "v7x:4x4x8", DEEPSEEK3, 4096, 2048, "fsdp:256", 27.02, "experts and MLA"),
    Run("7-DS3-128-f8", "v7x:4x4x8", DEEPSEEK3, 4096, 2048, "fsdp:256", 22.47, "fp8"),
    Run("7-DS3-256", "v7x:4x8x8", DEEPSEEK3, 4096, 4096, "fsdp:512", 26.79, "experts and MLA"),
    Run("7-G4-26-64", "v7x:4x4x4", GEMMA4_26B, 4096, 2048, "fsdp:128", 5.54, "experts"),
    Run("7-G4-31-64", "v7x:4x4x4", replace(GEMMA4_31B, keep=("o", "mlpwo")), 8192, 512, "fsdp:128", 12.2, "windows"),
    Run("7-OSS-64", "v7x:4x4x4", replace(GPT_OSS, keep=("mlpwo",)), 8192, 1280, "dp:2,fsdp:64", 17.1, "experts"),
    Run("7-405B-256", "v7x:4x8x8", replace(LLAMA_405B, keep=("k", "v", "mlpwo")), 8192, 1536, "fsdp:512", 98.34),
    Run("7-70B-64", "v7x:4x4x4", replace(LLAMA_70B, keep=("ctx", *QKV)), 8192, 256, "fsdp:128", 12.2),
    Run("7-70B-64-f8", "v7x:4x4x4", replace(LLAMA_70B, keep=("ctx", *QKV)), 8192, 256, "fsdp:128", 7.93, "fp8"),
    Run("7-70B-256", "v7x:4x8x8", replace(LLAMA_70B, keep=("ctx", *QKV)), 8192, 1024, "fsdp:512", 12.27),
    Run("7-70B-128k", "v7x:4x8x8", replace(LLAMA_70B, keep=("ctx", *QKV, "mlpwo")), 131072, 64, "fsdp:64,sp:8", 34.02),
    Run("7-Qwen-256", "v7x:4x8x8", QWEN3_235B, 4096, 8192, "fsdp:512", 30.87, "experts"),
]

MINIMAL = "dots_with_no_batch_dims_saveable"
OLDER = {  # id: chip and topology of one slice, model, sequences per chip, mesh of a slice, policy
    "4-22B": ("v4:4x4x4", _old(48, 6144, 24, 24576), 16, "fsdp:64", ""),
    "5e-16B": ("v5e:16x16", _old(32, 5120, 32, 32768), 6, "fsdp:256", ""),
    "5e-64B": ("v5e:16x16", _old(64, 10240, 32, 32768), 2, "fsdp:256", ""),
    "5p-32B": ("v5p:4x4x4", _old(32, 10240, 32, 32768), 8, "fsdp:16,tp:4", MINIMAL),
    "5p-128B": ("v5p:4x4x8", _old(64, 10240, 64, 65536), 2, "fsdp:16,tp:8", MINIMAL),
    "5p-128B-512": ("v5p:4x8x8", _old(64, 10240, 64, 65536), 2, "fsdp:32,tp:8", MINIMAL),
    "5p-512B": ("v5p:8x8x8", _old(128, 20480, 64, 65536), 2, "fsdp:32,tp:16", ""),
}
TFLOPS = {  # id: {slices: TFLOP/s per chip}
    "4-22B": {1: 156, 2: 152, 4: 149, 8: 146},
    "5e-16B": {1: 120, 2: 117, 4: 117, 8: 115, 16: 111, 32: 108},
    "5e-64B": {1: 118, 2: 112, 4: 110, 8: 108, 16: 105, 32: 99},
    "5p-32B": {1: 328, 2: 319},
    "5p-128B": {1: 315, 2: 305},
    "5p-128B-512": {1: 316, 2: 274},
    "5p-512B": {1: 294, 2: 282},
}


def num_parameters(s: Shape) -> int:
    """All parameters of a shape without experts."""
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    mlp = s.hidden * s.mlp * (3 if s.gated else 2)
    return s.layers * (attention + mlp + 2 * s.hidden) + s.hidden * s.vocab * (1 if s.tied else 2) + s.hidden


def stated_flops(s: Shape, sequence: int) -> float:
    """FLOPs per token of the older table: 6 times all parameters, and 6 L h c S for causal attention."""
    return 6.0 * num_parameters(s) + 6.0 * s.layers * s.heads * s.head_dim * sequence


def _older() -> Iterator[Run]:
    for name, (topology, shape, per_chip, mesh, policy) in OLDER.items():
        chips = math.prod(map(int, topology.partition(":")[2].split("x")))
        shape = replace(shape, policy=policy, split_hidden="tp" in mesh)
        for slices, tflops in TFLOPS[name].items():
            seconds = per_chip * 2048 * stated_flops(shape, 2048) / (tflops * 1e12)
            place = (topology, mesh) if slices == 1 else (f"{topology}*{slices}", f"dp:{slices},{mesh}")
            yield Run(f"{name}-{slices:02d}", place[0], shape, 2048, per_chip * chips * slices, place[1], seconds)


RUNS = sorted([*NEW, *_older()], key=lambda run: run.id)


SEED = 20261126  # of the split; drawn before anything was fitted to it
SMALL = 8  # rows of a chip; of fewer, every row is compared with the constants that the others give


def of_chips() -> dict[str, list[Run]]:
    """The rows with a bar by chip, in the random order of SEED."""
    runs = [run for run in RUNS if not run.no_bar]
    return grouped(random.Random(SEED).sample(runs, len(runs)), lambda run: run.topology.partition(":")[0])


def fitted() -> list[Run]:
    """The rows that the constants of the chips are fitted to: half of those of a chip, or all if they are few."""
    return [run for runs in of_chips().values() for run in runs[: len(runs) // 2 if len(runs) >= SMALL else None]]


def held_out() -> list[Run]:
    return [run for runs in of_chips().values() if len(runs) >= SMALL for run in runs[len(runs) // 2 :]]
