"""The recipe of these tests: a small model with every kind of state that a resumed run must restore.

These are weights, their moments, a running mean that the loss depends on, and dropout, whose masks depend on seed and
step. `count_compilations` and `snapshot` are defined here because all tests of the loop use them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_mesh import partitioned
from flax_mesh.train import CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig

COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class BigramConfig:
    vocab_size: int = 256
    hidden_size: int = 64
    dropout: float = 0.1
    note: str = field(default="", metadata={"changes_result": False})


@partitioned(rules=[(r"embed/embedding$", ("vocab", "embed")), (r"head/kernel$", ("embed", "vocab")), (".*", ())])
class Bigram(nnx.Module):
    def __init__(self, config: BigramConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(config.hidden_size))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if not self.dropout.deterministic:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(x.mean((0, 1)))
        return self.head(self.dropout(x - self.mean[...]))


def make_bigram(config: BigramConfig, rngs: nnx.Rngs) -> Bigram:
    return Bigram(config, rngs)


def loss_fn(model: Bigram, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return losses.sum(), jnp.float32(losses.size)


# The next two sleep, and run on one device only: devices that wait for each other must not wait for Python too.


def loss_with_slow_evaluation(model: Bigram, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    if model.dropout.deterministic:
        jax.debug.callback(lambda: time.sleep(2))
    return loss_fn(model, batch)


def slow_loss(model: Bigram, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    jax.debug.callback(lambda: time.sleep(1.5))
    return loss_fn(model, batch)


def sample(model: Bigram, prompt: jax.Array, num_tokens: int, key: jax.Array) -> jax.Array:
    last = jnp.argmax(model(prompt[None])[0, -1]).astype(jnp.int32)
    return jnp.concatenate([prompt, jnp.full(num_tokens, last)])


def recipe() -> TrainConfig:
    return TrainConfig(
        make_model=make_bigram,
        loss_fn=loss_fn,
        sample=sample,
        flops_per_token=lambda model, num_parameters, sequence_length: 6.0 * num_parameters,
        model=BigramConfig(),
        mesh=MeshConfig(shape="dp:2"),
        data=DataConfig(sequence_length=32, batch_size=8, held_out=0.2, eval_batches=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=100),
        checkpoint=CheckpointConfig(every=100, keep=3),
        run=RunConfig(steps=12, eval_every=4, sample_tokens=0),
    )


def slow_recipe() -> TrainConfig:
    """Every step takes more than a second, so that a signal arrives during a step."""
    return replace(recipe(), loss_fn=slow_loss, mesh=MeshConfig(shape="dp:1"))


def write_text(folder: Path) -> Path:
    """Write twenty kilobytes of regular text."""
    path = folder / "squares.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(1000)))
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Yield a list with one item per program that XLA compiles in this process or loads from the cache."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
