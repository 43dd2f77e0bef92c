"""The losses of a decoder with experts; training with sharded experts equals training on one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import abstract_state, partition_rules
from flax_mesh.models import make_decoder, moe, next_token_loss
from flax_mesh.models.moe import router_losses
from flax_mesh.sharding.abstract import abstract_split
from flax_mesh.train import DataConfig, OptimizerConfig, abstract_train_state, make_train_step
from flax_mesh.train.build import batch_sharding
from flax_mesh.train.data.batches import make_batch_fn
from flax_mesh.train.data.data import load_corpus
from flax_mesh.train.optimizers.make import make_optimizer
from flax_mesh.tree import map_named, named_leaves
from tests.models.reference import EXPERTS, NATURAL, REPLICATED, make_mesh, normal, small

pytestmark = pytest.mark.usefixtures("quick_compilation")


def batch_of(rows=4, seq=8, seed=0) -> Any:
    ids = np.random.default_rng(seed).integers(0, 256, (rows, seq + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


@jax.jit
def loss_and_aux(model, batch):
    return next_token_loss(model, batch), model.forward(batch["inputs"])


def test_the_loss_is_the_sum_in_its_docstring():
    model, batch = small(EXPERTS, load_balance_loss=0.5, router_z_loss=0.25), batch_of()
    batch["targets"][0, :5] = -1
    (loss, weight, metrics), (logits, aux) = loss_and_aux(model, batch)
    p = np.asarray(logits) - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    entropy = -sum(p[i, j, t] for (i, j), t in np.ndenumerate(batch["targets"]) if t >= 0)
    found = router_losses(aux)
    assert weight == 27 and found["load_balance_loss"].shape == (2,)
    np.testing.assert_allclose(metrics["cross_entropy"], entropy, rtol=1e-5)
    added = 27 * (0.5 * sum(found["load_balance_loss"]) + 0.25 * sum(found["router_z_loss"]))
    np.testing.assert_allclose(loss, entropy + added, rtol=1e-5)
    for name in ("load_balance_loss", "router_z_loss"):
        np.testing.assert_allclose(metrics[name], 27 * np.mean(found[name]), rtol=1e-6)
    np.testing.assert_allclose(metrics["expert_load_max"], 27 * max(found["expert_load_max"]), rtol=1e-6)


@pytest.mark.slow
def test_scan_and_remat_do_not_change_results():
    listed, stacked = small(EXPERTS, scan=False), small(EXPERTS, remat="full")
    nnx.update(stacked.layers, jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, listed.layers)))
    found = []
    for model in (listed, stacked):
        graphdef, state = nnx.split(model)
        loss = lambda state, graphdef=graphdef: loss_and_choices(nnx.merge(graphdef, state), batch_of())  # noqa: E731
        compute = jax.value_and_grad(lambda state, loss=loss: (loss(state)[0], loss(state)[2]), has_aux=True)
        (total, metrics), grads = jax.jit(compute)(state)
        found.append((total, metrics, dict(named_leaves(grads))))
    (one, metrics, grads), (other, other_metrics, scanned) = found
    np.testing.assert_allclose(other, one, rtol=1e-6)
    assert metrics["experts"].shape == (2, 4, 8, 2)
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=0 if name == "experts" else 1e-5, err_msg=name)
    for name in ("router", "gate", "down"):
        layers = np.stack([grads[f"layers/{i}/moe/{name}/kernel"] for i in range(2)])
        np.testing.assert_allclose(scanned[f"layers/moe/{name}/kernel"], layers, atol=1e-5, err_msg=name)


class Watched:
    """A decoder that records the statistics of its routers."""

    def __init__(self, model):
        self.model, self.config = model, model.config

    def hidden(self, tokens):
        *rest, self.aux = self.model.hidden(tokens)
        return *rest, self.aux


def loss_and_choices(model, batch):
    watched: Any = Watched(model)
    loss, weight, metrics = next_token_loss(watched, batch)
    return loss, weight, metrics | {"experts": weight * jnp.sort(watched.aux["experts"], axis=-1)}


def train(steps, config, data, optimizer, initial=None, **sizes):
    """(losses, experts of every token at every step, initial leaves) of a run on real text."""
    mesh = make_mesh(**sizes)

    def make():
        model = make_decoder(config, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    rules = partition_rules(nnx.merge(*abstract_split(make))["model"])
    abstract = abstract_state(make, mesh, rules)
    state = abstract_train_state(make, abstract)
    if initial is None:
        values = lambda path, x: normal(x) if path.startswith("model/") else np.zeros(x.shape, x.dtype)  # noqa: E731
        initial = [np.asarray(x) for x in jax.tree.leaves(map_named(values, abstract))]
    put = [jax.device_put(x, leaf.sharding) for x, leaf in zip(initial, state.leaves, strict=True)]
    state = dataclasses.replace(state, leaves=tuple(put))
    batch = make_batch_fn(load_corpus(data).train, seed=0, config=data, sharding=batch_sharding(mesh, rules.axes))
    step = make_train_step(loss_and_choices, state, layers=rules.layers)
    losses, experts = [], []
    for i in range(steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
        experts.append(np.rint(np.asarray(metrics["experts"])))
    return np.array(losses), np.array(experts), initial


def check_parity(got, reference):
    """Compares the routing first: a token with nearly tied experts may flip by rounding, which is not an error."""
    flipped = [int((a != b).any(-1).sum()) for a, b in zip(got[1], reference[1], strict=True)]
    assert not any(flipped), f"tokens routed differently, by step: {flipped} of {reference[1][0][..., 0].size}"
    assert np.max(np.abs(got[0] - reference[0])) <= 5e-5
    assert reference[0][-1] < reference[0][0] - 0.1  # the loss decreases, so that the comparison is not vacuous


def experts_permuted_on_one_device(x, weights, experts, kernels, apply=moe.apply_experts):
    here = jax.lax.axis_index("ep") == 1
    return apply(x, weights, experts, moe.Kernels(*(jnp.where(here, jnp.roll(w, 1, axis=0), w) for w in kernels)))


def combine_weights_dropped(x, weights, experts, kernels, apply=moe.apply_experts):
    return apply(x, jnp.ones_like(weights) / weights.shape[1], experts, kernels)


def check_that_comparison_fails(got, reference):
    with pytest.raises(AssertionError):
        check_parity(got, reference)
    assert np.max(np.abs(got[0] - reference[0])) > 5e-4  # the losses differ too, not only the routing
    assert np.isfinite(got[0]).all()  # wrong, not broken


LARGER = dataclasses.replace(EXPERTS, hidden_size=64, num_heads=4, num_kv_heads=4, mlp_size=64)
LARGER_DATA = DataConfig(sequence_length=64, batch_size=8)
ADAM = make_optimizer(OptimizerConfig(learning_rate=1e-3, warmup_steps=20, decay_steps=1000))


@pytest.fixture(scope="module")
def reference():
    return train(40, LARGER, LARGER_DATA, ADAM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"fsdp": 2, "ep": 2, "tp": 2}, NATURAL),
        ({"fsdp": 2, "ep": 4}, NATURAL),
        ({"ep": 4, "tp": 2}, REPLICATED),
        ({"ep": 8}, NATURAL),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_forty_steps_are_equal_on_every_mesh(sizes, axes, reference):
    config = dataclasses.replace(LARGER, axes=axes)
    got = train(40, config, LARGER_DATA, ADAM, reference[2], **sizes)
    check_parity(got, reference)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [experts_permuted_on_one_device, combine_weights_dropped])
def test_a_mutation_of_the_experts_fails_the_comparison(mutation, reference, monkeypatch):
    monkeypatch.setattr(moe, "apply_experts", mutation)
    check_that_comparison_fails(train(40, LARGER, LARGER_DATA, ADAM, reference[2], fsdp=2, ep=2, tp=2), reference)
