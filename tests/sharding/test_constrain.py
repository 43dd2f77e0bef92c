from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh import PartitionAxis, ShardingError, constrain, create_mesh, with_sharding_constraint

P = PartitionSpec
X: Any = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(params=["auto", "explicit", "mixed"])
def mesh(request):
    kinds = {"auto": "auto", "explicit": "explicit", "mixed": ("explicit", "auto")}
    return create_mesh((2, 4), ("a", "b"), axis_types=kinds[request.param])


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b"), P(("a", "b")), P()], ids=str)
def test_the_result_has_the_spec_and_equal_values_inside_and_outside_of_jit(mesh, spec):
    if spec == P(("a", "b")) and len(set(mesh.axis_types)) == 2:
        error = pytest.raises(ShardingError, match="splits dim 0 over Explicit and Auto axes together")
        with jax.set_mesh(mesh), error:
            with_sharding_constraint(X, spec)
        return
    with jax.set_mesh(mesh):
        for y in (with_sharding_constraint(X, spec), jax.jit(lambda x: with_sharding_constraint(x, spec))(X)):
            assert (y == X).all()
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_manual_axes_are_ignored():
    mesh = create_mesh((2, 4), ("a", "b"))
    with jax.set_mesh(mesh):
        inside = lambda x: with_sharding_constraint(x, P(("a", "b"))) * 2  # noqa: E731  (8 does not divide 4 rows)
        both = jax.shard_map(inside, in_specs=P("a"), out_specs=P("a"))
        assert (jax.jit(both)(X) == X * 2).all()
        some = jax.shard_map(inside, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})  # b is still Auto here
        assert (jax.jit(some)(X) == X * 2).all()


def test_mesh_axes_that_do_not_fit_are_errors_also_in_jit():
    mesh = create_mesh((2, 4), ("a", "b"))
    with jax.set_mesh(mesh):
        with pytest.raises(ShardingError, match=r"dim 1 has size 6, not divisible by 4 \(axes \('b',\) of b=4\)"):
            jax.jit(lambda x: with_sharding_constraint(x, P("a", "b")))(jnp.ones((8, 6)))
        with pytest.raises(ShardingError, match=r"names mesh axis 'c', which the mesh .* lacks"):
            with_sharding_constraint(X, P("c"))


def test_a_mesh_axis_of_two_logical_axes_follows_the_policy():
    axes = PartitionAxis(extra={"channels": "tp"})
    with jax.set_mesh(create_mesh((1, 2, 1, 2, 2))):
        with pytest.raises(ShardingError, match=r"'channels'\): dim 1 \('channels'\) resolves to mesh axis 'tp'"):
            constrain(X, ("hidden", "channels"), axes=axes)
        dropped = []
        kept = constrain(X, ("hidden", "channels"), axes=axes, on_mismatch="drop", dropped=dropped)
        assert kept.sharding.is_equivalent_to(NamedSharding(jax.sharding.get_mesh(), P("tp")), 2) and len(dropped) == 1


def test_without_a_mesh_a_spec_is_an_error_and_logical_axes_have_no_effect():
    with pytest.raises(AssertionError, match="No mesh is in context"):
        with_sharding_constraint(X, P())
    assert constrain(X, ("batch", "hidden"), axes=PartitionAxis()) is X


def test_logical_axes_are_mapped_by_partition_axis_and_mode():
    mesh = create_mesh((1, 2, 1, 2, 2))
    axes = PartitionAxis(generation_batch_axis="dp")
    x = jnp.ones((4, 4, 4))
    with jax.set_mesh(mesh):
        train = constrain(x, ("batch", "sequence", "hidden"), axes=axes)
        decode = constrain(x, ("batch", "query_sequence", "hidden"), axes=axes, mode="decode")
    assert train.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "sp", "tp")), 3)
    assert decode.sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, "tp")), 3)
