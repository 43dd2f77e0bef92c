"""Which sums over mesh axes XLA for CPUs combines into one instruction, against a small program that it compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_mesh import create_mesh
from flax_mesh.hlo.program import read_hlo
from flax_mesh.plan.forecast import estimate
from flax_mesh.plan.program.collectives import find_exchanges
from flax_mesh.plan.program.combine import combined_sums
from flax_mesh.text import grouped

P = PartitionSpec
SIZES = {"dp": 8}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return create_mesh((8,), ("dp",))


def sums(x, weights):
    """The second and the third scalar depend on the one before it; the products do not depend on them."""
    first, second, third = (x.T @ jnp.tanh(x @ w) for w in weights)
    scale = jnp.sum(jnp.sin(x))
    norm = jnp.sum(jnp.cos(x * scale))
    return first / norm, second, third * jnp.sum(jnp.exp(x / norm)), jnp.max(x), jnp.max(x * scale)


def test_sums_are_combined_as_xla_combines_them(mesh):
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    weights = [jax.ShapeDtypeStruct((16, 16 * n), jnp.float32, sharding=NamedSharding(mesh, P())) for n in (1, 2, 3)]
    step = jax.jit(sums)
    program = read_hlo(step.lower(x, weights).compile())
    shapes = [each.shape for each in program.computations[program.entry] if each.opcode == "all-reduce"]
    one = estimate(step, (x, weights), SIZES, "cpu")
    exchanges = grouped(find_exchanges(one.program), lambda exchange: id(exchange.operation))
    groups = [
        sorted(exchanges[id(each)][0].operand_bytes for each in group)
        for group in combined_sums(one.program.block, exchanges)
    ]
    assert sorted(groups) == sorted(sorted(array.bytes for array in jax.tree.leaves(shape)) for shape in shapes)
    assert max(map(len, groups)) > 2 and len(groups) > 3
