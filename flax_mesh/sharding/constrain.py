"""Sharding constraints on activations, by mesh axes or by logical axes."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh.axes import Mode, PartitionAxis, as_entry, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types
from flax_mesh.mesh.context import AnyMesh, current_mesh, get_incontext_mesh
from flax_mesh.sharding.rules import Finding, Policy, apply_policy, fit_spec, lost_finding

Array = TypeVar("Array")


@check_types
def with_sharding_constraint(
    x: Array, spec: PartitionSpec, *, on_mismatch: Policy = "error", dropped: list[Finding] | None = None
) -> Array:
    """Returns `x` with the sharding `spec` on the mesh in context, inside or outside of jit; `P()` replicates.

    Dims with `P.UNCONSTRAINED` keep their sharding on Explicit axes, and may have any sharding on Auto axes.

    Axes of type Auto become a sharding constraint, Explicit axes a `jax.sharding.reshard`. Manual axes are ignored:
    inside `shard_map` the array is one shard already. `on_mismatch` and `dropped` are as in `match_partition_rules`;
    inside jit, mismatches are reported once per trace. Raises NoMeshError if no mesh is in context.

    Example:
        >>> with jax.set_mesh(fm.create_mesh((8,), ("fsdp",))):
        ...     fm.with_sharding_constraint(np.ones((8, 2)), jax.P("fsdp", None)).sharding.spec
        P('fsdp', None)
    """
    mesh = get_incontext_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    local = PartitionSpec(*(_only(entry, types, AxisType.Auto, AxisType.Explicit, None) for entry in spec))
    fitting, findings = fit_spec("with_sharding_constraint", getattr(x, "shape", ()), local, mesh)
    apply_policy(findings, on_mismatch, dropped)
    if all(kind == AxisType.Manual for kind in types.values()):
        return x
    explicit = [_only(entry, types, AxisType.Explicit) for entry in fitting]
    auto = [_only(entry, types, AxisType.Auto) for entry in fitting]
    free = PartitionSpec.UNCONSTRAINED
    if both := [dim for dim, (a, b) in enumerate(zip(explicit, auto, strict=True)) if a and b and a is not free]:
        raise ShardingError(
            f"{spec} splits dim {both[0]} over Explicit and Auto axes together, which JAX does not support. Split it "
            "over axes of one type, or give both axes the same type in create_mesh(axis_types=...)."
        )
    if AxisType.Explicit in types.values():
        current = jax.typeof(x).sharding.spec
        wanted = [current[dim] if entry is free else entry for dim, entry in enumerate(explicit)]
        x = jax.sharding.reshard(x, _target(mesh, PartitionSpec(*wanted)))  # pyright: ignore[reportUnknownMemberType] (of JAX)
        # The constraint on the Auto axes below must leave these dims as they are.
        auto = [free if split else entry for split, entry in zip(explicit, auto, strict=True)]
    if AxisType.Auto in types.values():
        x = jax.lax.with_sharding_constraint(x, _target(mesh, PartitionSpec(*auto)))  # pyright: ignore[reportUnknownMemberType]
    return x


@check_types
def constrain(
    x: Array,
    logical_axes: Iterable[str | None],
    *,
    axes: PartitionAxis,
    mode: Mode = "train",
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> Array:
    """Constrains the sharding of an activation, given the logical axis of each of its dims.

    `axes` maps the logical axes to mesh axes, and `with_sharding_constraint` applies the resulting spec. Without a mesh
    in context, `x` is returned unchanged, so that the same model runs on a single device. Mesh axes that only the
    default values of `axes` name may be missing in the mesh, and then count as size 1.

    Args:
        x: Array of any shape, usually traced.
        logical_axes: One name or None per dim, at most as many as `x` has dims. Dims with None and dims that are not
            named are replicated.
        axes: The mapping from logical axes to mesh axes.
        mode: "train", "prefill" or "decode". "decode" uses the `generation_*` fields of `axes`.
        on_mismatch: The reaction to a mesh axis that is used for two dims, or does not divide its dim: "error" raises a
            ShardingError, "warn" and "drop" leave out the mesh axes that do not fit.
        dropped: List to which "warn" and "drop" append a finding for every mesh axis that is left out.

    Returns:
        `x` with the constraint.

    Raises:
        ShardingError: A logical axis is unknown, or a mesh axis does not fit and `on_mismatch` is "error".

    Example:
        >>> axes = fm.PartitionAxis()
        >>> with jax.set_mesh(fm.create_mesh((1, 2, 1, 4, 1))):  # dp, fsdp, ep, tp, sp
        ...     x = fm.constrain(np.ones((8, 16, 64)), ("batch", "sequence", "hidden"), axes=axes)
        >>> x.addressable_shards[0].data.shape
        (4, 16, 16)
    """
    if (mesh := current_mesh()) is None:
        return x
    logical_axes = tuple(logical_axes)
    spec, lost = axes.resolve_and_report(logical_axes, mode)
    apply_policy([lost_finding(f"constrain{logical_axes}", axis) for axis in lost], on_mismatch, dropped)
    return with_sharding_constraint(x, spec_in_mesh(spec, axes, mesh), on_mismatch=on_mismatch, dropped=dropped)


def spec_in_mesh(spec: PartitionSpec, axes: PartitionAxis, mesh: AnyMesh) -> PartitionSpec:
    """`spec` without the axes that the mesh lacks and only the default values of `axes` name."""
    absent = axes.default_names - set(mesh.axis_names)
    return PartitionSpec(*(as_entry(axis for axis in as_tuple(entry) if axis not in absent) for entry in spec))


def _only(entry: Any, types: dict[str, AxisType], *kinds: AxisType | None) -> Any:
    """The axes of one entry whose type is one of `kinds`. An axis that the mesh lacks has type None."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return as_entry(axis for axis in as_tuple(entry) if types.get(axis) in kinds)


def _target(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
    return NamedSharding(mesh, spec) if isinstance(mesh, jax.sharding.Mesh) else spec
