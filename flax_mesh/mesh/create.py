"""`create_mesh`: a `jax.sharding.Mesh` from axis sizes and names."""

# JAX has no types for its clients and devices.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Users may pass other types than the annotated ones, which this file reports.
# pyright: reportUnnecessaryIsInstance=false

import math
import os
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import jax
from jax.extend.backend import get_backend
from jax.sharding import AxisType, Mesh

from flax_mesh.fields import is_sized, require_types
from flax_mesh.mesh.device_mesh import create_device_mesh, hybrid_mesh_of
from flax_mesh.mesh.shape import (
    DEFAULT_AXIS_DIMS,
    DEFAULT_AXIS_NAMES,
    check_axis_names,
    integers,
    parse_mesh_shape,
    resolve_dims,
    split_between_hosts,
)
from flax_mesh.mesh.slices import find_granules, resolve_dcn_dims
from flax_mesh.mesh.torus.torus import DeviceLike, slice_of
from flax_mesh.text import shortened, shown

_AxisTypes: TypeAlias = AxisType | str | Sequence[AxisType | str] | None
# Set by multislice TPU runs. The library reads no other environment variables except the ones that launchers set.
_NUM_SLICES_VARIABLE = "MEGASCALE_NUM_SLICES"
_NAMES_IN_TEXT = re.compile(r"([^\s,:=]+)\s*[:=]")
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}


def create_mesh(
    axis_dims: Sequence[int] | str | Mapping[str, int] = DEFAULT_AXIS_DIMS,
    axis_names: Sequence[str] = DEFAULT_AXIS_NAMES,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: _AxisTypes = None,
    devices: Sequence[DeviceLike] | None = None,
    num_slices: int | None = None,
) -> Mesh:
    """Creates a mesh of the given shape.

    Mesh axes are laid out over the network so that the last axis, which should have the most traffic, gets the fastest
    links. On TPU this is JAX's assignment of mesh axes to the torus, unless `torus.assign` finds a strictly better one.
    Several slices, or hosts without a fast network between them, are connected by the slow network (DCN); the axes pp,
    dp and fsdp are split over it first. Equal arguments return the same object, so repeated calls are cheap.

    Args:
        axis_dims: The size of each axis; one of them may be -1, which is inferred from the number of devices. Or the
            names with the sizes, as "dp:2,tp:4" or {"dp": 2, "tp": 4}.
        axis_names: The name of each axis. Default: dp, fsdp, ep, tp, sp, with all devices on fsdp.
        dcn_mesh_dims: The number of slices (or hosts) that each axis spans; one of them may be -1. Default: chosen
            in the order pp, dp, fsdp, axes with other names, ep, sp, tp.
        should_sort_granules_by_key: Order slices by their index. If False, by their first device in `devices`.
        allow_split_physical_axes: Allow several mesh axes to share one physical axis of the torus.
        backend: The platform of the devices ("cpu", "gpu", "tpu"). Default: JAX's default backend.
        use_jax: Use `jax.make_mesh` if there is a single slice and a single process.
        axis_types: "auto" (default), "explicit", "manual" or a `jax.sharding.AxisType`; one for all axes or one each.
        devices: The devices to use, in any order. Default: all devices of the backend.
        num_slices: The number of slices, if the devices have no slice index. On TPU the default is then the environment
            variable MEGASCALE_NUM_SLICES.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        ValueError: The sizes do not match the number of devices (the message lists sizes that do), names or devices are
            not unique, an axis type is invalid, or the devices do not form a torus.
        NotImplementedError: A physical axis would have to be split, and `allow_split_physical_axes` is False.

    Warns:
        SlowNetworkWarning: ep, sp or tp had to be split over the slow network.

    Example:
        >>> mesh = fm.create_mesh((2, -1), ("dp", "tp"))  # on 8 devices
        >>> dict(mesh.shape)
        {'dp': 2, 'tp': 4}
        >>> fm.create_mesh("dp:2,tp:4") is mesh
        True
    """
    if isinstance(axis_dims, str):
        names = dict.fromkeys(_NAMES_IN_TEXT.findall(axis_dims))
        axis_dims = parse_mesh_shape(axis_dims, tuple(names) or axis_names)
    if isinstance(axis_dims, Mapping):
        axis_dims, axis_names = tuple(axis_dims.values()), tuple(axis_dims)
    flags = should_sort_granules_by_key, allow_split_physical_axes, backend, use_jax, axis_types
    return _mesh(axis_dims, axis_names, dcn_mesh_dims, *flags, devices, num_slices)


