"""What a pipeline keeps for its backward pass, and what it costs to make the rest again.

A decoder on four groups of one device, 1F1B, four microbatches. For each dtype and way of `remat`: MiB that F hands
over, for one microbatch of all stages, and a step over that of a pipeline that makes nothing again, in time and in CPU
time of the process: medians of the ratios in rounds, in which all take a step, in an order drawn anew.

    python -m tests.benchmarks remat [--layers 8] [--width 256] [--sequence 256] [--steps 15]
        [--dtypes float32,bfloat16]
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import optax
from flax import nnx

from flax_mesh import create_mesh
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.mpmd import MpmdMesh, Pipeline, make_schedule, split_stages
from flax_mesh.mpmd.split import remat
from tests.benchmarks._report import print_json, print_table, use_cpu

GROUPS, MICROBATCHES, ROWS = 4, 4, 4
AXES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
NOTHING_AGAIN = "all"  # the way that the others are held against


class Way:
    """One pipeline, and what its steps took."""

    def __init__(self, config: DecoderConfig, how: str, batch: dict[str, np.ndarray]):
        mesh = MpmdMesh(create_mesh((GROUPS, 1, 1, 1, 1, 1), AXES, devices=jax.devices()[:GROUPS]), "pp")
        schedule = make_schedule("1f1b", num_groups=GROUPS, num_microbatches=MICROBATCHES)
        micro = {name: x[:ROWS] for name, x in batch.items()}
        staged = split_stages(
            next_token_loss, lambda: make_decoder(config, nnx.Rngs(0)), micro, num_stages=GROUPS, mesh=mesh.unstack[0]
        )
        known: Any = "none" if how == NOTHING_AGAIN else how
        self.pipeline = Pipeline(staged, optax.sgd(1e-2), mesh=mesh, schedule=schedule, rules=[(".*", ())], remat=known)
        self.batch, self.state = batch, self.pipeline.init_state()
        self.time: list[float] = []
        self.cpu: list[float] = []
        kept: dict[int, int] = {}

        def watch(action: Any, saved: Any) -> None:
            if action.kind == "F":
                kept[action.stage] = sum(x.nbytes for x in saved[action.stage, action.microbatch][1])

        self.pipeline.on_action = watch
        if how == NOTHING_AGAIN:
            with patch.object(remat, "is_expensive", lambda *_: True):
                self.step()
        else:
            self.step()
        self.pipeline.on_action = None
        self.kept = sum(kept.values())

    def step(self) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        self.state, metrics = self.pipeline.step(self.state, self.batch)
        jax.block_until_ready((self.state.leaves, metrics))
        self.time.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - cpu)


def measure(config: DecoderConfig, sequence: int, steps: int) -> list[dict[str, Any]]:
    """A row for every way."""
    rng = np.random.default_rng(0)
    shape = MICROBATCHES * ROWS, sequence
    batch = {name: rng.integers(0, config.vocab_size, shape).astype(np.int32) for name in ("inputs", "targets")}
    ways = {how: Way(config, how, batch) for how in (NOTHING_AGAIN, *remat.REMAT_MODES)}
    order = list(ways.values())
    for _ in range(steps + 1):
        random.shuffle(order)
        for way in order:
            way.step()
    base = ways[NOTHING_AGAIN]

    def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
        return statistics.median(a / b for a, b in zip(mine[2:], theirs[2:], strict=True))  # the first two compile

    return [
        {"dtype": config.dtype, "remat": how, "kept MiB": way.kept / 2**20}
        | {"of all": way.kept / base.kept, "time": ratio(way.time, base.time), "CPU time": ratio(way.cpu, base.cpu)}
        for how, way in ways.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks remat")
    for name, default in (("layers", 8), ("width", 256), ("sequence", 256), ("steps", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    given = parser.parse_args(arguments)
    use_cpu()
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": given.width, "mlp_size": 3 * given.width}
    heads: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_dim": given.width // 8}
    rows = []
    for dtype in given.dtypes.split(","):
        config = DecoderConfig(**sizes, **heads, num_layers=given.layers, dtype=dtype)
        rows += measure(config, given.sequence, given.steps)
    print_table(rows)
    print_json("remat", arguments, rows=rows)
    return 0
