"""The settings of a pipeline: how the layers are cut, and in which order the pieces run."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import Schedule, StagedModel, make_schedule, split_stages
from flax_mesh.mpmd.split.remat import REMAT_MODES
from flax_mesh.mpmd.transport.ordered import TRANSPORTS
from flax_mesh.train.config import PipelineConfig, TrainConfig


def cut_model(
    config: TrainConfig, layers: Sequence[str], num_groups: int, mesh: Mesh | AbstractMesh
) -> tuple[StagedModel, Schedule]:
    """The stages of the recipe's model and their schedule on `num_groups` groups; `mesh` is that of one group."""
    wanted = config.pipeline
    schedule = make_schedule(
        wanted.schedule,
        num_groups=num_groups,
        num_microbatches=wanted.num_microbatches,
        num_virtual_stages=wanted.num_virtual_stages,
    )
    rows = jax.ShapeDtypeStruct(
        (config.data.batch_size // wanted.num_microbatches, config.data.sequence_length), jnp.int32
    )
    staged = split_stages(
        config.loss_fn,
        lambda: config.make_model(config.model, nnx.Rngs(config.run.seed)),
        {"inputs": rows, "targets": rows},
        layers=layers or None,
        num_stages=schedule.num_stages,
        mesh=mesh,
        **parse_cut(wanted.cut),
    )
    return staged, schedule


def parse_cut(text: str) -> dict[str, Any]:
    """Arguments of `split_stages` for `pipeline.cut`: "flops", "count", or the first layers of the later stages, "2,5".

    ConfigError for anything else.
    """
    if text in ("flops", "count"):
        return {"balance": text}
    try:
        return {"cuts": [int(part) for part in text.split(",")]}
    except ValueError:
        raise ConfigError(
            f"pipeline.cut must be flops, count, or the first layer of every stage but the first, such as 2,5; "
            f"got {text!r}"
        ) from None


def check_pipeline(config: PipelineConfig, num_groups: int) -> list[str]:
    """One line per mistake in the settings of a pipeline over `num_groups` groups."""
    found = []
    try:
        parse_cut(config.cut)
    except ConfigError as error:
        found.append(str(error))
    if config.remat not in REMAT_MODES:
        found.append(f"pipeline.remat must be one of {', '.join(REMAT_MODES)}, got {config.remat!r}")
    if config.transport not in TRANSPORTS:
        found.append(f"pipeline.transport must be one of {', '.join(TRANSPORTS)}, got {config.transport!r}")
    if num_groups > 1 and config.num_microbatches >= 1:
        try:
            make_schedule(
                config.schedule,
                num_groups=num_groups,
                num_microbatches=config.num_microbatches,
                num_virtual_stages=config.num_virtual_stages,
            )
        except ValueError as error:
            found.append(f"pipeline.schedule={config.schedule}: {error}")
    return found
