"""End-to-end parity: every mesh has the losses of one device, and plausible mistakes are detected."""

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import abstract_state, create_mesh, partition_rules
from flax_mesh.models import DecoderConfig, decoder, make_decoder, next_token_loss
from flax_mesh.models.rotary import rotate
from flax_mesh.sharding.abstract import abstract_split
from flax_mesh.train import DataConfig, OptimizerConfig, init_train_state, make_train_step
from flax_mesh.train.build import batch_sharding
from flax_mesh.train.data.batches import make_batch_fn
from flax_mesh.train.data.data import load_corpus
from flax_mesh.train.optimizers.make import make_optimizer

MESHES = {
    "one": {"dp": 1, "fsdp": 1, "ep": 1, "tp": 1, "sp": 1},
    "dp2fsdp2tp2": {"dp": 2, "fsdp": 2, "ep": 1, "tp": 2, "sp": 1},
    "fsdp8": {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1},
    "tp4sp2": {"dp": 1, "fsdp": 1, "ep": 1, "tp": 4, "sp": 2},
}
SMALL = DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, mlp_size=128)
FIVE_MILLION = DecoderConfig(hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32, mlp_size=768)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=20, decay_steps=1000)
SMALL_DATA = DataConfig(sequence_length=32, batch_size=8)
DATA = DataConfig(sequence_length=128, batch_size=8)
SLOWLY = OptimizerConfig(learning_rate=3e-4, warmup_steps=20, decay_steps=1000)
# By default XLA omits roundings to bf16 between operations that it fuses, which differ between meshes.
AS_WRITTEN = {"xla_allow_excess_precision": False}
FP32, BF16 = 5e-5, 2e-3  # largest difference of a loss over the run


def losses(mesh, model, steps, data, *, optimizer=OPTIMIZER, make_model=make_decoder, loss_fn=next_token_loss, **kinds):
    """(losses of `steps` steps on real text, SHA-256 of the initial parameters)."""
    sizes = MESHES[mesh]
    device_mesh = create_mesh(tuple(sizes.values()), devices=jax.devices()[: math.prod(sizes.values())])

    def make():
        module = make_model(model, nnx.Rngs(0))
        return module, nnx.Optimizer(module, make_optimizer(optimizer), wrt=nnx.Param)

    rules = partition_rules(nnx.merge(*abstract_split(make))["model"])
    state = init_train_state(make, abstract_state(make, device_mesh, rules))
    parameters = [np.asarray(x) for x in jax.tree.leaves(state.to_nnx()["model"])]
    digest = hashlib.sha256(b"".join(x.tobytes() for x in parameters)).hexdigest()
    sharding = batch_sharding(device_mesh, rules.axes)
    batch = make_batch_fn(load_corpus(data).train, seed=0, config=data, sharding=sharding)
    step = make_train_step(loss_fn, state, layers=rules.layers, **kinds)
    found = []
    for i in range(steps):
        state, metrics = step(state, batch(i))
        found.append(float(metrics["loss"]))
    return np.array(found), digest


def check_parity(got, reference, tolerance):
    assert got[1] == reference[1], "initial parameters differ"
    assert np.max(np.abs(got[0] - reference[0])) <= tolerance
    assert reference[0][-1] < reference[0][0] - 0.5  # the model learned something: otherwise equality would be vacuous


@pytest.fixture(scope="module")
def small_reference():
    return losses("one", SMALL, 12, SMALL_DATA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "change", "kinds"),
    [
        ("dp2fsdp2tp2", {}, {}),
        ("tp4sp2", {}, {}),
        ("one", {"remat": "full", "scan": True}, {}),
        ("one", {"remat": "dots_saveable"}, {}),
        ("dp2fsdp2tp2", {}, {"num_microbatches": 2}),
    ],
)
def test_meshes_scan_remat_and_microbatches_do_not_change_the_losses(mesh, change, kinds, small_reference):
    got = losses(mesh, dataclasses.replace(SMALL, **change), 12, SMALL_DATA, **kinds)
    digest = small_reference[1] if change else got[1]  # the leaves of a stack have another order
    check_parity((got[0], digest), small_reference, FP32)


def without_gradient_reduction(model, batch):
    """The loss of all rows with the gradient of the rows of the first data shard only."""
    loss, weight = next_token_loss(model, batch)
    local, _ = next_token_loss(model, jax.tree.map(lambda x: x[: x.shape[0] // 4], batch))
    return jax.lax.stop_gradient(loss - 4 * local) + 4 * local, weight


def with_layers_swapped(config, rngs):
    model = make_decoder(config, rngs)
    first, second, *others = jax.tree.leaves(model.layers, is_leaf=lambda x: isinstance(x, decoder.DecoderLayer))
    model.layers = nnx.List([second, first, *others])
    return model


def attention_that_sees_one_token_ahead(self, x, mode="train", segment_ids=None):
    q, k = (rotate(part(x), self.config.rope_theta) for part in (self.q, self.k))
    mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool), k=1)
    return self.o(jax.nn.dot_product_attention(q, k, self.v(x), mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["gradient", "mask", "layers"])
def test_a_mistake_in_the_model_or_the_gradient_is_detected(mutation, small_reference, monkeypatch):
    changed = {}
    if mutation == "gradient":
        changed["loss_fn"] = without_gradient_reduction
    elif mutation == "mask":
        monkeypatch.setattr(decoder.Attention, "__call__", attention_that_sees_one_token_ahead)
    else:
        changed["make_model"] = with_layers_swapped
    got = losses("one", SMALL, 12, SMALL_DATA, **changed)
    with pytest.raises(AssertionError):
        check_parity((got[0], small_reference[1]), small_reference, FP32)
    assert np.isfinite(got[0]).all()  # wrong, but finite


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "meshes", "tolerance"),
    [("float32", ("dp2fsdp2tp2", "tp4sp2"), FP32), ("bfloat16", ("dp2fsdp2tp2",), BF16)],
)
def test_five_million_parameters_have_the_same_losses_on_every_mesh(dtype, meshes, tolerance):
    model = dataclasses.replace(FIVE_MILLION, dtype=dtype)
    count = sum(x.size for x in jax.tree.leaves(abstract_split(lambda: make_decoder(model, nnx.Rngs(0)))[1]))
    assert 4.5e6 < count < 5.5e6
    reference, *found = (
        losses(mesh, model, 40, DATA, optimizer=SLOWLY, compiler_options=AS_WRITTEN) for mesh in ("one", *meshes)
    )
    for mesh, got in zip(meshes, found, strict=True):
        print(f"{dtype} {mesh}: largest difference {np.max(np.abs(got[0] - reference[0])):.2e}")
        check_parity(got, reference, tolerance)
