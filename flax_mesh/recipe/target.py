"""The mesh of a recipe: on the devices of this machine, or without devices."""

import math
from collections.abc import Callable, Mapping

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from flax_mesh.errors import ConfigError
from flax_mesh.mesh.create import create_mesh, normalize_axis_types
from flax_mesh.mesh.shape import parse_mesh_shape, resolve_dims
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.text import mesh_text

AXIS_NAMES = ("pp", "dp", "fsdp", "ep", "tp", "sp")


def mesh_shape(config: TrainConfig) -> dict[str, int]:
    """Axis sizes of `mesh.shape` in its order, then the omitted axes with size 1. One size may be -1."""
    return parse_mesh_shape(config.mesh.shape, AXIS_NAMES, omitted=1)


def abstract_mesh(config: TrainConfig) -> AbstractMesh:
    """The mesh of `mesh.shape`, not shrunk to the available devices; with pp, the mesh of one group.

    Of its devices only the platform is known, and that only if `run.platform` names it.
    """
    shape = mesh_shape(config)
    sizes = tuple(shape.values())
    if -1 in sizes:
        platform, _, count = config.run.platform.partition(":")
        if not count:
            raise ConfigError(
                f"mesh.shape={config.mesh.shape} derives a size from the number of devices, which is not known here. "
                f"Set every size, or set the number of devices by run.platform=cpu:N (it is {platform})"
            )
        try:
            sizes = resolve_dims(sizes, tuple(shape), int(count), what="mesh.shape")
        except ValueError as error:
            raise ConfigError(str(error)) from error
    of_group = {name: size for name, size in zip(shape, sizes, strict=True) if name != "pp"}
    types = normalize_axis_types(config.mesh.axis_types, tuple(of_group))
    platform = config.run.platform.partition(":")[0]
    device = None if platform == "auto" else AbstractDevice(platform, None, platform)
    return AbstractMesh(tuple(of_group.values()), tuple(of_group), axis_types=types, abstract_device=device)


def group_mesh(config: TrainConfig, shape: Mapping[str, int], platform: str) -> AbstractMesh:
    """The mesh of a step, or of one group of a pipeline, without devices, of which only the platform is known."""
    sizes = {name: size for name, size in shape.items() if name != "pp"}
    types = normalize_axis_types(config.mesh.axis_types, tuple(sizes))
    device = AbstractDevice(platform, None, platform)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


SHRINK_ORDER = ("pp", "dp", "fsdp", "sp", "ep", "tp")  # stages, copies, shards of the batch ...


def make_mesh(config: TrainConfig, say: Callable[[str], None]) -> Mesh:
    """The mesh of the run. `run.platform=auto` shrinks it to the available devices and reports that."""
    shape = mesh_shape(config)
    if shape["pp"] == 1:
        del shape["pp"]
    devices = jax.devices()
    if config.run.platform == "auto":
        fitted = fit_mesh(shape, len(devices))
        if any(size not in (-1, fitted[name]) for name, size in shape.items()):
            wanted, found = mesh_text(shape), mesh_text(fitted)
            say(f"mesh: {wanted} needs more than the {len(devices)} devices here; shrunk to {found}")
        shape = {name: size for name, size in fitted.items() if (name, size) != ("pp", 1)}
        used = math.prod(shape.values())
        if used < len(devices):
            say(f"mesh: uses {used} of the {len(devices)} devices here")
            devices = devices[:used]
    names = sorted(shape, key=lambda name: name != "pp")  # outermost: groups communicate over the slowest network
    try:
        dims = tuple(shape[name] for name in names)
        return create_mesh(dims, tuple(names), devices=devices, axis_types=config.mesh.axis_types)
    except ValueError as error:
        raise ConfigError(f"mesh.shape={config.mesh.shape}: {error}") from error


def fit_mesh(shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """`shape` with axes divided by their smallest factors until it fits `num_devices`; -1 takes what is left."""
    free = [name for name, size in shape.items() if size == -1]
    fitted = dict(shape) | dict.fromkeys(free, 1)
    while math.prod(fitted.values()) > num_devices:
        name = next(axis for axis in SHRINK_ORDER if fitted.get(axis, 1) > 1)
        size = fitted[name]
        fitted[name] = size // next(factor for factor in range(2, size + 1) if size % factor == 0)
    for name in free:
        fitted[name] = num_devices // math.prod(fitted.values())
    return fitted
