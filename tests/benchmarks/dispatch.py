"""Host time to dispatch one training step of a model with 150 leaves (AdamW: 450 and a few in all).

`train step` is `make_train_step` on a TrainState; `flat jit` is `jax.jit` of the same computation on a flat list of the
same leaves, the floor; `nnx.jit` is the plain Flax way. Each call is waited for outside the measured time, and the
three take turns, so that their ratios hold on a busy machine. Target: train step at most 1.1 times flat jit.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.train import TrainState, init_train_state, make_train_step

ROUNDS = 200


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(75)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_fn(model: Net, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.tanh(model(batch)) ** 2), jnp.float32(batch.shape[0])


def make() -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def measure(devices: int) -> dict[str, float]:
    """Median microseconds per dispatch of each variant."""
    mesh = create_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    abstract = abstract_state(make, mesh, [(".*", ())])
    states = [init_train_state(make, abstract) for _ in range(3)]
    step = make_train_step(loss_fn, states[0])
    definition = states[0].definition

    def on_leaves(leaves: list[jax.Array], batch: jax.Array):
        state, metrics = step.__wrapped__(TrainState(tuple(leaves), definition), batch)
        return list(state.leaves), metrics

    layout = [leaf.sharding for leaf in states[0].leaves]
    flat = jax.jit(on_leaves, donate_argnums=0, out_shardings=(layout, None))

    @nnx.jit
    def plain(model: Net, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m, batch)[0] / batch.shape[0])(model)
        optimizer.update(model, grads)
        return loss

    batch = jnp.ones((8, 8))
    state, leaves, modules = states[0], list(states[1].leaves), states[2].merge()
    times: dict[str, list[float]] = {"train step": [], "flat jit": [], "nnx.jit": []}
    for i in range(ROUNDS + 10):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        times["train step"].append(time.perf_counter() - began)
        jax.block_until_ready((state, metrics))
        began = time.perf_counter()
        leaves, metrics = flat(leaves, batch)
        times["flat jit"].append(time.perf_counter() - began)
        jax.block_until_ready((leaves, metrics))
        if i % 10 == 0:  # a hundred times slower: fewer rounds do
            began = time.perf_counter()
            loss = plain(*modules, batch)
            times["nnx.jit"].append(time.perf_counter() - began)
            jax.block_until_ready(loss)
    warm = {"train step": 10, "flat jit": 10, "nnx.jit": 1}
    return {name: 1e6 * statistics.median(values[warm[name] :]) for name, values in times.items()}


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    leaves = len(jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(Net(nnx.Rngs(0))))))
    print(f"jax {jax.__version__}, {leaves} leaves, median of {ROUNDS} dispatches on the CPU, us")
    rows = {}
    for devices in (1, 2, 8):
        row = rows[devices] = measure(devices)
        ratios = "  ".join(f"{name} {us:8.0f} ({us / row['flat jit']:.2f}x)" for name, us in row.items())
        print(f"{devices} devices: {ratios}")
    print(json.dumps({"benchmark": "dispatch", "jax": jax.__version__, "leaves": leaves, "us": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