def _mesh(
    axis_dims: Sequence[int],
    axis_names: Sequence[str],
    dcn_mesh_dims: Sequence[int] | None,
    sort: bool,
    allow_split: bool,
    backend: str | None,
    use_jax: bool,
    axis_types: _AxisTypes,
    devices: Sequence[DeviceLike] | None,
    num_slices: int | None,
) -> Mesh:
    if devices is not None or backend is not None:
        require_types(create_mesh, devices=devices, backend=backend)
    if devices is None:
        client = _client(backend)
        # The id of a client is fast to hash, and cannot be reused: the cached mesh keeps its client alive.
        source = id(client)
        environment = _slices_in_environment(client.devices()) if _is_tpu(client) else None
    else:
        source = tuple(devices)
        environment = _slices_in_environment(source)
    # With tuples the key is hashable, and lists equal tuples. Their contents are checked once, in _cached_mesh.
    key = (
        axis_dims if type(axis_dims) is tuple else _as_tuple(axis_dims),
        axis_names if type(axis_names) is tuple else _as_tuple(axis_names),
        None if dcn_mesh_dims is None else _as_tuple(dcn_mesh_dims),
        sort,
        allow_split,
        backend,
        use_jax,
        _as_tuple(axis_types) if type(axis_types) is list else axis_types,
        source,
        (num_slices, environment if num_slices is None else None),
    )
    try:
        hash(key)
    except TypeError:  # an invalid argument, which the checks report
        return _cached_mesh.__wrapped__(*key)
    return _cached_mesh(*key)


