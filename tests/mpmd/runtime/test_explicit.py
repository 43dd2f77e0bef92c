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
from flax_mesh.mpmd.split.backward import differentiate
from tests.mpmd.zoo.base import FAST, Run, differences, run_steps

pytestmark = pytest.mark.usefixtures("quick_unless_slow")

WIDTH, VOCAB, COUNT = 8, 16, 4
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
    """An MLP, whose hidden units are split over tp."""

    def __init__(self, rngs: nnx.Rngs):
        def weight(shape, *names):
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape), out_sharding=names)

        self.up = weight((WIDTH, 16), "fsdp", "tp")
        self.down = weight((16, WIDTH), "tp", "fsdp")
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        up = with_sharding_constraint(self.up[...], P(None, "tp"))  # gathered over fsdp
        down = with_sharding_constraint(self.down[...], P("tp"))
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


class Periods(Stack):
    """Every step of the scan calls two layers."""

    def call_layers(self, x):
        graphdef, stack = nnx.split(self.layers)

        def two(x, pair):
            for i in range(2):
                x = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], pair))(x)
            return x, None

        return jax.lax.scan(two, x, jax.tree.map(lambda leaf: leaf.reshape(-1, 2, *leaf.shape[1:]), stack))[0]


class Linears(nnx.Module):
    """Linear layers, without rules and without any sharding in the model; `combine(x, y)` adds their outputs."""

    def __init__(self, rngs: nnx.Rngs, depth: int):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)])

    @staticmethod
    def combine(x, y) -> Any:
        return x + jnp.tanh(y)

    def __call__(self, x):
        for layer in self.layers:
            x = self.combine(x, layer(x))
        return x


def decoder_loss(model, batch):
    logits = model(batch["x"])
    picked = batch["y"][..., None] == jnp.arange(VOCAB)
    logs = jnp.where(picked, logits, 0).sum(-1) - jax.nn.logsumexp(logits, -1)
    return -logs.sum(), batch["y"].size


def square_loss(model, batch):
    return jnp.sum(jnp.square(model(batch))), batch.size


def batch_of(model):
    rng = np.random.default_rng(0)
    if issubclass(model, Linears):
        return rng.normal(size=(4 * COUNT, WIDTH)).astype(np.float32)
    return {key: rng.integers(0, VOCAB, (4 * COUNT, 3)).astype(np.int32) for key in "xy"}


def groups_of(mesh, kind):
    shape = MESHES[mesh]
    devices = jax.devices()[: math.prod(shape)]
    return MpmdMesh(create_mesh(shape, AXES, devices=devices, axis_types=TYPES[kind]), "pp")


def split(model, mesh="dp", kind="explicit", schedule="zb-h1", **kinds):
    depth = 4 if schedule in ("interleaved-1f1b", "zb-v") else 2
    return split_stages(
        square_loss if issubclass(model, Linears) else decoder_loss,
        lambda: model(nnx.Rngs(0), depth),
        batch_of(model),
        mesh=groups_of(mesh, kind),
        schedule=schedule,
        num_microbatches=COUNT,
        layers="layers",
        **kinds,
    )


def trained(model, mesh, kind, schedule="1f1b", optimizer=OPTIMIZER, **kinds) -> Run:
    rules = [(".*", ())] if model is Linears else None
    pipeline = Pipeline(split(model, mesh, kind, schedule), optimizer, rules=rules, compiler_options=FAST, **kinds)

    def same_layout(state):
        assert [x.sharding for x in state.leaves] == [x.sharding for x in pipeline.abstract.leaves]
        return state

    return run_steps(pipeline.step, pipeline.init_state(), batch_of(model), same_layout)


on_auto_axes = functools.cache(lambda model, mesh, schedule, remat: trained(model, mesh, "auto", schedule, remat=remat))
MODELS = {"blocks": Blocks, "remat": Remat, "stack": Stack, "periods": Periods, "linears": Linears}
MATRIX = {
    ("blocks", "dp", "explicit", "1f1b", "none"),
    ("linears", "dp", "mixed", "zb-h1", "full"),
    *product(["blocks"], ["fsdp and tp"], ["explicit"], ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"], ["none"]),
    *product(["periods"], ["fsdp and tp"], ["explicit"], ["zb-h1", "interleaved-1f1b"], ["none"]),
    *product(["stack"], ["fsdp"], ["mixed"], ["zb-h1"], ["none", "cheap", "full"]),
    *product(["blocks"], MESHES, ["explicit", "mixed"], ["1f1b"], ["none"]),
    *product(MODELS, ["dp"], ["explicit"], ["zb-h1"], ["none"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "kind", "schedule", "remat"), sorted(MATRIX))
def test_explicit_axes_train_as_auto_axes(name, mesh, kind, schedule, remat):
    have = trained(MODELS[name], mesh, kind, schedule, remat=remat)
    assert differences(on_auto_axes(MODELS[name], mesh, schedule, remat), have, 1e-6) == []


def test_boundaries_residuals_and_cotangents_have_the_type_of_their_values():
    staged = split(Linears)
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
    split(Linears, check=True)


ERRORS = [
    (lambda x, y: y + x @ (x.T @ x), ShardingError, r": .*x.T @ x.*\n.*ambiguous.*\n.*out_sharding="),
    (lambda x, y: x + jax.sharding.reshard(y, P(None, "dp")), ShardingError, r".*\nadd "),
    (
        lambda x, y: jax.sharding.reshard(x + y, NamedSharding(one_group(), P(ROWS))),
        CutError,
        r": P.*'fsdp', 'dp'.* on 2 devices\nPass the spec without a mesh",
    ),
    (
        lambda x, y: x + jax.shard_map(jnp.tanh, mesh=one_group(), in_specs=P(ROWS), out_specs=P(ROWS))(y),
        CutError,
        r": shard_map on 2 devices\n.*shard_map without mesh=",
    ),
]


@pytest.mark.parametrize(("combine", "error", "message"), ERRORS)
def test_errors_name_the_line_of_the_model(combine, error, message):
    with pytest.raises(error, match=r"test_explicit.py:\d+ \(<lambda>\)" + message):
        split(type("Written", (Linears,), {"combine": staticmethod(combine)}))


def one_group():
    return create_mesh((1, 2, 1, 1), AXES, devices=jax.devices()[:2], axis_types="explicit")


@pytest.mark.parametrize("kind", [pytest.param("auto", marks=pytest.mark.slow), "explicit"])
def test_the_mesh_of_all_groups_may_be_in_context(kind):
    with jax.set_mesh(groups_of("dp", kind).jax_mesh):
        have = trained(Linears, "dp", kind, optimizer=optax.sgd(0.1))
    assert differences(trained(Linears, "dp", kind, optimizer=optax.sgd(0.1)), have, 0.0) == []


def test_the_mesh_in_context_is_the_default_mesh_of_one_group():
    make = lambda: Blocks(nnx.Rngs(0), 2)  # noqa: E731
    with jax.set_mesh(one_group()):
        staged = split_stages(decoder_loss, make, batch_of(Blocks), num_stages=2, layers="layers")
    (received,) = staged.cut(staged.example).stages[1].received
    assert staged.mesh == one_group().abstract_mesh and received.aval.sharding.spec == P(ROWS, None, None)
