"""What XLA allocates and sends in the cases, and what the estimate says: both as `Figures`.

    python -m tests.plan.compiled "tpu scan" "tpu dots"

compiles cases in a process of its own and prints a line of JSON for each: libtpu reads its environment variables when
JAX is imported, and a process that has loaded it must not run tests on CPUs.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from flax_mesh.hlo.collectives import read_collectives
from flax_mesh.hlo.program import read_hlo
from flax_mesh.plan.compile import worker
from flax_mesh.plan.forecast import Estimate, estimate
from flax_mesh.plan.recipe import Split, split_recipe
from flax_mesh.recipe.resolve import derive
from flax_mesh.recipe.target import Target
from flax_mesh.train import PipelineConfig
from tests.plan.cases import CASES, Case, decoder_config

# The third lets several processes use libtpu, none of which has a TPU.
TPU_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
SECONDS = 300  # for each case of a process
MICROBATCHES = 4  # of the pipelines


@dataclass(frozen=True)
class Figures:
    """Bytes on one device. `operands` has the operands of all collectives by their mesh axes, such as "fsdp+tp"."""

    arguments: int
    total: int
    operands: Mapping[str, float]


Programs = dict[str, Figures]  # by their names: "step", or "F0", "B0" and so on of a pipeline


# XLA


@cache
def compiled(case: Case) -> Programs:
    """The programs of a case as XLA compiles them. TPUs need not be here, only libtpu."""
    if case.platform == "tpu":
        return _in_process(case)
    return compile_here(case)


def compile_here(case: Case) -> Programs:
    mesh = _real_mesh(case)
    if case.is_pipeline:
        programs = worker.compiled_stages(_split(case, mesh.abstract_mesh), mesh)
        return {name: _figures(program, mesh, case) for name, program in programs.items()}
    step, arguments = case.make(mesh, **case.settings)
    return {"step": _figures(step.lower(*arguments).compile(), mesh, case)}


def _real_mesh(case: Case) -> Mesh:
    """The mesh of the case on its devices; of a pipeline, the mesh of its first group."""
    sizes = {name: size for name, size in case.sizes.items() if name != "pp"}
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    if case.platform == "cpu":
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    else:
        from jax.experimental import mesh_utils, topologies

        found = topologies.get_topology_desc(platform="tpu", topology_name=case.topology)
        devices = mesh_utils.create_device_mesh(shape, found.devices, allow_split_physical_axes=True)
    return Mesh(devices, tuple(sizes), axis_types=types)


def _split(case: Case, mesh: AbstractMesh) -> Split:
    """The pipeline of a case, for the devices of one group."""
    settings = dict(case.settings)
    options = {"schedule": settings.pop("schedule"), "remat": settings.pop("stage_remat", "none")}
    config = decoder_config(pipeline=PipelineConfig(num_microbatches=MICROBATCHES, **options), **settings)
    sizes = {"pp": case.sizes["pp"], **mesh.shape}
    return split_recipe(derive(config, Target(sizes, given=mesh)))


def _figures(program: Any, mesh: Mesh, case: Case) -> Figures:
    """On TPUs XLA states the peak. On CPUs that number lacks what loops allocate, and all temporary bytes are used."""
    memory = program.memory_analysis()
    total = memory.peak_memory_in_bytes
    if case.platform == "cpu":
        written = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + written + memory.temp_size_in_bytes
    operands: dict[str, float] = {}
    for one in read_collectives(read_hlo(program), mesh):
        size = one.payload_bytes / (one.group_size if one.kind == "all-gather" else 1)
        _add(operands, one.axes, size * one.times)
    return Figures(memory.argument_size_in_bytes, total, operands)


def _add(operands: dict[str, float], axes: Sequence[str], size: float) -> None:
    name = "+".join(sorted(axes))
    operands[name] = operands.get(name, 0.0) + size


def _in_process(case: Case) -> Programs:
    command = [sys.executable, "-m", "tests.plan.compiled", case.name]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | TPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    programs = json.loads(done.stdout.splitlines()[-1])
    return {name: Figures(**figures) for name, figures in programs.items()}


# The estimate


def estimated(case: Case) -> Programs:
    """The same figures without compiling."""
    return {name: figures_of(one) for name, one in estimates(case).items()}


@cache
def estimates(case: Case) -> dict[str, Estimate]:
    target = Target(case.sizes, platform=case.platform)  # on which the kernel of the attention depends
    mesh, sizes = target.abstract_mesh("auto"), {name: size for name, size in case.sizes.items() if name != "pp"}
    if case.is_pipeline:
        found = _split(case, mesh).estimates(case.platform)
        return {f"{kind}{k}": one for k, stage in enumerate(found) for kind, one in stage.programs.items()}
    return {"step": estimate(*case.make(mesh, **case.settings), sizes, case.platform)}


def figures_of(one: Estimate) -> Figures:
    operands: dict[str, float] = {}
    for exchange in one.exchanges:
        _add(operands, exchange.axes, exchange.operand_bytes * exchange.times)
    return Figures(one.argument_bytes, one.argument_bytes + one.profile.peak, operands)


# Comparison


def memory_error(found: Figures, true: Figures) -> float:
    return found.total / true.total - 1


def operand_errors(found: Figures, true: Figures) -> dict[str, float]:
    """The error of all combinations of axes that carry at least 5% of the bytes in XLA's program or the estimate."""
    totals = [sum(each.operands.values()) for each in (found, true)]
    errors = {}
    for axes in sorted(found.operands.keys() | true.operands.keys()):
        sizes = [each.operands.get(axes, 0.0) for each in (found, true)]
        if any(size >= 0.05 * total > 0 for size, total in zip(sizes, totals, strict=True)):
            errors[axes] = sizes[0] / sizes[1] - 1 if sizes[1] else math.inf
    return errors


def main(names: Sequence[str]) -> None:
    by_name = {case.name: case for case in CASES}
    assert len(by_name) == len(CASES)
    for name in names:
        programs = compile_here(by_name[name])
        print(json.dumps({key: asdict(figures) for key, figures in programs.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
