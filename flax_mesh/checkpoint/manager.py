"""Checkpointer: asynchronous, atomic checkpoints of one layout-free state, over Orbax.

On disk every parameter stands under its own global path, one array a layer, whatever the mesh and whether the layers
were a list or one scanned stack: "model/layers/3/attention/q/kernel". Plain Orbax reads it.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.errors import ConfigError
from flax_mesh.tree import in_stack, layer_path, named_leaves, nest, owner_of, path_and_start

STATE, METADATA = "state", "metadata"  # the two items of a step


class Checkpointer:
    """Checkpoints below `folder`, one a step; the newest `keep` stay, all with `keep=None`.

    `layers` are the paths of layer lists (`PartitionRules.layers`): scanned stacks there are saved layer by layer.
    Use it as a context manager: a save is durable only once `wait` or the end of the block has been passed.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = 3, layers: Iterable[str] = ()):
        import orbax.checkpoint as ocp

        self.folder = Path(folder).absolute()
        self.layers = tuple(layers)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        handlers = {STATE: ocp.StandardCheckpointHandler(), METADATA: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps that are committed or, after `save`, on their way; oldest first."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest committed step; None: there is none yet."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: nnx.State, metadata: Mapping[str, Any]) -> None:
        """Start saving `state`; returns once the arrays are copied to the host, so that they may be donated.

        `metadata` is JSON. An error of the previous save is raised here. A step that exists is an error.
        """
        import orbax.checkpoint as ocp

        if step in self.steps():
            raise ConfigError(f"{self.folder} already holds a checkpoint of step {step}; nothing was overwritten.")
        args = ocp.args.Composite(
            **{STATE: ocp.args.StandardSave(to_disk(state, self.layers)), METADATA: ocp.args.JsonSave(dict(metadata))}
        )
        if not self._manager.save(step, args=args, force=True):
            raise RuntimeError(f"Orbax declined to save step {step} in {self.folder}.")

    def wait(self) -> None:
        """Return once every save is durable; raise what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """As `wait`, and end the background threads."""
        self._manager.close()

    def metadata(self, step: int) -> dict[str, Any]:
        """What was saved beside the state."""
        import orbax.checkpoint as ocp

        return self._manager.restore(step, args=ocp.args.Composite(**{METADATA: ocp.args.JsonRestore()}))[METADATA]

    def check(self, abstract: nnx.State, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Raise what `restore` would raise about another model; reads no array. path on disk -> what is restored."""
        target = disk_target(abstract, self.layers)
        stored = self._manager.item_metadata(step)[STATE].tree
        check_same(target, dict(named_leaves(stored)), f"checkpoint {self.folder / str(step)}")
        return target

    def restore(self, abstract: nnx.State, step: int | None = None) -> nnx.State:
        """The state of `step` (default: the newest) laid out as `abstract` says, from whatever layout it was saved.

        Raises one ConfigError that lists every path that is missing, left over, or of another shape or dtype.
        """
        import orbax.checkpoint as ocp

        step = self.latest_step() if step is None else step
        if step is None:
            raise ConfigError(f"{self.folder} holds no checkpoint.")
        target = self.check(abstract, step)
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(nest(target.items()))})
        return from_disk(self._manager.restore(step, args=args)[STATE], abstract, self.layers)


def to_disk(state: nnx.State, layers: Sequence[str]) -> dict[str, Any]:
    """Nested dict of arrays with string keys, stacks taken apart into their layers."""
    named = [(path, jax.random.key_data(x) if _is_key(x) else x) for path, x in named_leaves(state)]
    stacks = _stacks(named, layers)
    split = {}
    for paths in _by_mesh({path: leaf.sharding for path, leaf in named if path in stacks}):
        stacked = [leaf for path, leaf in named if path in paths]
        unstack = _compiled_unstack(tuple((leaf.shape[0], _layer_sharding(leaf)) for leaf in stacked))
        split |= dict(zip(paths, unstack(stacked), strict=True))
    return nest(
        pair
        for path, leaf in named
        for pair in (zip(stacks[path], split[path], strict=True) if path in stacks else [(path, leaf)])
    )


def disk_target(abstract: nnx.State, layers: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """path on disk -> shape, dtype and concrete sharding to restore into."""
    named = [(path, _as_key_data(x)) for path, x in named_leaves(abstract)]
    stacks = _stacks(named, layers)
    target = {}
    for path, leaf in named:
        if path in stacks:
            layer = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=_layer_sharding(leaf))
            target |= dict.fromkeys(stacks[path], layer)
        else:
            target[path] = leaf
    return target


