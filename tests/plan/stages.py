"""F, B and W of the stages of a pipeline of decoders: estimated, and compiled for the devices of one group."""

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from flax_mesh.plan.compile import stages
from flax_mesh.plan.forecast import Estimate
from flax_mesh.plan.recipe import Split, split_recipe
from flax_mesh.train import PipelineConfig
from flax_mesh.train.build import run_rules
from tests.plan.cases import Case, decoder_config


def _split(case: Case, mesh: AbstractMesh) -> Split:
    settings = dict(case.settings)
    pipeline = PipelineConfig(
        num_microbatches=4, schedule=settings.pop("schedule"), remat=settings.pop("stage_remat", "none")
    )
    config = decoder_config(pipeline=pipeline, **settings)
    return split_recipe(config, case.sizes["pp"], mesh, run_rules(config, mesh))


def estimated_stages(case: Case, mesh: AbstractMesh) -> dict[str, Estimate]:
    found = _split(case, mesh).estimates(mesh, case.sizes, case.platform)
    return {f"{kind}{k}": one for k, stage in enumerate(found) for kind, one in stage.programs.items()}


def compiled_stages(case: Case, mesh: Mesh) -> dict[str, Any]:
    return stages.compiled_stages(_split(case, mesh.abstract_mesh), mesh)
