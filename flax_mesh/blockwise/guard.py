"""A kernel that computes an attention for most data: a check when the function runs decides about each call."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flax_mesh.blockwise.attend import Attention
from flax_mesh.blockwise.fused import Fused
from flax_mesh.blockwise.place import on_devices
from flax_mesh.kernels import sees_keys

TEXTS = {
    "numbers": "a number of its padding is neither 0 nor 1",
    "keys": "a query sees no key",
    "order": "a row has a key behind padding",
}


class Guarded:
    """An attention by a kernel, or in blocks where the data are not as `fused.guards` needs them.

    The check is one boolean for all devices, of the arrays of padding. A GPU waits for it in every layer.
    """

    saved = 0  # bytes of scores

    def __init__(self, fused: Fused, blocks: Attention):
        self.fused, self.blocks, self.name, self.region = fused, blocks, fused.name, fused.region
        self.leaves = [*{id(x): x for x in (*fused.leaves, *blocks.leaves)}.values()]

    @property
    def text(self) -> str:
        return f"{self.fused.text}; in blocks if {' or '.join(TEXTS[x] for x in self.fused.guards)}"

    def __call__(self, values: Sequence[jax.Array]) -> jax.Array:
        at = {id(x): n for n, x in enumerate(self.leaves)}
        of_kernel, of_blocks = ([at[id(x)] for x in each.leaves] for each in (self.fused, self.blocks))
        pads = {
            name: values[n] for name, n in zip(self.fused.formula.operands, of_kernel, strict=True) if "_pad" in name
        }
        whole = dict.fromkeys(pads, PartitionSpec())
        return jax.lax.cond(
            on_devices(self.fused.placement, self._holds, (pads,), (whole,), PartitionSpec()),
            lambda *x: self.fused([x[n] for n in of_kernel]),
            jax.checkpoint(lambda *x: self.blocks([x[n] for n in of_blocks])),
            *values,
        )

    def _holds(self, pads: Mapping[str, jax.Array]) -> jax.Array:
        formula, guards, region = self.fused.formula, self.fused.guards, self.region
        holds = jnp.bool_(True)
        for x in pads.values() if "numbers" in guards else ():
            holds &= ((x == 0) | (x == 1)).all()
        if "k_pad" not in pads:
            return holds
        keys = pads["k_pad"] == formula.seen["k_pad"]
        keys = jnp.moveaxis(keys, formula.operands["k_pad"].labels.index(region.k), -1)
        if "keys" in guards:
            holds &= sees_keys(keys, jnp.arange(region.shape[region.q]), formula.band).all()
        if "order" in guards:
            holds &= (keys[..., :-1] | ~keys[..., 1:]).all()
        return holds


def guarded(fused: Fused, in_blocks: Callable[[], Attention]) -> Fused | Guarded:
    """`fused`, with the same attention in blocks for data that it does not compute."""
    return Guarded(fused, in_blocks()) if fused.guards else fused
