"""Leaves of every kind: `restore` returns what `save` accepts, and `save` refuses by path what would be lost."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flax_mesh as fm
from flax_mesh import ConfigError
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.tree import is_key, named_leaves

DTYPES = ["bool", "int4", "int8", "uint16", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"]


def stored() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 8)
    mesh = fm.create_mesh((8,), ("fsdp",))
    split, columns = (jax.NamedSharding(mesh, spec) for spec in (P("fsdp"), P(None, "fsdp")))
    dropout = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    return {
        "jax": {name: jnp.ones((8,), name) for name in DTYPES},
        "split": {name: jax.device_put(jnp.ones((8,), name), split) for name in DTYPES},
        "numpy": {name: np.ones((3,), jnp.dtype(name)) for name in [*DTYPES, "float64", "int64", "complex128"]},
        "without dims": {
            "jax": jnp.float32(2),
            "numpy": np.array(2.5),
            "scalar": np.int64(2**40),
            "bool": np.bool_(True),
        },
        "empty": {
            "jax": jnp.zeros((0, 2)),
            "numpy": np.zeros((0, 2)),
            "keys": keys[:0],
            "split": jax.device_put(jnp.zeros((0, 8), jnp.bfloat16), columns),
        },
        "keys": {"one": keys[0], "many": keys, "rbg": jax.random.key(1, impl="rbg"), "dims": keys.reshape(2, 4)},
        "split keys": jax.device_put([keys, jax.random.split(jax.random.key(1, impl="rbg"), 8)], split),
        "unsafe keys": jax.random.key(2, impl="unsafe_rbg"),
        "on another device": jax.device_put((jnp.ones(3), keys[1]), jax.devices()[3]),
        "python": {"int": 3, "large": 2**62, "float": 0.1, "bool": True, "complex": 1j, "none": None},
        "not contiguous": np.arange(6.0).reshape(2, 3).T,
        "model": nnx.state(dropout),
        "layers": {
            "empty": jnp.zeros((2, 0)),
            "q": jnp.arange(6.0).reshape(2, 3),
            "numpy": np.arange(6.0).reshape(2, 3),
            "keys": keys[:2],
            "bools": np.ones(2, bool),
        },
    }


def assert_same(found: Any, wanted: Any) -> None:
    for (path, x), (_, y) in zip(named_leaves(found), named_leaves(wanted), strict=True):
        if isinstance(y, bool | int | float | complex) and not isinstance(y, np.generic):
            assert (type(x), x) == (type(y), y), path
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        assert getattr(x, "sharding", None) == getattr(y, "sharding", None), path
        a, b = (jax.random.key_data(z) if is_key(y) else np.asarray(z) for z in (x, y))
        assert np.array_equal(a, b), path


def test_every_kind_of_leaf_that_is_saved_is_restored_as_it_was(tmp_path):
    tree = stored()
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        with pytest.raises(ConfigError, match="contains no checkpoint"):
            checkpointer.restore(tree)
        checkpointer.save(1, tree, {"step": 1, "text": "ä"})
        assert_same(checkpointer.restore(tree), tree)
        assert checkpointer.metadata(1) == {"step": 1, "text": "ä"}
        assert not [path for path in checkpointer.arrays(1) if "empty" in path]
        found, report = checkpointer.restore_partial(
            {**tree, "python": jax.tree.map(lambda x: type(x)(), tree["python"])}
        )
        many = tree["keys"]["many"]
        without_sharding = {"keys": {"many": jax.ShapeDtypeStruct(many.shape, many.dtype)}}
        assert_same(checkpointer.restore(without_sharding, include="keys/many"), {"keys": {"many": many}})
    assert_same(found, tree)
    assert not report.unchanged and not report.unused


REFUSED = {
    "masked": (
        np.ma.masked_array(np.ones(2), [True, False]),
        "is a masked array, whose mask JAX drops; pass x.filled(",
    ),
    "big": (np.ones(2, ">f4"), "is an array of >f4, another byte order; pass x.astype(x.dtype.newbyteorder('='))"),
    "object": (np.array([1, "a"], object), "is an array of object; it must be an array of numbers"),
    "text": (np.array(["a"]), "is an array of <U1; it must be an array of numbers"),
    "time": (np.array([1], "m8[s]"), "is an array of timedelta64[s]; it must be an array of numbers"),
    "long": (np.ones(2, np.longdouble), f"is an array of {np.dtype(np.longdouble)}; it must be an array of numbers"),
    "large": (2**70, "is an array of object; it must be an array of numbers"),
    "str": ("a", "is of type str; it must be an array of numbers"),
    "uint4": (np.ones(2, ml_dtypes.uint4), "is an array of uint4, which Orbax does not have; convert it"),
}


def test_leaves_that_would_be_lost_are_refused_by_path(tmp_path):
    tree = {name: leaf for name, (leaf, _) in REFUSED.items()}
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(ConfigError, match="a checkpoint cannot store every leaf of this tree") as error:
            checkpointer.save(1, {"a": tree})
        lines = error.value.lines[1:]
        assert len(lines) == len(REFUSED)
        for name, (_, text) in REFUSED.items():
            assert any(line.startswith(f"  a/{name}: {text}") for line in lines), lines
        with pytest.raises(ConfigError, match="save requires arrays, but these are abstract: x"):
            checkpointer.save(1, {"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert not (tmp_path / "run").exists()


# --- names on disk: leaves that would share one are refused, with both names ---


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
