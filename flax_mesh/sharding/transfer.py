"""Placement of trees of arrays on a mesh: `shard`, `reshard` and `make_shard_and_gather_fns`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

from flax_mesh.errors import ShardingError
from flax_mesh.fields import require_types
from flax_mesh.mesh.context import get_incontext_mesh
from flax_mesh.modes import array_from
from flax_mesh.sharding.gather import gather_leaf
from flax_mesh.sharding.memory import memory_problem
from flax_mesh.sharding.rules import Finding, Policy, apply_policy, fit_spec
from flax_mesh.text import path_lines, paths_text, shown
from flax_mesh.tree import PyTree, check_dtype, map_named, named_leaves


class _UnfittedSharding(NamedTuple):
    """The arguments of a NamedSharding whose spec has not been checked against an array and the mesh yet."""

    spec: PartitionSpec
    mesh: Mesh | AbstractMesh
    memory_kind: str | None


def shard(
    tree: PyTree,
    specs: PyTree,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike | None = None,
    memory_kind: str | None = None,
    donate: bool = False,
    may_alias: bool | None = None,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> PyTree:
    """Places every leaf of `tree`: a numpy array, a number or a jax array with any sharding.

    Args:
        tree: Any pytree.
        specs: PartitionSpecs, shardings, or arrays and ShapeDtypeStructs with a sharding, such as an `abstract_state`:
            a tree of the same structure with one per leaf, or a single one for all leaves.
        mesh: The mesh of PartitionSpecs. Default: the mesh in context.
        dtype: Floating leaves are cast to it: on the host, or on the devices for leaves on several devices.
        memory_kind: "device" or "pinned_host". Default: the memory kind of the sharding.
        donate: Transfer one leaf at a time, and drop each source once it is copied. A source on devices is freed, and
            the caller's array becomes invalid. On CPU, sources are not donated: `jax.device_put` frees nothing there,
            and has been seen to crash. There, and for numpy leaves, memory is freed only if the caller holds no
            reference: `shard(load(), ..., donate=True)`.
        may_alias: As in `jax.device_put`, whether the result may share memory with the leaves. By default it may: a
            leaf that has the sharding already is returned itself, and an array of one device becomes the shard of that
            device. A step that donates the result then deletes the caller's array too. False copies all of it.
        on_mismatch: "error", "warn" or "drop" for a spec that does not fit its leaf, as in `match_partition_rules`.
        dropped: List to which "warn" and "drop" append the findings.

    Nothing is compiled for numpy leaves and for leaves that have the sharding already. Arrays on one device compile at
    most one program per shape. Every process copies only the shards of its devices. On CPU the result may share
    memory with numpy leaves, as after `jax.device_put`: do not modify them afterwards, or pass `may_alias=False`.

    Example:
        >>> tree = {"kernel": np.ones((8, 8)), "bias": np.ones(8)}
        >>> specs = {"kernel": jax.P("fsdp", "tp"), "bias": jax.P()}
        >>> arrays = fm.shard(tree, specs, fm.create_mesh((2, 4), ("fsdp", "tp")))
        >>> arrays["kernel"].sharding.shard_shape((8, 8))
        (4, 2)
    """
    require_types(shard, dtype=dtype, memory_kind=memory_kind, dropped=dropped)
    check_dtype(dtype)
    leaves, treedef = jax.tree.flatten(tree)
    layouts = [_layout(x, mesh, memory_kind) for x in _aligned(tree, leaves, treedef, specs)]
    shardings = _fitting(tree, leaves, layouts, on_mismatch, dropped)
    del tree
    return jax.tree.unflatten(treedef, _place(leaves, shardings, dtype, donate, may_alias))


def reshard(
    tree: PyTree,
    specs: PyTree = None,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike | None = None,
    memory_kind: str | None = None,
    donate: bool = False,
    may_alias: bool | None = None,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> PyTree:
    """As `shard`, for arrays that are on a mesh already: changes their specs, mesh, memory kind or dtype.

    A leaf keeps its spec, mesh or memory kind where the argument is None: `reshard(state, memory_kind="pinned_host")`
    offloads a state. Leaves that need not change are returned themselves, unless `may_alias=False`. Raises a
    ShardingError that names the leaves without a mesh.

    Example:
        >>> mesh = fm.create_mesh((2, 4), ("fsdp", "tp"))
        >>> w = fm.shard(np.ones((8, 8)), jax.P("fsdp", "tp"), mesh)
        >>> fm.reshard(w, jax.P(("fsdp", "tp"), None)).sharding.shard_shape((8, 8))
        (1, 8)
    """
    require_types(reshard, dtype=dtype, memory_kind=memory_kind, dropped=dropped)
    check_dtype(dtype)
    leaves, treedef = jax.tree.flatten(tree)
    current: list[PyTree] = [getattr(leaf, "sharding", None) for leaf in leaves]
    if without_mesh := [number for number, sharding in enumerate(current) if not isinstance(sharding, NamedSharding)]:
        named = named_leaves(tree)
        paths = paths_text(named[number][0] for number in without_mesh)
        raise ShardingError(
            f"reshard requires arrays on a mesh, and these are not: {paths}. Place them with shard(tree, specs, mesh)."
        )
    requested = current if specs is None else _aligned(tree, leaves, treedef, specs)
    layouts = [_layout(x, mesh, memory_kind, sharding) for x, sharding in zip(requested, current, strict=True)]
    shardings = _fitting(tree, leaves, layouts, on_mismatch, dropped)
    del tree
    return jax.tree.unflatten(treedef, _place(leaves, shardings, dtype, donate, may_alias))


def make_shard_and_gather_fns(
    specs: PyTree,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike | None = None,
    may_alias: bool | None = None,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> tuple[PyTree, PyTree]:
    """Creates one function per array that places it on the mesh, and one that copies it back to the host.

    Use it where arrays arrive one by one, for example when a checkpoint is read file by file. To place or to gather an
    entire tree at once, call `shard` or `gather`, which overlap the transfers of its arrays.

    Args:
        specs: Tree of PartitionSpecs, of shardings, or of arrays and ShapeDtypeStructs that have a sharding, such as an
            `abstract_state`.
        mesh: The mesh of PartitionSpecs. Default: the mesh in context when this function is called.
        dtype: Floating arrays are cast to it in both directions. Default: dtypes do not change.
        may_alias: Whether a sharded array may share memory with its source, as in `shard`.
        on_mismatch: The reaction to a spec that does not fit an array: "error" raises a ShardingError, "warn" and
            "drop" leave out the mesh axes that do not fit. Specs are checked when a function is first called with a
            shape.
        dropped: List to which "warn" and "drop" append a finding for everything that is left out.

    Returns:
        (shard_fns, gather_fns), two trees with the structure of `specs`. A shard function takes a numpy array, a
        number or a jax array and returns a jax array with the sharding of its spec. A gather function takes a jax
        array and returns the complete array as numpy.

    Raises:
        NoMeshError: `specs` contains PartitionSpecs, `mesh` is None and no mesh is in context.
        ShardingError: A leaf of `specs` has no sharding. The shard functions raise it for specs that do not fit, the
            gather functions for arrays that are partly on devices of other processes.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> mesh = fm.create_mesh((2, 4), ("fsdp", "tp"))
        >>> specs = {"kernel": P("fsdp", "tp"), "bias": P("tp")}
        >>> shard_fns, gather_fns = fm.make_shard_and_gather_fns(specs, mesh)
        >>> kernel = shard_fns["kernel"](np.ones((64, 256), np.float32))
        >>> kernel.addressable_shards[0].data.shape
        (32, 64)
        >>> gather_fns["kernel"](kernel).shape
        (64, 256)
    """
    require_types(make_shard_and_gather_fns, dtype=dtype, dropped=dropped)
    check_dtype(dtype)
    layouts = (_layout(spec, mesh, None) for spec in _aligned(specs, *jax.tree.flatten(specs), specs))
    options = dtype, may_alias, on_mismatch, dropped
    shard_fns = map_named(lambda path, _: _shard_fn(path, next(layouts), *options), specs)
    return shard_fns, map_named(lambda path, spec: lambda x: gather_leaf(x, dtype), specs)


def _shard_fn(
    path: str,
    layout: _UnfittedSharding | Sharding,
    dtype: DTypeLike | None,
    may_alias: bool | None,
    on_mismatch: Policy,
    dropped: list[Finding] | None,
) -> Callable[[ArrayLike], jax.Array]:
    fitting: dict[tuple[int, ...], Sharding] = {}  # by shape; usually there is only one

    def place(x: ArrayLike) -> jax.Array:
        shape = np.shape(x)
        if shape not in fitting:
            sharding, findings = _sharding(path, shape, layout)
            apply_policy(findings, on_mismatch, dropped, stacklevel=3)
            fitting[shape] = sharding
        return _place([x], [fitting[shape]], dtype, may_alias=may_alias)[0]

    return place


def _aligned(tree: PyTree, leaves: Sequence[object], treedef: object, specs: PyTree) -> list[Any]:
    """A PartitionSpec or a sharding for each leaf. Trees of different node types are matched by path."""
    if isinstance(specs, PartitionSpec | Sharding):
        return [specs] * len(leaves)
    layouts, structure = jax.tree.flatten(specs)
    if structure != treedef:
        layouts = align_by_path(tree, specs)
    layouts = [x if isinstance(x, PartitionSpec | Sharding) else getattr(x, "sharding", None) for x in layouts]
    if None in layouts:
        paths = [path for (path, _), layout in zip(named_leaves(specs), layouts, strict=True) if layout is None]
        raise ShardingError(
            "leaves of specs must be PartitionSpecs, shardings or arrays with a sharding, and these are not: "
            f"{paths_text(paths)}."
        )
    return layouts


def align_by_path(tree: PyTree, specs: PyTree, further_problems: Sequence[str] = ()) -> list[PyTree]:
    """The leaf of `specs` for each leaf of `tree`.

    Raises one ShardingError that lists all paths that only one of the trees has, and `further_problems`.
    """
    expected, by_path = [path for path, _ in named_leaves(tree)], dict(named_leaves(specs))
    problems = [f"{path}: missing in specs" for path in expected if path not in by_path]
    problems += [f"{path}: in specs, but not in the tree" for path in by_path if path not in set(expected)]
    if problems := [*problems, *further_problems]:
        raise ShardingError("specs must be a tree of the same structure:\n" + "\n".join(path_lines(problems)))
    return [by_path[path] for path in expected]


def _layout(
    spec: PartitionSpec | Sharding,
    mesh: Mesh | AbstractMesh | None,
    memory_kind: str | None,
    current: NamedSharding | None = None,
) -> _UnfittedSharding | Sharding:
    """`spec` with the mesh and the memory kind that it lacks: from the `current` sharding, or else the context."""
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a Mesh, got {shown(mesh)}.")
    if isinstance(spec, PartitionSpec):
        mesh = mesh or (current.mesh if current else get_incontext_mesh())
        return _UnfittedSharding(spec, mesh, memory_kind or (current.memory_kind if current else None))
    if isinstance(spec, NamedSharding):
        return _UnfittedSharding(spec.spec, spec.mesh, memory_kind or spec.memory_kind)
    return spec.with_memory_kind(memory_kind) if memory_kind else spec


def _fitting(
    tree: PyTree,
    leaves: Sequence[object],
    layouts: Sequence[_UnfittedSharding | Sharding],
    on_mismatch: Policy,
    dropped: list[Finding] | None,
) -> list[Sharding]:
    cache: dict[object, Sharding] = {}
    shardings: list[Sharding] = []
    findings: list[Finding] = []
    paths: list[str] = []
    for number, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        shape = getattr(leaf, "shape", ())
        sharding = cache.get((shape, layout))
        if sharding is None:
            sharding, problems = _sharding("", shape, layout)
            if problems:  # building the paths takes longer than everything else, so it is done only for errors
                paths = paths or [path for path, _ in named_leaves(tree)]
                findings += [problem._replace(path=paths[number]) for problem in problems]
            else:
                cache[shape, layout] = sharding
        shardings.append(sharding)
    apply_policy(findings, on_mismatch, dropped)
    return shardings


def _sharding(
    path: str, shape: tuple[int, ...], layout: _UnfittedSharding | Sharding
) -> tuple[Sharding, list[Finding]]:
    if not isinstance(layout, _UnfittedSharding):
        return layout, []
    if isinstance(layout.mesh, AbstractMesh):
        raise ShardingError(
            "arrays can be placed only on a mesh of devices, but the specs are for an AbstractMesh. Pass a Mesh as "
            "mesh=, or shardings on one."
        )
    kind = layout.memory_kind
    if kind is not None and (problem := memory_problem(layout.mesh, kind)):
        raise ShardingError(f"memory_kind: {problem}.")
    spec, findings = fit_spec(path, shape, layout.spec, layout.mesh)
    return NamedSharding(layout.mesh, spec, memory_kind=kind), findings


def _place(
    leaves: list[PyTree],
    shardings: Sequence[Sharding],
    dtype: DTypeLike | None,
    donate: bool = False,
    may_alias: bool | None = None,
) -> list[jax.Array]:
    """The leaves with their shardings. `donate` transfers one leaf at a time and removes it from the list."""
    if donate:
        pairs = enumerate(shardings)
        return [_place_and_free(leaves, number, sharding, dtype, may_alias) for number, sharding in pairs]
    if dtype is not None:
        leaves = [cast(leaf, dtype) for leaf in leaves]
    placed: list[PyTree] = [
        _from_numpy(leaf, sharding, may_alias) if isinstance(leaf, np.ndarray) else None
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    if remaining := [number for number, leaf in enumerate(placed) if leaf is None]:
        targets = [shardings[i] for i in remaining]
        moved = jax.device_put([leaves[i] for i in remaining], targets)
        if may_alias is False:
            # device_put copies only if the sharding stays the same: otherwise it may still use buffers of the source.
            moved = jax.device_put(moved, targets, may_alias=False)
        for number, leaf in zip(remaining, moved, strict=True):
            placed[number] = leaf
    return placed


def _from_numpy(leaf: np.ndarray, sharding: Sharding, may_alias: bool | None) -> jax.Array:
    part = (lambda index: leaf[index].copy()) if may_alias is False else leaf.__getitem__
    # device_put takes longer, and with several processes it compares the entire array across all of them.
    return array_from(leaf.shape, sharding, part, leaf.dtype)


def _place_and_free(
    leaves: list[PyTree], number: int, sharding: Sharding, dtype: DTypeLike | None, may_alias: bool | None
) -> jax.Array:
    leaf, leaves[number] = leaves[number], None
    device = next(iter(leaf.sharding.device_set)) if isinstance(leaf, jax.Array) else None
    if device is None or device.platform == "cpu":
        return jax.block_until_ready(_place([leaf], [sharding], dtype, may_alias=may_alias)[0])
    source, leaf = leaf, cast(leaf, dtype)
    memory, before = (x.memory_kind or device.default_memory().kind for x in (sharding, source.sharding))
    if leaf is source and memory == before:
        return jax.block_until_ready(jax.device_put(leaf, sharding, donate=True))
    placed = jax.block_until_ready(jax.device_put(leaf, sharding))  # JAX can donate only within one memory kind
    source.delete()
    return placed


def cast(x: Any, dtype: DTypeLike | None) -> Any:
    """`x` cast to `dtype` if it is floating: on the host, which compiles nothing, unless it is on several devices."""
    current = getattr(x, "dtype", None) or np.result_type(x)
    if dtype is None or current == dtype or not jnp.issubdtype(current, jnp.floating):
        return x
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return x.astype(dtype)
    return np.asarray(x).astype(dtype)
