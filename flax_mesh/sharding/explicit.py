"""Models in a trace: how they are made, and how they run on Explicit axes, where types contain shardings."""

import contextlib
import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from flax_mesh.axes import Mode, PartitionAxis
from flax_mesh.errors import ShardingError
from flax_mesh.jax_compat import LIBRARIES, sharding_type_errors
from flax_mesh.mesh.context import current_mesh, in_mesh
from flax_mesh.modes import promotions
from flax_mesh.sharding.constrain import spec_in_mesh
from flax_mesh.text import path_lines, says
from flax_mesh.tree import PyTree, path_of

_Result = TypeVar("_Result")


def on_auto_axes(
    function: Callable[..., PyTree],
    *args: PyTree,
    out: Iterable[tuple[str | None, ...]],
    axes: PartitionAxis,
    mode: Mode = "train",
) -> PyTree:
    """`function(*args)`, in which the Explicit axes of the mesh in context are Auto: XLA chooses the shardings.

    A model that is written for Auto axes then runs on Explicit axes too. `out` has the logical axes of every result, as
    in `constrain`; if a result is a tree, they apply to all of its arrays. All arrays that `function` uses must be in
    `args`. On a mesh without Explicit axes, `function` is only called. It may promote ranks and dtypes.
    """
    mesh = current_mesh()
    function = promotions()(function)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return function(*args)
    specs = [spec_in_mesh(axes.resolve(logical, mode), axes, mesh) for logical in out]
    return jax.sharding.auto_axes(function, out_sharding=tuple(specs) if len(specs) > 1 else specs[0])(*args)


def made_on_auto_axes(make: Callable[[], _Result], mesh: Mesh | AbstractMesh | None) -> _Result:
    """`make()` with `mesh` in context, in a trace. Explicit axes are Auto, unless `make` raises an error on Auto axes.

    On Explicit axes random values are replicated unless `make` passes `out_sharding=`: every device would compute and
    store all of them. On Auto axes XLA computes on each device the shards that it stores. An error on Explicit axes has
    the error on Auto axes as its cause.
    """
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        with in_mesh(mesh), axis_types_explained():
            return make()
    auto = mesh.abstract_mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    try:
        with in_mesh(auto):
            return make()
    except Exception as first:  # `make` may need Explicit axes in any of its lines
        with in_mesh(mesh), axis_types_explained():
            try:
                return make()
            except Exception as second:
                # Either error may be the one to repair. If `second` has a cause, the context of this cause is `first`.
                raise second from second.__cause__ or first


def normalize(modules: PyTree, eager_sharding: bool) -> None:
    """Give modules created in a trace the attributes and metadata that they would have outside of a trace."""
    problems = []
    for path, node in nnx.iter_graph(modules, graph=True):
        if isinstance(node, nnx.Variable):
            for name, value in node.get_metadata().items():
                # Random streams are equal only to themselves and contain arrays of this trace: nothing can use them.
                if isinstance(value, nnx.Rngs | nnx.RngStream):
                    node.del_metadata(name)
                elif _has_array(value):
                    problems.append((path_of(path), f"its metadata {name!r} contains an array"))
            node.set_metadata(eager_sharding=eager_sharding)
        elif isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if _has_array(value):  # Flax 0.12 treats a traced array as a static attribute, unless it is nnx.data
                    setattr(node, name, nnx.data(value))
    if problems:
        raise ShardingError(
            "\n".join(path_lines(f"{path}: {problem}" for path, problem in problems))
            + "\nMetadata is static. Make the array a Variable of the module instead."
        )


def _has_array(value: object) -> bool:
    """Whether `value` is an array, or a list, tuple or dict that contains one."""
    if isinstance(value, list | tuple):
        return any(map(_has_array, value))
    if isinstance(value, dict):
        return any(map(_has_array, value.values()))
    return isinstance(value, jax.Array | np.ndarray)


@contextlib.contextmanager
def axis_types_explained() -> Iterator[None]:
    """Context in which JAX's errors about the types of mesh axes are ShardingErrors that name the line of the model.

    They are: an operation whose sharding is ambiguous on Explicit axes, and `out_sharding=` or a reshard on Auto axes.
    """
    try:
        yield
    except sharding_type_errors() as error:
        raise ShardingError(
            "on Explicit axes every operation must determine the sharding of its result, but this one does not:\n"
            f"{_place(error)}\n{str(error).strip()}\nPass out_sharding= to the operation, or reshard its inputs with "
            "jax.sharding.reshard; or use Auto axes, create_mesh(axis_types='auto')."
        ) from error
    except ValueError as error:
        if not says(error, "PartitionSpec passed to", "AxisType.Auto"):
            raise
        raise ShardingError(
            "out_sharding= and jax.sharding.reshard refer to Explicit axes, but the axes of this mesh are Auto:\n"
            f"{_place(error)}\n{str(error).strip()}\nUse Explicit axes, create_mesh(axis_types='explicit') or "
            "mesh.axis_types=explicit in a recipe; or flax_mesh.with_sharding_constraint, for axes of both types."
        ) from error


def _place(error: BaseException) -> str:
    """`layers/0 (Block): model.py:31 (Block.__call__): y = x @ w`, the module and the line of the user's code.

    The path starts at the outermost module in the traceback. The path is missing for this module itself, and for a
    module that a transformation of NNX copied.
    """
    libraries = (*LIBRARIES, f"{Path(jax.__file__).parent}/")
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(libraries)
    ]
    if not frames:
        return "(in no file of the model)"
    frame, line = frames[-1]
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    return f"{_module_of([frame for frame, _ in frames])}{code.co_filename}:{line} ({code.co_qualname}): {text}"


def _module_of(frames: list[FrameType]) -> str:
    """`layers/0 (Block): `, the innermost module that a function in `frames` has as its first argument."""
    called = [frame.f_locals.get(name) for frame in frames for name in frame.f_code.co_varnames[:1]]
    modules = [x for x in called if isinstance(x, nnx.Pytree)]
    if not modules:
        return ""
    path = next((path_of(path) for path, node in nnx.iter_graph(modules[0], graph=True) if node is modules[-1]), "")
    return f"{path} ({type(modules[-1]).__name__}): " if path else ""
