"""Mixture of experts: a router selects K of E SwiGLU experts for every token; experts may be sharded over devices.

Shape letters: B batch, S sequence, D hidden, F mlp, E experts, K experts per token. On one device: T tokens, P devices
that share the experts, L local experts, C rows sent to each of the P devices, R rows to compute, A assignments of a row
to an expert.

Router: `ops.router`; sparsity: Shazeer et al. 2017. No token is ever dropped: there is no fixed capacity.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from flax_mesh.axes import Mode, PartitionAxis, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.kernels import platform_of
from flax_mesh.mesh.context import AnyMesh, current_mesh
from flax_mesh.models.ops.activations import activated, shifted
from flax_mesh.models.ops.grouped import grouped_dot
from flax_mesh.models.ops.router import Aux, Routing, balanced_capacity, route
from flax_mesh.models.parts import Balance, Kernel, token_dims
from flax_mesh.text import axes_text

_NOT_SPLIT = PartitionSpec()


class _Local(NamedTuple):
    """The activations of the experts of gate and up, and the platform of the devices that compute them."""

    gate: Callable[[jax.Array], jax.Array]
    up: Callable[[jax.Array], jax.Array]
    platform: str


class MoE(nnx.Module):
    """(B, S, D) -> (B, S, D) and statistics of the router; each token is routed to `experts_per_token` experts.

    The router computes in float32: by default softmax over all experts, the K largest, their probabilities divided by
    their sum. With `bias` the router and the experts have biases, with `balance` the choice of experts has a bias that
    is no `nnx.Param`; the other options are options of `DecoderConfig`.
    The second result is a dict with "experts" (B, S, K) int32, and sums over all tokens, or over those of a mask that a
    call is given: "expert_tokens" (E,) int32, "router_probability" (E,) and "router_z" (). `router_losses` computes
    losses from it.

    On a mesh the layer runs in its own `jax.shard_map`. The experts are split over the mesh axes of the logical axis
    "experts"; tokens are sent to them and back by all-to-all. A batch that is split over those axes too,
    `PartitionAxis(batch_axis=("fsdp", "dp", "ep"))`, is the natural layout: no computation outside of the layer is then
    replicated. Another batch is split over them for this layer, along B if that divides, otherwise along S, and the
    result is gathered again; ShardingError if neither divides.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        axes: PartitionAxis = PartitionAxis(),  # noqa: B008 (a frozen value)
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        routing: Routing = Routing(),  # noqa: B008
        bias: bool = False,
        balance: bool = False,
        activation: str = "silu",
        swiglu_limit: float = 0.0,
        rngs: nnx.Rngs,
    ):
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(f"experts_per_token={experts_per_token} must be between 1 and num_experts={num_experts}.")
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.axes, self.dtype = axes, jnp.dtype(dtype)
        self.routing, self.bias = routing, bias
        self.activation, self.swiglu_limit = activation, swiglu_limit
        kernel = lambda *shape: Kernel(shape, param_dtype, bias, rngs=rngs)  # noqa: E731
        self.router = kernel(hidden_size, num_experts)
        if balance:
            self.balance = Balance(jnp.zeros(num_experts, jnp.float32))
        self.gate = kernel(num_experts, hidden_size, mlp_size)
        self.up = kernel(num_experts, hidden_size, mlp_size)
        self.down = kernel(num_experts, mlp_size, hidden_size)

    def __call__(
        self, x_BSD: jax.Array, mode: Mode = "train", counted_BS: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """`counted_BS`, booleans: the tokens that count in the sums; the others, such as padding, are routed only."""
        experts = (self.gate, self.up, self.down)
        kernels = tuple(k.kernel[...].astype(self.dtype) for k in experts)
        kernels += tuple(k.bias[...].astype(self.dtype) for k in experts if self.bias)
        layout = find_layout(self.axes, x_BSD.shape, self.num_experts, mode)
        activate = lambda x: activated(x, self.activation, self.swiglu_limit)  # noqa: E731
        local = _Local(activate, partial(shifted, limit=self.swiglu_limit), platform_of(current_mesh()))
        run = partial(_run_on_device, k=self.experts_per_token, routing=self.routing, local=local, layout=layout)
        router = {"router_DE": self.router.kernel[...].astype(jnp.float32)}
        if self.bias:
            router["bias_E"] = self.router.bias[...].astype(jnp.float32)
        if hasattr(self, "balance"):
            router["balance_E"] = self.balance[...]
        if layout.mesh is None:
            return run(x_BSD, counted_BS, router, kernels)
        tokens, of_kernel = PartitionSpec(layout.batch, layout.sequence), {"router_DE": layout.router}
        aux = {"experts": tokens} | dict.fromkeys(("expert_tokens", "router_probability", "router_z"), _NOT_SPLIT)
        return jax.shard_map(
            run,
            mesh=layout.mesh,
            in_specs=(tokens, tokens, dict.fromkeys(router, _NOT_SPLIT) | of_kernel, layout.specs(self.bias)),
            out_specs=(tokens, aux),
            axis_names=layout.manual,
        )(x_BSD, counted_BS, router, kernels)


class Kernels(NamedTuple):
    """Kernels of all experts: gate and up (E, D, F), down (E, F, D); and their biases (E, F) and (E, D), or None."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class _MoELayout(NamedTuple):
    """Mesh axes (without those of size 1) that split the dims of one call; all empty without a mesh."""

    mesh: AnyMesh | None = None
    manual: frozenset[str] = frozenset()
    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.batch + self.sequence

    @property
    def router(self) -> PartitionSpec:
        return PartitionSpec(self.embed, None)

    def specs(self, bias: bool) -> tuple[PartitionSpec, ...]:
        """Of the fields of Kernels, the biases only where the experts have some."""
        wide, tall = (self.experts, self.embed, self.mlp), (self.experts, self.mlp, self.embed)
        of_kernels = [PartitionSpec(*dims) for dims in (wide, wide, tall)]
        return *of_kernels, *(PartitionSpec(dims[0], dims[2]) for dims in (wide, wide, tall) if bias)


def find_layout(axes: PartitionAxis, shape: tuple[int, ...], num_experts: int, mode: Mode = "train") -> _MoELayout:
    """Layout of tokens (B, S, ...) and experts on the current mesh; axes of the experts split tokens too."""
    mesh = current_mesh()
    if mesh is None:
        return _MoELayout()
    manual = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    if inside := sorted(manual.intersection(axes.mesh_axes("experts"))):
        raise ShardingError(
            f"MoE inside a shard_map over {', '.join(inside)}: it exchanges tokens over the axes of the experts in a "
            "shard_map of its own. Leave them out of the outer axis_names."
        )
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in manual}
    if not sizes:
        return _MoELayout()

    def resolve(*logical: str, mode: Mode = "train") -> list[tuple[str, ...]]:
        return [tuple(a for a in as_tuple(entry) if a in sizes) for entry in axes.resolve(logical, mode)]

    experts, embed, mlp = resolve("experts", "embed", "mlp")
    batch, sequence = resolve(*token_dims(mode), mode=mode)
    rest = tuple(axis for axis in experts if axis not in batch + sequence)

    def divides(size: int, over: tuple[str, ...]) -> bool:
        return size % math.prod(sizes[axis] for axis in over) == 0

    if not divides(num_experts, experts):
        raise ShardingError(f"num_experts={num_experts} is not divisible over {axes_text(sizes, experts)} of the mesh.")
    if divides(shape[0], batch + rest) and divides(shape[1], sequence):
        batch += rest
    elif divides(shape[0], batch) and divides(shape[1], sequence + rest):
        sequence += rest
    else:
        raise ShardingError(
            f"MoE splits the tokens over all devices of {axes_text(sizes, batch + sequence + rest)}, but neither batch "
            f"{shape[0]} nor sequence {shape[1]} is divisible. Use a batch that is a multiple of "
            f"{math.prod(sizes[a] for a in batch + rest)}, with PartitionAxis(batch_axis={batch + rest}), or a mesh "
            f"with a smaller {' or '.join(rest or batch + sequence)}."
        )
    # If an embed axis splits no tokens, as in decode, its devices would compute equal results, which shard_map cannot
    # verify after a gather inside. Such kernels are passed in gathered.
    embed = tuple(axis for axis in embed if axis in batch + sequence)
    return _MoELayout(mesh, frozenset(mesh.axis_names) - manual, batch, sequence, experts, embed, mlp)


def _run_on_device(
    x_BSD: jax.Array,
    counted_BS: jax.Array | None,
    router: dict[str, jax.Array],
    arrays: tuple[jax.Array, ...],
    *,
    k: int,
    routing: Routing,
    local: _Local,
    layout: _MoELayout,
) -> tuple[jax.Array, Aux]:
    """The layer on one device: B, S, and D, F, E of the kernels are the local sizes."""
    x_TD, counted_T = x_BSD.reshape(-1, x_BSD.shape[-1]), None if counted_BS is None else counted_BS.reshape(-1)
    shared = tuple(axis for axis in layout.mlp if axis in layout.tokens)  # unusual axes, but valid
    split = tuple(axis for axis in layout.mlp if axis not in shared)
    router = router | {"router_DE": _gather(router["router_DE"], layout.router, layout)}
    specs = layout.specs(bias="bias_E" in router)
    kernels = Kernels(*(_gather(w, dims, layout) for w, dims in zip(arrays, specs, strict=True)))
    weights_TK, experts_TK, sums = route(x_TD, k=k, routing=routing, counted_T=counted_T, **router)
    if (
        kernels.down_bias is not None and split
    ):  # each device has a part of the sum over F, to which one of them adds the bias
        is_first = jax.lax.axis_index(split) == 0
        kernels = kernels._replace(down_bias=jnp.where(is_first, _vary(kernels.down_bias, split), 0))
    # Each device has a part of F, so the cotangents of the inputs are partial sums, reduced here once for T rows.
    inputs = _vary(x_TD.astype(kernels.gate.dtype), split), _vary(weights_TK, split), experts_TK, kernels, local
    y_TD = _psum(_exchange(*inputs, layout) if layout.experts else _apply_experts(*inputs), split)
    aux = {name: _psum(total, layout.tokens) for name, total in sums.items()}
    return y_TD.reshape(x_BSD.shape), aux | {"experts": experts_TK.reshape(*x_BSD.shape[:2], k)}


def _apply_experts(
    x_RD: jax.Array, weights_RK: jax.Array, experts_RK: jax.Array, kernels: Kernels, local: _Local
) -> jax.Array:
    """Weighted sums (R, D) of the outputs of the local experts; an expert id of L or more means no expert."""
    k, num_experts = experts_RK.shape[1], kernels.gate.shape[0]
    order_A = jnp.argsort(experts_RK.reshape(-1), stable=True)
    sizes_L = jnp.bincount(experts_RK.reshape(-1), length=num_experts + 1)[:num_experts]
    # The products of rows beyond the groups are undefined on TPUs: masked before them (gradients) and after them.
    live_A1 = (jnp.arange(order_A.size) < jnp.sum(sizes_L))[:, None]
    x_AD = jnp.where(live_A1, x_RD[order_A // k], 0)

    def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = grouped_dot(x, kernel, sizes_L, local.platform)
        return y if bias is None else y + bias[jnp.minimum(experts_RK.reshape(-1)[order_A], num_experts - 1)]

    gate_AF, up_AF = product(x_AD, kernels.gate, kernels.gate_bias), product(x_AD, kernels.up, kernels.up_bias)
    y_AD = product(local.gate(gate_AF) * local.up(up_AF), kernels.down, kernels.down_bias)
    y_AD = jnp.where(live_A1, y_AD, 0)
    y_RKD = y_AD[jnp.argsort(order_A)].reshape(*experts_RK.shape, -1)
    return jnp.einsum("rkd,rk->rd", y_RKD, weights_RK.astype(y_RKD.dtype))


def _exchange(
    x_TD: jax.Array,
    weights_TK: jax.Array,
    experts_TK: jax.Array,
    kernels: Kernels,
    local: _Local,
    layout: _MoELayout,
) -> jax.Array:
    """`_apply_experts` with the experts split over P devices: tokens are sent there, and weighted sums are sent back.

    A token is sent to a device at most once, however many of its experts are there. Each pair of devices exchanges C
    rows, with padding: C = T is enough for any routing. A balanced router leaves most of them empty, so a smaller C is
    used if it is enough on all devices, which they decide together in every step; no token is dropped.
    `ragged_all_to_all` would send exact counts, but XLA supports it only on TPU and GPU, so the CPU tests would not
    cover it. For T = 4 tokens, P = 2 devices and C = 3, the rows that one device sends, with slot numbers of tokens:

        experts on device     0    1             to device 0:  [t0 t2 t3]
        t0, t2                x                  to device 1:  [t1 t3 --]   -- is padding
        t1                         x
        t3                    x    x             received rows are computed, sent back, and added at their slots
    """
    num_tokens, k = experts_TK.shape
    per_device = kernels.gate.shape[0]
    num_devices = jax.lax.axis_size(layout.experts)
    rank = jnp.arange(num_devices)
    sent_TP = jnp.any((experts_TK // per_device)[:, None] == rank[:, None], axis=-1)
    # Row p starts with the tokens that are sent to device p, in their order.
    slots_PT = jnp.argsort(~sent_TP, axis=0, stable=True).T

    def all_to_all(x_PC: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x_PC, layout.experts, split_axis=0, concat_axis=0)

    def run(capacity: int) -> jax.Array:
        slots_PC = slots_PT[:, :capacity]
        local_PCK = experts_TK[slots_PC] - per_device * rank[:, None, None]
        is_local_PCK = (local_PCK >= 0) & (local_PCK < per_device)  # false in padding
        local_PCK = jnp.where(is_local_PCK, local_PCK, per_device)
        # Expert ids are sent as floats beside the weights, which saves one all-to-all.
        routing_PC = jnp.concatenate([weights_TK[slots_PC], local_PCK.astype(jnp.float32)], axis=-1)
        x_RD, routing_R = (all_to_all(x).reshape(num_devices * capacity, -1) for x in (x_TD[slots_PC], routing_PC))
        weights_RK, local_RK = routing_R[:, :k], routing_R[:, k:].astype(jnp.int32)
        if k > per_device:  # choices of other devices' experts sort last and are dropped
            local_RK, which = jax.lax.sort_key_val(local_RK, jnp.broadcast_to(jnp.arange(k), local_RK.shape))
            weights_RK = jnp.take_along_axis(weights_RK, which, axis=1)[:, :per_device]
            local_RK = local_RK[:, :per_device]
        y_RD = _apply_experts(x_RD, weights_RK, local_RK, kernels, local)
        back_PCD = all_to_all(y_RD.reshape(num_devices, capacity, -1))
        return jnp.zeros_like(x_TD).at[slots_PC].add(back_PCD)

    capacity = balanced_capacity(num_tokens, k, per_device, num_devices)
    if capacity is None:
        return run(num_tokens)
    largest = jax.lax.pmax(jnp.max(jnp.sum(sent_TP, axis=0)), layout.tokens)
    return jax.lax.cond(largest <= capacity, lambda: run(capacity), lambda: run(num_tokens))


def _gather(kernel: jax.Array, dims: PartitionSpec, layout: _MoELayout) -> jax.Array:
    """Gather a kernel, split as in `dims`, over the axes that split tokens, except the axes of the experts.

    Done here and not by in_specs, so that the gradient is reduce-scattered first, and only its shard is all-reduced
    over the remaining token axes.
    """
    kernel = _vary(kernel, layout.tokens, known=dims)
    for dim, axes in enumerate(dims):
        over = tuple(axis for axis in as_tuple(axes) if axis in layout.tokens and axis not in layout.experts)
        if over:
            kernel = jax.lax.all_gather(kernel, over, axis=dim, tiled=True)
    return kernel


def _vary(x: jax.Array, axes: tuple[str, ...], known: PartitionSpec = _NOT_SPLIT) -> jax.Array:
    """Mark `x` as varying along `axes`; here the backward pass sums its cotangent over them."""
    new = tuple(axis for axis in axes if axis not in [a for entry in known for a in as_tuple(entry)])
    return jax.lax.pcast(x, new, to="varying") if new else x


def _psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
