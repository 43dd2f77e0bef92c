"""The operations of a region, evaluated on one block of its arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from flax_mesh.blockwise.dims import Labels
from flax_mesh.blockwise.graph import Literal, Op
from flax_mesh.blockwise.region import Step

_SAME = {"sharding_constraint", "layout_constraint", "name", "optimization_barrier", "reshard", "copy", "copy_p"}


@dataclass(frozen=True)
class Block:
    """Which part of the dims of the scores a block has.

    `sizes` are the sizes of dims that loops cut, and `offsets` the positions of their first elements; `parts` are the
    numbers of parts of dims that devices have a part of, and `index` the numbers of these parts.
    """

    sizes: Mapping[int, int]
    offsets: Mapping[int, Any]
    parts: Mapping[int, int]
    index: Mapping[int, Any]

    def shape(self, shape: Sequence[int], labels: Labels) -> tuple[int, ...]:
        return tuple(
            size if label is None else self.sizes.get(label, size // self.parts.get(label, 1))
            for size, label in zip(shape, labels, strict=True)
        )

    def positions(self, dtype: Any, shape: Sequence[int], labels: Labels, dim: int) -> Any:
        label, sizes = labels[dim], self.shape(shape, labels)
        positions = lax.broadcasted_iota(dtype, sizes, dim)
        if label is None:
            return positions
        if label in self.offsets:  # rows and columns that do not exist repeat the last one, whose results are finite
            offset = jnp.minimum(lax.broadcasted_iota(jnp.int32, sizes, dim) + self.offsets[label], shape[dim] - 1)
            return offset.astype(dtype)
        if label in self.index:
            return positions + jnp.asarray(self.index[label] * sizes[dim]).astype(dtype)
        return positions


def run_steps(steps: Sequence[Step], env: dict[Any, Any], block: Block) -> None:
    for step in steps:
        values = [x.value if isinstance(x, Literal) else env[x] for x in step.inputs]
        env[step.output] = evaluate_block(step.op, step.labels, values, block)


def evaluate_block(op: Op, labels: Labels, values: Sequence[Any], block: Block) -> Any:
    name, params, out = op.name, op.params, op.outputs[0]
    shape = block.shape(out.shape, labels)
    if name in _SAME:
        return values[0]
    if name == "broadcast_in_dim":
        return lax.broadcast_in_dim(values[0], shape, params["broadcast_dimensions"])
    if name == "reshape":
        return lax.reshape(values[0], shape)
    if name == "iota":
        return block.positions(params["dtype"], out.shape, labels, params["dimension"])
    if name == "random_bits":
        return _random_bits(values[0], out.shape, labels, block)
    if name == "convert_element_type":
        return lax.convert_element_type(values[0], params["new_dtype"])
    if name == "slice":
        limits = [
            size if label is not None else limit
            for size, label, limit in zip(shape, labels, params["limit_indices"], strict=True)
        ]
        return lax.slice(values[0], params["start_indices"], limits, params["strides"])
    if name == "select_n":
        which, *cases = values
        values = [which if jnp.ndim(which) == 0 else jnp.broadcast_to(which, shape)]
        values += [jnp.broadcast_to(x, shape) for x in cases]
    # Shardings of the arrays do not hold for their blocks.
    unplaced = {key: None for key in ("sharding", "out_sharding") if key in params}
    return op.eqn.primitive.bind(*values, **{**params, **unplaced})


def _random_bits(key: Any, shape: Sequence[int], labels: Labels, block: Block) -> Any:
    """The bits of threefry in a block: it numbers the elements of the array in the order of memory."""
    place = jnp.zeros((), jnp.uint32)
    for d in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[d + 1 :]) % 2**32)
        place = place + block.positions(jnp.uint32, shape, labels, d) * stride
    first, second = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(place), place)
    return high ^ low
