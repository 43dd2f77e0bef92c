"""Reports on a recipe before training: the sharding of its arrays, and the cost of its pipeline stages.

`explain` needs only the config, no devices; `measure_recipe` runs every stage on the available devices.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from flax_mesh.data.user_batches import batch_shapes
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.mpmd import CutError
from flax_mesh.mpmd.runtime.placement import MODEL, OPTIMIZER, bytes_of_groups
from flax_mesh.mpmd.runtime.profile import measure_costs, with_split_backward
from flax_mesh.mpmd.schedules.simulate import StageCost
from flax_mesh.recipe.checks import check_config, check_on_mesh
from flax_mesh.recipe.config import TrainConfig, shard_over
from flax_mesh.recipe.model import method_of, model_notes, run_rules
from flax_mesh.recipe.optimizer import make_modules
from flax_mesh.recipe.program import build_program, split_model
from flax_mesh.recipe.target import abstract_mesh, mesh_shape
from flax_mesh.sharding import Explanation
from flax_mesh.sharding.report.explain import explain_sharding
from flax_mesh.sharding.rules import Finding
from flax_mesh.text import bytes_text, count_text


def explain(config: TrainConfig) -> Explanation:
    """Explain the sharding of every array of the recipe's model and optimizer on `mesh.shape`, and list all findings.

    With pp > 1 the report is for the mesh of one group as if it stored the arrays of all stages; the note lists the
    stages and the bytes that each group stores. `run.platform` is read only if `mesh.shape` contains -1: it then must
    be `cpu:N`, for N devices. Raises ConfigError for invalid settings; dims that are not divisible by their mesh
    axes are findings. A model that needs an accelerator to be traced, as with `model.attention=cudnn`, is
    explained as `without_devices()` of its config returns it: its arrays are the same.
    """
    if problems := check_config(config):
        raise ConfigError(problems)
    mesh, given = abstract_mesh(config), config.model
    notes = model_notes(config, mesh)
    config = replace(config, model=method_of(given, "without_devices", lambda: given)())
    explanation = explain_sharding(
        partial(make_modules, config),
        mesh,
        config.mesh.rules or config.rules,
        shard_optimizer_over=shard_over(config),
        optimizer_memory=config.optimizer.memory,
    )
    settings = [_setting_finding(problem) for problem in check_on_mesh(config, mesh, explanation.axes)]
    note, unsplit = ("", []) if settings else _stages(config, explanation, mesh)
    note = "\n".join([*notes, note] if note else notes)
    return explanation._replace(findings=(*settings, *unsplit, *explanation.findings), note=note)


def _stages(config: TrainConfig, explanation: Explanation, mesh: AbstractMesh) -> tuple[str, list[Finding]]:
    """(note, findings): the stages and bytes of every group, or why the model cannot be split into these stages."""
    num_groups = mesh_shape(config)["pp"]
    if num_groups == 1:
        return "", []
    try:
        batch = batch_shapes(config)
        staged, schedule = split_model(config, batch, run_rules(config, mesh).layers, num_groups, mesh)
    except CutError as error:
        return "", [Finding("pipeline", str(error).rstrip("."), "Change pipeline.cut or mesh.shape")]
    parts = [OPTIMIZER if leaf.kind == "optimizer" else MODEL for leaf in explanation.report.leaves]
    named = [(part + x.path, x) for part, x in zip(parts, explanation.report.leaves, strict=True)]
    both = [[(path, x, x.device_bytes * (x.on_host == host)) for path, x in named] for host in (False, True)]
    sizes, on_host = (bytes_of_groups(staged, schedule.stage_to_group, leaves) for leaves in both)
    lines = [
        f"pipeline: {schedule.name} over {num_groups} groups of this mesh (pp), "
        f"{count_text(schedule.num_microbatches, 'microbatch')}; "
        "the table below is for one group as if it stored all arrays",
        *(
            f"group {group} stores {bytes_text(size)} per device"
            + (f", and {bytes_text(host)} for it in the memory of the host" if host else "")
            for group, (size, host) in enumerate(zip(sizes, on_host, strict=True))
        ),
        str(staged),
    ]
    return "\n".join(lines), []


def _setting_finding(problem: Problem) -> Finding:
    setting = f"{problem.setting}={problem.value}" if problem.value else problem.setting
    repair = problem.repair[:1].upper() + problem.repair[1:]
    return Finding(setting, problem.text.removeprefix("is "), repair)


class Measured(NamedTuple):
    costs: tuple[StageCost, ...]  # in milliseconds, one per stage
    num_groups: int
    num_microbatches: int


def measure_recipe(config: TrainConfig) -> Measured:
    """Measure every stage of the recipe by itself on random tokens, or on the first batch of `make_batches`.

    The costs of a stage are those of its forward pass, of its backward pass to the input and to the weights, and of the
    transfer of its output. Raises ConfigError for invalid settings, or if the mesh has no axis pp.
    """
    program = build_program(config, change=with_split_backward)
    if (pipeline := program.pipeline) is None:
        raise ConfigError(
            f"mesh.shape={config.mesh.shape} has no axis pp, so the model is not split into stages; add pp:N"
        )
    batch = program.batches.first if program.batches else _random_tokens(config)
    costs = measure_costs(pipeline, pipeline.init_state(), batch)
    return Measured(costs, len(pipeline.groups), config.pipeline.num_microbatches)


def _random_tokens(config: TrainConfig) -> dict[str, np.ndarray]:
    shape = config.data.batch_size, config.data.sequence_length
    ids = getattr(config.model, "vocab_size", None) or 2
    tokens = np.random.default_rng(config.run.seed).integers(0, ids, shape).astype(np.int32)
    return {"inputs": tokens, "targets": tokens}
