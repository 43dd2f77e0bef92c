"""The mesh of a recipe, on devices or without them."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.hardware import Chip
from flax_mesh.mesh.create import create_mesh, normalize_axis_types
from flax_mesh.mesh.shape import parse_mesh_shape, resolve_dims
from flax_mesh.mesh.torus.torus import DeviceLike
from flax_mesh.recipe.config import MeshConfig
from flax_mesh.text import listed, mesh_text

AXIS_NAMES = ("pp", "dp", "fsdp", "ep", "tp", "sp")
SHRINK_ORDER = ("pp", "dp", "fsdp", "sp", "ep", "tp")  # stages, copies, shards of the batch ...


@dataclass(frozen=True)
class Target:
    """Where a recipe runs.

    Attributes:
        sizes: The size of every mesh axis, with "pp" if the mesh has groups. With `devices`, one may be -1: the rest.
        devices: As many devices. None: there are none, and the mesh of a step, or of one group, is abstract.
        platform: The platform of devices that are not here; None if it is not known.
        kind: Their `device_kind`, which determines the memory of a device; "" if only the platform is known.
        given: A mesh of these sizes, which is used as it is.
        notes: How `sizes` differ from the settings, one line each.
    """

    sizes: Mapping[str, int]
    devices: Sequence[DeviceLike] | None = None
    platform: str | None = None
    kind: str = ""
    given: Mesh | AbstractMesh | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises one ConfigError for axes that no recipe has, and for sizes that are not numbers of devices."""
        free = [name for name, size in self.sizes.items() if size == -1 and self.devices is not None]
        problems = [] if len(free) < 2 else [f"Target: {listed(free)} have the size -1; only one axis may have it"]
        for name, size in self.sizes.items() if self.given is None else ():
            if name not in AXIS_NAMES:
                problems.append(f"Target: {name!r} is not a mesh axis of a recipe; use {listed(AXIS_NAMES)}")
            if name not in free and size < 1:
                problems.append(f"Target: {name} must have at least 1 device, got {size}; -1 requires devices")
        if problems:
            raise ConfigError(problems)

    @property
    def num_groups(self) -> int:
        return self.sizes.get("pp", 1)

    def mesh(self, axis_types: str) -> Mesh | AbstractMesh:
        """The mesh of all devices, outermost the groups; without devices, the mesh of one group."""
        if self.given is not None:
            return self.given
        return self.abstract_mesh(axis_types) if self.devices is None else self.device_mesh(axis_types)

    def device_mesh(self, axis_types: str) -> Mesh:
        # Outermost, since groups communicate over the slowest network.
        sizes = dict(sorted(self.sizes.items(), key=lambda item: item[0] != "pp"))
        return create_mesh(tuple(sizes.values()), tuple(sizes), devices=self.devices, axis_types=axis_types)

    def abstract_mesh(self, axis_types: str) -> AbstractMesh:
        sizes = {name: size for name, size in self.sizes.items() if name != "pp"}
        types = normalize_axis_types(axis_types, tuple(sizes))
        device = AbstractDevice(self.kind or self.platform, None, self.platform) if self.platform else None
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def axis_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Axis sizes of `mesh.shape` in its order, then the omitted axes with size 1. One size may be -1."""
    return parse_mesh_shape(mesh.shape, AXIS_NAMES, omitted=1)


def without_groups(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes without "pp" if there is one group only."""
    return {name: size for name, size in sizes.items() if (name, size) != ("pp", 1)}


def chip_target(sizes: Mapping[str, int], chip: Chip) -> Target:
    """Devices of this kind, none of which is here."""
    return Target(sizes, platform=chip.platform, kind=next(iter(chip.kinds), ""))


def target_of(mesh: Mesh | AbstractMesh) -> Target:
    """A mesh that exists already."""
    return Target(dict(mesh.shape), given=mesh)


@check_types
def local_target(mesh: MeshConfig, platform: str) -> Target:
    """The devices that are here. For the platform "auto" the mesh is shrunk to fit them.

    Example:
        >>> from flax_mesh.recipe import local_target
        >>> from flax_mesh.train import MeshConfig
        >>> len(local_target(MeshConfig("fsdp:-1,tp:2"), "cpu").devices)
        8
    """
    sizes, notes = without_groups(axis_sizes(mesh)), list[str]()
    devices: Sequence[DeviceLike] = jax.devices()
    if platform == "auto":
        fitted = fit_sizes(sizes, len(devices))
        if any(size not in (-1, fitted[name]) for name, size in sizes.items()):
            wanted, text = mesh_text(sizes), mesh_text(fitted)
            notes.append(f"mesh: {wanted} needs more than the {len(devices)} devices here; shrunk to {text}")
        sizes = without_groups(fitted)
        used = math.prod(sizes.values())
        if used < len(devices):
            notes.append(f"mesh: uses {used} of the {len(devices)} devices here")
            devices = devices[:used]
    return Target(sizes, devices, notes=tuple(notes))


@check_types
def abstract_target(mesh: MeshConfig, platform: str) -> Target:
    """The mesh of `mesh.shape`, not shrunk to the devices here. Its platform is known if `platform` names it.

    A size of -1 requires the platform `cpu:N`, for N devices.

    Example:
        >>> from flax_mesh.recipe import abstract_target
        >>> from flax_mesh.train import MeshConfig
        >>> abstract_target(MeshConfig("fsdp:512,tp:8"), "tpu").sizes["fsdp"]
        512
    """
    sizes = axis_sizes(mesh)
    name, _, count = platform.partition(":")
    if -1 in sizes.values():
        if not count:
            raise ConfigError(
                f"mesh.shape={mesh.shape} derives a size from the number of devices, which is not known here. "
                f"Set every size, or set the number of devices by run.platform=cpu:N (it is {name})"
            )
        try:
            resolved = resolve_dims(tuple(sizes.values()), tuple(sizes), int(count), what="mesh.shape")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        sizes = dict(zip(sizes, resolved, strict=True))
    return Target(sizes, platform=None if name == "auto" else name)


def fit_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """`sizes` with axes divided by their smallest factors until they fit `num_devices`; -1 takes the rest."""
    free = [name for name, size in sizes.items() if size == -1]
    fitted = dict(sizes) | dict.fromkeys(free, 1)
    while math.prod(fitted.values()) > num_devices:
        name = next(axis for axis in SHRINK_ORDER if fitted.get(axis, 1) > 1)
        size = fitted[name]
        fitted[name] = size // next(factor for factor in range(2, size + 1) if size % factor == 0)
    for name in free:
        fitted[name] = num_devices // math.prod(fitted.values())
    return fitted
