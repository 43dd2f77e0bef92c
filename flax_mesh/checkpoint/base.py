"""The base of a checkpoint: a step, or a Hugging Face folder, with the arrays that the checkpoint leaves out.

A run that trains adapters saves them alone; its frozen weights stay in the folder that it started from. The
metadata of a step contain this folder, the checksums of its files, and the arrays that are read there.
"""

import operator
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.checkpoint.checksums import RECORD, checksums_of, files_below, read_metadata
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.checkpoint.hf.kept import is_huggingface
from flax_mesh.checkpoint.layout import Target, disk_target, paths_on_disk
from flax_mesh.checkpoint.stacks import layers_of, tree_of
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.sharding.memory import brought, is_on_host
from flax_mesh.step.state import TrainState
from flax_mesh.store import commit_of, model_folder, stored_path, with_commit
from flax_mesh.text import path_lines
from flax_mesh.tree import MODEL, Shaped, model_state, named_leaves, nest

BASE = "base"  # section of the metadata


class Base(NamedTuple):
    """A folder, the checksums of its files by name, and [dtype, shape] of the arrays read there by path on disk.

    The folder may be the id of a model of the hub with its commit.
    """

    folder: str
    files: Mapping[str, object]
    arrays: Mapping[str, Any]

    def problems(self) -> list[str]:
        """The differences in the files of the folder, one line each; reads every byte of them."""
        folder = model_folder(self.folder)
        if not folder.is_dir():
            return ["the folder is gone"]
        of_hub = commit_of(self.folder) is not None  # other programs add files to the cache
        current = {name: x for name, x in _contents(folder).items() if name in self.files or not of_hub}
        names = sorted(name for name in {**self.files, **current} if current.get(name) != self.files.get(name))
        return [
            f"{name}: {'gone' if name not in current else 'changed' if name in self.files else 'new'}" for name in names
        ]

    def restricted(self, arrays: Target) -> "Base":
        """Only the arrays that have the path, shape and dtype of one of `arrays`."""
        same = {path: self.arrays[path] for path, x in arrays.items() if self.arrays.get(path) == _described(x)}
        return self._replace(arrays=same)


def make_base(folder: str | Path, arrays: Target) -> Base:
    """The base of checkpoints that leave out `arrays`, which were read from `folder`, or from the model of this id.

    If that is a step with a base, only the arrays that are read there can be left out.
    """
    path, source = stored_path(folder), model_folder(folder)
    if not is_huggingface(str(folder)) and (base := read_base(path)) is not None:
        return base.restricted(arrays)
    name = str(path.absolute()) if path == source else with_commit(str(folder))
    return Base(name, _contents(source), {path: _described(x) for path, x in arrays.items()})


