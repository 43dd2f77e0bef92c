"""Sharding constraints on activations, by mesh axes or by logical axes."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_mesh.axes import Mode, PartitionAxis, as_entry, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.mesh.context import current_mesh, get_incontext_mesh
from flax_mesh.sharding.rules import Finding, Policy, apply_policy, fit_spec, lost_finding

Array = TypeVar("Array")


def with_sharding_constraint(
    x: Array, spec: PartitionSpec, *, on_mismatch: Policy = "error", dropped: list[Finding] | None = None
) -> Array:
    """`x` laid out as `spec` on the mesh in context, inside jit or outside; `P()` replicates.

    Axes of type Auto are constrained, Explicit ones resharded; Manual ones (inside `shard_map`) are left alone, since
    there the array is one shard already. A spec that does not fit `x` and the mesh follows `on_mismatch` as in
    `match_partition_rules`, inside jit once a trace. Without a mesh in context: the error of `get_incontext_mesh`.
    """
    mesh: Any = get_incontext_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    local = PartitionSpec(*(_only(entry, types, AxisType.Auto, AxisType.Explicit, None) for entry in spec))
    fitting, findings = fit_spec("with_sharding_constraint", getattr(x, "shape", ()), local, mesh)
    apply_policy(findings, on_mismatch, dropped)
    if all(kind == AxisType.Manual for kind in types.values()):
        return x
    explicit = [_only(entry, types, AxisType.Explicit) for entry in fitting]
    auto = [_only(entry, types, AxisType.Auto) for entry in fitting]
    if both := [dim for dim, (a, b) in enumerate(zip(explicit, auto, strict=True)) if a and b]:
        raise ShardingError(
            f"{spec} splits dim {both[0]} over Explicit and Auto axes together, for which JAX has no operation. "
            "Split it over axes of one type, or give both axes the same type in create_mesh(axis_types=...)."
        )
    if AxisType.Explicit in types.values():
        x = jax.sharding.reshard(x, _target(mesh, PartitionSpec(*explicit)))
        # The constraint on the Auto axes that follows must not undo this.
        auto = [PartitionSpec.UNCONSTRAINED if split else entry for split, entry in zip(explicit, auto, strict=True)]
    if AxisType.Auto in types.values():
        x = jax.lax.with_sharding_constraint(x, _target(mesh, PartitionSpec(*auto)))
    return x


def constrain(
    x: Array,
    logical_axes: Iterable[str | None],
    *,
    axes: PartitionAxis,
    mode: Mode = "train",
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> Array:
    """`x` with its dims laid out as its logical axes say: `constrain(x, ("batch", "sequence", "hidden"), axes=axes)`.

    Without a mesh in context returns `x`. What does not fit, as a mesh axis for two dims, follows `on_mismatch`.
    """
    if (mesh := current_mesh()) is None:
        return x
    logical_axes = tuple(logical_axes)
    spec, lost = axes.resolve_and_report(logical_axes, mode)
    apply_policy([lost_finding(f"constrain{logical_axes}", one) for one in lost], on_mismatch, dropped)
    absent = axes.default_names - set(mesh.axis_names)
    present = PartitionSpec(*(as_entry(axis for axis in as_tuple(entry) if axis not in absent) for entry in spec))
    return with_sharding_constraint(x, present, on_mismatch=on_mismatch, dropped=dropped)


def _only(entry: Any, types: dict[str, AxisType], *kinds: AxisType | None) -> Any:
    """The axes of one entry whose type is one of `kinds`; an axis the mesh lacks has type None."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return as_entry(axis for axis in as_tuple(entry) if types.get(axis) in kinds)


def _target(mesh: Any, spec: PartitionSpec) -> Any:
    return NamedSharding(mesh, spec) if isinstance(mesh, jax.sharding.Mesh) else spec
