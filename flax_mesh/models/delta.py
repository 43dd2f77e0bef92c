"""Gated delta nets (Yang et al. 2025), layers whose cache has the same size for any number of tokens.

Shape letters: B batch, S sequence, P slots of a prompt, D hidden, K key heads, H value heads, C head dim of queries and
keys, V head dim of values, X numbers of a key head, W tokens of a convolution.

Each key head reads and writes the states of H / K value heads, which follow each other.
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.axes import Mode, num_parts
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.cache import STATE_DIMS
from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.ops.delta import Tokens, causal_conv, delta_step, gated_delta, runs_of, unit
from flax_mesh.models.ops.matmul import dot_float32
from flax_mesh.models.parts import linear_options
from flax_mesh.models.settings.remat import named
from flax_mesh.sharding.constrain import constrain

_DIMS = ("batch", "query_sequence", "heads", "head_dim")
_NAMES = ("q", "k", "v")


class DeltaNet(nnx.Module):
    """A gated delta net, (B, S, D) -> (B, S, D)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        heads, width, value = config.delta_key_heads, config.delta_key_dim, config.delta_value_dim
        self.each = config.delta_value_heads // heads
        options, size, window = linear_options(config, rngs), self.each * value, config.delta_conv
        dtype = options["param_dtype"]

        def linear(size: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(config.hidden_size, (heads, size), **options)

        def uniform(*shape: int, scale: float) -> jax.Array:
            return jax.random.uniform(rngs.params(), shape, maxval=scale)

        self.q, self.k, self.v, self.gate = (linear(x) for x in (width, width, size, size))
        self.beta, self.decay = linear(self.each), linear(self.each)
        bound = window**-0.5
        for name, number in zip(_NAMES, (width, width, size), strict=True):
            kernel_W1KX = uniform(window, 1, heads, number, scale=2 * bound) - bound
            setattr(self, f"{name}_conv", nnx.Param(kernel_W1KX.astype(dtype)))
        self.log_rate = nnx.Param(jnp.log(0.01 + uniform(heads, self.each, scale=16.0)).astype(dtype))
        self.decay_bias = nnx.Param(jnp.ones((heads, self.each), dtype))
        self.norm = nnx.RMSNorm(value, epsilon=config.norm_epsilon, dtype=jnp.float32, param_dtype=dtype, rngs=rngs)
        # Sums over heads, and over tp, before rounding.
        self.o = nnx.LinearGeneral((heads, size), config.hidden_size, axis=(-2, -1), dot_general=dot_float32, **options)

    def __call__(self, x_BSD: jax.Array, mode: Mode = "train", segment_ids_BS: jax.Array | None = None) -> jax.Array:
        """Documents of a packed row are runs of equal segment ids: each starts without a state."""
        runs_BS = None if segment_ids_BS is None else runs_of(segment_ids_BS)
        tokens = self._tokens(self._heads(x_BSD, mode), x_BSD, mode, runs_BS)
        return self._out(gated_delta(tokens, runs_BS, parts=self._parts(mode))[0], x_BSD, mode)

    def prefill(self, x_BPD: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output for prompts of these lengths, and their states (B, H, C, V) and last values (B, K, W - 1, X)."""
        is_prompt_BP1 = (jnp.arange(x_BPD.shape[1]) < lengths_B[:, None])[..., None]
        heads_BPKX = self._heads(x_BPD, "prefill")
        tokens = self._tokens(heads_BPKX, x_BPD, "prefill")
        g, beta = (jnp.where(is_prompt_BP1, x, 0) for x in (tokens.g, tokens.beta))
        y_BPHV, state_BHCV = gated_delta(tokens._replace(g=g, beta=beta), parts=self._parts("prefill"))
        last_BW = lengths_B[:, None] + jnp.arange(1 - self.config.delta_conv, 0)
        window_BWKX = jnp.take_along_axis(heads_BPKX, jnp.maximum(last_BW, 0)[..., None, None], axis=1)
        window_BWKX = jnp.where((last_BW >= 0)[..., None, None], window_BWKX, 0)
        write = partial(constrain, logical_axes=STATE_DIMS, axes=self.config.axes, mode="decode")
        return self._out(y_BPHV, x_BPD, "prefill"), write(state_BHCV), write(jnp.swapaxes(window_BWKX, 1, 2))

    def decode(
        self, x_B1D: jax.Array, states: jax.Array, windows: jax.Array, layer: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The output for one token of each row, and `states` and `windows` after it; see `Attention.decode`."""
        state_BHCV, window_BKWX = (states, windows) if layer is None else (states[layer], windows[layer])
        heads_B1KX = self._heads(x_B1D, "decode")
        heads_BWKX = jnp.concatenate([jnp.swapaxes(window_BKWX, 1, 2), heads_B1KX], axis=1)
        y_B1HV, state_BHCV = delta_step(self._tokens(heads_BWKX, x_B1D, "decode"), state_BHCV)
        new = (state_BHCV, jnp.swapaxes(heads_BWKX[:, 1:], 1, 2))
        dims = STATE_DIMS if layer is None else ("layers", *STATE_DIMS)
        if layer is not None:
            pairs = zip((states, windows), new, strict=True)
            new = tuple(jax.lax.dynamic_update_index_in_dim(stack, x, layer, 0) for stack, x in pairs)
        states, windows = (constrain(x, dims, axes=self.config.axes, mode="decode") for x in new)
        return self._out(y_B1HV, x_B1D, "decode"), states, windows

    def _parts(self, mode: Mode) -> int:
        mesh = current_mesh()
        return 1 if mesh is None else num_parts(self.config.axes, mesh.shape, "query_sequence", mode=mode)

    def _heads(self, x_BSD: jax.Array, mode: Mode) -> jax.Array:
        """Queries, keys and values (B, S, K, X) before the convolution."""
        heads_BSKX = jnp.concatenate([self.q(x_BSD), self.k(x_BSD), self.v(x_BSD)], axis=-1)
        return constrain(heads_BSKX, _DIMS, axes=self.config.axes, mode=mode)

    def _tokens(self, heads_BSKX: jax.Array, x_BSD: jax.Array, mode: Mode, runs_BS: jax.Array | None = None) -> Tokens:
        """Of the last tokens of `heads_BSKX`, as many as `x_BSD` has."""
        config, (rows, length, _) = self.config, x_BSD.shape
        kernel = jnp.concatenate([getattr(self, f"{name}_conv")[...] for name in _NAMES], axis=-1)[:, 0]
        y_BSKX = causal_conv(heads_BSKX, kernel, runs_BS)[:, -length:]
        width = config.delta_key_dim
        q, k, v = (
            named(constrain(x, _DIMS, axes=config.axes, mode=mode), name, config.remat)
            for x, name in zip(jnp.split(y_BSKX, [width, 2 * width], axis=-1), _NAMES, strict=True)
        )
        q, k = (jnp.repeat(unit(x), self.each, axis=2) for x in (q, k))
        of_value_heads = (rows, length, config.delta_value_heads, -1)
        each = v, self.decay(x_BSD), self.beta(x_BSD)
        v, decay, beta = (x.astype(jnp.float32).reshape(of_value_heads) for x in each)
        rate_H, bias_H = (x[...].astype(jnp.float32).reshape(-1) for x in (self.log_rate, self.decay_bias))
        g = -jnp.exp(rate_H) * jax.nn.softplus(decay[..., 0] + bias_H)
        return Tokens(q * width**-0.5, k, v, g, jax.nn.sigmoid(beta[..., 0]))

    def _out(self, y_BSHV: jax.Array, x_BSD: jax.Array, mode: Mode) -> jax.Array:
        config = self.config
        y_BSHV = named(constrain(y_BSHV, _DIMS, axes=config.axes, mode=mode), "attention", config.remat)
        gate_BSKX = self.gate(x_BSD)
        y_BSKX = self.norm(y_BSHV).reshape(gate_BSKX.shape) * jax.nn.silu(gate_BSKX.astype(jnp.float32))
        return self.o(y_BSKX.astype(x_BSD.dtype))
