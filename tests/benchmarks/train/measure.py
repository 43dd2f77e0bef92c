"""Tokens/s of `flax_mesh.train.train` over those of a plain script, for a decoder of 20M parameters on one CPU device.

train: a run with its rows of metrics, checks and prefetched batches; it evaluates and saves at its end only. plain: the
script in `plain.py`, which has all batches on the device beforehand, and reads a loss while the next step runs, as the
trainer does.

Both start from the same parameters and train on the same batches, in turn: after each round of steps of the run, its
hook waits until the step that was dispatched before it has ended, then trains the plain model for as many steps. The
first two steps of a round are not counted, since they overlap with the other program. A figure is the median time of
all other steps. Target: a ratio of at least 0.98, and the same losses: float32 with 1e-6 relative in the first steps.

    python -m tests.benchmarks train [--rounds 6] [--steps 8] [--layers 11] [--width 384] [--rows 4] [--length 64]
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig, train
from flax_mesh.train.build import TrainProgram, batch_sharding
from flax_mesh.train.config import data_seed
from flax_mesh.train.data.batches import make_batch_fn
from flax_mesh.train.data.data import load_corpus
from tests.benchmarks._report import print_json, print_table, use_cpu
from tests.benchmarks.train import plain

TARGET, LOSSES = 0.98, 1e-6
NOT_COUNTED = 2  # first steps of a round
SAME_STEPS = 8  # whose losses must agree; later ones differ by the growth of rounding errors


def make_config(given: argparse.Namespace, folder: str) -> TrainConfig:
    steps, heads = given.rounds * given.steps, given.width // 32
    sizes = {"hidden_size": given.width, "mlp_size": 3 * given.width, "num_layers": given.layers}
    return TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(**sizes, num_heads=heads, num_kv_heads=max(1, heads // 2), head_dim=32),
        mesh=MeshConfig("fsdp:1"),
        data=DataConfig(source="stdlib", sequence_length=given.length, batch_size=given.rows),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, decay_steps=1000),
        checkpoint=CheckpointConfig(every=steps),
        run=RunConfig(steps=steps, folder=folder, platform="cpu", eval_every=steps, sample_tokens=0),
    )


class Plain:
    """The plain script, paused after each round."""

    def __init__(self, config: TrainConfig, program: TrainProgram):
        corpus, sharding = load_corpus(config.data), batch_sharding(program.mesh, program.rules.axes)
        batch = make_batch_fn(corpus.train, seed=data_seed(config), config=config.data, sharding=sharding)
        self.batches: Iterator[Any] = iter([batch(step) for step in range(config.run.steps)])
        self.model = plain.Model(config.model, nnx.Rngs(0))
        values = program.model(program.init())
        nnx.update(self.model, jax.tree.map(lambda x: x + 0, nnx.state(values)))
        self.optimizer = nnx.Optimizer(self.model, plain.make_optimizer(config.optimizer), wrt=nnx.Param)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """Train, reading each loss while the next step runs; the last one after it."""
        times, pending = [], []
        for _ in range(steps):
            pending.append(plain.train_step(self.model, self.optimizer, next(self.batches)))
            if len(pending) > 1:
                self.losses.append(float(pending.pop(0)))
                times.append(time.perf_counter())
        self.losses.append(float(pending.pop()))
        times.append(time.perf_counter())
        self.seconds += np.diff(times)[NOT_COUNTED - 1 :].tolist()


def measure(config: TrainConfig, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of the counted steps, and the losses of all steps, by program."""
    made: list[Plain] = []
    rows: list[dict[str, Any]] = []

    def after_row(row: dict[str, Any]) -> None:
        rows.append(row)
        if row["step"] % steps == 0:
            time.sleep(2 * rows[-1]["seconds"])  # the next step of the run was dispatched before this call
            began = time.perf_counter()
            made[0].run(steps)
            per_step = 1e3 * statistics.median(row["seconds"] for row in rows[1 - steps :])
            print(f"round {row['step'] // steps}: train {per_step:.0f} ms per step, ", end="")
            print(f"plain {1e3 * (time.perf_counter() - began) / steps:.0f} ms", flush=True)

    train(config, hooks=[after_row], on_start=lambda program: made.append(Plain(config, program)))
    counted = [row["seconds"] for row in rows if (row["step"] - 1) % steps >= NOT_COUNTED and row["step"] > steps]
    losses = {"train": [row["loss"] for row in rows], "plain": made[0].losses}
    return {"train": counted, "plain": made[0].seconds[steps - NOT_COUNTED :]}, losses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks train")
    parser.add_argument("--rounds", type=int, default=6, help="the first one is not counted")
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    given = parser.parse_args(arguments)
    with contextlib.suppress(RuntimeError):  # the devices of a process that has used them stay as they are
        use_cpu(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds, losses = measure(make_config(given, folder), given.steps)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    differences = [abs(a / b - 1) for a, b in zip(losses["train"], losses["plain"], strict=True)]
    tokens = given.rows * given.length
    rows = [
        {"program": name, "ms": 1e3 * found, "tokens/s": tokens / found, "steps": len(seconds[name])}
        for name, found in median.items()
    ]
    ratio, first = median["plain"] / median["train"], max(differences[:SAME_STEPS])
    print_table(rows)
    print(f"ratio {ratio:.3f} (target {TARGET})")
    print(f"losses differ by at most {first:.1e} in the first {SAME_STEPS} steps, {max(differences):.1e} in all")
    print_json(
        "train", arguments, target=TARGET, ratio=ratio, rows=rows, first=first, largest=max(differences), same=LOSSES
    )
    return 0 if first <= LOSSES else 1
