"""Every array of a checkpoint has its own name on disk: leaves that would share one are refused, with both names."""

import collections
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import ConfigError
from flax_mesh.checkpoint import Checkpointer


def array(value, *shape):
    return jnp.full(shape or (3,), value, jnp.float32)


SAME = {
    "dot": ({"a.b": array(1), "a": {"b": array(2)}}, "['a']['b'] and ['a.b']"),
    "slash": ({"a/b": array(1), "a": {"b": array(2)}}, "['a']['b'] and ['a/b']"),
    "dot and slash": ({"a/b.c": array(1), "a.b": {"c": array(2)}}, "['a.b']['c'] and ['a/b.c']"),
    "index": ({"p": [array(1)], "p.0": array(2)}, "['p'][0] and ['p.0']"),
    "number and text": (collections.OrderedDict([(0, array(1)), ("0", array(2))]), "[0] and ['0']"),
    "empty name": ({"a": {"": array(1)}, "a.": array(2)}, "['a'][''] and ['a.']"),
    "array as folder": ({"a": array(1), "a/b": array(2)}, "['a'] and ['a/b']"),
    "layer of a stack": ({"layers": {"q": array(1, 2, 3), "1": {"q": array(2)}}}, "['layers']['1']['q'] and"),
    "variables": (
        nnx.state(nnx.Dict({"a.b": nnx.Param(array(1)), "a": nnx.Dict(b=nnx.Param(array(2)))})),
        "['a']['b']",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_leaves_with_one_name_on_disk_are_refused_with_both_names(name, tmp_path):
    tree, names = SAME[name]
    with Checkpointer(tmp_path, layers=["layers"]) as checkpointer:
        checkpointer.save(0, {"x": array(0)})
        checkpointer.wait()
        for call in (
            lambda: checkpointer.save(1, tree),
            lambda: checkpointer.restore(tree, 0),
            lambda: checkpointer.check(tree, 0),
            lambda: checkpointer.restore_partial(tree, 0),
        ):
            with pytest.raises(ConfigError, match="every array of a checkpoint must have its own name") as error:
                call()
            assert any(line.startswith(f"  {names}") for line in error.value.problems)
        assert checkpointer.steps() == [0]


def test_all_leaves_with_one_name_are_reported_at_once(tmp_path):
    tree = {"a.b": array(1), "a": {"b": array(2), "c": array(3)}, "a/c": array(4), "d": array(5)}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError) as error:
        checkpointer.save(1, tree)
    assert error.value.problems[1:-1] == ["  ['a']['b'] and ['a.b']", "  ['a']['c'] and ['a/c']"]


def test_names_that_look_alike_but_differ_on_disk_are_restored(tmp_path):
    tree = {
        "a": array(1),
        "a.b": array(2),
        "c/d": array(3),
        "e": {"from here": array(4), "from 2": array(5), "": array(6)},
        "": array(7),
        "A": array(8),
        "p": [array(9)],
        "p0": array(10),
        "..": {".zarray": array(11)},
        "none": {"0": array(0, 0, 2)},  # not stored
        "none/0": array(0, 0, 2),
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tree)
        got = checkpointer.restore(jax.tree.map(jnp.zeros_like, tree))
    for saved, found in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True):
        assert np.array_equal(saved, found)


# A program without flax_mesh, on one device; the code of docs/checkpoints.md is put between.
PLAIN_ORBAX = """
import sys
from pathlib import Path
from types import SimpleNamespace
import jax
import numpy as np
jax.config.update("jax_platforms", "cpu")
checkpointer = SimpleNamespace(folder=Path(sys.argv[1]))
{code}
assert jax.device_count() == 1 and not any(name.startswith("flax_mesh") for name in sys.modules)
assert (tree["model"]["layers"]["1"]["bias"] == np.arange(16)).all()
"""


@pytest.mark.slow
def test_orbax_alone_reads_a_checkpoint_of_other_devices(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (code,) = re.findall(r"^```python\n(import orbax.*?)^```", page, re.DOTALL | re.MULTILINE)
    devices = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    kernel, bias = (jax.device_put(x, devices) for x in (jnp.zeros((32, 4, 8)), jnp.arange(16.0)))
    layers = {"0": {"attention": {"q": {"kernel": kernel}}}, "1": {"bias": bias}}
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, {"model": {"layers": layers}})
    command = [sys.executable, "-c", PLAIN_ORBAX.format(code=code), str(tmp_path / "c")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
