"""Reported bytes equal the bytes of the real shards, also for abstract trees and abstract meshes."""

import json
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.sharding.report.report import report_page
from flax_mesh.text import bytes_text, group_paths

P = PartitionSpec
MESHES = {"2x2x2": (2, 2, 2), "8x1x1": (8, 1, 1), "1x4x2": (1, 4, 2), "1x1x1": (1, 1, 1)}
SHAPES = {
    "kernel": ((16, 32), jnp.float32, P("b", "c")),
    "joint": ((16, 8, 3), jnp.bfloat16, P(("a", "b"), None)),
    "all": ((8,), jnp.int32, P(("a", "b", "c"))),
    "whole": ((5, 7), jnp.float32, P()),
    "scalar": ((), jnp.float32, P()),
}


def mesh_of(name):
    dims = MESHES[name]
    return fm.create_mesh(dims, ("a", "b", "c"), devices=jax.devices()[: int(np.prod(dims))])


TREE = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype, _) in SHAPES.items()}
SPECS = {name: spec for name, (_, _, spec) in SHAPES.items()}


def bytes_of_shards(tree) -> dict:
    """Device -> bytes, from the addressable shards of every array."""
    stored = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            stored[shard.device] = stored.get(shard.device, 0) + shard.data.nbytes
    return stored


@pytest.mark.parametrize("name", MESHES)
def test_reported_bytes_equal_real_shards_and_the_abstract_tree(name):
    mesh = mesh_of(name)
    real = fm.shard({k: np.zeros(shape, dtype) for k, (shape, dtype, _) in SHAPES.items()}, SPECS, mesh)
    real["key"] = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a")))
    report = fm.analyze_sharding_strategy(real)
    assert report.memory_per_device == bytes_of_shards(real)
    assert sum(report.memory_per_device.values()) == report.total_bytes + report.replicated_bytes
    assert report.padded_bytes == 0 and report.balance_score == 1.0
    del real["key"]
    report = fm.analyze_sharding_strategy(real)
    assert fm.analyze_sharding_strategy(TREE, SPECS, mesh) == report
    with jax.set_mesh(mesh):
        assert fm.analyze_sharding_strategy(TREE, SPECS) == report
    abstract = fm.analyze_sharding_strategy(TREE, SPECS, mesh.abstract_mesh)
    assert list(abstract.memory_per_device) == list(range(mesh.size))
    assert list(abstract.memory_per_device.values()) == list(report.memory_per_device.values())


def test_devices_with_more_bytes_lower_the_balance_score():
    left, right = (fm.create_mesh((4,), ("a",), devices=jax.devices()[i : i + 4]) for i in (0, 4))
    tree = {
        "x": jax.device_put(np.zeros(8, np.float32), NamedSharding(left, P("a"))),
        "y": jax.device_put(np.zeros(32, np.float32), NamedSharding(right, P("a"))),
        "alone": jax.device_put(np.zeros(2, np.float32), jax.devices()[0]),
    }
    report = fm.analyze_sharding_strategy(tree)
    assert report.memory_per_device == bytes_of_shards(tree)
    assert report.balance_score == 8 / 32
    assert len(report.memory_per_device) == 8


def test_the_report_is_a_mapping_with_the_documented_keys():
    report = fm.analyze_sharding_strategy(TREE, SPECS, mesh_of("2x2x2"))
    known = dict(report)
    assert known["total_parameters"] == 16 * 32 + 16 * 8 * 3 + 8 + 35 + 1
    assert known["sharded_parameters"] == 16 * 32 + 16 * 8 * 3 + 8
    assert known["partition_stats"]["a"].arrays == 2 and known["partition_stats"]["b"].arrays == 3
    assert known["partition_stats"]["c"].total_bytes == 16 * 32 * 4 + 8 * 4
    assert report["balance_score"] == 1.0 and "padded_bytes" in report and "nothing" not in report
    with pytest.raises(KeyError, match="'nothing' is none of total_parameters, sharded_parameters"):
        report["nothing"]
    alone = fm.analyze_sharding_strategy(TREE, SPECS, mesh_of("1x1x1"))  # axes of size 1 split nothing
    assert alone.sharded_parameters == 0 and alone.replicated_bytes == 0


