"""Published training runs: settings and step times, from the MaxText and tpu-recipes repositories.

`SOURCE` of a row is a commit of tpu-recipes or of maxtext. TFLOP/s are per chip, without recomputation, by the formula
that was current then; see `docs/plan.md`.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flax_mesh import PartitionAxis
from flax_mesh.models import next_token_loss
from flax_mesh.text import grouped
from flax_mesh.train import DataConfig, MeshConfig, TrainConfig
from tests.plan.shapes import Shape, make_model


def _shape(layers: int, hidden: int, heads: int, kv: int, head_dim: int, mlp: int, vocab: int, **more: Any) -> Shape:
    usual: dict[str, Any] = {"dtype": "bfloat16", "tied": False, "scan": True, "remat": "full"}
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "mlp_size": mlp, "vocab_size": vocab}
    return Shape(num_heads=heads, num_kv_heads=kv, head_dim=head_dim, **usual | sizes | more)


LLAMA_8B = _shape(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = _shape(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = _shape(126, 16384, 128, 8, 128, 53248, 128256)
LLAMA2_70B = replace(LLAMA_70B, vocab_size=32000)
GPT3 = _shape(96, 12288, 96, 96, 128, 49152, 50304, tied=True, gated=False)
MIXTRAL = _shape(32, 4096, 32, 8, 128, 14336, 32000, num_experts=8, experts_per_token=2)
# Windows are the keys of the blocks that the kernels of these runs read for a query: two blocks of 1024 or 2048.
GEMMA3_12B = _shape(48, 3840, 16, 8, 256, 15360, 262144, tied=True, sliding_window=2560, period=6)
SCOUT = _shape(48, 5120, 40, 8, 128, 8192, 202048, num_experts=16, experts_per_token=1, shared=8192)
DEEPSEEK3 = _shape(61, 7168, 128, 128, 160, 2048, 129280, num_experts=256, experts_per_token=8, shared=2048)
DEEPSEEK3 = replace(DEEPSEEK3, ranks=(1536, 512))
GEMMA4_26B = _shape(30, 2816, 16, 8, 256, 704, 262144, tied=True, sliding_window=3072, period=6)
GEMMA4_26B = replace(GEMMA4_26B, num_experts=128, experts_per_token=8, shared=2112)
GEMMA4_31B = _shape(60, 5376, 32, 16, 256, 21504, 262144, tied=True, sliding_window=3072, period=6)
GPT_OSS = _shape(36, 2880, 64, 8, 64, 2880, 201088, sliding_window=3072, period=2, num_experts=128, experts_per_token=4)
QWEN3_235B = _shape(94, 4096, 64, 4, 128, 1536, 151936, num_experts=128, experts_per_token=8)


def _old(layers: int, hidden: int, heads: int, mlp: int) -> Shape:
    return _shape(layers, hidden, heads, heads, 256, mlp, 32768, gated=False)


class Run(NamedTuple):
    id: str
    topology: str
    model: Shape
    remat: str
    sequence: int
    batch: int  # sequences of all devices
    mesh: str
    seconds: float  # per step
    no_bar: str = ""  # why its prediction has no bar

    def config(self) -> TrainConfig:
        # Runs on v7x, and runs of 2025-07 on v6e, set sa_use_fused_bwd_kernel: five products, as cuDNN has them.
        fused = self.id.startswith(("7-", "6-8B", "6-70B"))
        axes = PartitionAxis() if "tp" in self.mesh else self.model.axes  # activations between the layers over tp
        model = replace(self.model, axes=axes, remat=self.remat, attention="cudnn" if fused else "splash")
        data = DataConfig(sequence_length=self.sequence, batch_size=self.batch)
        return TrainConfig(make_model, next_token_loss, model, mesh=MeshConfig(self.mesh), data=data)


# What the backward pass finds stored, some of it in the memory of the host.
KEPT, INPUT = "q+k+v+attention", "layer_input@host"
HOSTED = f"{INPUT}+q@host+k@host+v@host"
HOSTED_OUT = f"{HOSTED}+attention_out@host"
INT8, FP8 = "int8", "float8_e4m3fn"
NEW = [
    Run("6-8B-8", "v6e:2x4", LLAMA_8B, HOSTED_OUT, 8192, 24, "fsdp:8", 3.443),
    Run("6-8B-32", "v6e:4x8", LLAMA_8B, HOSTED_OUT, 8192, 96, "fsdp:32", 3.495),
    Run("6-8B-256", "v6e:16x16", LLAMA_8B, HOSTED_OUT, 8192, 1024, "fsdp:256", 4.546),
    Run("6-70B-32", "v6e:4x8", replace(LLAMA_70B, param_dtype="bfloat16"), HOSTED, 8192, 64, "fsdp:32", 17.79),
    Run("6-70B-256", "v6e:16x16", LLAMA_70B, HOSTED, 8192, 1280, "fsdp:256", 42.656),
    Run("6-405B-2x256", "v6e:16x16*2", LLAMA_405B, INPUT, 8192, 512, "fsdp:512", 54.803),
    Run("6-L2-256", "v6e:16x16", LLAMA2_70B, "q@host+k@host+v@host", 4096, 512, "fsdp:256", 9.052),
    Run("6-GPT3-256", "v6e:16x16", GPT3, "full", 2048, 768, "fsdp:256", 17.182),
    Run("6-Mx7-256", "v6e:16x16", MIXTRAL, HOSTED_OUT, 4096, 3072, "fsdp:256", 13.484, "experts"),
    Run("6-G3-1x256", "v6e:16x16", GEMMA3_12B, "full", 32768, 256, "fsdp:256", 7.318, "windows"),
    Run("6-G3-4x256", "v6e:16x16*4", GEMMA3_12B, "full", 32768, 1024, "dp:4,fsdp:256", 8.39, "windows"),
    Run("5p-405B-512", "v5p:8x8x8", LLAMA_405B, "attention@host", 8192, 1024, "fsdp:512", 131.474),
    Run("5p-Scout-512", "v5p:8x8x8", SCOUT, INPUT, 8192, 4096, "fsdp:512", 31.652, "experts"),
    Run(
        "5p-GPT3-512-i8", "v5p:8x8x8", replace(GPT3, products=INT8), "full", 2048, 2048, "fsdp:64,tp:8", 22.197, "int8"
    ),
    Run("7-DS3-128", "v7x:4x4x8", DEEPSEEK3, INPUT, 4096, 2048, "fsdp:256", 27.02, "experts and MLA"),
    Run("7-DS3-128-f8", "v7x:4x4x8", replace(DEEPSEEK3, products=FP8), INPUT, 4096, 2048, "fsdp:256", 22.47, "fp8"),
    Run("7-DS3-256", "v7x:4x8x8", DEEPSEEK3, INPUT, 4096, 4096, "fsdp:512", 26.79, "experts and MLA"),
    Run("7-G4-26-64", "v7x:4x4x4", GEMMA4_26B, "full", 4096, 2048, "fsdp:128", 5.54, "experts"),
    Run("7-G4-31-64", "v7x:4x4x4", GEMMA4_31B, "attention_out", 8192, 512, "fsdp:128", 12.2, "windows"),
    Run("7-OSS-64", "v7x:4x4x4", GPT_OSS, INPUT, 8192, 1280, "dp:2,fsdp:64", 17.1, "experts"),
    Run("7-405B-256", "v7x:4x8x8", LLAMA_405B, "k+v+layer_input@host", 8192, 1536, "fsdp:512", 98.34),
    Run("7-70B-64", "v7x:4x4x4", LLAMA_70B, KEPT, 8192, 256, "fsdp:128", 12.2),
    Run("7-70B-64-f8", "v7x:4x4x4", replace(LLAMA_70B, products=FP8), KEPT, 8192, 256, "fsdp:128", 7.93, "fp8"),
    Run("7-70B-256", "v7x:4x8x8", LLAMA_70B, KEPT, 8192, 1024, "fsdp:512", 12.27),
    Run("7-70B-128k", "v7x:4x8x8", LLAMA_70B, KEPT, 131072, 64, "fsdp:64,sp:8", 34.02),
    Run("7-Qwen-256", "v7x:4x8x8", QWEN3_235B, INPUT, 4096, 8192, "fsdp:512", 30.87, "experts"),
]

MINIMAL = "q+k+v+attention_out+mlp_up"  # the products with weights that the backward pass reads
OLDER = {  # id: chip and topology of one slice, model, sequences per chip, mesh of a slice, policy
    "4-22B": ("v4:4x4x4", _old(48, 6144, 24, 24576), 16, "fsdp:64", "full"),
    "5e-16B": ("v5e:16x16", _old(32, 5120, 32, 32768), 6, "fsdp:256", "full"),
    "5e-64B": ("v5e:16x16", _old(64, 10240, 32, 32768), 2, "fsdp:256", "full"),
    "5p-32B": ("v5p:4x4x4", _old(32, 10240, 32, 32768), 8, "fsdp:16,tp:4", MINIMAL),
    "5p-128B": ("v5p:4x4x8", _old(64, 10240, 64, 65536), 2, "fsdp:16,tp:8", MINIMAL),
    "5p-128B-512": ("v5p:4x8x8", _old(64, 10240, 64, 65536), 2, "fsdp:32,tp:8", MINIMAL),
    "5p-512B": ("v5p:8x8x8", _old(128, 20480, 64, 65536), 2, "fsdp:32,tp:16", "full"),
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
    attention = s.hidden_size * s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads)
    layer = attention + (3 if s.gated else 2) * s.hidden_size * s.mlp_size + 2 * s.hidden_size
    return s.num_layers * layer + s.hidden_size * (s.vocab_size * (1 if s.tied else 2) + 1)


def stated_flops(s: Shape, sequence: int) -> float:
    """FLOPs per token of the older table: 6 times all parameters, and 6 L h c S for causal attention."""
    return 6.0 * num_parameters(s) + 6.0 * s.num_layers * s.num_heads * s.head_dim * sequence


def _older() -> Iterator[Run]:
    for name, (topology, shape, per_chip, mesh, policy) in OLDER.items():
        chips = math.prod(map(int, topology.partition(":")[2].split("x")))
        for slices, tflops in TFLOPS[name].items():
            seconds = per_chip * 2048 * stated_flops(shape, 2048) / (tflops * 1e12)
            place = (topology, mesh) if slices == 1 else (f"{topology}*{slices}", f"dp:{slices},{mesh}")
            yield Run(
                f"{name}-{slices:02d}", place[0], shape, policy, 2048, per_chip * chips * slices, place[1], seconds
            )


RUNS = sorted([*NEW, *_older()], key=lambda run: run.id)


SEED = 20261126  # of the splits; drawn before anything was fitted to them
SMALL = 8  # rows of a chip; of fewer, every row is compared with the constants that the others give
EXPERTS = "experts"  # what `no_bar` starts with


def of_chips() -> dict[str, list[Run]]:
    """The rows of dense models with a bar by chip, in the random order of SEED."""
    runs = [run for run in RUNS if not run.no_bar]
    return grouped(random.Random(SEED).sample(runs, len(runs)), lambda run: run.topology.partition(":")[0])


def fitted() -> list[Run]:
    """The rows that the constants of the chips are fitted to: half of the rows of a chip, or all if they are few."""
    return [run for runs in of_chips().values() for run in runs[: len(runs) // 2 if len(runs) >= SMALL else None]]


def held_out() -> list[Run]:
    return [run for runs in of_chips().values() if len(runs) >= SMALL for run in runs[len(runs) // 2 :]]


def of_experts() -> tuple[list[Run], list[Run]]:
    """The rows with experts that `indexed_fraction` is fitted to, and those that are held out."""
    runs = [run for run in RUNS if run.no_bar.startswith(EXPERTS)]
    runs = random.Random(SEED).sample(runs, len(runs))
    return runs[: len(runs) // 2], runs[len(runs) // 2 :]
