"""Models of Flax's own layers and of Linen, with a rule table each: sharded results equal those of one device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.train import init_train_state, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compilation")

P = PartitionSpec
# Filters are (height, width, in, out). "embed" maps to fsdp, "mlp" to tp.
CONV_RULES = [
    ("(conv|shortcut)\\d*/kernel$", (None, None, "embed", "mlp")),
    ("norm\\d*/(scale|bias|mean|var)$", ("mlp",)),
    ("stem/kernel$", (None, None, None, "mlp")),
    ("head/kernel$", ("embed", None)),
    ("head/bias$", ()),
]
ENCODER_RULES = [
    ("embed/embedding$", ("vocab", "embed")),
    ("(query|key|value)/kernel$", ("embed", "heads", None)),
    ("(query|key|value)/bias$", ("heads", None)),
    ("out/kernel$", ("heads", None, "embed")),
    ("up/kernel$", ("embed", "mlp")),
    ("down/kernel$", ("mlp", "embed")),
    ("up/bias$", ("mlp",)),
    ("(bias|scale|positions)$", ()),
]


def waves(key, shape, dtype=jnp.float32):
    """An initializer that compiles fast: on CPU, normal ones take seconds to compile per array of four dims."""
    phase = (jax.random.key_data(key)[-1] % 1000).astype(jnp.float32)
    values = jnp.sin(phase + 1.7 * jnp.arange(math.prod(shape), dtype=jnp.float32))
    return (values * (2 / math.prod(shape[:-1])) ** 0.5).reshape(shape).astype(dtype)


class Block(nnx.Module):
    def __init__(self, width, features, strides, rngs):
        conv: dict[str, Any] = {"use_bias": False, "kernel_init": waves, "rngs": rngs}
        self.conv1, self.norm1 = nnx.Conv(width, features, (3, 3), strides, **conv), nnx.BatchNorm(features, rngs=rngs)
        self.conv2, self.norm2 = nnx.Conv(features, features, (3, 3), **conv), nnx.BatchNorm(features, rngs=rngs)
        self.shortcut = nnx.Conv(width, features, (1, 1), strides, **conv)

    def __call__(self, x):
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        return jax.nn.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(nnx.Module):
    """A residual network (He et al. 2015) of two blocks."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, kernel_init=waves, rngs=rngs)
        self.blocks = nnx.Dict(first=Block(8, 8, 1, rngs), second=Block(8, 16, 2, rngs))
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x.mean((1, 2)))


class EncoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, kernel_init=waves, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        linear: dict[str, Any] = {"kernel_init": waves, "rngs": rngs}
        self.up, self.down = nnx.Linear(16, 32, **linear), nnx.Linear(32, 16, **linear)

    def __call__(self, x, mask):
        x = self.norm1(x + self.attention(x, mask=mask))  # attention in both directions, except to padding
        return self.norm2(x + self.down(jax.nn.gelu(self.up(x))))


