"""The residuals that a pipeline stores for its backward pass, and the cost to recompute the rest.

A decoder on four groups of one device, 1F1B. For each dtype and mode of `remat`: MiB of residuals for one microbatch,
and medians of the time and CPU time relative to a pipeline that recomputes nothing, in rounds of random order.

    python -m tests.benchmarks remat [--layers 8] [--width 256] [--sequence 256] [--steps 15] [--dtypes float32]
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
from flax import nnx

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.mpmd.runtime.pipeline import REMAT_MODES
from flax_mesh.mpmd.split import remat
from tests.benchmarks.common.pipelines import Turn, make_pipeline, median_ratio
from tests.benchmarks.common.report import options, report, use_cpu

GROUPS, MICROBATCHES, ROWS = 4, 4, 4
AXES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
STORE_ALL = "all"  # the baseline: nothing is recomputed


class Variant(Turn):
    """One pipeline and its step times."""

    def __init__(self, config: DecoderConfig, mode: str, batch: dict[str, np.ndarray]):
        accepted: Any = "none" if mode == STORE_ALL else mode
        make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
        self.pipeline = make_pipeline(
            make, next_token_loss, batch, "1f1b", GROUPS, MICROBATCHES, AXES, rules=[(".*", ())], remat=accepted
        )
        self.batch, self.state = batch, self.pipeline.init_state()
        super().__init__(self.step)
        residual_bytes: dict[int, int] = {}

        def record(action: Any, saved: Any) -> None:
            if action.kind == "F":
                residual_bytes[action.stage] = sum(x.nbytes for x in saved[action.stage, action.microbatch][1])

        self.pipeline.on_action = record
        everything = patch.object(remat, "is_expensive", lambda *_: True)
        with everything if mode == STORE_ALL else nullcontext():
            self.run()
        self.pipeline.on_action = None
        self.residual_bytes = sum(residual_bytes.values())

    def step(self) -> Any:
        self.state, metrics = self.pipeline.step(self.state, self.batch)
        return self.state.leaves, metrics


def measure(config: DecoderConfig, sequence: int, steps: int) -> list[dict[str, Any]]:
    """One row per mode."""
    rng = np.random.default_rng(0)
    shape = MICROBATCHES * ROWS, sequence
    batch = {name: rng.integers(0, config.vocab_size, shape).astype(np.int32) for name in ("inputs", "targets")}
    variants = {mode: Variant(config, mode, batch) for mode in (STORE_ALL, *REMAT_MODES)}
    order = list(variants.values())
    for _ in range(steps + 1):
        random.shuffle(order)
        for variant in order:
            variant.run()
    base, rows = variants[STORE_ALL], []
    for mode, variant in variants.items():
        row: dict[str, Any] = {"dtype": config.dtype, "remat": mode, "kept MiB": variant.residual_bytes / 2**20}
        row |= {"of all": variant.residual_bytes / base.residual_bytes}
        row["time"] = median_ratio(variant.time[2:], base.time[2:])  # the first two compile
        rows.append(row | {"CPU time": median_ratio(variant.cpu[2:], base.cpu[2:])})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    sizes = {"layers": 8, "width": 256, "sequence": 256, "steps": 15}
    given = options("remat", arguments, **sizes, dtypes=("float32", "bfloat16"))
    use_cpu()
    of_model: dict[str, Any] = {"vocab_size": 256, "hidden_size": given.width, "mlp_size": 3 * given.width}
    of_model |= {"num_heads": 8, "num_kv_heads": 4, "head_dim": given.width // 8, "num_layers": given.layers}
    rows = []
    for dtype in given.dtypes:
        rows += measure(DecoderConfig(**of_model, dtype=dtype), given.sequence, given.steps)
    return report("remat", arguments, rows)
