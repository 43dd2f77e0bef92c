"""Pipelines on meshes with Explicit axes, where the sharding of an array belongs to its type."""

import functools
import math
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mesh import create_mesh, with_sharding_constraint
from flax_mesh.errors import ShardingError
from flax_mesh.mpmd import CutError, MpmdMesh, Pipeline, split_stages
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.split.backward import differentiate

pytestmark = pytest.mark.usefixtures("quick_unless_slow")

WIDTH, VOCAB, COUNT = 8, 16, 4
FAST = {"xla_backend_optimization_level": 0}
AXES = ("pp", "dp", "fsdp", "tp")
MESHES = {"dp": (2, 2, 1, 1), "fsdp": (2, 1, 4, 1), "tp": (2, 1, 1, 2), "fsdp and tp": (2, 1, 2, 2)}
TYPES = {"auto": "auto", "explicit": "explicit", "mixed": ("auto", "explicit", "explicit", "explicit")}
ROWS = ("fsdp", "dp")  # the axes of the batch in `PartitionAxis`
# A large epsilon: otherwise Adam turns rounding errors of gradients near zero into full steps.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-2))


def is_explicit():
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def einsum(text, a, b, *spec):
    """The result is P(*spec), which is part of its type on Explicit axes and a constraint on Auto axes."""
    if is_explicit():
        return jnp.einsum(text, a, b, out_sharding=P(*spec))
    return with_sharding_constraint(jnp.einsum(text, a, b), P(*spec))


class Block(nnx.Module):
    """Attention and an MLP, whose heads and hidden units are split over tp."""

    def __init__(self, rngs: nnx.Rngs):
        def weight(shape, *names):
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape), out_sharding=names)

        self.q = weight((WIDTH, 2, 4), "fsdp", "tp", None)
        self.o = weight((2, 4, WIDTH), "tp", None, "fsdp")
        self.up = weight((WIDTH, 16), "fsdp", "tp")
        self.down = weight((16, WIDTH), "tp", "fsdp")
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        q, up = (with_sharding_constraint(w[...], P(None, "tp")) for w in (self.q, self.up))  # gathered over fsdp
        o, down = (with_sharding_constraint(w[...], P("tp")) for w in (self.o, self.down))
        q = einsum("btd,dhk->bthk", x, q, ROWS, None, "tp", None)
        scores = einsum("bqhk,bshk->bhqs", q, q, ROWS, "tp", None, None)
        scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9))
        heads = einsum("bhqs,bshk->bqhk", scores, q, ROWS, None, "tp", None)
        x = x + einsum("bqhk,hkd->bqd", heads, o, ROWS, None, None)
        h = jax.nn.silu(einsum("btd,df->btf", x, up, ROWS, None, "tp"))
        return x + einsum("btf,fd->btd", h, down, ROWS, None, None) + self.bias[...]


class Blocks(nnx.Module):
    """A decoder with a tied embedding. `remat` recomputes every layer."""

    remat = False

    def __init__(self, rngs: nnx.Rngs, depth: int):
        self.embed = nnx.Param(0.3 * jax.random.normal(rngs.params(), (VOCAB, WIDTH)), out_sharding=("tp", "fsdp"))
        self.layers = self.make_layers(rngs, depth)

    def make_layers(self, rngs, depth):
        return nnx.List([Block(rngs) for _ in range(depth)])

    def __call__(self, tokens):
        table = with_sharding_constraint(self.embed[...], P("tp", None))
        tokens = with_sharding_constraint(tokens, P(ROWS, None))
        x = table.at[tokens].get(out_sharding=P(ROWS, None, None)) if is_explicit() else table[tokens]
        x = self.call_layers(with_sharding_constraint(x, P(ROWS, None, None)))
        return einsum("btd,vd->btv", x, table, ROWS, None, "tp")

    def call_layers(self, x):
        for layer in self.layers:
            x = nnx.remat(type(layer).__call__)(layer, x) if self.remat else layer(x)
        return x


class Remat(Blocks):
    remat = True


class Stack(Blocks):
    """The layers in a scanned stack."""

    def make_layers(self, rngs, depth):
        stacked = nnx.vmap(Block, in_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        return stacked(nnx.Rngs(params=jax.random.split(rngs.params(), depth)))

    def call_layers(self, x):
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)


