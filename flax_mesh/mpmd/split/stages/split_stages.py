"""split_stages: any NNX model, split into the stages of a pipeline by its layers."""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AbstractMesh, Mesh

from flax_mesh.fields import check_types
from flax_mesh.mesh.context import current_mesh, without_mesh
from flax_mesh.mpmd.mesh import MpmdMesh
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.split.assign import CutError, label
from flax_mesh.mpmd.split.problems import (
    check_effects,
    check_layers,
    check_meshes,
    check_references,
    check_states,
    check_trained,
)
from flax_mesh.mpmd.split.split import StagedModel, input_ranks, stage_of_rank
from flax_mesh.mpmd.split.stages.arguments import (
    abstract_model,
    calls_of_shared,
    check_order,
    default_layers,
    layout_of,
    schedule_and_sizes,
    trained_filter,
)
from flax_mesh.mpmd.split.stages.bounds import boundary_bytes, bounds_of, copies_beside, layer_order, rank_costs
from flax_mesh.mpmd.split.trace import Layer, open_forward, places_of, split_leaves
from flax_mesh.step.batch import microbatch_shapes, shapes_of
from flax_mesh.step.loss import Batch, LossFn
from flax_mesh.tree import PyTree


@check_types
def split_stages(
    loss_fn: LossFn,
    model: PyTree,
    batch: Batch,
    *,
    mesh: MpmdMesh | Mesh | AbstractMesh | None = None,
    schedule: Schedule | str | None = None,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    layers: str | Iterable[str] | None = None,
    cuts: Sequence[int] | None = None,
    balance: Literal["flops", "count"] = "flops",
    wrt: Filter | None = None,
    attention: Literal["auto", "kernel", "blockwise", "as_written"] | tuple[str, ...] = "auto",
    check: bool = False,
) -> StagedModel:
    """Split the forward pass of `loss_fn(model, batch)` into the stages of a pipeline, by the layers of the model.

    The loss function is traced once, and its trace is split; the model itself is not changed. Layers are ordered as
    the model calls them, and a stage is a range of them.

    Args:
        loss_fn: A LossFn: `loss_fn(model, batch)` returns (loss_sum, weight), or another of its forms.
        model: An nnx.Module or another nnx.Pytree, abstract or not, or a function that makes one. A function may
            return (model, optimizer), as for `abstract_state`; `Pipeline` then needs no optimizer.
        batch: A batch of `num_microbatches` equal microbatches, as arrays or ShapeDtypeStructs.
        mesh: The groups of the pipeline as an MpmdMesh; or, if a Pipeline is not wanted, the mesh of one group, by
            default the mesh in context. Constraints in the model see the mesh of a group.
        schedule: A name of `schedules.SCHEDULE_NAMES` for the groups of `mesh`, or a Schedule. It determines the number
            of stages.
        num_microbatches: Microbatches of a batch. Default: the number of `schedule`, and 1 without a schedule.
        num_stages: The number of stages, if no schedule is given.
        layers: Path of the `nnx.List` or scanned stack to split, "layers" or "encoder/layers", or several paths. Any
            other module is one layer, as in ("inc", "down", "up", "out"). By default the paths of the model's own table
            (`@partitioned`), or else "layers" if that is a list.
        cuts: Position of the first layer of every stage but the first. By default the most expensive stage is made as
            cheap as possible.
        balance: The measure of a stage's cost: its "flops", embedding and head included, or the "count" of its layers.
            With "flops", each byte that it receives beyond twice the smallest possible boundary counts as 1000 FLOPs.
        wrt: Filter of the variables that are trained. Default: the filter of the optimizer, or nnx.Param without
            one.
        attention: How the attention of the loss function is computed, as in `make_train_step`.
        check: Run the stages on two microbatches and compare all results with the model's, on one device; see
            `StagedModel.check`.

    Returns:
        A StagedModel, for `Pipeline`. Its text lists stages, bytes of state, share of FLOPs, and boundary activations.

    Raises:
        CutError: The model has no such layers, has fewer layers than stages, or cannot be split there; or `check` has
            found a result that differs.
        ConfigError: Mesh, schedule, batch and numbers do not fit each other.

    Example:
        >>> from flax_mesh.mpmd import MpmdMesh, split_stages
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        ...     def __call__(self, x):
        ...         for layer in self.layers:
        ...             x = nnx.relu(layer(x))
        ...         return x
        >>> loss_fn = lambda model, x: ((model(x) ** 2).sum(), x.size)
        >>> mesh = MpmdMesh(fm.create_mesh((2, 4), ("pp", "fsdp")), "pp")
        >>> batch = np.ones((8, 8), np.float32)
        >>> split_stages(loss_fn, Net(nnx.Rngs(0)), batch, mesh=mesh, schedule="1f1b", num_microbatches=4).num_stages
        2
    """
    groups = mesh if isinstance(mesh, MpmdMesh) else None
    schedule, num_microbatches, num_stages = schedule_and_sizes(groups, schedule, num_microbatches, num_stages)
    check_order(loss_fn, model)
    around = mesh.unstack[0] if isinstance(mesh, MpmdMesh) else mesh or current_mesh()
    around = around.abstract_mesh if isinstance(around, Mesh) else around
    with without_mesh():
        make, jaxpr, split_model, filters = abstract_model(model, around)
        wrt = trained_filter(wrt, filters)
        check_meshes(jaxpr.eqns)
        abstract = nnx.merge(*split_model)
        layers = default_layers(abstract) if layers is None else (layers,) if isinstance(layers, str) else tuple(layers)
        if not layers:
            raise CutError("layers is empty; name the list or the stack to cut, such as layers='layers'.")
        specs, axes = layout_of(make, abstract, around)
        whole = StagedModel(
            loss_fn=loss_fn,
            make=make,
            split_model=split_model,
            wrt=wrt,
            layers=layers,
            mesh=around,
            num_stages=num_stages,
            example=shapes_of(batch) if num_microbatches is None else microbatch_shapes(batch, num_microbatches),
            groups=groups,
            schedule=schedule,
            specs=specs,
            axes=axes,
            make_state=model if filters else None,
            attention=attention,
            ranks={("", call): call for call in range(calls_of_shared(abstract, layers))},
        )
        staged = _divided(whole, cuts, balance)
        if staged.imbalance:
            warnings.warn(staged.imbalance, stacklevel=3)
        if check:
            staged.check(batch)
        return staged


