"""Costs of a sharding: bytes per device, balance, replication, padding; arrays and traffic of each mesh axis."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from flax_mesh.axes import as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.fields import check_types
from flax_mesh.hlo.collectives import Traffic, read_collectives, sum_traffic
from flax_mesh.hlo.program import read_hlo
from flax_mesh.mesh.context import AnyMesh, get_incontext_mesh
from flax_mesh.sharding.memory import is_on_host
from flax_mesh.sharding.report.report import ArrayReport, AxisStats, Kind, ShardingReport
from flax_mesh.sharding.rules import apply_policy, fit_spec
from flax_mesh.sharding.transfer import align_by_path
from flax_mesh.text import path_lines
from flax_mesh.tree import PyTree, named_leaves, path_of

Location = tuple[Any, bool]  # a mesh or a set of devices, and whether the array is in their host memory


@check_types
def analyze_sharding_strategy(
    tree: PyTree, specs: PyTree = None, mesh: AnyMesh | None = None, *, compiled: Any = None
) -> ShardingReport:
    """Computes the memory of a sharded tree: bytes per device, replication, balance, and the use of each mesh axis.

    The report is computed from shapes, dtypes and specs. Nothing is allocated, and no device is required. The bytes are
    the bytes of the arrays in `tree`, without activations.

    Dims that are not divisible are counted with the padding of the compiler. Leaves that are not arrays, such as
    numbers and text, are left out. Arrays without a mesh are counted on their device.

    Args:
        tree: Arrays or ShapeDtypeStructs, such as an `abstract_state` or a state. Parameters, optimizer state and other
            variables are distinguished by their Variable types; plain arrays are parameters.
        specs: Tree of the same structure of PartitionSpecs or shardings. Default: the shardings of the leaves.
        mesh: Mesh or AbstractMesh of PartitionSpecs. Default: the mesh in context.
        compiled: A compiled step, `jax.jit(...).lower(...).compile()`. Adds its collectives to the report: which mesh
            axes they use, how often per step, and how many bytes a device sends.

    Returns:
        A `ShardingReport`, a mapping with attributes. Sizes are in bytes. Print it, or use `to_text()`, `to_dict()` and
        `to_html()`.

    Raises:
        ShardingError: Leaves without a sharding, such as numpy arrays without `specs`; specs that are too long, name
            unknown mesh axes or use one twice. One error lists all of them.
        NoMeshError: `specs` contains PartitionSpecs, `mesh` is None and no mesh is in context.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "tp"))
        >>> tree = {"w": jax.ShapeDtypeStruct((64, 256), np.float32), "b": jax.ShapeDtypeStruct((256,), np.float32)}
        >>> report = fm.analyze_sharding_strategy(tree, {"w": P("fsdp", "tp"), "b": P()}, mesh)
        >>> report.memory_per_device[0]  # 64 * 256 * 4 / 8 + 256 * 4
        9216
        >>> report["replicated_bytes"], report["balance_score"]
        (7168, 1.0)
    """
    placed, problems = [], []
    for (path, leaf), kind, layout in zip(named_leaves(tree), _kinds(tree), _layouts(tree, specs), strict=True):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            continue
        if isinstance(layout, PartitionSpec):
            mesh = mesh or get_incontext_mesh()
        try:
            placed.append(_place(path, kind, leaf, layout, mesh))
        except ShardingError as error:
            problems.append(str(error))
    if problems:
        raise ShardingError("\n".join(path_lines(problems)))
    leaves, locations = [leaf for leaf, _ in placed], [location for _, location in placed]
    mesh = mesh or next((where for where, _ in locations if isinstance(where, Mesh | AbstractMesh)), None)
    if compiled is not None and mesh is None:
        raise ShardingError(
            "a mesh is required to assign the collectives of a compiled step to mesh axes, and no array is on one. "
            "Pass mesh=."
        )
    traffic = () if compiled is None or mesh is None else sum_traffic(read_collectives(read_hlo(compiled), mesh))
    return _report(leaves, locations, mesh, tuple(traffic))


def _report(leaves: list[ArrayReport], locations: list[Location], mesh: AnyMesh | None, traffic: tuple[Traffic, ...]):
    # Summed per mesh first, not per device: a model has thousands of arrays on thousands of devices, but few meshes.
    per_location: dict[Any, Counter[str]] = {}
    host_bytes = 0
    for leaf, (where, on_host) in zip(leaves, locations, strict=True):
        if on_host:
            host_bytes += leaf.device_bytes * leaf.num_devices
        else:
            per_location.setdefault(where, Counter())[leaf.kind] += leaf.device_bytes
            if leaf.kind == "parameter" and leaf.dtype.startswith(("float", "bfloat", "complex")):
                per_location[where]["gradient"] += leaf.device_bytes
    devices = _devices(per_location)
    stored = {device: parts.total() - parts["gradient"] for device, parts in devices.items()}
    fullest = devices[max(stored, key=stored.__getitem__)] if stored else Counter()
    parameters = [leaf for leaf in leaves if leaf.kind == "parameter"]
    return ShardingReport(
        total_parameters=sum(math.prod(leaf.shape) for leaf in parameters),
        sharded_parameters=sum(math.prod(leaf.shape) for leaf in parameters if math.prod(leaf.pieces) > 1),
        memory_per_device=stored,
        balance_score=min(stored.values()) / max(stored.values()) if any(stored.values()) else 1.0,
        partition_stats=_axis_stats(leaves, mesh, traffic),
        total_bytes=sum(leaf.total_bytes for leaf in leaves),
        replicated_bytes=sum(round((leaf.copies - 1) * leaf.total_bytes) for leaf in leaves),
        padded_bytes=sum(leaf.padded_bytes for leaf in leaves),
        host_bytes=host_bytes,
        parameter_bytes=fullest["parameter"],
        optimizer_bytes=fullest["optimizer"],
        variable_bytes=fullest["variable"],
        gradient_bytes=fullest["gradient"],
        mesh=dict(mesh.shape) if mesh is not None else {},
        leaves=tuple(leaves),
        traffic=traffic,
    )


def _place(path: str, kind: Kind, leaf: Any, layout: Any, mesh: AnyMesh | None) -> tuple[ArrayReport, Location]:
    shape, itemsize = tuple(leaf.shape), leaf.dtype.itemsize
    if layout is None:
        raise ShardingError(
            f"{path}: {type(leaf).__name__} {shape} has no sharding. Pass specs, or shard the tree first."
        )
    spec = layout
    if isinstance(layout, Sharding):
        spec, mesh = getattr(layout, "spec", None), getattr(layout, "mesh", None)
    if isinstance(spec, PartitionSpec) and mesh is not None:
        pieces = _pieces(path, shape, spec, mesh)
        where, num_devices = mesh, mesh.size
    else:  # one device, or a sharding without a spec, such as a GSPMDSharding
        sizes = zip(shape, layout.shard_shape(shape), strict=True)
        pieces = tuple(-(-size // part) if part else 1 for size, part in sizes)
        spec, where, num_devices = None, frozenset(layout.device_set), len(layout.device_set)
    device_bytes = math.prod(-(-size // ways) for size, ways in zip(shape, pieces, strict=True)) * itemsize
    total_bytes = math.prod(shape) * itemsize
    padded = device_bytes * math.prod(pieces) - total_bytes
    copies = num_devices // math.prod(pieces)
    on_host = is_on_host(layout)
    numbers = total_bytes, device_bytes, num_devices, padded * copies
    placed = ArrayReport(path, kind, shape, str(leaf.dtype), spec, pieces, *numbers, on_host=on_host)
    return placed, (where, on_host)


def _pieces(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ShardingError(
            f"{path}: the bytes per device of {spec} are unknown, since the compiler chooses how to split the "
            "UNCONSTRAINED dim. Name its mesh axes, or None."
        )
    # Sizes that are not divisible are padded, all other mismatches are errors: 0 is divisible by every size.
    _, findings = fit_spec(path, (0,) * len(shape), spec, mesh)
    apply_policy(findings, "error")
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(math.prod(mesh.shape[axis] for axis in as_tuple(entry)) for entry in entries)


def _layouts(tree: PyTree, specs: PyTree) -> list[PartitionSpec | Sharding | None]:
    """A PartitionSpec, a Sharding or None for each leaf of `tree`."""
    if specs is None:
        return [getattr(leaf, "sharding", None) for _, leaf in named_leaves(tree)]
    wrong = [
        f"{path}: {layout!r} is neither a PartitionSpec nor a Sharding"
        for path, layout in named_leaves(specs)
        if not isinstance(layout, PartitionSpec | Sharding)
    ]
    return align_by_path(tree, specs, wrong)


def _kinds(tree: PyTree) -> list[Kind]:
    """The kind of each leaf, in the order of `jax.tree.leaves`."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))[0]
    return [_kind(path, node) for path, node in nodes for _ in jax.tree.leaves(node)]