class Linears(nnx.Module):
    """Linear layers with residuals, without rules and without any sharding in the model."""

    def __init__(self, rngs: nnx.Rngs, depth: int):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def decoder_loss(model, batch):
    logits = model(batch["x"])
    picked = batch["y"][..., None] == jnp.arange(VOCAB)
    logs = jnp.where(picked, logits, 0).sum(-1) - jax.nn.logsumexp(logits, -1)
    return -logs.sum(), batch["y"].size


def square_loss(model, batch):
    return jnp.sum(jnp.square(model(batch))), batch.size


MODELS = {"blocks": Blocks, "remat": Remat, "stack": Stack, "linears": Linears}


def batch_of(name):
    rng = np.random.default_rng(0)
    if name == "linears":
        return rng.normal(size=(4 * COUNT, WIDTH)).astype(np.float32)
    return {key: rng.integers(0, VOCAB, (4 * COUNT, 3)).astype(np.int32) for key in "xy"}


def loss_of(name):
    return square_loss if name == "linears" else decoder_loss


def rules_of(name):
    return [(".*", ())] if name == "linears" else None


def build(name, mesh, kind, schedule="1f1b", **kinds):
    shape = MESHES[mesh]
    devices = jax.devices()[: math.prod(shape)]
    groups = MpmdMesh(create_mesh(shape, AXES, devices=devices, axis_types=TYPES[kind]), "pp")
    plan = make_schedule(schedule, num_groups=2, num_microbatches=COUNT)
    staged = split_stages(
        loss_of(name),
        lambda: MODELS[name](nnx.Rngs(0), plan.num_stages),
        batch_of(name),
        mesh=groups,
        schedule=plan,
        layers="layers",
    )
    return Pipeline(staged, OPTIMIZER, rules=rules_of(name), compiler_options=FAST, **kinds)


def trained(name, mesh, kind, schedule="1f1b", steps=2, **kinds):
    """(metrics of every step, {path and rows: leaf of the state on the host}) of a pipeline."""
    pipeline = build(name, mesh, kind, schedule, **kinds)
    state, rows_of_metrics = pipeline.init_state(), []
    for _ in range(steps):
        state, metrics = pipeline.step(state, batch_of(name))
        rows_of_metrics.append({key: np.asarray(value) for key, value in metrics.items()})
    assert [x.sharding for x in state.leaves] == [x.sharding for x in pipeline.abstract.leaves]
    keys = [(owner.path, owner.rows) for owner in pipeline.placement.owners]
    return rows_of_metrics, dict(zip(keys, map(np.asarray, state.leaves), strict=True))


@functools.cache
def on_auto_axes(name, mesh, schedule, remat):
    return trained(name, mesh, "auto", schedule, remat=remat)


def assert_close(have, want, rtol):
    for found, expected in zip(have[0], want[0], strict=True):
        assert found.keys() == expected.keys()
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], rtol=rtol, err_msg=key)
    for key, expected in want[1].items():
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(have[1][key], expected, rtol=rtol, atol=rtol * largest, err_msg=str(key))