def read_base(step: Path) -> Base | None:
    """The base of a step, None if it contains all its arrays."""
    record = read_metadata(step).get(BASE) if (step / RECORD).exists() else None
    if record is None:
        return None
    try:
        base = Base(**record)
        is_array = [_described(_array(x)) == x and min(x[1], default=0) >= 0 for x in base.arrays.values()]
        is_place = commit_of(base.folder) is not None or stored_path(base.folder).is_absolute()
        is_valid = is_place and isinstance(base.files, dict) and all(is_array)
    except (AttributeError, ConfigError, OverflowError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise CheckpointCorruptedError(f"{step}: the section {BASE!r} of its metadata is not as it was saved")
    return base


def check_base(step: Path) -> None:
    """Raise ConfigError if the base of a step is gone, or is another one than when the step was saved."""
    base = read_base(step)
    if base is not None and (problems := base.problems()):
        raise ConfigError(
            path_lines(problems),
            head=f"{step} contains only what its run trained; its other {len(base.arrays)} arrays are read in "
            f"{base.folder}, whose files must be those that the run started from, but:",
            repair="Put these files back, or a link to a copy of them.",
        )


def frozen_arrays(state: TrainState) -> list[tuple[str, jax.Array]]:
    """Path in the state and array of the parameters that the optimizer does not train."""
    _, frozen, _ = nnx.split_state(model_state(state.to_nnx()), state.definition.wrt, nnx.Param, ...)
    return [(f"model/{path}", x) for path, x in named_leaves(frozen)]


def frozen_on_disk(
    state: TrainState,
    layers: Sequence[str] | None,
    paths: Collection[str] | None = None,
    without: Collection[str] = (),
) -> Target:
    """As `arrays_on_disk`, of the parameters that the optimizer does not train.

    `paths` on disk are all that count, if given; the paths in the state `without` do not.
    """
    names = {path for path, _ in frozen_arrays(state)}.difference(without)
    named, stacks = paths_on_disk(tree_of(state), layers_of(state, layers))
    target = disk_target([(path, x) for path, x in named if path in names], stacks)
    return {path: x for path, x in target.items() if paths is None or path in paths}


def stored_arrays(step: Path) -> dict[str, Shaped]:
    """Shape and dtype of the arrays of a step and of its base, by path on disk; reads no array, and not the base."""
    from flax_mesh.checkpoint import orbax

    arrays, base = orbax.stored_arrays(step), read_base(step)
    return arrays if base is None else {path: _array(x) for path, x in base.arrays.items()} | arrays


def read_arrays(step: Path, target: Target) -> dict[str, jax.Array]:
    """The arrays at the paths of `target`, with its shardings and dtypes, of a step and of its base."""
    from flax_mesh.checkpoint import orbax

    base = read_base(step)
    if base is None:
        return orbax.read_arrays(step, target)
    stored = orbax.stored_arrays(step)
    here = {path: x for path, x in target.items() if path in stored or path not in base.arrays}
    # In the dtype that the run had: another one is cast from it, as if the step contained the array.
    there = {
        path: jax.ShapeDtypeStruct(x.shape, jnp.dtype(base.arrays[path][0]), sharding=x.sharding)
        for path, x in target.items()
        if path not in here
    }
    arrays = orbax.read_arrays(step, here) if here else {}
    values = _read_base(model_folder(base.folder), there) if there else {}
    return arrays | {path: value.astype(target[path].dtype) for path, value in values.items()}


def fingerprints(named: Iterable[tuple[str, jax.Array]]) -> dict[str, int]:
    """Maps the path of each array with a part on devices of this process to a number that changes with its bits.

    Every process must call it with the same arrays in the same order. Each array is read once, on its devices.
    """
    groups: dict[frozenset[object], list[tuple[str, jax.Array]]] = {}  # one program for all arrays on the same devices
    for path, x in named:
        if x.addressable_shards:
            groups.setdefault(frozenset(x.sharding.device_set), []).append((path, x))
    by_path = {}
    for group in groups.values():
        numbers = _numbers(on_host=tuple(is_on_host(x) for _, x in group), arrays=[x for _, x in group])
        by_path |= {path: number.addressable_data(0) for (path, _), number in zip(group, numbers, strict=True)}
    return {path: int(number) for path, number in by_path.items()}


@partial(jax.jit, static_argnames="on_host")
def _numbers(arrays: Sequence[jax.Array], on_host: Sequence[bool]) -> list[jax.Array]:
    return [_number(brought(x) if here else x) for x, here in zip(arrays, on_host, strict=True)]


def _number(x: jax.Array) -> jax.Array:
    """The sum of a hash (the finalizer of MurmurHash3) of the bits of each element and of its place, modulo 2**32."""
    if jnp.iscomplexobj(x):
        return _number(x.real) + 3 * _number(x.imag)
    if x.dtype == bool or jax.dtypes.itemsize_bits(x.dtype) < 8:
        x = x.astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))  # 8 bytes: 2 numbers
    place = jnp.uint32(0)
    for dim, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    mixed = bits.astype(jnp.uint32) + place * jnp.uint32(0x9E3779B1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed.sum(dtype=jnp.uint32)


def _read_base(folder: Path, target: Target) -> dict[str, jax.Array]:
    from flax_mesh.checkpoint import orbax

    if not is_huggingface(str(folder)):
        return orbax.read_arrays(folder, target)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    tree = nest(
        (path.removeprefix(MODEL), jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or default))
        for path, x in target.items()
    )
    decoder = open_decoder(folder)._replace(ignore=("",))  # all arrays that are not in `target`
    return {MODEL + path: value for path, value in named_leaves(decoder.load(tree))}


def _described(x: Shaped) -> list[object]:
    return [jnp.dtype(x.dtype).name, list(x.shape)]


def _array(described: Sequence[Any]) -> jax.ShapeDtypeStruct:
    dtype, shape = described
    return jax.ShapeDtypeStruct(tuple(map(operator.index, shape)), jnp.dtype(dtype))


def _contents(folder: Path) -> dict[str, list[object]]:
    """Name -> [bytes, checksums] of the files with the arrays of a step or of a Hugging Face folder; {} without it."""
    if is_huggingface(str(folder)):
        names = [name for name in os.listdir(folder) if name.endswith((".safetensors", ".safetensors.index.json"))]
    else:
        names = [f"state/{name}" for name in files_below(folder / "state")]
    try:
        return {name: [size, sums] for name, (size, sums) in checksums_of(folder, sorted(names)).items()}
    except OSError as error:
        raise ConfigError(f"the files of {folder} cannot be read: {error}; repair that") from error
