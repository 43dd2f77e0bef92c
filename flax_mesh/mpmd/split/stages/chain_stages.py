"""chain_stages: modules that are stages already, called in order."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.fields import check_types, is_sized
from flax_mesh.modes import optimizer_of
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.split import StagedModel
from flax_mesh.mpmd.split.stages.arguments import with_optimizer
from flax_mesh.mpmd.split.stages.split_stages import split_stages
from flax_mesh.step.loss import Batch
from flax_mesh.text import array_text, first_line, shown
from flax_mesh.tree import PyTree
from flax_mesh.user_code import check_arguments


class _Chain(nnx.Module):
    """Modules called in order: the first one with the batch, each of the others with the result of the previous one."""

    def __init__(self, stages: Sequence[nnx.Module]):
        self.stages = nnx.List(stages)

    def __call__(self, value: PyTree) -> PyTree:
        for k, stage in enumerate(self.stages):
            try:
                value = stage(value)
            except (TypeError, ValueError, AttributeError) as error:
                given = jax.tree.map(array_text, value)
                reason = first_line(error)
                raise CutError(f"stage {k}, {type(stage).__name__}, cannot take {given}: {reason}") from error
        return value


@check_types
def chain_stages(
    loss_fn: Callable[[PyTree, Batch], PyTree],
    stages: Callable[[], Sequence[nnx.Module] | tuple[Sequence[nnx.Module], nnx.Optimizer]] | Sequence[nnx.Module],
    batch: Batch,
    *,
    mesh: MpmdMesh | Mesh | AbstractMesh | None = None,
    schedule: Schedule | str | None = None,
    num_microbatches: int | None = None,
    wrt: Filter | None = None,
    check: bool = False,
) -> StagedModel:
    """A StagedModel from modules that are stages already, called in order; the low-level API beside `split_stages`.

    Args:
        loss_fn: `loss_fn(outputs, batch)`, with the outputs of the last stage, returns the same as a LossFn.
        stages: One module per stage, or a function that makes them, which is traced only. The first one is called with
            the batch, each of the others with the result of the previous one, any pytree. Every stage must have
            variables. A function may return (modules, optimizer), as in `split_stages`.
        batch, mesh, schedule, num_microbatches, wrt, check: As in `split_stages`.

    Raises:
        CutError: Names the stage that cannot be called with the result of the previous one.
        ConfigError: As in `split_stages`; also if the schedule has another number of stages.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, chain_stages
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> stages = [nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)]
        >>> loss_fn = lambda outputs, batch: ((outputs - batch) ** 2).sum()
        >>> chain_stages(loss_fn, stages, np.ones((8, 8), np.float32), mesh=mesh, schedule="gpipe", num_microbatches=4)
        StagedModel(2 stages of stages; print it to see them)
    """
    make = stages if callable(stages) else lambda: stages
    check_arguments("stages", make)
    count = _count(make)
    if not count:
        raise CutError("stages is empty; it must have one module per stage.")
    return split_stages(
        lambda model, batch: loss_fn(model(batch), batch),
        lambda: _make_chain(make),
        batch,
        layers="stages",
        mesh=mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_stages=count,
        wrt=wrt,
        check=check,
    )


def _count(make: Callable[[], PyTree]) -> int:
    """The number of modules that `make` returns; it is traced only."""
    counts: list[int] = []

    def traced() -> None:
        modules, _ = with_optimizer(make())
        if not is_sized(modules):
            raise CutError(f"stages must be modules, or a function that returns them, got {shown(modules)}.")
        counts.append(len(modules))

    jax.eval_shape(traced)
    return counts[0]


def _make_chain(make: Callable[[], PyTree]) -> PyTree:
    """The modules that `make` returns as a _Chain, with their optimizer if it returns one."""
    modules, optimizer = with_optimizer(make())
    chain = _Chain(modules)
    return chain if optimizer is None else (chain, optimizer_of(chain, optimizer, optimizer.wrt))
