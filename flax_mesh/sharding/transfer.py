"""Whole trees from the host or from devices into a layout: `shard`, `reshard`, and the classic trees of functions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from flax_mesh.errors import ShardingError
from flax_mesh.mesh.context import get_incontext_mesh
from flax_mesh.sharding.gather import gather_leaf
from flax_mesh.sharding.rules import Finding, Policy, apply_policy, fit_spec
from flax_mesh.tree import map_named, named_leaves


class UnfittedSharding(NamedTuple):
    """What makes a NamedSharding, before it is known whether the spec fits the mesh."""

    spec: PartitionSpec
    mesh: Any
    memory_kind: str | None


def shard(
    tree: Any,
    specs: Any,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
    memory_kind: str | None = None,
    donate: bool = False,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> Any:
    """`tree` with every leaf laid out as its spec says; leaves are numpy arrays, numbers, or jax arrays anywhere.

    specs: a tree of the same structure, or one for all leaves, of PartitionSpecs (for `mesh`, or the mesh in context),
        of shardings, or of arrays and ShapeDtypeStructs that have one, such as an `abstract_state`
    dtype: floating leaves are cast to it; on the host, but for leaves that lie on several devices
    memory_kind: "device" or "pinned_host"; by default that of the sharding
    donate: one leaf after another, each source let go once it is copied. On devices it is freed, and the caller's
        array with it. Not on CPU, where donation to `jax.device_put` frees nothing and has been seen to crash: there,
        as for numpy leaves, memory is free if the caller holds no reference: `shard(load(), ..., donate=True)`

    Nothing is compiled for numpy leaves and for leaves that lie as asked, and at most once a shape for arrays on one
    device. In several processes each copies what its own devices hold. On CPU the arrays may share the memory of numpy
    leaves, as after `jax.device_put`: do not change these afterwards. A spec that does not fit its leaf follows
    `on_mismatch`, and adds to `dropped`, as in `match_partition_rules`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    layouts = [_layout(x, mesh, memory_kind) for x in _aligned(tree, leaves, treedef, specs)]
    shardings, findings = _fitting(tree, leaves, layouts)
    apply_policy(findings, on_mismatch, dropped)
    del tree
    return jax.tree.unflatten(treedef, _place(leaves, shardings, dtype, donate))


