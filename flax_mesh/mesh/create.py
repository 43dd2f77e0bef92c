"""`create_mesh`: axis sizes and names to a `jax.sharding.Mesh` over the devices at hand."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import jax
from jax.extend.backend import get_backend
from jax.sharding import AxisType, Mesh

from flax_mesh.mesh.device_mesh import create_device_mesh, hybrid_mesh_of
from flax_mesh.mesh.shape import (
    DEFAULT_AXIS_DIMS,
    DEFAULT_AXIS_NAMES,
    check_axis_names,
    parse_mesh_shape,
    resolve_dims,
    split_between_hosts,
)
from flax_mesh.mesh.slices import find_granules, resolve_dcn_dims

AxisTypes: TypeAlias = AxisType | str | Sequence[AxisType | str] | None
NUM_SLICES_VARIABLE = "MEGASCALE_NUM_SLICES"  # set by multislice TPU runs; the one variable that the library reads
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


def create_mesh(
    axis_dims: Sequence[int] = DEFAULT_AXIS_DIMS,
    axis_names: Sequence[str] = DEFAULT_AXIS_NAMES,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: AxisTypes = None,
    devices: Sequence[Any] | None = None,
    num_slices: int | None = None,
) -> Mesh:
    """A mesh of exactly the shape asked for; equal arguments give the same object.

    axis_dims: sizes; one -1 takes what is left. The last axis is the busiest: it gets the best links.
    dcn_mesh_dims: how many slices (or hosts) each axis spans; one -1. By default pp, then dp, then fsdp take them.
    should_sort_granules_by_key: slices in the order of their index; False: in the order of `devices`.
    allow_split_physical_axes: let two mesh axes share one side of the torus.
    backend: whose devices, by default those of the default backend.
    use_jax: by `jax.make_mesh`, where there is one slice and one process.
    axis_types: "auto" (default), "explicit", "manual" or AxisType; one for all axes, or one per axis.
    devices: a subset of the devices; their order does not matter.
    num_slices: where the devices do not know their slice. On TPU MEGASCALE_NUM_SLICES is read in that case.

    ValueError for sizes that do not fit (naming what would), duplicate names, wrong axis types, devices that form no
    torus; NotImplementedError where a side of the torus must be split and may not. Warns with `SlowNetworkWarning`
    where only ep, sp or tp could take the slow network.

    >>> create_mesh((2, -1), ("dp", "tp")).shape  # 8 devices
    OrderedDict({'dp': 2, 'tp': 4})
    """
    if devices is None:
        client = _client(backend)
        # The number of a client is a quick key, and a safe one: the cached mesh keeps its client alive.
        source = id(client)
        environment = _slices_in_environment(client.devices()) if _is_tpu(client) else None
    else:
        source = tuple(devices)
        environment = _slices_in_environment(source)
    # Tuples make the key hashable and a list equal to a tuple; what is in them is checked once, in _cached_mesh.
    return _cached_mesh(
        axis_dims if type(axis_dims) is tuple else _as_tuple(axis_dims),
        axis_names if type(axis_names) is tuple else _as_tuple(axis_names),
        None if dcn_mesh_dims is None else _as_tuple(dcn_mesh_dims),
        should_sort_granules_by_key,
        allow_split_physical_axes,
        backend,
        use_jax,
        _as_tuple(axis_types) if type(axis_types) is list else axis_types,
        source,
        num_slices,
        environment if num_slices is None else None,
    )


@lru_cache(maxsize=256)
def _cached_mesh(
    axis_dims: tuple[int, ...],
    axis_names: tuple[str, ...],
    dcn_mesh_dims: tuple[int, ...] | None,
    sort: bool,
    allow_split: bool,
    backend: str | None,
    use_jax: bool,
    axis_types: AxisTypes,
    source: int | tuple[Any, ...],
    num_slices: int | None,
    environment: str | None,
) -> Mesh:
    names = check_axis_names(axis_names)
    types = normalize_axis_types(axis_types, names)
    devices = _checked(source, backend) if isinstance(source, tuple) else get_backend(backend).devices()
    advice = "" if isinstance(source, tuple) else "Or pass devices= to use some of them."
    dims = resolve_dims(axis_dims, names, len(devices), advice=advice)
    origin = "num_slices"
    if environment is not None:
        num_slices, origin = _parse_environment(environment), NUM_SLICES_VARIABLE
    granules, granule = find_granules(devices, num_slices, source=origin, dcn_mesh_dims=dcn_mesh_dims, sort=sort)
    kind = devices[0].device_kind
    cuts = resolve_dcn_dims(dims, names, len(granules), granule, dcn_mesh_dims=dcn_mesh_dims, kind=kind)
    if len(granules) > 1:
        inner = tuple(size // cut for size, cut in zip(dims, cuts, strict=True))
        array = hybrid_mesh_of(granules, inner, cuts, allow_split_physical_axes=allow_split)
    elif use_jax and len({device.process_index for device in devices}) == 1:
        return jax.make_mesh(dims, names, axis_types=types, devices=devices)
    else:
        array = create_device_mesh(dims, devices, allow_split_physical_axes=allow_split)
    return Mesh(array, names, axis_types=types)


def normalize_axis_types(axis_types: AxisTypes, names: Sequence[str]) -> tuple[AxisType, ...]:
    """One AxisType per axis; None means Auto. ValueError for a wrong string or count, TypeError for a wrong type."""
    if axis_types is None or isinstance(axis_types, str | AxisType):
        given = [axis_types or AxisType.Auto] * len(names)
    elif isinstance(axis_types, Sequence):
        given = list(axis_types)
    else:
        raise TypeError(f"axis_types must be an AxisType, a string or a sequence of them, got {axis_types!r}.")
    if len(given) != len(names):
        raise ValueError(
            f"axis_types has {len(given)} entries {tuple(given)} for {len(names)} axes {tuple(names)}. "
            "Give one for all, or one per axis."
        )
    wrong = [repr(entry) for entry in given if not isinstance(entry, str | AxisType)]
    if wrong:
        raise TypeError(f"axis_types must hold AxisType or strings, got {', '.join(wrong)}.")
    unknown = [repr(entry) for entry in given if isinstance(entry, str) and entry.strip().lower() not in _AXIS_TYPES]
    if unknown:
        raise ValueError(f"axis_types must be of {', '.join(_AXIS_TYPES)}, got {', '.join(unknown)}.")
    return tuple(_AXIS_TYPES[entry.strip().lower()] if isinstance(entry, str) else entry for entry in given)


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int], total_devices: int | None = None, num_processes: int | None = None
) -> tuple[int, ...]:
    """Shape of the block of a mesh that one process holds, when equal blocks are cut from the leading axes first.

    `total_devices` counts the devices of one process (default: of this one), `num_processes` the processes (default:
    of this run). A split is found wherever one exists; ValueError where the sizes do not multiply to all devices.

    >>> calculate_host_mesh_shape((4, 6), total_devices=4, num_processes=6)
    (2, 2)
    """
    per_process = jax.local_device_count() if total_devices is None else total_devices
    processes = jax.process_count() if num_processes is None else num_processes
    shape = tuple(int(size) for size in global_mesh_shape)
    cuts = split_between_hosts(shape, processes)
    if cuts is None or math.prod(shape) != per_process * processes:
        raise ValueError(
            f"Mesh shape {shape} holds {math.prod(shape)} devices, but {processes} processes of "
            f"{per_process} devices have {per_process * processes}. The sizes must multiply to that number."
        )
    return tuple(size // cut for size, cut in zip(shape, cuts, strict=True))


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """`create_mesh` from `"dp:2,tp:4"` (mesh axes in the order of the string) or `"2,4"` (in the order of `names`).

    The string errors are those of `parse_mesh_shape`; the sizes must fit the devices as in `create_mesh`.
    """
    shape = parse_mesh_shape(axis_dims, names)
    return create_mesh(tuple(shape.values()), tuple(shape))


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_AXIS_DIMS, axis_names: Sequence[str] = DEFAULT_AXIS_NAMES
) -> Mesh:
    """`create_mesh` over the CPU devices, also where the default backend is another."""
    return create_mesh(axis_dims, axis_names, backend="cpu")


@contextmanager
def force_cpu() -> Iterator[Any]:
    """New arrays and uncommitted computations go to the first local CPU device, which is yielded."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        yield device