def _kind(key_path: Sequence[object], node: object) -> Kind:
    """The kind of a leaf by its Variable type. A plain array is a parameter unless its path is in an optimizer."""
    if isinstance(node, nnx.optimizer.OptState):
        return "optimizer"
    if isinstance(node, nnx.Variable):
        return "parameter" if isinstance(node, nnx.Param) else "variable"
    return "optimizer" if {"optimizer", "opt_state"} & set(path_of(key_path).split("/")) else "parameter"


def _devices(per_location: dict[Any, Counter[str]]) -> dict[Hashable, Counter[str]]:
    """Device, or index in the only AbstractMesh -> bytes by kind."""
    abstract = [where for where in per_location if isinstance(where, AbstractMesh)]
    if len(abstract) > 1 or (abstract and len(per_location) > 1):
        shapes = ", ".join(str(dict(where.shape)) if hasattr(where, "shape") else "devices" for where in per_location)
        raise ShardingError(
            f"arrays must be on a single AbstractMesh or all on devices, got {shapes}: it is unknown which arrays "
            "share a device. Use meshes of devices, or report each part separately."
        )
    devices: dict[Hashable, Counter[str]] = {}
    for where, parts in per_location.items():
        members = where.devices.flat if isinstance(where, Mesh) else where
        for device in range(where.size) if isinstance(where, AbstractMesh) else members:
            devices.setdefault(device, Counter()).update(parts)
    return devices


def _axis_stats(
    leaves: Sequence[ArrayReport], mesh: AnyMesh | None, traffic: tuple[Traffic, ...]
) -> dict[str, AxisStats]:
    stats = {}
    for axis, size in mesh.shape.items() if mesh is not None else ():
        split = [x for x in leaves if x.spec is not None and any(axis in as_tuple(entry) for entry in x.spec)]
        stats[axis] = AxisStats(
            size=size,
            arrays=len(split),
            parameters=sum(math.prod(x.shape) for x in split if x.kind == "parameter"),
            total_bytes=sum(x.total_bytes for x in split),
            traffic=tuple(collective for collective in traffic if axis in collective.axes),
        )
    return stats