def reshard(
    tree: Any,
    specs: Any = None,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
    memory_kind: str | None = None,
    donate: bool = False,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> Any:
    """As `shard`, for a tree that lies on a mesh: in another layout, on another mesh, in another memory, or cast.

    Without `specs` each leaf keeps its layout, without `mesh` its mesh, without `memory_kind` its memory:
    `reshard(state, memory_kind="pinned_host")` offloads a state. ShardingError names leaves that are on no mesh.
    """
    leaves, treedef = jax.tree.flatten(tree)
    homes = [getattr(leaf, "sharding", None) for leaf in leaves]
    if strangers := [number for number, home in enumerate(homes) if not isinstance(home, NamedSharding)]:
        named = named_leaves(tree)
        paths = ", ".join(named[number][0] for number in strangers)
        raise ShardingError(f"reshard: {paths} lie on no mesh. Place them with shard(tree, specs, mesh).")
    given = homes if specs is None else _aligned(tree, leaves, treedef, specs)
    layouts = [_layout(x, mesh, memory_kind, home) for x, home in zip(given, homes, strict=True)]
    shardings, findings = _fitting(tree, leaves, layouts)
    apply_policy(findings, on_mismatch, dropped)
    del tree
    return jax.tree.unflatten(treedef, _place(leaves, shardings, dtype, donate))


def make_shard_and_gather_fns(
    specs: Any,
    mesh: Mesh | None = None,
    *,
    dtype: Any = None,
    on_mismatch: Policy = "error",
    dropped: list[Finding] | None = None,
) -> tuple[Any, Any]:
    """Two trees of functions, one function a leaf: x -> x laid out as its spec says, and back to numpy.

    Arguments as in `shard`; `dtype` casts floating leaves on either way. `on_mismatch` is followed at the first array
    of each shape. For a whole tree at once `shard` and `gather` do the same.
    """

    def shard_fn(path: str, spec: Any) -> Callable[[Any], jax.Array]:
        layout = _layout(spec, mesh, None)
        fitting: dict[Any, Sharding] = {}  # by shape: as a rule there is one

        def place(x: Any) -> jax.Array:
            shape = np.shape(x)
            if shape not in fitting:
                sharding, findings = _sharding(path, shape, layout)
                apply_policy(findings, on_mismatch, dropped)
                fitting[shape] = sharding
            return _place([x], [fitting[shape]], dtype)[0]

        return place

    given = iter(_aligned(specs, *jax.tree.flatten(specs), specs))
    shard_fns = map_named(lambda path, _: shard_fn(path, next(given)), specs)
    return shard_fns, map_named(lambda path, spec: lambda x: gather_leaf(x, dtype), specs)


def _aligned(tree: Any, leaves: list[Any], treedef: Any, specs: Any) -> list[Any]:
    """A PartitionSpec or a sharding for each leaf, by structure or else by path."""
    if isinstance(specs, PartitionSpec | Sharding):
        return [specs] * len(leaves)
    given, structure = jax.tree.flatten(specs)
    if structure != treedef:
        given = align_by_path(tree, specs)
    given = [x if isinstance(x, PartitionSpec | Sharding) else getattr(x, "sharding", None) for x in given]
    if None in given:
        problems = [p for (p, _), layout in zip(named_leaves(specs), given, strict=True) if layout is None]
        raise ShardingError(f"no PartitionSpec and no sharding for {', '.join(problems)} in specs.")
    return given


def align_by_path(tree: Any, specs: Any, further_problems: Sequence[str] = ()) -> list[Any]:
    """The leaf of `specs` for each leaf of `tree`; ShardingError, with the further problems, unless the paths agree."""
    wanted, by_path = [path for path, _ in named_leaves(tree)], dict(named_leaves(specs))
    problems = [f"{path}: no spec" for path in wanted if path not in by_path]
    problems += [f"{path}: a spec, but the tree has no such leaf" for path in by_path if path not in set(wanted)]
    if problems := [*problems, *further_problems]:
        raise ShardingError("specs must be a tree of the same structure:\n" + "\n".join(problems))
    return [by_path[path] for path in wanted]


def _layout(
    spec: Any, mesh: Any, memory_kind: str | None, home: NamedSharding | None = None
) -> UnfittedSharding | Sharding:
    """`spec` with what it leaves out taken from `home`, the sharding so far, or else from the context."""
    if isinstance(spec, PartitionSpec):
        where = mesh or (home.mesh if home else get_incontext_mesh())
        return UnfittedSharding(spec, where, memory_kind or (home.memory_kind if home else None))
    if isinstance(spec, NamedSharding):
        return UnfittedSharding(spec.spec, spec.mesh, memory_kind or spec.memory_kind)
    return spec.with_memory_kind(memory_kind) if memory_kind else spec


def _fitting(
    tree: Any, leaves: Sequence[Any], layouts: Sequence[UnfittedSharding | Sharding]
) -> tuple[list[Sharding], list[Finding]]:
    made: dict[Any, Sharding] = {}
    shardings: list[Sharding] = []
    findings: list[Finding] = []
    paths: list[str] = []
    for number, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        shape = getattr(leaf, "shape", ())
        sharding = made.get((shape, layout))
        if sharding is None:
            sharding, problems = _sharding("", shape, layout)
            if problems:  # only now are the paths made, which takes longer than all the rest
                paths = paths or [path for path, _ in named_leaves(tree)]
                findings += [problem._replace(path=paths[number]) for problem in problems]
            else:
                made[shape, layout] = sharding
        shardings.append(sharding)
    return shardings, findings


def _sharding(path: str, shape: tuple[int, ...], layout: UnfittedSharding | Sharding) -> tuple[Sharding, list[Finding]]:
    if not isinstance(layout, UnfittedSharding):
        return layout, []
    if isinstance(layout.mesh, AbstractMesh):
        raise ShardingError("arrays need devices, and the specs are for an AbstractMesh. Pass mesh=.")
    spec, findings = fit_spec(path, shape, layout.spec, layout.mesh)
    return NamedSharding(layout.mesh, spec, memory_kind=layout.memory_kind), findings


def _place(leaves: list[Any], shardings: Sequence[Sharding], dtype: Any, donate: bool = False) -> list[jax.Array]:
    """The leaves as asked; with `donate` one by one, and taken out of the list."""
    if donate:
        return [_place_and_free(leaves, number, sharding, dtype) for number, sharding in enumerate(shardings)]
    if dtype is not None:
        leaves = [cast(leaf, dtype) for leaf in leaves]
    placed: list[Any] = [
        # Not device_put: it takes longer, and in several processes it compares the whole array with the others'.
        jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__) if isinstance(leaf, np.ndarray) else None
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    if rest := [number for number, leaf in enumerate(placed) if leaf is None]:
        moved = jax.device_put([leaves[i] for i in rest], [shardings[i] for i in rest])
        for number, leaf in zip(rest, moved, strict=True):
            placed[number] = leaf
    return placed


def _place_and_free(leaves: list[Any], number: int, sharding: Sharding, dtype: Any) -> jax.Array:
    leaf, leaves[number] = leaves[number], None
    device = next(iter(leaf.sharding.device_set)) if isinstance(leaf, jax.Array) else None
    if device is None or device.platform == "cpu":
        return jax.block_until_ready(_place([leaf], [sharding], dtype)[0])
    source, leaf = leaf, cast(leaf, dtype)
    memory, before = (x.memory_kind or device.default_memory().kind for x in (sharding, source.sharding))
    if leaf is source and memory == before:
        return jax.block_until_ready(jax.device_put(leaf, sharding, donate=True))
    placed = jax.block_until_ready(jax.device_put(leaf, sharding))  # JAX donates within one memory only
    source.delete()
    return placed


def cast(x: Any, dtype: Any) -> Any:
    """`x` in `dtype` if it is floating. On the host, so that nothing compiles, unless it lies on several devices."""
    found = getattr(x, "dtype", None) or np.result_type(x)
    if dtype is None or found == dtype or not jnp.issubdtype(found, jnp.floating):
        return x
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return x.astype(dtype)
    return np.asarray(x).astype(dtype)
