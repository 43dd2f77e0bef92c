"""Random batches, meshes and steps: FLOPs and bytes per device, and results equal to one device.

python -m tests.step.batches SEED...     the cases of these seeds
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_mesh import abstract_state, create_mesh
from flax_mesh.train import init_train_state, make_eval_step, make_train_step, place_batch

ROWS, LENGTH, WIDTH = 64, 64, 32
RULES = [("up/kernel", ("embed", "mlp")), ("down/kernel", ("mlp", "embed")), (".*", ())]
SHAPES = ("dp:8", "fsdp:8", "dp:2,fsdp:2,tp:2", "dp:4,tp:2", "fsdp:4,sp:2", "dp:2,sp:2,tp:2", "dp:2,tp:4", "tp:8")
LEAVES: dict[str, Callable[[np.random.Generator], Any]] = {
    "features": lambda rng: rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "images": lambda rng: rng.normal(size=(ROWS, 2, 2, WIDTH)),  # float64
    "pair": lambda rng: (rng.normal(size=(ROWS, WIDTH)).astype("bfloat16"), [rng.integers(0, 9, ROWS)]),
    "mask": lambda rng: rng.integers(0, 2, ROWS).astype(bool),
    "scale": lambda rng: np.asarray(rng.normal(), np.float32),
    "keys": lambda rng: jax.random.split(jax.random.key(int(rng.integers(9))), ROWS),
}
SOURCES = ("numpy", "jax", "placed")


@dataclass(frozen=True)
class Case:
    """`shape` of the mesh; the batch has tokens (ROWS, LENGTH) and `leaves`, from `source`."""

    shape: str
    num_microbatches: int = 1
    leaves: tuple[str, ...] = ()
    source: str = "numpy"
    evaluates: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(size) for name, size in (part.split(":") for part in self.shape.split(","))}


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    evaluates = bool(rng.integers(4) == 0)
    return Case(
        str(rng.choice(SHAPES)),
        1 if evaluates else int(rng.choice([1, 2, 4])),
        tuple(name for name in LEAVES if rng.integers(2)),
        str(rng.choice(SOURCES)),
        evaluates,
    )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 256, rngs=rngs), nnx.Linear(256, WIDTH, rngs=rngs)

    def __call__(self, batch):
        x = self.embed(batch["tokens"])
        if "features" in batch:
            x += batch["features"][:, None]
        if "images" in batch:
            x += batch["images"].mean((1, 2))[:, None]
        if "pair" in batch:
            wide, (numbers,) = batch["pair"]
            x += (wide * numbers[:, None])[:, None]
        if "keys" in batch:
            x += jax.vmap(lambda key: jax.random.normal(key, (1, WIDTH)))(batch["keys"])
        return self.down(jnp.tanh(self.up(x))) * batch.get("scale", 1.0)


def loss_fn(model: Net, batch: Any):
    losses = (model(batch) ** 2).mean((1, 2))
    weights = batch.get("mask", jnp.ones(len(losses)))
    return (losses * weights).sum(), weights.sum()


def make():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def batch_of(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, 64, (ROWS, LENGTH)), **{name: LEAVES[name](rng) for name in case.leaves}}


def step_and_state(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    rules = RULES if "tp" in case.sizes else [(".*", ())]
    state = init_train_state(make, abstract_state(make, mesh, rules))
    if case.evaluates:
        return make_eval_step(loss_fn, state), state
    return make_train_step(loss_fn, state, num_microbatches=case.num_microbatches), state


def check(case: Case) -> None:
    """AssertionError unless each device has its share of FLOPs and bytes, and the results equal a run on one device."""
    mesh = create_mesh(tuple(case.sizes.values()), tuple(case.sizes))
    one = create_mesh((1,), ("dp",), devices=jax.devices()[:1])
    batch, plain = batch_of(case), batch_of(case)
    if case.source != "numpy":
        batch = place_batch(batch, mesh) if case.source == "placed" else jax.tree.map(jnp.asarray, batch)
    (step, state), (plain_step, plain_state) = step_and_state(case, mesh), step_and_state(case, one)
    compiled, whole = step.lower(state, batch).compile(), plain_step.lower(plain_state, plain).compile()
    assert flops(compiled) <= 1.05 * flops(whole) / math.prod(case.sizes.values()), (flops(compiled), flops(whole))
    ways = math.prod(size for name, size in case.sizes.items() if name in ("dp", "fsdp"))
    for leaf, sharding in zip(jax.tree.leaves(batch), jax.tree.leaves(compiled.input_shardings[0][1]), strict=True):
        wanted = leaf.size // ways if leaf.ndim else 1
        assert math.prod(sharding.shard_shape(leaf.shape)) <= wanted, (leaf.shape, sharding)
    for a, b in zip(jax.tree.leaves(step(state, batch)), jax.tree.leaves(plain_step(plain_state, plain)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def flops(compiled: Any) -> float:
    return compiled.cost_analysis()["flops"]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for seed in map(int, sys.argv[1:]):
        print(seed, case := random_case(seed), flush=True)
        check(case)
