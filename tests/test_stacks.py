"""Which modules under `layers` are scanned stacks, and how rules and random streams treat the others."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from flax_mesh import PartitionRules, abstract_state, create_mesh, match_partition_rules
from flax_mesh.sharding.report.explain import explain_sharding
from flax_mesh.step.loss import reseed
from flax_mesh.tree import is_single_layer, named_leaves, ranks_in, without_single_layers


class Pair(nnx.Module):
    """A module with parameters and without a Flax layer."""

    def __init__(self, *shapes):
        self.a, self.b = (nnx.Param(jnp.ones(shape)) for shape in shapes)


def stacked(make, size=4):
    return nnx.vmap(make)(jax.random.split(jax.random.key(0), size))


SINGLE = {
    "convolution": lambda: nnx.Conv(2, 8, (3, 3), rngs=nnx.Rngs(0)),
    "square linear": lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
    "norm": lambda: nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
    "embedding": lambda: nnx.Embed(4, 8, rngs=nnx.Rngs(0)),
    "nested": lambda: nnx.Sequential(nnx.Dict(norm=nnx.LayerNorm(8, rngs=nnx.Rngs(0)))),
    "parameters of several sizes": lambda: Pair((2, 8), (8,)),
    "scalars": lambda: Pair((), ()),
    "a module with a list": lambda: nnx.Dict(
        blocks=nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))]), norm=Pair((2,), (3,))
    ),
}
NOT_SINGLE = {
    "list": lambda: nnx.List([nnx.Linear(8, 4, rngs=nnx.Rngs(0)) for _ in range(3)]),
    "stack of Linear": lambda: stacked(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key))),
    "stack of experts": lambda: stacked(lambda _: stacked(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)), 2)),
    "stack with a scalar": lambda: nnx.Dict(
        l=stacked(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key))), n=Pair((), ())
    ),
    "parameters of one size": lambda: Pair((3, 8), (3, 8, 4)),
    "no arrays": lambda: nnx.Dict(),
}


@pytest.mark.parametrize("name", SINGLE | NOT_SINGLE)
def test_single_layers_are_recognized_and_lists_and_stacks_are_none(name):
    model = nnx.Dict(top=nnx.eval_shape((SINGLE | NOT_SINGLE)[name]))
    assert is_single_layer(model.top) == (name in SINGLE)
    others = without_single_layers(["top"], named_leaves(nnx.state(model)), ranks_in(model))
    assert others == (() if name in SINGLE else ("top",))


def test_a_tree_without_modules_shows_the_shapes_only():
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    leaves = [("inc/kernel", leaf(3, 3, 8)), ("inc/bias", leaf(8)), ("norm/scale", leaf(8))]
    leaves += [("x/q/from 0", leaf(3, 8)), ("x/q/from 3", leaf(1, 8))]  # chunks of a pipeline
    assert without_single_layers(("inc", "norm", "x", "absent"), leaves) == ("norm", "x", "absent")


def test_rules_do_not_count_a_layer_dim_in_a_single_layer():
    mesh = create_mesh((2, 4), ("fsdp", "tp"))
    rules = PartitionRules([("kernel$", P("fsdp", "tp")), (".*", P())], layers=("square", "wide", "layers"))

    def make():
        linear = lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key))  # noqa: E731
        square, wide = linear(jax.random.key(0)), nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        return nnx.Dict(square=square, wide=wide, layers=stacked(linear))

    state = abstract_state(make, mesh, rules)
    specs = {path: leaf.sharding.spec for path, leaf in named_leaves(state) if "kernel" in path}
    want = {"layers/kernel": P(None, "fsdp", "tp"), "square/kernel": P("fsdp", "tp"), "wide/kernel": P("fsdp", "tp")}
    assert specs == want
    explained = explain_sharding(make, mesh, rules)
    assert not explained.findings
    assert {leaf.path: leaf.spec for leaf in explained.report.leaves if "kernel" in leaf.path} == want
    tree = {"wide": nnx.state(nnx.eval_shape(make).wide)}  # an nnx.State has shapes only
    assert match_partition_rules(rules, tree, mesh=mesh)["wide"]["kernel"].get_value() == P("fsdp", "tp")


def test_the_random_stream_of_a_single_layer_has_the_key_of_its_path():
    streams = nnx.state(nnx.Dict(inc=nnx.Dropout(0.1, rngs=nnx.Rngs(0))), nnx.RngState)
    named, plain = reseed(streams, (0, 1), ["inc"]), reseed(streams, (0, 1))
    key = lambda state: jax.random.key_data(dict(named_leaves(state))["inc/rngs/key"])  # noqa: E731
    assert (key(named) == key(plain)).all()
