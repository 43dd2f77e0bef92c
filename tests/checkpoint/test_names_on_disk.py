"""Every array of a checkpoint has a unique name on disk: leaves that would share one are refused, with both names."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import ConfigError
from flax_mesh.checkpoint import Checkpointer


def array(value, *shape) -> Any:
    return np.full(shape or (3,), value, np.float32)


VARIABLES = nnx.Dict({"a.b": nnx.Param(array(1)), "a": nnx.Dict(b=nnx.Param(array(2)))})
MANY = {"a.b": array(1), "a": {"b": array(2), "c": array(3)}, "a/c": array(4), "d": array(5)}
SAME = [  # a tree, and the beginnings of the lines about leaves that have one name
    ({"a.b": array(1), "a": {"b": array(2)}}, "  ['a']['b'] and ['a.b']"),
    ({"a/b": array(1), "a": {"b": array(2)}}, "  ['a']['b'] and ['a/b']"),
    ({"a/b.c": array(1), "a.b": {"c": array(2)}}, "  ['a.b']['c'] and ['a/b.c']"),
    ({"p": [array(1)], "p.0": array(2)}, "  ['p'][0] and ['p.0']"),
    (collections.OrderedDict([(0, array(1)), ("0", array(2))]), "  [0] and ['0']"),
    ({"a": {"": array(1)}, "a.": array(2)}, "  ['a'][''] and ['a.']"),
    ({"a": array(1), "a/b": array(2)}, "  ['a'] and ['a/b']"),
    ({"layers": {"q": array(1, 2, 3), "1": {"q": array(2)}}}, "  ['layers']['1']['q'] and"),
    (nnx.state(VARIABLES), "  ['a']['b']"),
    (MANY, "  ['a']['b'] and ['a.b']", "  ['a']['c'] and ['a/c']"),
]


def test_leaves_with_one_name_on_disk_are_refused_with_both_names(tmp_path):
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        checkpointer.save(0, {"x": array(0)})
        checkpointer.wait()
        for tree, *names in SAME:
            for call in (checkpointer.save, checkpointer.restore, checkpointer.check, checkpointer.restore_partial):
                arguments = (1, tree) if call == checkpointer.save else (tree, 0)
                with pytest.raises(ConfigError, match="every array of a checkpoint must have its own name") as error:
                    call(*arguments)
                found = error.value.lines[1:-1]
                assert all(map(str.startswith, found, names)) and len(found) == len(names), found
        assert checkpointer.steps() == [0]


def test_names_that_look_alike_but_differ_on_disk_are_restored(tmp_path):
    tree = {name: array(i) for i, name in enumerate(["a", "a.b", "c/d", "", "A", "p0"])}
    tree |= {"e": {"from here": array(7), "from 2": array(8), "": array(9)}, "p": [array(10)]}
    tree |= {"..": {".zarray": array(11)}}
    tree |= {"none": {"0": array(0, 0, 2)}, "none/0": array(0, 0, 2)}  # these two are not stored
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree)
        got = checkpointer.restore(jax.tree.map(jnp.zeros_like, tree))
    for saved, found in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True):
        assert np.array_equal(saved, found)
