"""Errors that list arrays: one line for all layers, and never more lines than a screen."""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import flax_mesh as fm
from flax_mesh.checkpoint.layout import check_same
from flax_mesh.checkpoint.warm_start import RestoreReport, restore_partial
from flax_mesh.errors import ShardingError
from flax_mesh.mpmd.runtime.placement import check_specs
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.sharding.legacy import get_partition_spec
from flax_mesh.step.state import TrainState
from flax_mesh.text import MOST_LINES

P = PartitionSpec
MESH = AbstractMesh((2, 4), ("fsdp", "tp"))


def tree(layers: int, leaf: Callable[[], object]) -> dict:
    return {"layers": {i: {"q": leaf()} for i in range(layers)}}


def paths(layers: int) -> list[str]:
    return [f"layers/{i}/q" for i in range(layers)]


array = functools.partial(np.zeros, (6, 6), np.float32)
abstract = functools.partial(jax.ShapeDtypeStruct, (6, 6), np.float32)
ERRORS = {
    "no rule": lambda n: fm.match_partition_rules([("kernel", ())], tree(n, array)),
    "a rule that does not fit": lambda n: fm.match_partition_rules([("q", P("tp"))], tree(n, array), mesh=MESH),
    "specs of another tree": lambda n: fm.shard(tree(n, array), {"layers": P()}, fm.create_mesh()),
    "specs without a sharding": lambda n: fm.shard(tree(n, array), tree(n, abstract), fm.create_mesh()),
    "no mesh": lambda n: fm.reshard(tree(n, array), P()),
    "no fingerprint": lambda n: sharding_fingerprint(tree(n, abstract)),
    "no sharding to analyze": lambda n: fm.analyze_sharding_strategy(tree(n, abstract), P("fsdp", ("fsdp",)), MESH),
    "no spec": lambda n: get_partition_spec(tree(n, abstract)),
    "another checkpoint": lambda n: check_same(dict.fromkeys(paths(n), abstract()), {}, "step 1"),
    "nothing to restore": lambda n: restore_partial(
        [(path, abstract()) for path in paths(n)], {}, lambda target: lambda paths: {}, {}, "", cast=False
    ),
    "another state": lambda n: TrainState((), SimpleNamespace(treedef=jax.tree.structure(()))).with_state(  # pyright: ignore[reportArgumentType]
        tree(n, array)
    ),
    "the axis of the pipeline": lambda n: check_specs(
        [(path, P("pp")) for path in paths(n)],
        SimpleNamespace(mpmd_axis_name="pp"),  # pyright: ignore[reportArgumentType]
    ),
}


@pytest.mark.parametrize("raises", ERRORS.values(), ids=ERRORS)
def test_all_layers_share_a_line(raises):
    with pytest.raises(ValueError, match=r"layers/\{0\.\.39\}/q") as error:
        raises(40)
    assert len(str(error.value).splitlines()) <= 5


def test_all_layers_share_a_line_of_the_report_of_a_partial_restore():
    report = str(RestoreReport((), dict.fromkeys(paths(40), "missing"), tuple(paths(40))))
    assert report.splitlines()[1:] == ["  unchanged layers/{0..39}/q: missing", "  unused layers/{0..39}/q"]


def test_an_error_about_many_arrays_is_cut_to_a_screen():
    many = {f"name{i}": jnp.ones((2, 2)) for i in range(1000)}
    with pytest.raises(ShardingError, match=f"and {1000 - MOST_LINES} more") as error:
        fm.match_partition_rules([("kernel", ())], many)
    assert len(str(error.value).splitlines()) == MOST_LINES + 2  # the count, and the repair