def _divided(whole: StagedModel, cuts: Sequence[int] | None, balance: str) -> StagedModel:
    """The model divided into stages. `whole` has no bounds; its ranks are the calls of a layer listed several times."""
    forward, places = whole.traced(whole.example), places_of(whole.model, whole.layers)
    single = split_leaves(forward, places)
    opened = open_forward(forward, single)
    check_effects(opened.program)
    check_references(opened.program)
    check_meshes(opened.program.eqns)
    check_trained(single, whole.wrt)
    inputs = opened.program.inputs
    layer_of = {v: leaf.layer for v, leaf in zip(inputs, single, strict=False) if leaf.layer is not None}
    order = list(whole.ranks) or layer_order(opened.program, layer_of, inputs[len(single) :])
    check_layers(whole.model, single, whole.layers, order, whole.num_stages)
    ranks = {layer: at for at, layer in enumerate(order)}

    def staged_with(copies: Mapping[str, Layer]) -> StagedModel:
        labels = label(opened.program, input_ranks(opened.program, single, ranks, copies), len(order))
        costs = rank_costs(opened.program, labels, len(order))
        sizes = functools.partial(boundary_bytes, opened, labels, len(order))
        bounds, remark = bounds_of(costs, whole.num_stages, cuts, balance, sizes)
        staged = replace(
            whole,
            ranks=ranks,
            bounds=bounds,
            costs=tuple(costs),
            leaves=split_leaves(forward, places, {layer: stage_of_rank(bounds, at) for layer, at in ranks.items()}),
            copies=copies,
            needs_full_remat=opened.opened_remat,
            remark=remark,
        )
        check_states(staged.cut(staged.example), staged.model, staged.layers, ranks, bounds)
        return staged

    copies = copies_beside(opened.program, single, ranks)
    try:
        return staged_with(copies)
    except CutError:  # a later stage computes a new value of a copy, for example
        if not copies:
            raise
        return staged_with({})
