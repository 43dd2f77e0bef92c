import pickle

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mesh.axes import LOGICAL_AXES, Lost, PartitionAxis, as_tuple
from flax_mesh.errors import ShardingError


def test_defaults_follow_the_default_mesh_axes():
    axes = PartitionAxis()
    assert axes.batch_axis == ("fsdp", "dp")
    assert (axes.sequence_axis, axes.head_axis, axes.expert_axis) == ("sp", "tp", "ep")
    assert axes.expert_gate_axis is None and axes.generation_batch_axis is None
    assert axes.generation_head_axis == "tp" and axes.generation_key_sequence_axis == "sp"


def test_an_omitted_field_follows_a_renamed_mesh_axis():
    axes = PartitionAxis(tensor_parallel_axis="model", data_parallel_axis=None)
    assert axes.head_axis == axes.mlp_intermediate_axis == axes.generation_head_axis == "model"
    assert axes.batch_axis == "fsdp"
    assert PartitionAxis(tensor_parallel_axis="model", head_axis=None).head_axis is None


def test_partition_axis_is_a_hashable_static_value():
    assert PartitionAxis() == PartitionAxis() and hash(PartitionAxis()) == hash(PartitionAxis())
    assert PartitionAxis(extra={"a": "tp", "b": None}) == PartitionAxis(extra={"b": None, "a": "tp"})
    assert jax.tree.leaves(PartitionAxis()) == []
    assert pickle.loads(pickle.dumps(PartitionAxis(head_axis=None))) == PartitionAxis(head_axis=None)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("", PartitionAxis()),
        ("tensor_parallel_axis='model'", PartitionAxis(tensor_parallel_axis="model")),
        ("data_parallel_axis=None, batch_axis='dp'", PartitionAxis(data_parallel_axis=None, batch_axis="dp")),
        ("tensor_parallel_axis='x', head_axis='tp'", PartitionAxis(tensor_parallel_axis="x", head_axis="tp")),
        ("batch_axis=None, extra={'rows': ('a', 'b')}", PartitionAxis(batch_axis=(), extra={"rows": ("a", "b")})),
    ],
)
def test_repr_contains_what_differs_from_the_defaults_and_can_be_evaluated(text, axes):
    assert repr(axes) == f"PartitionAxis({text})"
    assert eval(repr(axes)) == axes


def test_resolve_returns_the_default_specs():
    axes = PartitionAxis()
    assert axes.resolve(("batch", "sequence", "hidden")) == PartitionSpec(("fsdp", "dp"), "sp", "tp")
    assert axes.resolve(("embed", "kv_heads", "head_dim")) == PartitionSpec("fsdp", "tp", None)
    assert axes.resolve(("experts", "embed", "mlp")) == PartitionSpec("ep", "fsdp", "tp")
    assert axes.resolve(("layers", None, "vocab")) == PartitionSpec(None, None, "tp")


def test_decode_uses_the_generation_fields():
    axes = PartitionAxis(generation_batch_axis="dp", generation_head_axis=None)
    logical = ("batch", "query_sequence", "heads", "head_dim")
    assert axes.resolve(logical, mode="decode") == PartitionSpec("dp", None, None, None)
    for resolved in (axes.resolve(logical, mode="prefill"), axes.resolve(logical)):
        assert resolved == PartitionSpec(("fsdp", "dp"), "sp", "tp", None)
    with pytest.raises(ValueError, match="mode must be 'train', 'prefill' or 'decode', got 'generate'"):
        axes.resolve(logical, mode="generate")  # pyright: ignore[reportArgumentType]


def test_the_earlier_dim_keeps_a_duplicate_axis_and_the_later_one_is_reported():
    spec, lost = PartitionAxis().resolve_and_report(("heads", "mlp"))
    assert spec == PartitionSpec("tp", None)
    assert lost == (Lost(1, "mlp", "tp"),)
    with pytest.raises(ShardingError, match=r"uses a mesh axis twice: dim 1 \('mlp'\) resolves to mesh axis 'tp'"):
        PartitionAxis().resolve(("heads", "mlp"), on_duplicate="error")


def test_extra_adds_and_overrides_logical_axes():
    axes = PartitionAxis(extra={"patches": ("dp", "sp"), "kv_heads": None})
    assert axes.resolve(("patches", "kv_heads", "heads")) == PartitionSpec(("dp", "sp"), None, "tp")
    with pytest.raises(ShardingError, match=r"unknown logical axis 'patch'.*Add it with PartitionAxis\(extra="):
        axes.resolve(("patch",))


def test_missing_axes_and_fields_of_a_wrong_type_are_errors():
    PartitionAxis().validate(AbstractMesh((1,) * 5, ("dp", "fsdp", "ep", "tp", "sp")))
    with pytest.raises(ShardingError, match=r"lacks: expert_parallel_axis='ep', expert_axis='ep', extra\['x'\]='y'"):
        PartitionAxis(extra={"x": "y"}).validate(AbstractMesh((1,) * 4, ("dp", "fsdp", "tp", "sp")))
    with pytest.raises(TypeError, match=r"PartitionAxis.head_axis must be a mesh axis name.*got 3"):
        PartitionAxis(head_axis=3)  # pyright: ignore[reportArgumentType]


names = st.sampled_from([*LOGICAL_AXES, None])


@given(st.lists(names, max_size=6), st.sampled_from(["train", "prefill", "decode"]))
def test_no_mesh_axis_appears_twice_and_every_lost_axis_is_reported(logical, mode):
    axes = PartitionAxis()
    spec, lost = axes.resolve_and_report(logical, mode)
    assert len(spec) == len(logical)
    used = [a for entry in spec for a in as_tuple(entry)]
    assert len(used) == len(set(used))
    requested = sorted(a for name in logical for a in axes.mesh_axes(name, mode))
    assert requested == sorted(used + [entry.mesh_axis for entry in lost])
