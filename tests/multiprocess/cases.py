"""Pipelines for runs in one process and in several (`tests.multiprocess.worker`), and helpers of its cases."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.models import make_decoder, next_token_loss
from flax_mesh.mpmd import Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.processes.agree import get_text, put_text
from tests.blockwise import model as long
from tests.mpmd.runtime.pipelines import CONFIG, FAST, decoder_batch, groups, make_net, make_small, net_batch, net_loss

ROWS, COUNT = 8, 4


def clipped() -> optax.GradientTransformation:
    """An optimizer with a clip that is always active, and that skips updates that are not finite."""
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    return optax.apply_if_finite(inner, max_consecutive_errors=5)


# model -> make, loss, batch(rows, seed), rules (None: the rules of the model). The models net and decoder have tied
# embeddings; long has attention in blocks, of packed documents.
MODELS: dict[str, Any] = {
    "net": (make_net, net_loss, net_batch, [("kernel$|embedding$", ("embed", None)), (".*", ())]),
    "small": (make_small, net_loss, net_batch, [("kernel$|embedding$", ("embed", None)), (".*", ())]),
    "decoder": (lambda: make_decoder(CONFIG, nnx.Rngs(0)), next_token_loss, decoder_batch, None),
    "long": (lambda: long.make()[0], long.loss_fn, lambda n, seed=0: long.batch_of(1024, n, 8), long.RULES),
}


def parse_sizes(text: str) -> dict[str, int]:
    """Parses "pp:2,fsdp:2"."""
    return {name: int(size) for name, size in (part.split(":") for part in text.split(","))}


def make_pipeline(model: str, schedule: str, sizes: dict[str, int]) -> Pipeline:
    """A pipeline on a mesh with these sizes."""
    make, loss, batch, rules = MODELS[model]
    mesh, attention = groups(**sizes), "blockwise" if model == "long" else "auto"
    plan = make_schedule(schedule, num_groups=mesh.mpmd_dim, num_microbatches=COUNT)
    micro = jax.tree.map(lambda x: x[: ROWS // COUNT], batch(ROWS))
    staged = split_stages(loss, make, micro, num_stages=plan.num_stages, mesh=mesh.unstack[0], attention=attention)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)) if model == "small" else clipped()
    return Pipeline(staged, optimizer, mesh=mesh, schedule=plan, rules=rules, compiler_options=FAST)


def batches(model: str, steps: int) -> list[Any]:
    """NumPy batches, equal in every process."""
    make_batch = MODELS[model][2]
    return [make_batch(ROWS, seed=seed) for seed in range(steps)]


def named_shards(pipeline: Pipeline, state: Any) -> dict[str, np.ndarray]:
    """ "leaf/index of the device in the mesh" -> shard, for the shards in this process."""
    indices = {device: index for index, device in enumerate(pipeline.mesh.jax_mesh.devices.flat)}
    found = {}
    for number, leaf in enumerate(state.leaves):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found |= {f"{number}/{indices[shard.device]}": np.asarray(shard.data) for shard in leaf.addressable_shards}
    return found


def results(
    pipeline: Pipeline, model: str, steps: int
) -> tuple[list[dict[str, float]], dict[str, float], dict[str, Any]]:
    """Trains and evaluates: the metrics of every step, the sums of the evaluation, and the shards of the state here."""
    state, rows = pipeline.init_state(), []
    for batch in batches(model, steps):
        state, metrics = pipeline.step(state, batch)
        rows.append({name: float(np.asarray(value)) for name, value in metrics.items()})
    sums = {name: float(np.asarray(x)) for name, x in pipeline.evaluate(state, batches(model, 1)[0]).items()}
    return rows, sums, named_shards(pipeline, state)


def error_of(function: Callable[[], object], kind: type[Exception] = ConfigError) -> str:
    try:
        function()
    except kind as error:
        assert type(error) is kind, error
        return str(error)
    raise AssertionError("no error")


def put_and_get_all(name: str, text: str) -> list[str]:
    put_text(f"{name}/{jax.process_index()}", text)
    return [get_text(f"{name}/{process}", 60) for process in range(jax.process_count())]


def end_at_once(text: str) -> None:
    """Exits without waiting for transfers that are never fetched; process 0, which hosts the store, exits last."""
    print(text, flush=True)
    if jax.process_index() == 0:
        for process in range(1, jax.process_count()):
            get_text(f"end/{process}", 60)
        time.sleep(1)  # until the others have the answer to their last call
    else:
        put_text(f"end/{jax.process_index()}", "now")
    os._exit(0)
