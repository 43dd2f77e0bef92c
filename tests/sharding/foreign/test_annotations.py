"""Annotations as other projects write them: with Flax's rules, as shardings, and for stacks."""

import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_mesh as fm


@pytest.fixture(scope="module")
def mesh():
    return fm.create_mesh((2, 2, 2), ("data", "fsdp", "tensor"))


def kernel_spec(mesh, annotation, **metadata):
    metadata = {"out_sharding": annotation} | metadata
    make = lambda: nnx.Linear(8, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))  # noqa: E731
    return dict(fm.named_leaves(fm.abstract_state(make, mesh)))["kernel"].sharding.spec


def test_the_rules_of_a_variable_map_its_names(mesh):
    rules = (("rows", None), ("columns", ("data", "tensor")))
    assert kernel_spec(mesh, ("rows", "columns"), sharding_rules=rules) == P(None, ("data", "tensor"))
    assert kernel_spec(mesh, ("embed", "columns"), sharding_rules=rules) == P("fsdp", ("data", "tensor"))


def test_the_rules_in_context_map_names_and_precede_the_logical_axes_of_flax_mesh(mesh):
    with nnx.logical_axis_rules((("embed", ("data", "fsdp")), ("rows", "tensor"))):
        assert kernel_spec(mesh, ("embed", "rows")) == P(("data", "fsdp"), "tensor")
        assert kernel_spec(mesh, ("embed", "rows"), sharding_rules=(("rows", None),)) == P(("data", "fsdp"), None)
    with pytest.raises(fm.ShardingError, match="names 'rows', neither a mesh axis nor a logical axis"):
        kernel_spec(mesh, ("embed", "rows"))


def test_an_annotation_may_be_a_spec_a_sharding_or_a_format(mesh):
    spec = P("fsdp", "tensor")
    sharding = NamedSharding(mesh, spec)
    for annotation in (spec, sharding, Format(Layout((0, 1)), sharding)):
        assert kernel_spec(mesh, annotation) == spec
    make = lambda: nnx.Linear(8, 8, kernel_metadata={"out_sharding": sharding}, rngs=nnx.Rngs(0))  # noqa: E731
    assert "fsdp, tensor" in fm.explain_sharding(make, mesh).to_text()


def test_two_names_with_the_same_axis_are_an_error(mesh):
    error = pytest.raises(fm.ShardingError, match=r"kernel: dim 1 .*uses mesh axis 'fsdp' that an earlier dim uses")
    with nnx.logical_axis_rules((("a", "fsdp"), ("b", "fsdp"))), error:
        kernel_spec(mesh, ("a", "b"))
