"""The same training twice: by flax_mesh on a mesh, and with Flax and optax alone on one device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.program import build_program
from flax_mesh.train import DataConfig, MeshConfig, OptimizerConfig, PipelineConfig, RunConfig, TrainConfig
from flax_mesh.tree import map_named, named_leaves, nest

MODEL = DecoderConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=32)
# Warm-up and decay are short, so that every step has another learning rate. With a small epsilon, Adam would divide
# gradients that are nearly zero by themselves, so that their rounding errors become updates.
SETTINGS = OptimizerConfig(
    learning_rate=0.01, end_learning_rate=0.002, warmup_steps=2, decay_steps=6, clip_norm=0.5, epsilon=1e-3
)
CONFIG = TrainConfig(
    make_decoder,
    next_token_loss,
    MODEL,
    data=DataConfig(sequence_length=8, batch_size=8),
    optimizer=SETTINGS,
    run=RunConfig(seed=3, eval_every=0),
)
RATE: Any = optax.warmup_cosine_decay_schedule(0.01 / 3, 0.01, 2, 6, 0.002)
CLIP = optax.clip_by_global_norm(0.5)
OUTPUT, INPUT = MuonDimensionNumbers((0, 1), (2,)), MuonDimensionNumbers((0,), (1, 2))


def is_decayed(params):
    return map_named(lambda path, _: path.split("/")[-1] not in ("scale", "bias"), params)


def muon():
    def dims(path, _):
        return OUTPUT if path.endswith("o/kernel") else INPUT if "attention" in path else MuonDimensionNumbers()

    def label(path, _):
        return "muon" if path.endswith("kernel") else "adamw"

    matrices = optax.contrib.muon(
        RATE,
        eps=1e-3,
        weight_decay=0.1,
        muon_weight_dimension_numbers=lambda params: map_named(dims, params),
        consistent_rms=0.2,
    )
    rest = optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1, mask=is_decayed)
    return optax.partition({"muon": matrices, "adamw": rest}, lambda params: map_named(label, params))


def by_groups():
    def label(path, _):
        return "embed" if path.startswith("embed") else "mlp" if "/mlp/" in path else "rest"

    def adamw(rate, decay):
        schedule = lambda count: rate * RATE(count)  # noqa: E731
        return optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-3, weight_decay=decay, mask=is_decayed)

    parts: dict[Any, Any] = {"embed": adamw(0.1, 0.1), "mlp": adamw(2.0, 0.05), "rest": adamw(1.0, 0.1)}
    return optax.partition(parts, lambda params: map_named(label, params))


PLAIN: dict[str, Any] = {
    "groups": (  # the first match counts
        {"groups": "embed learning_rate*0.1; /mlp/ learning_rate*2 weight_decay*0.5; embed learning_rate*7"},
        by_groups,
    ),
    "adamw": ({}, lambda: optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1, mask=is_decayed)),
    "bfloat16 moments": (
        {"moment_dtype": "bfloat16"},
        lambda: optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-3, mu_dtype=jnp.bfloat16, weight_decay=0.1, mask=is_decayed),
    ),
    "muon": ({"name": "muon"}, muon),
    "adafactor": (
        {"name": "adafactor", "momentum": 0.8},
        lambda: optax.adafactor(
            RATE, momentum=0.8, weight_decay_rate=lambda count: 0.1 * RATE(count), weight_decay_mask=is_decayed
        ),
    ),
    "sgd": (
        {"name": "sgd", "weight_decay": 0.2},
        # AdamW's decay, which optax.sgd has not
        lambda: optax.chain(
            optax.trace(0.9), optax.add_decayed_weights(0.2, is_decayed), optax.scale_by_learning_rate(RATE)
        ),
    ),
    "sgd without momentum and decay": ({"name": "sgd", "weight_decay": 0.0, "momentum": 0.0}, lambda: optax.sgd(RATE)),
}


MESHES = {"one": "dp:1", "mesh": "dp:2,fsdp:2,tp:2", "pp": "pp:2,fsdp:2,tp:2", "sp": "fsdp:2,tp:2,sp:2"}
STEPS = 3


def config_of(mesh, *, model=MODEL, recipe=CONFIG, **settings):
    """The config of a run on one of MESHES with other settings of the optimizer."""
    if settings.get("name") in ("sgd", "adafactor"):  # which have no epsilon
        settings = {"epsilon": OptimizerConfig.epsilon, **settings}
    changed = replace(recipe, model=model, mesh=MeshConfig(MESHES[mesh]), optimizer=replace(SETTINGS, **settings))
    return replace(changed, pipeline=PipelineConfig(num_microbatches=4)) if mesh == "pp" else changed


def host_batch(step):
    tokens = np.random.default_rng(step).integers(0, 32, (8, 9), np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def trained(config, steps=STEPS):
    """(program, state after `steps` steps, metrics of every step)."""
    program = build_program(config)
    state, rows = program.init(), []
    for step in range(steps):
        state, metrics = program.step(state, host_batch(step))
        rows.append({name: float(value) for name, value in metrics.items()})
    return program, state, rows


def parameters(state):
    """Path -> value of the parameters of a TrainState."""
    return {path: np.asarray(x) for path, x in named_leaves(state.to_nnx()["model"])}


def plain(optimizer, is_trained=lambda path: True, steps=STEPS):
    """(parameters by path after every step, losses); `optimizer` sees the trained ones as nested dicts."""
    graphdef, state = nnx.split(make_decoder(MODEL, nnx.Rngs(CONFIG.run.seed)))
    named = dict(named_leaves(state))
    frozen = {path: x for path, x in named.items() if not is_trained(path)}

    def loss(tree, batch):
        values = {**frozen, **dict(named_leaves(tree))}
        leaves = [values[path] for path in named]
        model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))
        loss_sum, weight = next_token_loss(model, batch)[:2]
        return loss_sum / weight

    @jax.jit
    def update(tree, moments, batch):
        value, grads = jax.value_and_grad(loss)(tree, batch)
        updates, moments = optimizer.update(grads, moments, tree)
        return optax.apply_updates(tree, updates), moments, value

    tree = nest((path, x) for path, x in named.items() if path not in frozen)
    moments, history, losses = optimizer.init(tree), [], []
    for step in range(steps):
        tree, moments, value = update(tree, moments, host_batch(step))
        history.append({**frozen, **dict(named_leaves(tree))})
        losses.append(float(value))
    return history, losses


def average_of(history, decay):
    """The mean of the parameters after every step with the weights decay^0, decay^1 ... from the last one back."""
    state = optax.ema(decay, debias=True).init(history[0])
    for values in history:
        found, state = optax.ema(decay, debias=True).update(values, state)
    return found


def assert_close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=tolerance, err_msg=path)
