"""What the stages of a recipe's pipeline cost on the devices that are here, for the search of a schedule."""

from typing import NamedTuple

import numpy as np

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.runtime.profile import measure_costs, with_split_backward
from flax_mesh.mpmd.schedules.simulate import StageCost
from flax_mesh.train.build import make_mesh, recipe_pipeline, run_rules
from flax_mesh.train.checks import check_config, check_on_mesh
from flax_mesh.train.config import TrainConfig


class Measured(NamedTuple):
    """Costs in milliseconds, one a stage, and the sizes of the pipeline that they were measured on."""

    costs: tuple[StageCost, ...]
    num_groups: int
    num_microbatches: int


def measure_recipe(config: TrainConfig) -> Measured:
    """Run every stage of the recipe alone, on random tokens: forward, backward to the input, to the weights, transfer.

    Raises ConfigError for settings that are wrong, or without pp.
    """
    if problems := check_config(config):
        raise ConfigError(problems)
    mesh = make_mesh(config, lambda text: None)
    if "pp" not in mesh.axis_names:
        raise ConfigError(f"mesh.shape={config.mesh.shape} has no pp: a recipe without stages has nothing to measure")
    rules = run_rules(config)
    if problems := check_on_mesh(config, mesh, rules.axes):
        raise ConfigError(problems)
    pipeline = recipe_pipeline(config, mesh, rules, with_split_backward)
    shape = config.data.batch_size, config.data.sequence_length
    ids = getattr(config.model, "vocab_size", None) or 2
    tokens = np.random.default_rng(config.run.seed).integers(0, ids, shape).astype(np.int32)
    costs = measure_costs(pipeline, pipeline.init_state(), {"inputs": tokens, "targets": tokens})
    return Measured(costs, len(pipeline.groups), config.pipeline.num_microbatches)
