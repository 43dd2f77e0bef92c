"""The settings of a pipeline: how the layers are cut, and in which order the pieces run."""

from typing import Any

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd import make_schedule
from flax_mesh.train.config import PipelineConfig


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
    if config.residuals not in ("store", "recompute"):
        found.append(f"pipeline.residuals must be store or recompute, got {config.residuals!r}")
    if num_groups > 1 and config.microbatches >= 1:
        try:
            make_schedule(
                config.schedule,
                num_groups=num_groups,
                num_microbatches=config.microbatches,
                virtual=config.virtual,
            )
        except ValueError as error:
            found.append(f"pipeline.schedule={config.schedule}: {error}")
    return found
