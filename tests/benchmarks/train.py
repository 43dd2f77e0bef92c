"""Tokens/s of `flax_mesh.train.train` relative to a plain script, for a decoder of 20M parameters on one CPU device.

The plain script has all batches on the device beforehand, and reads a loss while the next step runs, as the trainer
does. Both start from the same parameters and take turns on the same batches: after each round of steps, a hook of the
run waits until the step that was dispatched before it has ended, then trains the plain model for as many steps. The
first two steps of a round, which overlap with the other program, and the first round are not counted. The figure is the
median of the ratios of a round of the plain script to the rounds of the run before and after it, in time and in CPU
time. Targets: a ratio of tokens/s of at least 0.98, and the same losses: 1e-6 relative in the first steps.

    python -m tests.benchmarks train [--rounds 10] [--steps 8] [--layers 11] [--width 384] [--rows 4] [--length 64]
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from flax_mesh.data.batches import make_batch_fn
from flax_mesh.data.corpus import load_corpus
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.config import data_seed
from flax_mesh.recipe.program import TrainProgram, batch_sharding
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig, train
from tests.benchmarks.common.plain_llama import make_optimizer
from tests.benchmarks.common.report import options, print_json, print_table, use_cpu

TARGET, LOSSES = 0.98, 1e-6
NOT_COUNTED = 2  # first steps of a round
SAME_STEPS = 8  # whose losses must agree; later ones differ by the growth of rounding errors


def make_config(given: Any, folder: str) -> TrainConfig:
    steps, heads = given.rounds * given.steps + 1, given.width // 32  # the last step is followed by an evaluation
    sizes = {"hidden_size": given.width, "mlp_size": 3 * given.width, "num_layers": given.layers}
    return TrainConfig(
        make_decoder,
        next_token_loss,
        DecoderConfig(**sizes, num_heads=heads, num_kv_heads=max(1, heads // 2), head_dim=32),
        mesh=MeshConfig("fsdp:1"),
        data=DataConfig(source="stdlib", sequence_length=given.length, batch_size=given.rows),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10, decay_steps=1000),
        checkpoint=CheckpointConfig(every=steps),
        run=RunConfig(steps=steps, folder=folder, platform="cpu", eval_every=steps, sample_tokens=0),
    )


@partial(nnx.jit, donate_argnames=("model", "optimizer"))
def train_step(model: Any, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_fn(model: Any) -> jax.Array:
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


class Times(NamedTuple):
    seconds: float
    cpu: float  # of all threads


class Plain:
    """The plain script, paused after each round."""

    def __init__(self, config: TrainConfig, program: TrainProgram):
        corpus, sharding = load_corpus(config.data), batch_sharding(program.mesh, program.rules.axes)
        batch = make_batch_fn(
            corpus.train, seed=data_seed(config.data, config.run), config=config.data, sharding=sharding
        )
        self.batches: Iterator[Any] = iter([batch(step) for step in range(config.run.steps)])
        self.model = make_decoder(config.model, nnx.Rngs(0))
        values = program.model(program.init())
        nnx.update(self.model, jax.tree.map(lambda x: x + 0, nnx.state(values)))
        self.optimizer = nnx.Optimizer(self.model, make_optimizer(config.optimizer), wrt=nnx.Param)
        self.losses: list[float] = []

    def run(self, steps: int) -> list[Times]:
        """Train, reading each loss while the next step runs, and the last one after it. Returns the times of steps."""
        stamps, pending = [], []
        for _ in range(steps):
            pending.append(train_step(self.model, self.optimizer, next(self.batches)))
            if len(pending) > 1:
                self.losses.append(float(pending.pop(0)))
                stamps.append(now())
        self.losses.append(float(pending.pop()))
        return between([*stamps, now()])[NOT_COUNTED - 1 :]


def now() -> Times:
    return Times(time.perf_counter(), time.process_time())


def between(stamps: Sequence[Times]) -> list[Times]:
    return [Times(b.seconds - a.seconds, b.cpu - a.cpu) for a, b in itertools.pairwise(stamps)]


def measure(config: TrainConfig, steps: int) -> tuple[dict[str, list[list[Times]]], dict[str, list[float]]]:
    """The times of the counted steps of each round, and the losses of all steps, by program."""
    made: list[Plain] = []
    losses: list[float] = []
    stamps: list[Times] = []
    rounds: dict[str, list[list[Times]]] = {"train": [], "plain": []}

    def after_row(row: dict[str, Any]) -> None:
        if row["step"] == config.run.steps:
            return
        losses.append(row["loss"])
        stamps.append(now())
        if row["step"] % steps == 0:
            rounds["train"].append(between(stamps)[NOT_COUNTED - 1 :])
            time.sleep(2 * median(rounds["train"][-1]).seconds)  # the next step of the run was dispatched before
            rounds["plain"].append(made[0].run(steps))
            stamps.clear()
            texts = [f"{name} {1e3 * median(found[-1]).seconds:.0f} ms" for name, found in rounds.items()]
            print(f"round {row['step'] // steps}: {', '.join(texts)}", flush=True)

    train(config, hooks=[after_row], on_start=lambda program, folder: made.append(Plain(config, program)))
    return {name: found[1:] for name, found in rounds.items()}, {"train": losses, "plain": made[0].losses}


def median(found: Sequence[Times]) -> Times:
    return Times(*(statistics.median(column) for column in zip(*found, strict=True)))


def ratios(rounds: dict[str, list[list[Times]]]) -> Times:
    """Medians of the times of each round of `plain` over the times of the rounds of `train` before and after it."""
    trained, others = [median(found) for found in rounds["train"]], [median(found) for found in rounds["plain"]]
    pairs = zip(others, trained, [*trained[1:], trained[-1]], strict=True)
    return median([Times(*(2 * x / (y + z) for x, y, z in zip(*each, strict=True))) for each in pairs])


def main(arguments: Sequence[str] | None = None) -> int:
    sizes = {"layers": 11, "width": 384, "rows": 4, "length": 64}
    given = options("train", arguments, rounds=10, steps=8, **sizes)  # the first round is not counted
    with contextlib.suppress(RuntimeError):  # the devices of a process that has used them stay as they are
        use_cpu(1)
    with tempfile.TemporaryDirectory() as folder:
        rounds, losses = measure(make_config(given, folder), given.steps)
    rows = []
    for name, found in rounds.items():
        steps = [each for of_round in found for each in of_round]
        seconds, cpu = median(steps)
        speed = given.rows * given.length / seconds
        rows.append({"program": name, "ms": 1e3 * seconds, "CPU ms": 1e3 * cpu, "tokens/s": speed, "steps": len(steps)})
    ratio = ratios(rounds)
    differences = [abs(a / b - 1) for a, b in zip(losses["train"], losses["plain"], strict=True)]
    first = max(differences[:SAME_STEPS])
    print_table(rows)
    print(f"tokens/s of train over plain: {ratio.seconds:.3f} (target {TARGET}), by CPU time {ratio.cpu:.3f}")
    print(f"losses differ by at most {first:.1e} in the first {SAME_STEPS} steps, {max(differences):.1e} in all")
    figures = {"ratio": ratio.seconds, "cpu_ratio": ratio.cpu, "rows": rows}
    print_json("train", arguments, target=TARGET, **figures, first=first, largest=max(differences))
    return 0 if first <= LOSSES else 1