def from_disk(restored: Mapping[str, Any], abstract: nnx.State, layers: Sequence[str]) -> nnx.State:
    """The restored arrays as the state that `abstract` describes, stacks put together again."""
    arrays = dict(named_leaves(restored))
    named = named_leaves(abstract)
    stacks = _stacks(named, layers)
    shardings = {path: _as_key_data(leaf).sharding for path, leaf in named if path in stacks}
    whole = {}
    for paths in _by_mesh(shardings):
        split = [[arrays[layer] for layer in stacks[path]] for path in paths]
        whole |= dict(zip(paths, _compiled_stack(tuple(shardings[path] for path in paths))(split), strict=True))
    leaves = [_as_key(whole[path] if path in stacks else arrays[path], leaf) for path, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def check_same(target: Mapping[str, Any], stored: Mapping[str, Any], what: str) -> None:
    """Raise one ConfigError with every path on which two trees of arrays differ."""
    problems = [f"  {path}: only in the model, {_text(target[path])}" for path in target.keys() - stored.keys()]
    problems += [f"  {path}: only in the checkpoint, {_text(stored[path])}" for path in stored.keys() - target.keys()]
    for path in target.keys() & stored.keys():
        if _text(target[path]) != _text(stored[path]):
            problems.append(f"  {path}: checkpoint {_text(stored[path])}, model {_text(target[path])}")
    if problems:
        head = f"{what} is of another model ({len(problems)} of {len(target.keys() | stored.keys())} leaves differ):"
        tail = "  Restore it into the model it was saved from, or start another run (another folder, or --restart)."
        raise ConfigError([head, *sorted(problems), tail])


def _stacks(named: Sequence[tuple[str, Any]], layers: Sequence[str]) -> dict[str, list[str]]:
    """Path of every leaf of a scanned stack -> its paths on disk, one a layer; optimizer leaves follow their owner."""
    has_parts = all(path.startswith(("model/", "optimizer/")) for path, _ in named)
    whole = [path_and_start(path) for path, _ in named]
    parameters = {path.removeprefix("model/") for path, _ in whole if path.startswith("model/") or not has_parts}
    found = {}
    for (path, leaf), (base, start) in zip(named, whole, strict=True):
        owner = owner_of(base, parameters)
        stack = in_stack(owner, layers) if owner else None
        if owner and stack and leaf.shape:
            head = base[: len(base) - len(owner)]
            found[path] = [head + layer_path(owner, stack, start + i) for i in range(leaf.shape[0])]
    return found


def _by_mesh(shardings: Mapping[str, Any]) -> list[list[str]]:
    """Paths by mesh, in order: no program runs on the meshes of several pipeline groups."""
    found: dict[Any, list[str]] = {}
    for path, sharding in shardings.items():
        found.setdefault(getattr(sharding, "mesh", None), []).append(path)
    return list(found.values())


def _layer_sharding(leaf: Any) -> Any:
    """Sharding of one layer of a stack: that of the stack without its leading dim."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


@functools.lru_cache(maxsize=8)
def _compiled_unstack(layers: tuple[tuple[int, Any], ...]):
    def unstack(stacked):
        return [[x[i] for i in range(count)] for x, (count, _) in zip(stacked, layers, strict=True)]

    return jax.jit(unstack, out_shardings=[[sharding] * count for count, sharding in layers])


@functools.lru_cache(maxsize=8)
def _compiled_stack(shardings: tuple[Any, ...]):
    return jax.jit(lambda split: [jnp.stack(x) for x in split], out_shardings=list(shardings))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_key_data(abstract: Any) -> Any:
    """Random keys lie on disk as the numbers they are made of: uint32, with one more dim."""
    if not _is_key(abstract):
        return abstract
    data, sharding = jax.eval_shape(jax.random.key_data, abstract), abstract.sharding
    spec = PartitionSpec(*sharding.spec, *[None] * (data.ndim - len(sharding.spec)))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=NamedSharding(sharding.mesh, spec))


def _as_key(data: jax.Array, abstract: Any) -> jax.Array:
    if not _is_key(abstract):
        return data
    name = str(abstract.dtype).removeprefix("key<").removesuffix(">")  # as JAX prints a key type: key<fry>
    impl = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[name]
    return jax.device_put(jax.random.wrap_key_data(data, impl=impl), abstract.sharding)


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
