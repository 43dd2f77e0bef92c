"""mpmd.jit: a program that every process calls and that runs on the devices of its inputs."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Sharding

from flax_mesh.mesh.torus.torus import DeviceLike
from flax_mesh.mpmd.array import MpmdArray, find_mpmd_mesh, is_fully_remote_sharding, is_local_device, is_weakly_typed
from flax_mesh.mpmd.mesh import MpmdMesh, current_mpmd_mesh
from flax_mesh.text import listed, paths_text, processes_text
from flax_mesh.tree import PyTree


def jit(fun: Callable[..., PyTree], *, out_shardings: PyTree = None, **options: Any) -> Callable[..., PyTree]:
    """`jax.jit(fun, out_shardings=..., **options)` for arrays on groups; every process calls it with the same inputs.

    A process that has devices of the inputs runs the program. Every other process only traces `fun` for the shapes of
    its outputs, compiles nothing, and returns fully remote arrays. The outputs are MpmdArrays in all processes. Inputs
    may be MpmdArrays, JAX arrays and anything else that `jax.jit` accepts. Uncommitted inputs (Python numbers, numpy
    arrays) must be equal in all processes. Without committed inputs, the program runs on the devices of its outputs.

    `out_shardings` is required: a Sharding, or a pytree prefix of Shardings for the output, with None for subtrees
    without arrays. Raises ValueError if it is missing or not a prefix, or if inputs and outputs are not all on the same
    devices. The message then lists inputs and outputs by devices, remote devices first.

    Example:
        >>> from flax_mesh import mpmd
        >>> groups = mpmd.MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp").unstack
        >>> first, second = (jax.sharding.NamedSharding(group, jax.P("fsdp")) for group in groups)
        >>> x = mpmd.device_put(np.arange(4.0), first)
        >>> doubled = mpmd.jit(lambda x: 2 * x, out_shardings=first)(x)
        >>> mpmd.as_jax_array(mpmd.device_put(doubled, second)).tolist()  # on the second group
        [0.0, 2.0, 4.0, 6.0]
    """
    name = getattr(fun, "__name__", repr(fun))
    prefix = _checked_prefix(name, out_shardings)
    devices = prefix[0][1].device_set
    is_remote = is_fully_remote_sharding(prefix[0][1])
    has_none = len(prefix) < len(jax.tree.leaves(out_shardings, is_leaf=_is_none))
    jitted = jax.jit(fun, out_shardings=out_shardings, **options)
    layouts: dict[object, list[Sharding]] = {}

    def flatten(outputs: PyTree) -> tuple[list[jax.Array | jax.ShapeDtypeStruct], PyTree, list[Sharding]]:
        leaves, tree = jax.tree.flatten(outputs)
        if tree not in layouts:
            layouts[tree] = _broadcast(name, out_shardings, outputs)
        return leaves, tree, layouts[tree]

    @functools.wraps(fun)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if _is_committed(leaf)]
        shardings = {id(array.sharding): array.sharding for array in arrays}  # many arrays share few shardings
        if any(sharding.device_set != devices for sharding in shardings.values()):
            raise _device_mismatch(name, [*_named_inputs(fun, args, kwargs), *prefix])
        if is_remote or has_none:  # a None for an array must raise before the program consumes donated inputs
            leaves, tree, layout = flatten(_apply(jitted.eval_shape, _abstract, args, kwargs))
        if not is_remote:
            leaves, tree, layout = flatten(_apply(jitted, _value, args, kwargs))
        mpmd_meshes = (*dict.fromkeys(getattr(array, "mpmd_mesh", None) for array in arrays), current_mpmd_mesh())
        return tree.unflatten([_output(leaf, to, mpmd_meshes) for leaf, to in zip(leaves, layout, strict=True)])

    return call


def _apply(program: Callable[..., PyTree], convert: Callable[[PyTree], PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    return program(*map(convert, args), **{key: convert(value) for key, value in kwargs.items()})


def _output(
    array: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding, mpmd_meshes: Sequence[MpmdMesh | None]
) -> MpmdArray:
    value = array if isinstance(array, jax.Array) else None
    mpmd_mesh = find_mpmd_mesh(sharding, *mpmd_meshes)
    return MpmdArray(array.shape, array.dtype, sharding, value, mpmd_mesh, is_weakly_typed(array))


def _is_committed(leaf: object) -> bool:
    if isinstance(leaf, Tracer):
        raise ValueError(
            "mpmd.jit was called inside a trace, such as a function under jax.jit or jax.grad. It runs programs on "
            "groups of devices, so call it from plain Python; inside a trace call the function itself."
        )
    return isinstance(leaf, MpmdArray) or (isinstance(leaf, jax.Array) and leaf.committed)


def _value(arg: PyTree) -> PyTree:
    """`arg` with its MpmdArrays replaced by their local parts."""
    return _replaced(arg, lambda leaf: isinstance(leaf, MpmdArray), lambda array: array.value)


def _abstract(arg: PyTree) -> PyTree:
    """`arg` with its committed arrays replaced by ShapeDtypeStructs."""
    return _replaced(arg, _is_committed, _shape_of)


def _replaced(arg: PyTree, applies: Callable[[PyTree], bool], change: Callable[[PyTree], PyTree]) -> PyTree:
    """`arg` with changed leaves. The same object if the change applies to none: it may be static."""
    leaves, tree = jax.tree.flatten(arg)
    if not any(map(applies, leaves)):
        return arg
    return tree.unflatten([change(leaf) if applies(leaf) else leaf for leaf in leaves])


def _shape_of(array: jax.Array | MpmdArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding, weak_type=is_weakly_typed(array))


def _is_none(leaf: object) -> bool:
    return leaf is None


def _checked_prefix(name: str, out_shardings: PyTree) -> list[tuple[str, Sharding]]:
    """Pairs (name such as `out_shardings['loss']`, sharding) for every Sharding in the prefix tree."""
    leaves = jax.tree.leaves_with_path(out_shardings)
    prefix = [(f"out_shardings{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
    if not prefix:
        raise ValueError(
            f"mpmd.jit({name}): out_shardings is missing. A process that does not run the program needs it to know "
            "where the outputs are placed: pass a Sharding, or a pytree prefix of Shardings for the output."
        )
    wrong = [f"{path} is {leaf!r}" for path, leaf in prefix if not isinstance(leaf, Sharding)]
    if wrong:
        raise ValueError(
            f"mpmd.jit({name}): out_shardings must contain only Shardings, but {paths_text(wrong)}. "
            "Instead of a PartitionSpec, pass NamedSharding(mpmd_mesh.unstack[i], spec)."
        )
    if any(sharding.device_set != prefix[0][1].device_set for _, sharding in prefix):
        raise _device_mismatch(name, prefix)
    return prefix


def _broadcast(name: str, out_shardings: PyTree, outputs: PyTree) -> list[Sharding]:
    shardings: list[Sharding | None] = []

    def repeat(sharding: Sharding | None, part: PyTree) -> None:
        shardings.extend([sharding] * len(jax.tree.leaves(part)))

    jax.tree.map(repeat, out_shardings, outputs, is_leaf=_is_none)
    paths = [jax.tree_util.keystr(path) or "itself" for path, _ in jax.tree.leaves_with_path(outputs)]
    without = [path for path, sharding in zip(paths, shardings, strict=True) if sharding is None]
    if without:
        raise ValueError(
            f"mpmd.jit({name}): out_shardings has None for output {paths_text(without)}. Pass a Sharding for each "
            "array."
        )
    return [sharding for sharding in shardings if sharding is not None]


def _named_inputs(
    fun: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> Iterator[tuple[str, Sharding]]:
    """Pairs (name such as `params['w']`, sharding) for every committed input."""
    try:
        arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    except ValueError:  # some built-in functions have no signature
        arguments = {"args": args, "kwargs": kwargs}
    for name, argument in arguments.items():
        for path, leaf in jax.tree.leaves_with_path(argument):
            if _is_committed(leaf):
                yield name + jax.tree_util.keystr(path), leaf.sharding


def _device_mismatch(name: str, arrays: Iterable[tuple[str, Sharding]]) -> ValueError:
    paths_by_devices: dict[frozenset[DeviceLike], list[str]] = {}
    for path, sharding in sorted(arrays, key=lambda array: not is_fully_remote_sharding(array[1])):
        paths_by_devices.setdefault(frozenset(sharding.device_set), []).append(path)
    groups = [f"{paths_text(paths)} on {_describe(devices)}" for devices, paths in paths_by_devices.items()]
    return ValueError(
        f"mpmd.jit({name}): inputs and outputs must all be on the same devices, but found {'; '.join(groups)}. "
        "Transfer the inputs to one group with mpmd.device_put first, and use that group in out_shardings."
    )


def _describe(devices: frozenset[DeviceLike]) -> str:
    remote = "" if any(map(is_local_device, devices)) else "remote "
    ids = listed(sorted(device.id for device in devices))
    return f"{remote}devices {ids} of {processes_text(device.process_index for device in devices)}"