def test_dims_that_are_not_divisible_are_counted_with_padding():
    mesh = AbstractMesh((4, 2), ("a", "b"))
    report = fm.analyze_sharding_strategy({"x": jax.ShapeDtypeStruct((10, 6), jnp.float32)}, {"x": P("a")}, mesh)
    assert set(report.memory_per_device.values()) == {3 * 6 * 4}
    assert report.padded_bytes == 2 * (4 * 3 - 10) * 6 * 4  # two copies of two rows
    assert report.replicated_bytes == report.total_bytes == 240
    assert sum(report.memory_per_device.values()) == 480 + report.padded_bytes


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def make_both():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def test_parameters_optimizer_variables_and_gradients_are_counted_separately():
    mesh = mesh_of("2x2x2")
    abstract = fm.abstract_state(make_both, mesh, [("linear/kernel", P("a", "b")), (".*", ())])
    report = fm.analyze_sharding_strategy(abstract)
    kernel, vectors = 16 * 32 * 4 // 4, 3 * 32 * 4  # bias, scale, bias
    assert report.parameter_bytes == report.gradient_bytes == kernel + vectors
    assert report.optimizer_bytes == 2 * (kernel + vectors) + 4 + 4  # both moments, count, step
    assert report.variable_bytes == 2 * 32 * 4 + 8 + 4  # mean, var, key, count
    assert report.total_parameters == 16 * 32 + 96
    assert report.memory_per_device == bytes_of_shards(fm.init_state(make_both, abstract))


def test_offloaded_arrays_count_as_host_memory():
    mesh = mesh_of("2x2x2")
    on_host = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("a"), memory_kind="pinned_host"))
    report = fm.analyze_sharding_strategy({"x": on_host})
    assert report.host_bytes == 8 * (4 * 8 * 4) and not report.memory_per_device


def test_all_mistakes_are_listed_in_one_error():
    mesh = mesh_of("2x2x2")
    tree = {"a": np.zeros(4), "b": np.zeros((4, 4)), "c": np.zeros(4), "text": "no array"}
    with pytest.raises(fm.ShardingError, match=r"a: ndarray \(4,\) has no sharding. Pass specs") as error:
        fm.analyze_sharding_strategy(tree)
    assert "c: ndarray (4,) has no sharding" in str(error.value) and "text" not in str(error.value)
    given = {"a": P("a", "b"), "b": P("nowhere"), "c": P(P.UNCONSTRAINED), "text": P()}
    with pytest.raises(fm.ShardingError, match="has 2 dims, the array") as error:
        fm.analyze_sharding_strategy(tree, given, mesh)
    assert "b: dim 0 names mesh axis 'nowhere', which the mesh" in str(error.value)
    assert "c: " in str(error.value) and "the compiler chooses how to split the UNCONSTRAINED dim" in str(error.value)
    with pytest.raises(fm.ShardingError, match="specs must be a tree of the same structure") as error:
        fm.analyze_sharding_strategy({"a": np.zeros(4), "b": np.zeros(4)}, {"a": P(), "z": P(), "b": 3}, mesh)
    assert "z: in specs, but not in the tree" in str(error.value)
    assert "b: 3 is neither a PartitionSpec nor a Sharding" in str(error.value)
    with pytest.raises(AssertionError, match="No mesh is in context"):
        fm.analyze_sharding_strategy({"a": np.zeros(4)}, {"a": P("a")})
    leaves = [jax.ShapeDtypeStruct((8,), "f4", sharding=NamedSharding(m, P("a"))) for m in (mesh, mesh.abstract_mesh)]
    with pytest.raises(fm.ShardingError, match="it is unknown which arrays share a device"):
        fm.analyze_sharding_strategy(leaves)


# --- text, JSON and HTML ---