@contextmanager
def cpu_context() -> Iterator[Mesh]:
    """`create_cpu_mesh()` entered with `jax.set_mesh`, within `force_cpu`; yields the mesh."""
    mesh = create_cpu_mesh()
    with force_cpu(), jax.set_mesh(mesh):
        yield mesh


def _client(backend: str | None) -> Any:
    try:
        return get_backend(backend)
    except RuntimeError as error:
        raise ValueError(f"backend={backend!r} has no devices here: {error}") from error


@lru_cache(maxsize=8)
def _is_tpu(client: Any) -> bool:
    return client.platform == "tpu"  # asking the client each time costs a fifth of a cached create_mesh


def _as_tuple(values: Any) -> Any:
    """A tuple of a sequence; a string or what is no sequence stays, for the checks to name it."""
    return tuple(values) if hasattr(values, "__iter__") and not isinstance(values, str) else values


def _slices_in_environment(devices: Sequence[Any]) -> str | None:
    """MEGASCALE_NUM_SLICES where the devices are TPUs that do not know their slice, else None."""
    if not devices or devices[0].platform != "tpu":
        return None
    if all(getattr(device, "slice_index", None) is not None for device in devices):
        return None
    return os.environ.get(NUM_SLICES_VARIABLE)


def _parse_environment(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{NUM_SLICES_VARIABLE} must be a positive integer, got {text!r}. Unset it for one slice.")
    return int(text)


def _checked(devices: tuple[Any, ...], backend: str | None) -> list[Any]:
    if not devices:
        raise ValueError("devices is empty. Leave it out to use all devices.")
    twice = [str(device) for device, count in Counter(devices).items() if count > 1]
    if twice:
        raise ValueError(f"devices must differ, but it holds {', '.join(twice)} more than once.")
    platforms = sorted({device.platform for device in devices})
    wanted = platforms[:1] if backend is None else [_client(backend).platform]
    if platforms != wanted:
        asked = "" if backend is None else f", but backend={backend!r}"
        raise ValueError(
            f"devices are of platform {', '.join(platforms)}{asked}. "
            "A mesh holds devices of one platform: pass those, without backend."
        )
    return list(devices)
