"""The devices that a program is compiled for, which the machine need not have, and the environment of the compiler."""

import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS
from flax_mesh.mesh.slices import preferred_splits
from flax_mesh.plan.topology import Topology, parse_topology, placement
from flax_mesh.recipe.target import Target
from flax_mesh.text import listed, one_line

TPU_NAMES = {"v3": "v3", "v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7x": "tpu7x"}  # of chips in libtpu
HOST_SIDES = (2, 2, 1)  # chips of a host, by default
CUDA_PLUGIN, NVCC = "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"
GPU_TARGETS = {"H100": "h100.txtpb"}  # chip -> the file of its figures for XLA
# Without a TPU, libtpu must neither ask the cloud for one nor lock it; warnings of its compiler are read from stderr.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
}


def check_target(topology: Topology) -> None:
    """Raises a ConfigError if the compiler for the topology is not installed, or its chip has no target."""
    chip = _table_name(topology)
    if topology.chip.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigError(f"--compile for {topology.text} requires libtpu: pip install 'flax-mesh[tpu-aot]'")
        if chip not in TPU_NAMES:
            raise ConfigError(f"--compile for {topology.text}: libtpu has no such chip; use {listed(TPU_NAMES)}")
    if topology.chip.platform == "gpu":
        if chip not in GPU_TARGETS:
            raise ConfigError(f"--compile for {topology.text}: XLA's figures are known for {listed(GPU_TARGETS)} only")
        if _spec(CUDA_PLUGIN) is None or _spec(NVCC) is None:
            raise ConfigError(
                f"--compile for {topology.text} requires JAX's CUDA plugin and nvcc: pip install 'flax-mesh[gpu-aot]'"
            )


def environment(topology: Topology, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process that compiles. Settings of JAX and XLA for this process do not apply to it."""
    variables = {name: text for name, text in inherited.items() if not name.startswith(("JAX_", "XLA_"))}
    variables |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    if topology.chip.platform == "tpu":
        variables |= TPU_ENVIRONMENT
    if topology.chip.platform == "gpu" and (spec := _spec(NVCC)) is not None:
        folder = next(iter(spec.submodule_search_locations or ()))
        variables |= {
            "PATH": f"{folder}/bin{os.pathsep}{variables.get('PATH', '')}",
            "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}",
        }
    return variables


def devices_target(topology: Topology, sizes: Mapping[str, int]) -> Target:
    """The topology's devices; with pp, the devices of one group, on a topology of the group's shape."""
    if "pp" in sizes:
        topology = group_topology(topology, sizes)
    sizes = {name: size for name, size in sizes.items() if name != "pp"}
    try:
        return Target(sizes, _devices(topology)[: math.prod(sizes.values())])
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{topology.text}: {one_line(error)}") from error


def slice_mesh(mesh: Mesh) -> tuple[AbstractMesh, tuple[str, ...]]:
    """The part of a mesh in one slice, for which libtpu compiles, and the axes that span several slices."""
    slices = len({getattr(device, "slice_index", None) for device in mesh.devices.flat})
    if slices == 1:
        return mesh.abstract_mesh, ()
    splits = preferred_splits(list(mesh.shape.values()), list(mesh.shape), slices)
    sizes = tuple(size // split for size, split in zip(mesh.shape.values(), splits, strict=True))
    outer = tuple(name for name, split in zip(mesh.shape, splits, strict=True) if split > 1)
    return AbstractMesh(sizes, tuple(mesh.shape)), outer


def group_topology(topology: Topology, shape: Mapping[str, int]) -> Topology:
    """The part of a topology that one group of a pipeline has. libtpu compiles for whole topologies only."""
    if not topology.chip.torus:
        return topology
    at = list(shape).index("pp")
    splits, assignment = placement(topology, tuple(shape.items()))
    rows = assignment or ()
    sides = [side // row[at] for side, row in zip(topology.slice_shape, rows, strict=False)]
    slices = topology.num_slices // splits[at]
    text = f"{topology.chip.name}:{'x'.join(map(str, sides))}" + (f"*{slices}" if slices > 1 else "")
    group = parse_topology(text, topology.chip)
    if group.num_devices * shape["pp"] != topology.num_devices:
        raise ConfigError(f"{topology.text}: pp splits the devices of a chip, so no topology has the shape of a group")
    return group


def _devices(topology: Topology) -> Sequence[Any]:
    if topology.chip.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.num_devices)
        return jax.devices()
    sides = "x".join(map(str, topology.slice_shape))
    if topology.chip.platform == "gpu":
        name = _table_name(topology)
        config = Path(__file__).with_name(GPU_TARGETS[name]).read_text(encoding="utf-8")
        options = {"target_config": config, "topology": f"1x{sides}"}
        return topologies.get_topology_desc(platform="cuda", topology_name=name.lower(), **options).devices
    chips = (*topology.slice_shape, 1)[:3]
    hosts = tuple(math.gcd(side, most) for side, most in zip(chips, HOST_SIDES, strict=True))
    options: dict[str, object] = {"chips_per_host_bounds": hosts} if hosts != HOST_SIDES else {}
    name = _table_name(topology)
    if name == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{TPU_NAMES[name]}:{sides}", **options).devices


def _table_name(topology: Topology) -> str:
    """The chip of the table; one of `run.hardware` is compiled as the chip on which its file is based."""
    return next((chip.name for chip in CHIPS if chip.kinds == topology.chip.kinds), topology.chip.name)


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of the package
        return None