def test_only_equal_layers_share_a_line():
    paths = [f"layers/{i}/q" for i in range(12)] + ["layers/3/k", "layers/7/k", "head"]
    groups = group_paths(paths, ["same"] * len(paths))
    rest = [("layers/3/k", [12]), ("layers/7/k", [13]), ("head", [14])]  # 3 and 7 are not a range
    assert groups == [("layers/{0..11}/q", list(range(12))), *rest]
    assert group_paths(["a/0", "a/1"], ["x", "y"]) == [("a/0", [0]), ("a/1", [1])]
    grid = [f"e/{i}/d/{j}" for i in range(2) for j in range(3)]
    assert group_paths(grid, [0] * 6) == [("e/{0..1}/d/{0..2}", list(range(6)))]
    assert len(group_paths(grid[:-1], [0] * 5)) == 5


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (2**44 * 17.9, "286 TiB")]
)
def test_bytes_have_three_digits(count, text):
    assert bytes_text(count) == text


def test_the_text_fits_its_width():
    tree = {"layers": [{"attention": TREE} for _ in range(3)]}
    report = fm.analyze_sharding_strategy(tree, {"layers": [{"attention": SPECS}] * 3}, mesh_of("2x2x2"))
    for width in (70, 100, 200):
        text = report.to_text(width=width)
        assert max(map(len, text.split("\n\n")[1].splitlines())) <= width
    assert "mesh a:2,b:2,c:2, 8 devices" in text and "3 x these:" in text and "a+b, -" in text
    assert str(report).startswith("mesh a:2,b:2,c:2, 8 devices\n")
    # Totals are continued below their text.
    lines = fm.analyze_sharding_strategy(TREE, SPECS, mesh_of("2x2x2")).to_text(width=60).splitlines()
    assert max(map(len, lines)) <= 60
    first = next(i for i, line in enumerate(lines) if line.startswith("per device   "))
    assert lines[first + 1].startswith(" " * 13) and "MiB" not in lines[first][-2:]


def test_json_contains_every_array():
    report = fm.analyze_sharding_strategy(TREE, SPECS, AbstractMesh((4, 2, 2), ("a", "b", "c")))
    data = json.loads(json.dumps(report.to_dict()))
    leaves = {leaf["path"]: leaf for leaf in data["leaves"]}
    assert leaves["joint"]["spec"] == [["a", "b"], None] and leaves["joint"]["pieces"] == [8, 1, 1]
    assert data["num_devices"] == 16 and data["memory_per_device"] == {"every device": report.memory_per_device[0]}
    assert data["partition_stats"]["a"]["size"] == 4


def test_the_page_contains_its_data_and_no_external_resources():
    tree = {"</script><b>%data%": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    report = fm.analyze_sharding_strategy(tree, {"</script><b>%data%": P("a")}, mesh_of("2x2x2"))
    page = report.to_html(title="<i>%mesh%")
    assert page.count("</script>") == 2  # of the data and of the code: no path ends an element
    assert "&lt;i&gt;%mesh%" in page and "<i>" not in page
    assert not any(word in page for word in ("http:", "https:", "src=", "@import", "url("))
    text = page.split('type="application/json">')[1].split("</script>")[0]
    data = json.loads(text)
    assert data["mesh"] == [{"name": n, "size": 2} for n in "abc"]
    assert data["arrays"][0]["path"] == "</script><b>%data%"
    assert data["arrays"][0]["axes"] == [["a"], []] and data["arrays"][0]["copies"] == "4"


def test_a_notebook_shows_the_page_in_a_frame():
    report = fm.analyze_sharding_strategy(TREE, SPECS, mesh_of("2x2x2"))
    frame = ElementTree.fromstring(report._repr_html_())
    assert frame.tag == "iframe" and frame.attrib["srcdoc"].split() == report.to_html().split()


def test_the_page_keeps_the_lines_of_a_note():
    report = fm.analyze_sharding_strategy(TREE, SPECS, mesh_of("2x2x2"))
    page = report_page(report, "title", note="pipeline: <2> groups\n  receives")
    assert 'pre-wrap">mesh a:2,b:2,c:2, 8 devices\npipeline: &lt;2&gt; groups\n  receives</p>' in page
