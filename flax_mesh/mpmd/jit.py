"""mpmd.jit: a program that every process calls, and that runs where its inputs live."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Sharding

from flax_mesh.mpmd.array import MpmdArray, find_mpmd_mesh, is_fully_remote_sharding, is_local_device, is_weakly_typed
from flax_mesh.mpmd.mesh import MpmdMesh, current_mpmd_mesh


def jit(fun: Callable[..., Any], *, out_shardings: Any = None, **options: Any) -> Callable[..., Any]:
    """`jax.jit(fun, out_shardings=..., **options)` for arrays on groups; every process calls it with the same inputs.

    A process that has devices of the inputs runs the program. Any other traces `fun` for the shapes of its outputs and
    gets them fully remote, without compiling. The outputs are MpmdArrays everywhere. Inputs are MpmdArrays, arrays of
    JAX, and what else `jax.jit` takes; what is uncommitted (numbers, numpy arrays) must be equal in all processes.
    Where no input is committed, the program runs where its outputs are to live.

    `out_shardings` is a Sharding, or a tree of them that is a prefix of the output; None there stands for no array.
    ValueError where it is missing or no prefix, and where inputs and outputs do not all live on the same devices: the
    message lists all of them by where they live, remote ones first.
    """
    name = getattr(fun, "__name__", repr(fun))
    prefix = _checked_prefix(name, out_shardings)
    home = prefix[0][1].device_set
    is_remote = is_fully_remote_sharding(prefix[0][1])
    may_lack = len(prefix) < len(jax.tree.leaves(out_shardings, is_leaf=_is_none))
    jitted = jax.jit(fun, out_shardings=out_shardings, **options)
    layouts: dict[Any, list[Sharding]] = {}

    def flatten(outputs: Any) -> tuple[list[Any], Any, list[Sharding]]:
        leaves, tree = jax.tree.flatten(outputs)
        if tree not in layouts:
            layouts[tree] = _broadcast(name, out_shardings, outputs)
        return leaves, tree, layouts[tree]

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if _is_committed(leaf)]
        shardings = {id(array.sharding): array.sharding for array in arrays}  # few, for many arrays
        if any(sharding.device_set != home for sharding in shardings.values()):
            raise _not_one_place(name, [*_named_inputs(fun, args, kwargs), *prefix])
        if is_remote or may_lack:  # the second finds out before donated inputs are gone
            leaves, tree, layout = flatten(_apply(jitted.eval_shape, _abstract, args, kwargs))
        if not is_remote:
            leaves, tree, layout = flatten(_apply(jitted, _value, args, kwargs))
        mpmd_meshes = (*dict.fromkeys(getattr(array, "mpmd_mesh", None) for array in arrays), current_mpmd_mesh())
        return tree.unflatten([_output(leaf, to, mpmd_meshes) for leaf, to in zip(leaves, layout, strict=True)])

    return call


def _apply(program: Callable[..., Any], convert: Callable[[Any], Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    return program(*map(convert, args), **{key: convert(value) for key, value in kwargs.items()})


def _output(array: Any, sharding: Sharding, mpmd_meshes: Sequence[MpmdMesh | None]) -> MpmdArray:
    value = array if isinstance(array, jax.Array) else None
    mpmd_mesh = find_mpmd_mesh(sharding, *mpmd_meshes)
    return MpmdArray(array.shape, array.dtype, sharding, value, mpmd_mesh, is_weakly_typed(array))


def _is_committed(leaf: Any) -> bool:
    if isinstance(leaf, Tracer):
        raise ValueError(
            "mpmd.jit was called inside a trace, such as that of jax.jit or jax.grad. It runs programs on groups of "
            "devices, so call it from plain Python; inside a trace call the function itself."
        )
    return isinstance(leaf, MpmdArray) or (isinstance(leaf, jax.Array) and leaf.committed)


def _value(arg: Any) -> Any:
    """`arg` with the local parts of its MpmdArrays; the same object where it has none, as static arguments are."""
    if isinstance(arg, MpmdArray):
        return arg.value
    leaves, tree = jax.tree.flatten(arg)
    if not any(isinstance(leaf, MpmdArray) for leaf in leaves):
        return arg
    return tree.unflatten([leaf.value if isinstance(leaf, MpmdArray) else leaf for leaf in leaves])


def _abstract(arg: Any) -> Any:
    """`arg` with shapes in place of committed arrays; the same object where it has none."""
    leaves, tree = jax.tree.flatten(arg)
    if not any(map(_is_committed, leaves)):
        return arg
    return tree.unflatten([_shape_of(leaf) if _is_committed(leaf) else leaf for leaf in leaves])


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding, weak_type=is_weakly_typed(array))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _checked_prefix(name: str, out_shardings: Any) -> list[tuple[str, Sharding]]:
    """(name such as `out_shardings['loss']`, sharding) of every Sharding in the prefix tree."""
    leaves = jax.tree.leaves_with_path(out_shardings)
    prefix = [(f"out_shardings{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
    if not prefix:
        raise ValueError(
            f"mpmd.jit({name}): out_shardings is missing. A process that does not run the program knows only from it "
            "where the outputs live: give a Sharding, or a tree of them that is a prefix of the output."
        )
    wrong = [f"{path} is {leaf!r}" for path, leaf in prefix if not isinstance(leaf, Sharding)]
    if wrong:
        raise ValueError(
            f"mpmd.jit({name}): out_shardings must hold Shardings, but {', '.join(wrong)}. "
            "For a PartitionSpec write NamedSharding(mpmd_mesh.unstack[i], spec)."
        )
    if any(sharding.device_set != prefix[0][1].device_set for _, sharding in prefix):
        raise _not_one_place(name, prefix)
    return prefix


def _broadcast(name: str, out_shardings: Any, outputs: Any) -> list[Sharding]:
    shardings: list[Any] = []

    def repeat(sharding: Any, part: Any) -> None:
        shardings.extend([sharding] * len(jax.tree.leaves(part)))

    jax.tree.map(repeat, out_shardings, outputs, is_leaf=_is_none)
    paths = [jax.tree_util.keystr(path) or "itself" for path, _ in jax.tree.leaves_with_path(outputs)]
    without = [path for path, sharding in zip(paths, shardings, strict=True) if sharding is None]
    if without:
        raise ValueError(
            f"mpmd.jit({name}): out_shardings has None for output {', '.join(without)}. Give every array a Sharding."
        )
    return shardings


def _named_inputs(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Sharding]]:
    """(name such as `params['w']`, sharding) of every committed input."""
    try:
        arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    except ValueError:  # some built-in functions have no signature
        arguments = {"args": args, "kwargs": kwargs}
    for name, argument in arguments.items():
        for path, leaf in jax.tree.leaves_with_path(argument):
            if _is_committed(leaf):
                yield name + jax.tree_util.keystr(path), leaf.sharding


def _not_one_place(name: str, arrays: Iterable[tuple[str, Sharding]]) -> ValueError:
    places: dict[frozenset[Any], list[str]] = {}
    for path, sharding in sorted(arrays, key=lambda array: not is_fully_remote_sharding(array[1])):
        places.setdefault(frozenset(sharding.device_set), []).append(path)
    found = [f"{', '.join(paths)} on {_describe(devices)}" for devices, paths in places.items()]
    return ValueError(
        f"mpmd.jit({name}): its inputs and outputs must all live on the same devices, but found {'; '.join(found)}. "
        "Bring the inputs to one group with mpmd.device_put first, and name that group in out_shardings."
    )


def _describe(devices: frozenset[Any]) -> str:
    ids = ", ".join(str(device.id) for device in sorted(devices, key=lambda device: device.id))
    processes = ", ".join(map(str, sorted({device.process_index for device in devices})))
    remote = "" if any(map(is_local_device, devices)) else "remote "
    return f"{remote}devices {ids} of process {processes}"
