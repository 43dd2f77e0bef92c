import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_mesh.tree import (
    in_stack,
    indexed_paths,
    layer_path,
    map_named,
    named_leaves,
    nest,
    owners_of,
    path_and_start,
    path_of,
)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)


PATHS = """
    layers/0/kernel layers/0/bias layers/1/scale layers/1/bias layers/1/mean layers/1/var drop/rngs/key drop/rngs/count
"""


def test_all_formats_of_one_model_give_the_same_paths():
    state = nnx.state(Net(nnx.Rngs(0)))
    by_jax = {path_of(kp) for kp, _ in jax.tree_util.tree_flatten_with_path(state)[0]}
    by_nnx = {path_of(p) for p, _ in nnx.to_flat_state(state)}
    pure = {path for path, _ in named_leaves(nnx.to_pure_dict(state))}
    module = {path for path, _ in named_leaves(Net(nnx.Rngs(0)))}
    assert set(PATHS.split()) == by_jax == by_nnx == pure == module == {path for path, _ in named_leaves(state)}


def test_every_kind_of_node_has_the_paths_of_jax():
    Pair = collections.namedtuple("Pair", "left right")
    x = np.ones(2)
    trees = [
        {"b": [x, (x, None)], "a": {}, "": {"c": x}, "ordered": collections.OrderedDict(z=x, y=x)},
        [
            Pair(x, {"value": 3, "k": jax.ShapeDtypeStruct((2,), jnp.float32)}),
            "text",
            None,
            jax.sharding.PartitionSpec(),
        ],
        {1: x, 0: {10: x, 2: x}},
        Net(nnx.Rngs(0)),
        nnx.List([nnx.Param({"v": x, "u": [x, x]}), nnx.Param(None)]),
        optax.chain(optax.adamw(1e-3), optax.scale(2.0)).init({"w": x}),
        x,
        None,
        {},
    ]
    for tree in trees:
        keyed = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))[0]
        expected = [(path_of(keys), node) for keys, node in keyed if not isinstance(node, nnx.Variable)]
        for keys, variable in keyed:
            if isinstance(variable, nnx.Variable):
                inner = jax.tree_util.tree_flatten_with_path(variable.get_raw_value())[0]
                expected += [(path_of((*keys, *rest)), leaf) for rest, leaf in inner]
        found = named_leaves(tree)
        assert sorted(path for path, _ in found) == sorted(path for path, _ in expected)
        assert all(dict(expected)[path] is leaf for path, leaf in found)
        assert all(a is b for (_, a), b in zip(found, jax.tree.leaves(tree), strict=True))


def test_a_single_leaf_or_variable_has_the_empty_path():
    assert named_leaves(3) == named_leaves(nnx.Variable(3)) == [("", 3)]
    assert named_leaves(nnx.Variable({"a": [1, 2]})) == [("a/0", 1), ("a/1", 2)]


def test_a_field_named_value_is_kept():
    params = {"layers": [{"kernel": jnp.ones(3)}]}
    assert [p for p, _ in named_leaves({"value": 1.0})] == ["value"]
    linesearch = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3, store_grad=True).init(params)
    assert "value" in {p for p, _ in named_leaves(linesearch)}


def test_map_named_keeps_the_structure():
    state = nnx.state(Net(nnx.Rngs(0)))
    mapped = map_named(lambda path, leaf: path, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert mapped["layers"][0]["kernel"].get_value() == "layers/0/kernel"


def test_nest_inverts_named_leaves_of_a_dict():
    tree = {"a": {"0": 1, "b": 2}, "c": 3}
    assert nest(named_leaves(tree)) == tree


def test_the_owner_of_an_optimizer_array_is_the_longest_suffix_of_its_path():
    parameters = {"layers/0/q/kernel", "q/kernel"}
    for path, owner in (
        ("opt_state/0/mu/layers/0/q/kernel", "layers/0/q/kernel"),
        ("opt_state/0/mu/head/q/kernel", "q/kernel"),
        ("opt_state/0/count", None),
        ("opt_state/0/xlayers/0/q", None),
    ):
        assert owners_of([path], parameters).get(path) == owner
    tail = "opt_state/0/mu/layers/0/q/kernel/1"
    assert not owners_of([tail], parameters) and owners_of([tail], parameters, tails=True)


def test_the_arrays_of_an_optimizer_itself_belong_to_no_variable_with_their_name():
    variables = {"step", "count", "w", "layers/0/q"}
    of_adam = [f"opt_state/0/{moment}/{name}" for moment in ("mu", "nu") for name in variables]
    own = ["step", "opt_state/0/count", "optimizer/step"]
    owned = owners_of([*own, *of_adam], variables)
    assert owned == {path: path.split("/", 3)[3] for path in of_adam}
    assert owners_of(["step"], variables) == {}, "the only array of plain SGD"


def test_stacks_are_distinguished_from_lists():
    assert in_stack("layers/q/kernel", ["layers"]) == "layers"
    assert in_stack("layers/0/q/kernel", ["layers"]) is None
    assert in_stack("layers/0/mlp/layers/kernel", ["layers"]) is None
    assert in_stack("encoder/layers/q", ["layers", "encoder/layers"]) == "encoder/layers"
    assert in_stack("layers_norm/scale", ["layers"]) is None
    assert layer_path("layers/q/kernel", "layers", 3) == "layers/3/q/kernel"


def test_only_numbers_after_from_name_a_part_of_a_stack():
    assert path_and_start("layers/q/from 2") == ("layers/q", 2)
    for name in ("layers/q/from here", "layers/q/from ", "layers/q/from -1", "layers/q/from 02", "q/from 2", "from 2"):
        assert path_and_start(name) == (name, 0)


def test_indexed_paths_distinguish_leaves_with_the_same_path():
    tree = nnx.State({"a/b": nnx.Param(1), "a": {"b": nnx.Param(2), "c": [3]}})
    assert [path for path, _ in named_leaves(tree)] == ["a/b", "a/c/0", "a/b"]
    assert indexed_paths(tree) == ["['a']['b']", "['a']['c'][0]", "['a/b']"]