class Encoder(nnx.Module):
    """A masked language model (Devlin et al. 2018) with tied embeddings."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, embedding_init=waves, rngs=rngs)
        self.positions = nnx.Param(waves(rngs.params(), (8, 16)))
        self.layers = nnx.List([EncoderLayer(rngs)])

    def __call__(self, tokens):
        mask = nnx.make_attention_mask(jnp.ones_like(tokens), tokens != 0)
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(x)


class Adapted(nnx.Module):
    """A base model with LoRA adapters of rank 2 (Hu et al. 2021)."""

    def __init__(self, rngs):
        self.up = nnx.LoRALinear(16, 32, lora_rank=2, rngs=rngs)
        self.down = nnx.LoRA(32, 2, 16, base_module=nnx.Linear(32, 16, rngs=rngs), rngs=rngs)
        # lora_b is initialized to zero, so that the gradient of lora_a would be zero too.
        for adapter in (self.up.lora, self.down):
            adapter.lora_b[...] = 0.1 * jax.random.normal(rngs.params(), adapter.lora_b.shape)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), use_bias=False, kernel_init=waves, name="conv1")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm1")(x))
        return nn.Dense(10, name="head")(x.mean((1, 2)))


class Bridged(nnx.Module):
    """A Linen model inside an NNX model."""

    def __init__(self, rngs):
        self.net = nnx.bridge.lazy_init(nnx.bridge.ToNNX(LinenNet(), rngs=rngs), jnp.zeros((1, 8, 8, 3)))

    def __call__(self, x):
        return self.net(x, mutable=["batch_stats"])


def classification(model, batch):
    loss = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return loss.sum(), jnp.float32(loss.size)


def masked_tokens(model, batch):
    loss = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return (loss * batch["weight"]).sum(), batch["weight"].sum()


def regression(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(), jnp.float32(batch["x"].shape[0])


def batch_of(name):
    rng = np.random.default_rng(0)
    if name == "encoder":
        tokens = rng.integers(1, 32, (8, 8))
        tokens[:, 6:] = 0
        return {"tokens": tokens, "targets": rng.integers(1, 32, (8, 8)), "weight": (rng.random((8, 8)) < 0.5) * 1.0}
    if name == "adapters":
        return {"x": rng.normal(size=(8, 16)), "y": rng.normal(size=(8, 16))}
    return {"image": rng.normal(size=(8, 8, 8, 3)), "label": rng.integers(0, 10, 8)}


class Case(NamedTuple):
    model: Callable[[nnx.Rngs], Any]
    rules: list[tuple[str, Any]]
    loss_fn: Callable[[Any, Any], Any]
    specs: dict[str, PartitionSpec]  # expected for some leaves, on dp:2,fsdp:2,tp:2
    wrt: Any = nnx.Param


CASES = {
    "convolutions": Case(
        ConvNet,
        CONV_RULES,
        classification,
        {
            "blocks/second/conv1/kernel": P(None, None, "fsdp", "tp"),
            "blocks/second/norm2/var": P("tp"),
            "stem/kernel": P(None, None, None, "tp"),
        },
    ),
    "encoder": Case(
        Encoder,
        ENCODER_RULES,
        masked_tokens,
        {
            "layers/0/attention/query/kernel": P("fsdp", "tp", None),
            "layers/0/attention/out/kernel": P("tp", None, "fsdp"),
            "embed/embedding": P("tp", "fsdp"),
        },
    ),
    "adapters": Case(
        Adapted,
        [("lora_a$", ("embed", None)), ("lora_b$", (None, "mlp")), ("kernel$", ("embed", "mlp")), ("bias$", ("mlp",))],
        regression,
        {"up/lora/lora_a": P("fsdp", None), "down/lora_b": P(None, "tp"), "up/kernel": P("fsdp", "tp")},
        nnx.LoRAParam,
    ),
    "linen": Case(
        Bridged,
        [
            ("conv1/kernel$", (None, None, None, "mlp")),
            ("norm1/", ("mlp",)),
            ("head/kernel$", ("mlp", None)),
            ("head", ()),
        ],
        classification,
        {"net/conv1/kernel": P(None, None, None, "tp"), "net/norm1/var": P("tp")},
    ),
}


def maker(case):
    def make():
        model = case.model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=case.wrt)

    return make


def mesh_of(count):
    return fm.create_mesh((2, 2, 1, 2, 1) if count == 8 else (1,) * 5, devices=jax.devices()[:count])


class Run(NamedTuple):
    layout: dict[str, NamedSharding]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    losses: list[float]


def run(name, state, steps=3):
    """Trains from `state` on its own mesh."""
    step, batch = make_train_step(CASES[name].loss_fn, state), batch_of(name)
    layout, before, losses = {p: x.sharding for p, x in fm.named_leaves(state.to_nnx())}, values(state.to_nnx()), []
    batch = fm.shard(batch, P(("fsdp", "dp")), next(iter(layout.values())).mesh, dtype=np.float32)
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert {path: x.sharding for path, x in fm.named_leaves(state.to_nnx())} == layout
    return Run(layout, before, values(state.to_nnx()), losses)


def values(state):
    named = fm.named_leaves(fm.gather(state))
    return {path: x for path, x in named if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, n in enumerate(CASES)])
def test_training_sharded_equals_training_on_one_device(name):
    case = CASES[name]
    state = init_train_state(maker(case), fm.abstract_state(maker(case), mesh_of(8), case.rules))
    alone = dataclasses.replace(state, leaves=fm.shard(fm.gather(state.leaves), P(), mesh_of(1)))
    found, expected = run(name, state), run(name, alone)
    for path, spec in case.specs.items():
        momentum = found.layout.get(f"optimizer/opt_state/0/trace/{path}")  # None if the parameter is frozen
        assert found.layout[f"model/{path}"].spec == spec and (momentum is None or momentum.spec == spec), path
    assert found.losses[-1] < 0.97 * found.losses[0]
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    for path, x in found.after.items():
        np.testing.assert_allclose(x, expected.after[path], rtol=1e-4, atol=1e-6, err_msg=path)
    changed = {path for path in found.after if not np.array_equal(found.before[path], found.after[path])}
    trained = {path.removeprefix("optimizer/opt_state/0/trace/") for path in found.after if "/trace/" in path}
    trained |= {path.removeprefix("model/") for path in found.after if path.endswith(("mean", "var"))}
    assert {path.removeprefix("model/") for path in changed if path.startswith("model/")} == trained
    if name == "adapters":
        assert trained == {"up/lora/lora_a", "up/lora/lora_b", "down/lora_a", "down/lora_b"}


@pytest.mark.slow
def test_a_plain_nnx_training_loop_runs_on_a_sharded_model():
    case, losses = CASES["adapters"], {}

    @nnx.jit
    def step(model, optimizer, batch):
        def mean(model):
            total, weight = case.loss_fn(model, batch)
            return total / weight

        loss, grads = nnx.value_and_grad(mean, argnums=nnx.DiffState(0, case.wrt))(model)
        optimizer.update(model, grads)
        return loss

    for count in (1, 8):
        mesh = mesh_of(count)
        model, optimizer = fm.init_model(maker(case), fm.abstract_state(maker(case), mesh, case.rules))
        batch = fm.shard(batch_of("adapters"), P(("fsdp", "dp")), mesh, dtype=np.float32)
        losses[count] = [float(step(model, optimizer, batch)) for _ in range(3)]
    assert model.up.kernel.get_value().sharding == NamedSharding(mesh_of(8), P("fsdp", "tp"))
    assert losses[8][-1] < losses[8][0]
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters", *(pytest.param(n, marks=pytest.mark.slow) for n in ("encoder", "linen"))])
def test_existing_weights_are_unchanged_by_shard_and_gather(name):
    case, mesh = CASES[name], mesh_of(8)
    state = nnx.state(case.model(nnx.Rngs(0)))
    specs = fm.match_partition_rules(case.rules, state, mesh=mesh, on_mismatch="error")
    placed = fm.shard(state, specs, mesh)
    assert any(not x.is_fully_replicated for x in jax.tree.leaves(placed))
    for (path, x), (_, y) in zip(fm.named_leaves(fm.gather(state)), fm.named_leaves(fm.gather(placed)), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(x, y, err_msg=path)
