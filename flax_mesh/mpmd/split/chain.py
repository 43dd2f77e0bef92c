"""chain_stages: the lower door to the pipeline, stages that somebody has cut already."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.split import StagedModel, split_stages
from flax_mesh.step.loss import Batch
from flax_mesh.text import array_text


class Chain(nnx.Module):
    """Modules called one after the other: the first on the batch, each of the others on what the one before gives."""

    def __init__(self, stages: Sequence[nnx.Module]):
        self.stages = nnx.List(stages)


def chain_stages(
    loss_fn: Callable[[Any, Batch], Any],
    stages: Callable[[], Sequence[nnx.Module]] | Sequence[nnx.Module],
    batch: Batch,
    *,
    wrt: Any = nnx.Param,
    mesh: Mesh | AbstractMesh | None = None,
) -> StagedModel:
    """A StagedModel of modules, one a stage: `loss_fn(outputs of the last, batch)` gives what a LossFn gives.

    `stages` may be a function that makes them. Every stage takes one argument, any pytree, and must have variables.
    Raises CutError that names the stage which cannot take what it is given.
    """
    make = stages if callable(stages) else lambda: stages

    def loss_of(model: Chain, batch: Batch) -> Any:
        value = batch
        for k, stage in enumerate(model.stages):
            try:
                value = stage(value)
            except (TypeError, ValueError) as error:
                given = jax.tree.map(array_text, value)
                reason = str(error).strip().splitlines()[0]
                raise CutError(f"stage {k}, {type(stage).__name__}, cannot take {given}: {reason}") from error
        return loss_fn(value, batch)

    found = make()
    if not found:
        raise CutError("stages is empty; give one module a stage.")
    return split_stages(
        loss_of,
        lambda: Chain(make()),
        batch,
        layers="stages",
        num_stages=len(found),
        cuts=range(1, len(found)),
        wrt=wrt,
        mesh=mesh,
    )
