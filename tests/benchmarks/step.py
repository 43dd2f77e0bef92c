"""Host time to dispatch one training step (AdamW), for models of 150 and 450 leaves on 1, 2 and 8 devices.

train step: `make_train_step` on a TrainState. flat jit: `jax.jit` of the same computation on a flat list of the same
leaves, the minimum cost. plain: a script in Flax and optax only. nnx.jit: the modules themselves. They alternate in
random order, since the cost of a call depends on the caches that the previous call left. A figure is the median of the
ratios to flat jit within a round, in time and in CPU time of this thread. Target: train step at most 1.1.

    python -m tests.benchmarks step [--rounds 200] [--leaves 150,450] [--devices 1,2,8]
"""

import inspect
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import abstract_state, create_mesh
from flax_mesh.text import count_text
from flax_mesh.train import TrainState, init_train_state, make_train_step
from tests.benchmarks.common.report import options, report, use_cpu

TARGET = 1.1
WARM = 10  # rounds not counted
SLOW = {"nnx.jit": 10}  # measured in every tenth round only: it is much slower, and fewer rounds suffice
TX = optax.adamw(1e-3)

Call = Callable[[Any], Any]  # dispatches a step on the result of the previous one


class Net(nnx.Module):
    """Two leaves per layer."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(num_layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_fn(model: Net, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.tanh(model(batch)) ** 2), jnp.float32(batch.shape[0])


def plain_step(
    loss_fn: Callable[..., Any], graphdef: Any, tx: optax.GradientTransformation, sharding: Any = None
) -> Callable[..., Any]:
    """step(params, optimizer state, batch) written in Flax and optax only."""

    def step(params: nnx.State, opt_state: Any, batch: Any):
        def loss_of(params: nnx.State) -> jax.Array:
            loss, weight = loss_fn(nnx.merge(graphdef, params), batch)
            return loss / weight

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=sharding)


def calls(num_leaves: int, devices: int) -> dict[str, tuple[Call, Any]]:
    """name -> (dispatch, argument of the first call)."""
    mesh = create_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    replicated = NamedSharding(mesh, PartitionSpec())

    def make() -> tuple[Net, nnx.Optimizer]:
        model = Net(num_leaves // 2, nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    abstract = abstract_state(make, mesh, [(".*", ())])
    states = [init_train_state(make, abstract) for _ in range(4)]
    batch = jax.device_put(jnp.ones((8, 8)), replicated)
    step, definition = make_train_step(loss_fn, states[0]), states[0].definition

    def on_leaves(leaves: list[jax.Array], batch: jax.Array):
        state, metrics = inspect.unwrap(step)(TrainState(tuple(leaves), definition), batch)
        return list(state.leaves), metrics

    layout = [leaf.sharding for leaf in states[1].leaves]
    flat = jax.jit(on_leaves, donate_argnums=0, out_shardings=(layout, None))
    graphdef, params = nnx.split(states[2].merge()[0])
    plain = plain_step(loss_fn, graphdef, TX, replicated)
    modules = states[3].merge()

    @nnx.jit
    def on_modules(model: Net, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m, batch)[0] / batch.shape[0])(model)
        optimizer.update(model, grads)
        return loss

    return {
        "train step": (lambda last: step(last[0], batch), (states[0], None)),
        "flat jit": (lambda last: flat(last[0], batch), (list(states[1].leaves), None)),
        "plain": (lambda last: plain(*last[:2], batch), (params, jax.device_put(TX.init(params), replicated), None)),
        "nnx.jit": (lambda last: on_modules(*modules, batch), None),
    }


def measure(num_leaves: int, devices: int, rounds: int) -> list[dict[str, Any]]:
    """One row per variant: microseconds, CPU microseconds, and both as ratios to flat jit.

    Prints a line per variant once it is compiled, and one once it is measured.
    """
    what = f"{num_leaves} leaves on {count_text(devices, 'device')}"
    variants = calls(num_leaves, devices)
    names, last = list(variants), {name: first for name, (_, first) in variants.items()}
    times: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in names}  # round -> time, CPU time
    draw = random.Random(0)
    for number in range(-WARM, rounds):
        for name in draw.sample(names, len(names)):
            if number % SLOW.get(name, 1):
                continue
            call = variants[name][0]
            began, cpu = time.perf_counter(), time.thread_time()
            last[name] = call(last[name])
            times[name][number] = time.perf_counter() - began, time.thread_time() - cpu
            jax.block_until_ready(last[name])
            if number == -WARM:
                print(f"{what}: {name} compiled in {time.perf_counter() - began:.1f} s", flush=True)
    floor = times["flat jit"]
    rows = []
    for name, found in times.items():
        row: dict[str, Any] = {"leaves": num_leaves, "devices": devices, "variant": name}
        for at, kind in enumerate(("", "CPU ")):
            counted = {number: spent[at] for number, spent in found.items() if number >= 0}
            ratios = [spent / floor[number][at] for number, spent in counted.items()]
            row |= {f"{kind}us": 1e6 * statistics.median(counted.values()), f"{kind}ratio": statistics.median(ratios)}
        print(f"{what}: {name} {row['us']:.0f} us, {row['ratio']:.3g} of flat jit", flush=True)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("step", arguments, rounds=200, leaves=(150, 450), devices=(1, 2, 8))
    use_cpu()
    cases = itertools.product(given.leaves, given.devices)
    rows = [row for num_leaves, devices in cases for row in measure(num_leaves, devices, given.rounds)]
    return report("step", arguments, rows, target=TARGET)
