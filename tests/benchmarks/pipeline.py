"""Host cost of a pipeline step compared with a handwritten loop for the same model.

Four residual MLP blocks of width 64, one per stage and device, 1F1B, plain SGD. The handwritten loop is specialized for
this model: a jit for F, for B and for the fused last stage, `jax.device_put` between them, no loss weights or metrics.

Medians over alternating steps: the ratio of the two, the same step on one device ("over jit"), CPU time of the
dispatching thread per action, and the second half of the run over the first. Target: time at most 1.5 times, no growth.

    python -m tests.benchmarks pipeline [--microbatches 8,32] [--steps 200]
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh import create_mesh
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.step.state import TrainState, init_train_state
from flax_mesh.step.step import make_train_step
from tests.benchmarks.common import pipelines
from tests.benchmarks.common.pipelines import Turn, median_ratio
from tests.benchmarks.common.report import options, report, use_cpu

TARGET = 1.5
WARM = 5  # steps not counted
STAGES, WIDTH, HIDDEN, ROWS, LENGTH, RATE = 4, 64, 128, 4, 16, 1e-2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(STAGES)])

    def __call__(self, x):
        return functools.reduce(lambda x, layer: layer(x), self.layers, x)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def handwritten_step(parameters, count):
    """step(parameters, xs, ys) -> parameters, loss; one list entry per stage or microbatch."""
    meshes = [Mesh(np.array(jax.devices()[k : k + 1]), ("dp",)) for k in range(STAGES)]
    shardings = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]

    def block(p, x):
        return x + jnp.tanh(x @ p[0]) @ p[1]

    def backward(p, x, ct, acc):
        grads, dx = jax.vjp(block, p, x)[1](ct)
        return [a + g for a, g in zip(acc, grads, strict=True)], dx

    def last(p, x, y, acc, total):
        loss, (grads, dx) = jax.value_and_grad(lambda p, x: jnp.mean((block(p, x) - y) ** 2), (0, 1))(p, x)
        return total + loss, [a + g for a, g in zip(acc, grads, strict=True)], dx

    forward, backward, last = jax.jit(block), jax.jit(backward, donate_argnums=3), jax.jit(last, donate_argnums=(3, 4))
    zeros = jax.jit(lambda p: [jnp.zeros_like(w) for w in p])
    zero = jax.jit(lambda p: jnp.zeros(()))
    update = jax.jit(lambda p, g: [w - RATE * x / count for w, x in zip(p, g, strict=True)], donate_argnums=1)
    order = make_schedule("1f1b", num_groups=STAGES, num_microbatches=count).order()
    parameters = [jax.device_put(p, t) for p, t in zip(parameters, shardings, strict=True)]

    def step(parameters, xs, ys):
        acc = [zeros(p) for p in parameters]
        total, values, saved = zero(parameters[-1]), {}, {}
        for kind, k, m in order:
            if kind == "F" and k < STAGES - 1:
                saved[k, m] = x = values.pop((k, m)) if k else xs[m]
                values[k + 1, m] = jax.device_put(forward(parameters[k], x), shardings[k + 1])
            elif kind == "B":
                if k == STAGES - 1:
                    total, acc[k], dx = last(parameters[k], values.pop((k, m)), ys[m], acc[k], total)
                else:
                    acc[k], dx = backward(parameters[k], saved.pop((k, m)), values.pop((k, m, "ct")), acc[k])
                if k:
                    values[k - 1, m, "ct"] = jax.device_put(dx, shardings[k - 1])
        return [update(p, a) for p, a in zip(parameters, acc, strict=True)], total

    return step, parameters, shardings


def measure(count: int, remat: Any, steps: int) -> dict[str, Any]:
    """A row of the table for `count` microbatches."""
    batch = pipelines.random_batch(count * ROWS, LENGTH, WIDTH)
    pipeline = pipelines.make_pipeline(Net, loss_fn, batch, "1f1b", STAGES, count, rate=RATE, remat=remat)
    kernels = [[layer.up.kernel[...], layer.down.kernel[...]] for layer in Net().layers]
    step, parameters, shardings = handwritten_step(kernels, count)
    xs = [jax.device_put(x, shardings[0]) for x in batch["x"].reshape(count, ROWS, LENGTH, WIDTH)]
    ys = [jax.device_put(y, shardings[-1]) for y in batch["y"].reshape(count, ROWS, LENGTH, WIDTH)]
    state, metrics, total = pipeline.init_state(), {}, jnp.float32(jnp.nan)

    def run_pipeline() -> Any:
        nonlocal state, metrics
        state, metrics = pipeline.step(state, batch)
        return state.leaves, metrics

    def run_handwritten() -> Any:
        nonlocal parameters, total
        parameters, total = step(parameters, xs, ys)
        return parameters, total

    plain, plain_step = plain_program(count)

    def run_plain() -> Any:
        nonlocal plain
        plain, found = plain_step(plain, batch)
        return plain.leaves, found

    turns = Turn(run_pipeline), Turn(run_handwritten), Turn(run_plain)
    for number in range(steps + WARM):
        for turn in turns if number % 2 else turns[::-1]:
            turn.run()
    error = abs(float(metrics["loss"]) - float(total) / count)
    num_actions = len(pipeline.schedule.order())
    pipelined, baseline, jitted = turns
    ratios = [a / b for a, b in zip(pipelined.time, baseline.time, strict=True)]
    early, late = ratios[WARM : WARM + steps // 2], ratios[WARM + steps // 2 :]
    row: dict[str, Any] = {"M": count, "remat": remat}
    row["time"] = median_ratio(pipelined.time[WARM:], baseline.time[WARM:])
    row["CPU time"] = median_ratio(pipelined.cpu[WARM:], baseline.cpu[WARM:])
    row["over jit"] = median_ratio(pipelined.time[WARM:], jitted.time[WARM:])
    for name, turn in (("action", pipelined), ("by hand", baseline)):
        row[f"{name} us"] = 1e6 * statistics.median(turn.dispatch[WARM:]) / num_actions
    row["late / early"] = statistics.median(late) / statistics.median(early)
    return row | {"loss differs": error}


def plain_program(count: int) -> tuple[TrainState, Callable[..., Any]]:
    """(state, step) of the same model on one device."""
    mesh = create_mesh((1,), ("dp",), devices=jax.devices()[:1])

    def make() -> tuple[Net, nnx.Optimizer]:
        model = Net()
        return model, nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

    state = init_train_state(make, abstract_state(make, mesh, [(".*", ())]))
    return state, make_train_step(loss_fn, state, num_microbatches=count, layers=("layers",))


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("pipeline", arguments, microbatches=(8, 32), steps=200)
    use_cpu()
    rows = [measure(count, remat, given.steps) for count in given.microbatches for remat in ("none", "full")]
    return report("pipeline", arguments, rows, target=TARGET)
