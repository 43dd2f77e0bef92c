"""The parts of layers: norms, options of linear layers, and the parameters of experts."""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_mesh.axes import Mode
from flax_mesh.models.config import DecoderConfig


class ZeroCenteredNorm(nnx.Module):
    """RMSNorm over the last dim, with the weights 1 + scale."""

    def __init__(self, size: int, *, epsilon: float, dtype: jnp.dtype, param_dtype: jnp.dtype):
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = nnx.Param(jnp.zeros(size, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return (x * (1 + self.scale[...].astype(jnp.float32))).astype(self.dtype)


class Balance(nnx.Variable[jax.Array]):
    """A bias of the choice of experts: it has no gradient, and balances them without a loss."""


class Kernel(nnx.Module):
    """The parameter `kernel`: one matrix, or one per expert, with LeCun normal initialization of each; and `bias`."""

    def __init__(self, shape: tuple[int, ...], param_dtype: DTypeLike, bias: bool = False, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=tuple(range(len(shape) - 2)))
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.dtype(param_dtype)))
        if bias:
            self.bias = nnx.Param(jnp.zeros((*shape[:-2], shape[-1]), jnp.dtype(param_dtype)))


def norm(
    config: DecoderConfig, rngs: nnx.Rngs, size: int | None = None, epsilon: float | None = None
) -> nnx.RMSNorm | ZeroCenteredNorm:
    size, epsilon = size or config.hidden_size, config.norm_epsilon if epsilon is None else epsilon
    if config.zero_centered:
        return ZeroCenteredNorm(size, epsilon=epsilon, **dtypes(config))
    return nnx.RMSNorm(size, epsilon=epsilon, rngs=rngs, **dtypes(config))


def linear_options(config: DecoderConfig, rngs: nnx.Rngs) -> dict[str, Any]:
    return {"use_bias": False, "rngs": rngs, **dtypes(config)}


def dtypes(config: DecoderConfig) -> dict[str, Any]:
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}


def token_dims(mode: Mode) -> tuple[str, str]:
    """Logical axes of the dims (B, S) of activations: in "decode" S is one token, which no mesh axis splits."""
    return "batch", "query_sequence" if mode == "decode" else "sequence"