QUICK = {
    ("blocks", "dp", "explicit", "1f1b", "none"),
    ("linears", "dp", "mixed", "zb-h1", "full"),
}
MATRIX = {
    *QUICK,
    *product(["blocks"], ["fsdp and tp"], ["explicit"], ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"], ["none"]),
    *product(["stack"], ["fsdp"], ["mixed"], ["zb-h1"], ["none", "cheap", "full"]),
    *product(["blocks"], MESHES, ["explicit", "mixed"], ["1f1b"], ["none"]),
    *product(MODELS, ["dp"], ["explicit"], ["zb-h1"], ["none"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "kind", "schedule", "remat"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in sorted(MATRIX)],
)
def test_explicit_axes_train_as_auto_axes(name, mesh, kind, schedule, remat):
    have = trained(name, mesh, kind, schedule, remat=remat)
    assert_close(have, on_auto_axes(name, mesh, schedule, remat), 1e-6)


class Written(Linears):
    """`combine(x, y)` combines the stream and the output of a layer."""

    combine: Any = None

    def __call__(self, x):
        for layer in self.layers:
            x = self.combine(x, layer(x))
        return x


def split(combine, kind="explicit", **kinds):
    model = type("Written", (Written,), {"combine": staticmethod(combine)})
    groups = MpmdMesh(create_mesh(MESHES["dp"], AXES, devices=jax.devices()[:4], axis_types=TYPES[kind]), "pp")
    make = lambda: model(nnx.Rngs(0), 2)  # noqa: E731
    batch = batch_of("linears")
    return split_stages(square_loss, make, batch, mesh=groups, schedule="zb-h1", num_microbatches=COUNT, **kinds)


def test_boundaries_residuals_and_cotangents_have_the_type_of_their_values():
    staged = split(lambda x, y: x + jnp.tanh(y))
    rules = [("kernel", P(None, "tp")), (".*", ())]
    pipeline = Pipeline(staged, OPTIMIZER, rules=rules)
    assert [spec for spec in pipeline.staged.specs if any(spec)] == [P(None, "tp")] * 2
    first, second = (differentiate(stage, [0, 1, 2, 3], split=True) for stage in staged.cut(staged.example).stages)
    rows = P(ROWS, None)
    assert [v.aval.sharding.spec for v in second.received] == [rows]
    assert second.backward is not None
    assert {v.aval.sharding.spec for v in second.backward.outputs if v.aval.shape == (4, WIDTH)} == {rows}
    assert {v.aval.sharding.spec for v in first.arguments[3] if v.aval.shape == (4, WIDTH)} == {rows}
    (again,) = [v.aval for v in pipeline.staged.cut(staged.example).stages[1].received]
    assert again.sharding.spec == P(ROWS, "tp")  # a Pipeline with other rules traces again


def test_a_split_on_explicit_axes_is_checked_on_one_device():
    split(lambda x, y: x + jnp.tanh(y), check=True)


@pytest.mark.parametrize(
    ("combine", "error", "message"),
    [
        (
            lambda x, y: y + x @ (x.T @ x),
            ShardingError,
            r"test_explicit.py:\d+ \(<lambda>\): .*x.T @ x.*\n.*ambiguous.*\n.*out_sharding=",
        ),
        (lambda x, y: x + jax.sharding.reshard(y, P(None, "dp")), ShardingError, r"test_explicit.py:\d+ .*\nadd "),
        (
            lambda x, y: jax.sharding.reshard(x + y, NamedSharding(one_group(), P(ROWS))),
            CutError,
            r"test_explicit.py:\d+ \(<lambda>\): P.*'fsdp', 'dp'.* on 2 devices\nPass the spec without a mesh",
        ),
        (
            lambda x, y: x + jax.shard_map(jnp.tanh, mesh=one_group(), in_specs=P(ROWS), out_specs=P(ROWS))(y),
            CutError,
            r"test_explicit.py:\d+ \(<lambda>\): shard_map on 2 devices\n.*shard_map without mesh=",
        ),
    ],
)
def test_errors_name_the_line_of_the_model(combine, error, message):
    with pytest.raises(error, match=message):
        split(combine)


def one_group():
    return create_mesh((1, 2, 1, 1), AXES, devices=jax.devices()[:2], axis_types="explicit")


@pytest.mark.parametrize("kind", [pytest.param("auto", marks=pytest.mark.slow), "explicit"])
def test_the_mesh_of_all_groups_may_be_in_context(kind):
    with jax.set_mesh(create_mesh(MESHES["dp"], AXES, devices=jax.devices()[:4], axis_types=TYPES[kind])):
        have = trained("linears", "dp", kind)
    assert_close(have, trained("linears", "dp", kind), 0)


def test_the_default_of_the_mesh_of_one_group_is_the_mesh_in_context():
    make = lambda: Blocks(nnx.Rngs(0), 2)  # noqa: E731
    with jax.set_mesh(one_group()):
        staged = split_stages(decoder_loss, make, batch_of("blocks"), num_stages=2, layers="layers")
    (received,) = staged.cut(staged.example).stages[1].received
    assert staged.mesh == one_group().abstract_mesh and received.aval.sharding.spec == P(ROWS, None, None)
