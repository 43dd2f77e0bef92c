"""Host cost of a pipeline step, against a loop written by hand for the same model.

Four residual MLP blocks of width 64, one a stage, one device a stage, 1F1B, plain SGD. The loop by hand knows its
model: a jit for F, B and the fused last stage, `jax.device_put` between them, and no loss weights, norms or metrics.
Prints the ratio of the medians of interleaved steps, in CPU time and in time, and the growth over 200 steps.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh import create_mesh
from flax_mesh.mpmd import MpmdMesh, Pipeline, make_schedule, split_stages

STAGES, WIDTH, HIDDEN, ROWS, LENGTH, RATE = 4, 64, 128, 4, 16, 1e-2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(STAGES)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def by_hand(parameters, count):
    """step(parameters, xs, ys) -> parameters, loss; one list entry a stage or a microbatch."""
    meshes = [Mesh(np.array(jax.devices()[k : k + 1]), ("dp",)) for k in range(STAGES)]
    there = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]

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
    parameters = [jax.device_put(p, t) for p, t in zip(parameters, there, strict=True)]

    def step(parameters, xs, ys):
        acc = [zeros(p) for p in parameters]
        total, values, saved = zero(parameters[-1]), {}, {}
        for kind, k, m in order:
            if kind == "F" and k < STAGES - 1:
                saved[k, m] = x = values.pop((k, m)) if k else xs[m]
                values[k + 1, m] = jax.device_put(forward(parameters[k], x), there[k + 1])
            elif kind == "B":
                if k == STAGES - 1:
                    total, acc[k], dx = last(parameters[k], values.pop((k, m)), ys[m], acc[k], total)
                else:
                    acc[k], dx = backward(parameters[k], saved.pop((k, m)), values.pop((k, m, "ct")), acc[k])
                if k:
                    values[k - 1, m, "ct"] = jax.device_put(dx, there[k - 1])
        return [update(p, a) for p, a in zip(parameters, acc, strict=True)], total

    return step, parameters, there


def run(count: int, steps: int) -> None:
    groups = MpmdMesh(create_mesh((STAGES, 1), ("pp", "dp"), devices=jax.devices()[:STAGES]), "pp")
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(count * ROWS, LENGTH, WIDTH)).astype(np.float32) for name in "xy"}
    micro = {name: x[:ROWS] for name, x in batch.items()}
    staged = split_stages(loss_fn, lambda: Net(nnx.Rngs(0)), micro, num_stages=STAGES, mesh=groups.unstack[0])
    schedule = make_schedule("1f1b", num_groups=STAGES, num_microbatches=count)
    for residuals in ("store", "recompute"):
        pipeline = Pipeline(staged, groups, schedule, optax.sgd(RATE), residuals=residuals)
        state = pipeline.init_state()
        model = Net(nnx.Rngs(0))
        step, parameters, there = by_hand([[x.up.kernel[...], x.down.kernel[...]] for x in model.layers], count)
        cut = {name: x.reshape(count, ROWS, LENGTH, WIDTH) for name, x in batch.items()}
        xs = [jax.device_put(x, there[0]) for x in cut["x"]]
        ys = [jax.device_put(y, there[-1]) for y in cut["y"]]
        ours, theirs, busy = [], [], []
        for _ in range(steps):
            start, begun = time.perf_counter(), time.process_time()
            state, metrics = pipeline.step(state, batch)
            jax.block_until_ready((state.leaves, metrics))
            middle, between = time.perf_counter(), time.process_time()
            parameters, total = step(parameters, xs, ys)
            jax.block_until_ready((parameters, total))
            ours.append(middle - start)
            theirs.append(time.perf_counter() - middle)
            busy.append((between - begun, time.process_time() - between))
        error = abs(float(metrics["loss"]) - float(total) / count)
        half = steps // 2
        late, early = statistics.median(ours[half:]), statistics.median(ours[5:half])
        ratio = statistics.median(ours[5:]) / statistics.median(theirs[5:])
        mine, by_hand_cpu = (statistics.median(column) for column in zip(*busy[5:], strict=True))
        print(
            f"M={count:<3} residuals={residuals:<10} pipeline / by hand: "
            f"CPU time {mine / by_hand_cpu:.2f}, time {ratio:.2f}"
            f"  (best {min(ours) / min(theirs):.2f}; {statistics.median(ours[5:]) * 1e3:.1f} ms)"
            f"  second half / first {late / early:.2f}  loss differs by {error:.1e}"
        )


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for count in (8, 32):
        run(count, 200)
