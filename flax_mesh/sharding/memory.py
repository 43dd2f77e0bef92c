"""Memory kinds: optimizer arrays that are stored in the memory of the host, and brought to the devices in a step.

The memory kind is part of the sharding of a leaf, so initialization, steps, saving and restoring follow the layout.
"""

from collections.abc import Iterable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from flax_mesh.errors import ConfigError
from flax_mesh.text import listed
from flax_mesh.tree import PyTree, model_state, named_leaves, owners_of

DEVICE, PINNED_HOST = "device", "pinned_host"
_OPTIMIZER_MEMORY = (DEVICE, PINNED_HOST)


def is_on_host(x: object) -> bool:
    """Whether `x`, a sharding or an array or ShapeDtypeStruct with a sharding, is in the memory of the host."""
    return getattr(getattr(x, "sharding", x), "memory_kind", None) in (PINNED_HOST, "unpinned_host")


def host_kind(sharding: Sharding) -> str | None:
    """The memory kind of a sharding in the memory of the host; None for the default, the memory of the devices."""
    return sharding.memory_kind if is_on_host(sharding) else None


def memory_problem(mesh: Mesh | AbstractMesh, kind: str) -> str | None:
    """Why the devices of a mesh have no memory of a kind, or None; the kinds of an AbstractMesh are not known."""
    if isinstance(mesh, AbstractMesh):
        return None if kind in _OPTIMIZER_MEMORY else f"must be {' or '.join(_OPTIMIZER_MEMORY)}, got {kind!r}"
    for device in mesh.local_devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if kind not in kinds:
            return f"{kind} is not a memory of {device.device_kind} devices, which have {listed(kinds) or 'none'}"
    return None


def optimizer_memory_kinds(state: PyTree, mesh: Mesh | AbstractMesh, kind: str) -> list[str | None]:
    """The memory kind of every leaf of a state {"model", "optimizer"}, in the order of `jax.tree.leaves`.

    Leaves of the optimizer that belong to a parameter have `kind`. Scalars, such as counts, and all other leaves
    are stored on the devices: None.
    """
    leaves = named_leaves(state)
    if kind == DEVICE:
        return [None] * len(leaves)
    if problem := memory_problem(mesh, kind):
        raise ConfigError(f"optimizer memory: {problem}; use {DEVICE}")
    if "optimizer" not in state:
        raise ConfigError(f"optimizer memory: {kind} needs an optimizer, but make() returns a model alone")
    parameters = {path for path, _ in named_leaves(model_state(state))}

    owned = owners_of([path for path, _ in leaves if path.startswith("optimizer/")], parameters, tails=True)
    return [kind if path in owned and leaf.shape else None for path, leaf in leaves]


def placed(mesh: Mesh | AbstractMesh, spec: PartitionSpec, kind: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec) if kind is None else NamedSharding(mesh, spec, memory_kind=kind)


def brought(x: jax.Array) -> jax.Array:
    """In a trace: a copy on the devices of an array in the memory of the host, with the same sharding."""
    return jax.device_put(x, jax.memory.Space.Device)  # pyright: ignore[reportUnknownMemberType] (of JAX)


def on_device(values: Iterable[jax.Array], layouts: Sequence[object]) -> tuple[jax.Array, ...]:
    """In a trace: `values`, with a copy on the devices of every value whose layout is in the memory of the host."""
    return tuple(brought(x) if is_on_host(like) else x for x, like in zip(values, layouts, strict=True))