@lru_cache(maxsize=256)
def _cached_mesh(
    axis_dims: tuple[int, ...],
    axis_names: tuple[str, ...],
    dcn_mesh_dims: tuple[int, ...] | None,
    sort: bool,
    allow_split: bool,
    backend: str | None,
    use_jax: bool,
    axis_types: _AxisTypes,
    source: int | tuple[DeviceLike, ...],
    slices: tuple[int | None, str | None],
) -> Mesh:
    """`slices`: their number, and the text of the environment variable."""
    num_slices, environment = slices
    flags = {"should_sort_granules_by_key": sort, "allow_split_physical_axes": allow_split, "use_jax": use_jax}
    require_types(create_mesh, num_slices=num_slices, **flags)
    names = check_axis_names(axis_names)
    types = normalize_axis_types(axis_types, names)
    devices = _checked(source, backend) if isinstance(source, tuple) else get_backend(backend).devices()
    advice = "" if isinstance(source, tuple) else "Or pass devices= to use some of them."
    dims = resolve_dims(axis_dims, names, len(devices), advice=advice)
    origin = "num_slices"
    if environment is not None:
        origin = _NUM_SLICES_VARIABLE
        if not re.fullmatch(r"\s*[1-9][0-9]{0,17}\s*", environment):
            raise ValueError(f"{origin} must be a positive integer, got {shown(environment)}. Unset it for one slice.")
        num_slices = int(environment)
    granules, granule = find_granules(devices, num_slices, source=origin, dcn_mesh_dims=dcn_mesh_dims, sort=sort)
    kind = devices[0].device_kind
    dcn_dims = resolve_dcn_dims(dims, names, len(granules), granule, dcn_mesh_dims=dcn_mesh_dims, kind=kind)
    if len(granules) > 1:
        inner = tuple(size // dcn for size, dcn in zip(dims, dcn_dims, strict=True))
        array = hybrid_mesh_of(granules, inner, dcn_dims, allow_split_physical_axes=allow_split)
    elif use_jax and len({device.process_index for device in devices}) == 1:
        return jax.make_mesh(dims, names, axis_types=types, devices=devices)
    else:
        array = create_device_mesh(dims, devices, allow_split_physical_axes=allow_split)
    return Mesh(array, names, axis_types=types)


def normalize_axis_types(axis_types: _AxisTypes, names: Sequence[str]) -> tuple[AxisType, ...]:
    """One AxisType per axis; None means Auto. ValueError for an invalid string or count, TypeError for a wrong type."""
    if axis_types is None or isinstance(axis_types, str | AxisType):
        entries = [axis_types or AxisType.Auto] * len(names)
    elif isinstance(axis_types, Sequence):
        entries = list(axis_types)
    else:
        raise TypeError(f"axis_types must be an AxisType, a string or a sequence of them, got {shown(axis_types)}.")
    if len(entries) != len(names):
        raise ValueError(
            f"axis_types has {len(entries)} entries {tuple(entries)} for {len(names)} axes {tuple(names)}. "
            "Pass one for all axes, or one per axis."
        )
    wrong = [repr(entry) for entry in entries if not isinstance(entry, str | AxisType)]
    if wrong:
        raise TypeError(f"axis_types must contain AxisType values or strings, got {', '.join(wrong)}.")
    unknown = [shown(entry) for entry in entries if isinstance(entry, str) and entry.strip().lower() not in _AXIS_TYPES]
    if unknown:
        raise ValueError(f"axis_types must be one of {', '.join(_AXIS_TYPES)}, got {', '.join(unknown[:8])}.")
    return tuple(_AXIS_TYPES[entry.strip().lower()] if isinstance(entry, str) else entry for entry in entries)


def calculate_host_mesh_shape(
    global_mesh_shape: Sequence[int], total_devices: int | None = None, num_processes: int | None = None
) -> tuple[int, ...]:
    """Shape of the block of a mesh that each process owns if the mesh is split evenly, leading axes first.

    `total_devices` is the number of devices per process (default: of this process), `num_processes` the number of
    processes (default: of this run). Finds a split whenever one exists. Raises a ValueError if the product of the sizes
    is not the total number of devices.

    >>> calculate_host_mesh_shape((4, 6), total_devices=4, num_processes=6)
    (2, 2)
    """
    require_types(calculate_host_mesh_shape, total_devices=total_devices, num_processes=num_processes)
    per_process = jax.local_device_count() if total_devices is None else total_devices
    processes = jax.process_count() if num_processes is None else num_processes
    shape = integers(global_mesh_shape, "global_mesh_shape", least=1)
    splits = split_between_hosts(shape, processes)
    if splits is None or math.prod(shape) != per_process * processes:
        raise ValueError(
            f"Mesh shape {shape} has {math.prod(shape)} devices, but {processes} processes with {per_process} devices "
            f"each have {per_process * processes}. The sizes must multiply to that number."
        )
    return tuple(size // split for size, split in zip(shape, splits, strict=True))


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """`create_mesh` from `"dp:2,tp:4"` (axes in the order of the string) or `"2,4"` (in the order of `names`).

    Raises the errors of `parse_mesh_shape` if the string is invalid, and the errors of `create_mesh` if the sizes are.

    Example:
        >>> dict(fm.parse_mesh_from_string("dp:2,tp:4", ("dp", "tp")).shape)
        {'dp': 2, 'tp': 4}
    """
    require_types(parse_mesh_from_string, axis_dims=axis_dims, names=names)
    shape = parse_mesh_shape(axis_dims, names)
    return create_mesh(tuple(shape.values()), tuple(shape))


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_AXIS_DIMS, axis_names: Sequence[str] = DEFAULT_AXIS_NAMES
) -> Mesh:
    """`create_mesh` over the CPU devices, whatever the default backend is.

    Example:
        >>> fm.create_cpu_mesh((2, 4), ("dp", "fsdp")).devices.shape
        (2, 4)
    """
    return create_mesh(axis_dims, axis_names, backend="cpu")


@contextmanager
def force_cpu() -> Generator[DeviceLike]:
    """Places new arrays and uncommitted computations on the first local CPU device, and yields that device.

    Example:
        >>> with fm.force_cpu() as device:
        ...     jnp.ones(4).devices() == {device}
        True
    """
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        yield device


@contextmanager
def cpu_context() -> Generator[Mesh]:
    """Enters `create_cpu_mesh()` with `jax.set_mesh`, inside `force_cpu`; yields the mesh.

    Example:
        >>> with fm.cpu_context() as mesh:
        ...     mesh.shape["fsdp"]
        8
    """
    mesh = create_cpu_mesh()
    with force_cpu(), jax.set_mesh(mesh):
        yield mesh


def _client(backend: str | None) -> Any:
    try:
        return get_backend(backend)
    except RuntimeError as error:
        raise ValueError(f"backend={shown(backend)} has no devices here: {shortened(str(error))}") from error


@lru_cache(maxsize=8)
def _is_tpu(client: Any) -> bool:
    return client.platform == "tpu"  # uncached, this is a fifth of the time of a cached create_mesh


def _as_tuple(values: Any) -> Any:
    """A tuple of a sequence; strings and other values are returned unchanged, so that the checks can report them."""
    return values if isinstance(values, str) or not is_sized(values) else tuple(values)


def _slices_in_environment(devices: Sequence[DeviceLike]) -> str | None:
    """MEGASCALE_NUM_SLICES if the devices are TPUs without a slice index, else None."""
    if not devices or devices[0].platform != "tpu":
        return None
    if None not in map(slice_of, devices):
        return None
    return os.environ.get(_NUM_SLICES_VARIABLE)


def _checked(devices: tuple[DeviceLike, ...], backend: str | None) -> list[DeviceLike]:
    if not devices:
        raise ValueError("devices is empty. Omit it to use all devices.")
    twice = [str(device) for device, count in Counter(devices).items() if count > 1]
    if twice:
        raise ValueError(
            f"devices must be unique, but {', '.join(twice)} appears more than once. Remove the duplicates."
        )
    platforms = sorted({device.platform for device in devices})
    expected = platforms[:1] if backend is None else [_client(backend).platform]
    if platforms != expected:
        requested = "" if backend is None else f", but backend={backend!r}"
        raise ValueError(
            f"devices are of platform {', '.join(platforms)}{requested}. "
            "All devices of a mesh must be of one platform: pass only those, and omit backend."
        )
    return list(devices)
