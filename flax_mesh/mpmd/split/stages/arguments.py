"""The arguments of split_stages: what the user left out is derived, and mistakes are reported."""

import inspect
from collections.abc import Sequence

from flax import nnx
from flax.nnx.filterlib import Filter
from jax.extend import core as jex
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Schedule, make_schedule
from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.problems import filter_text, modules_text
from flax_mesh.mpmd.split.split import specs_of
from flax_mesh.program.program import has_explicit_axes
from flax_mesh.sharding.abstract import Make, Split, is_with_optimizer, model_layers, trace_split
from flax_mesh.tree import PyTree, module_at


def schedule_and_sizes(
    groups: MpmdMesh | None, schedule: Schedule | str | None, num_microbatches: int | None, num_stages: int | None
) -> tuple[Schedule | None, int | None, int]:
    """Schedule, number of microbatches (None: the batch is one microbatch of any structure) and number of stages."""
    if isinstance(schedule, str):
        if groups is None or num_microbatches is None:
            raise ConfigError(
                f"schedule={schedule!r} needs the number of groups and of microbatches: pass mesh=MpmdMesh(...) and "
                "num_microbatches=, or a schedule from make_schedule(...)"
            )
        schedule = make_schedule(schedule, num_groups=groups.mpmd_dim, num_microbatches=num_microbatches)
    if schedule is None:
        if num_stages is None:
            raise ConfigError("the number of stages is unknown: pass schedule= with mesh=, or num_stages=")
        return None, num_microbatches, num_stages
    problems = [] if groups is None else schedule.group_problems(groups.mpmd_dim, groups.mpmd_axis_name)
    if num_microbatches not in (None, schedule.num_microbatches):
        problems.append(
            f"num_microbatches={num_microbatches} differs from the {schedule.num_microbatches} of schedule "
            f"{schedule.name}; leave one of them out"
        )
    if num_stages not in (None, schedule.num_stages):
        problems.append(
            f"num_stages={num_stages} differs from the {schedule.num_stages} of schedule {schedule.name}; leave one of "
            "them out"
        )
    if problems:
        raise ConfigError(problems)
    return schedule, schedule.num_microbatches, schedule.num_stages


def check_order(loss_fn: object, model: object) -> None:
    """ConfigError for arguments in another order than split_stages(loss_fn, model, batch)."""
    given = f"got {_kind_text(loss_fn)} and {_kind_text(model)}"
    if isinstance(loss_fn, nnx.Pytree) or not callable(loss_fn):
        raise ConfigError(f"split_stages takes loss_fn, a function, before the model: {given}. Exchange them.")
    if isinstance(model, nnx.Pytree):
        return
    if not callable(model):
        raise ConfigError(f"model must be an nnx.Module, or a function without arguments that makes one: {given}.")
    try:
        inspect.signature(model).bind()
    except TypeError:
        raise ConfigError(
            f"split_stages takes loss_fn before the model, which must be an nnx.Module, or a function without "
            f"arguments that makes one: {given}, which requires arguments. Exchange them, or pass a lambda."
        ) from None
    except ValueError:  # a callable without a signature
        return


def _kind_text(x: object) -> str:
    return f"the function {x.__name__}" if inspect.isroutine(x) else f"an object of type {type(x).__name__}"


def abstract_model(model: PyTree, mesh: AbstractMesh | None) -> tuple[Make, jex.ClosedJaxpr, Split, list[Filter]]:
    """From a module or a function that makes one: (such a function, its jaxpr, graph definition and abstract state).

    The last result contains the filters of the optimizers that the function has returned with the model.
    """
    filters: list[Filter] = []
    if isinstance(model, nnx.Pytree):
        graphdef, state = nnx.split(model, graph=True)

        def copied() -> nnx.Pytree:
            return nnx.merge(graphdef, state, copy=True)

        return copied, *trace_split(copied, mesh), filters

    def make() -> nnx.Pytree:
        module, optimizer = with_optimizer(model())
        filters.extend([] if optimizer is None else [optimizer.wrt])
        if not isinstance(module, nnx.Pytree):
            raise ConfigError(f"the function that makes the model must return an nnx.Module, got {_kind_text(module)}.")
        return module

    return make, *trace_split(make, mesh), filters


def with_optimizer(result: PyTree) -> tuple[PyTree, nnx.Optimizer | None]:
    """(model, optimizer) from the result of a function; the optimizer is None if it returned a model only."""
    return result if is_with_optimizer(result) else (result, None)


def trained_filter(wrt: Filter | None, filters: Sequence[Filter]) -> Filter:
    """The filter of the variables that are trained. ConfigError if it is given twice, and the two differ."""
    if not filters:
        return nnx.Param if wrt is None else wrt
    if wrt not in (None, filters[0]):
        raise ConfigError(
            f"wrt={filter_text(wrt)} must be that of the optimizer, wrt={filter_text(filters[0])}; leave it out"
        )
    return filters[0]


def layout_of(make: Make, model: PyTree, mesh: AbstractMesh | None) -> tuple[tuple[PartitionSpec, ...], PartitionAxis]:
    """The layout with which the model is traced on Explicit axes: (specs of its leaves, mesh axes of the batch).

    It follows the model's table or annotations. A Pipeline with other rules traces again, and reports names and
    dims that do not fit. A model without rules is replicated.
    """
    axes = getattr(model, "axes", DEFAULT_AXES)
    axes = axes if isinstance(axes, PartitionAxis) else DEFAULT_AXES
    return (specs_of(make, model, mesh) if mesh is not None and has_explicit_axes(mesh) else ()), axes


def calls_of_shared(model: PyTree, layers: Sequence[str]) -> int:
    """Length of the list if one layer object appears in it several times; else 0."""
    for path in layers:
        try:
            stack = module_at(model, path)
        except (AttributeError, IndexError, TypeError):
            raise CutError(
                f"layers={path!r}: {type(model).__name__} has nothing there. {modules_text(model)}"
            ) from None
        modules = [id(item) for item in stack if isinstance(item, nnx.Pytree)] if isinstance(stack, nnx.List) else []
        if len(set(modules)) < len(modules):
            if len(layers) > 1:
                raise CutError(
                    f"layers={path!r} has one layer several times; it must be the only list, not one of {layers}."
                )
            return len(modules)
    return 0


def default_layers(model: PyTree) -> tuple[str, ...]:
    """Default of `layers=`: the layers of the model's table, or else the list `layers`."""
    if named := model_layers(model):
        return named
    attribute = getattr(model, "layers", None)
    if isinstance(attribute, nnx.List) and any(isinstance(item, nnx.Pytree) for item in attribute):
        return ("layers",)
    # A module `layers` may be a scanned stack or anything else: it does not show which dim counts the layers.
    what = "its `layers` is not a list" if attribute is not None else "it has no list `layers`"
    raise CutError(
        f"the layers of {type(model).__name__} must be named: it has no table that names them, and {what}. Name "
        "the list or the scanned stack to split, by split_stages(..., layers=...) or @partitioned(..., layers=...) on "
        f"the class. {modules_text(model)}"
    )
