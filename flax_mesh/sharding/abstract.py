"""From a model and a rule table to the sharded abstract state, and to arrays initialized directly sharded."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_mesh.axes import DEFAULT_AXES, PartitionAxis, as_tuple
from flax_mesh.errors import ShardingError
from flax_mesh.jax_compat import short_tracer_errors
from flax_mesh.sharding.annotations import annotations_of, match_annotations
from flax_mesh.sharding.optimizer import match_optimizer
from flax_mesh.sharding.rules import (
    Finding,
    PartitionRules,
    Policy,
    RuleMatch,
    Rules,
    apply_policy,
    as_rules,
    match_leaves,
)
from flax_mesh.text import array_text, path_lines
from flax_mesh.tree import named_leaves

Model = TypeVar("Model", bound=type[nnx.Module])
ATTRIBUTE = "partition_rules"  # attribute of a class that has a rule table
Make = Callable[[], Any]  # returns a model, or (model, nnx.Optimizer)


def partitioned(
    rules: str | Iterable[tuple[str, Any]],
    layers: str | Iterable[str] = (),
    axes: PartitionAxis = DEFAULT_AXES,
) -> Callable[[Model], Model]:
    """Class decorator: defines the rule table of a model, and the paths of its layer lists.

    `rules`, `axes` and `layers` are those of PartitionRules. If an instance has an attribute `axes` that is a
    PartitionAxis, its table is resolved through that one.
    """
    table = PartitionRules(rules, axes, layers if isinstance(layers, str) else tuple(layers))

    def decorate(cls: Model) -> Model:
        setattr(cls, ATTRIBUTE, table)
        return cls

    return decorate


def partition_rules(model: Any) -> PartitionRules:
    """The rule table of a model whose class is `@partitioned`, resolved through the model's own `axes`.

    Raises a ShardingError if the class has no table.
    """
    rules = getattr(model, ATTRIBUTE, None)
    if rules is None:
        raise ShardingError(
            f'{type(model).__name__} has neither a rule table nor annotations. Pass rules="fsdp" to split every '
            "array on its largest dim, pass rules=PartitionRules([...]), or decorate the class with "
            "@partitioned(rules=[...])."
        )
    axes = getattr(model, "axes", None)
    return as_rules(rules, axes if isinstance(axes, PartitionAxis) else None)


def model_layers(model: Any) -> tuple[str, ...]:
    """Paths of the layer lists and scanned stacks in the model's own table; () if it has none."""
    rules = getattr(model, ATTRIBUTE, None)
    return () if rules is None else as_rules(rules).layers


def abstract_state(
    make: Make,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    axes: PartitionAxis | None = None,
    on_mismatch: Policy = "error",
    min_size: int = 0,
    shard_optimizer_over: str | tuple[str, ...] = (),
    dropped: list[Finding] | None = None,
) -> nnx.State:
    """The state of a model, or of a model and its optimizer, as ShapeDtypeStructs with shardings.

    `make` is only traced; nothing is allocated. The result is what initialization (`init_state`, `init_model`), steps
    (`init_train_state`, `make_train_step`) and `Checkpointer.restore` take as the layout of a state.

    Args:
        make: Returns an nnx.Module, or (model, nnx.Optimizer): the state then has the parts "model" and "optimizer".
        mesh: The mesh of the shardings. It may be an AbstractMesh, with which nothing can be initialized.
        rules: A rule table, a PartitionRules, or mesh axes such as "fsdp" (see PartitionRules), for the parameters. By
            default the model's own table (`@partitioned`), or else Flax's annotations on its Variables, whose names are
            mesh axes or logical axes. Rules without `layers` use those of the model's own table.
        axes: The mesh axes of each logical axis; by default those of the table.
        on_mismatch, min_size, dropped: As in `match_partition_rules`.
        shard_optimizer_over: Mesh axes such as "dp", over which parameters are replicated, that split the optimizer's
            arrays as well: ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054).

    An optimizer array follows the parameter whose path ends its own, dim by dim if it has another shape. Others follow
    the table.

    Returns:
        An nnx.State with the paths of `nnx.state(model)`; leaves are ShapeDtypeStruct(shape, dtype, sharding=...).

    Raises:
        ShardingError: The model has no rules, leaves match no rule, or specs do not fit. Lists all leaves.

    Example:
        >>> make = lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0))
        >>> abstract = fm.abstract_state(make, fm.create_mesh(), rules="fsdp")
        >>> abstract["kernel"].get_value().sharding.spec
        P(None, 'fsdp')
    """
    made = abstract_model(make)
    match = _match(made, mesh, rules, axes, min_size, as_tuple(shard_optimizer_over))
    apply_policy(match.findings, on_mismatch, dropped)
    if dropped is not None:
        dropped += match.replicated
    return lay_out(nnx.state(made), match.specs, mesh)


def lay_out(state: nnx.State, specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh) -> nnx.State:
    """`state` as ShapeDtypeStructs; `specs` in the order of `jax.tree.leaves`."""
    leaves, treedef = jax.tree.flatten(state)
    shaped = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(treedef, shaped)


def _match(
    made: Any,
    mesh: Mesh | AbstractMesh,
    rules: Rules | None,
    axes: PartitionAxis | None,
    min_size: int,
    over: tuple[str, ...],
) -> RuleMatch:
    """Specs of all leaves of `nnx.state(made)`: the module's, or those of {"model", "optimizer"}."""
    model, own = made["model"] if isinstance(made, dict) else made, None
    if rules is None and not hasattr(model, ATTRIBUTE) and annotations_of(nnx.state(model)):
        table = PartitionRules([])
        match = match_annotations(nnx.state(model), mesh, axes or DEFAULT_AXES)
        if isinstance(made, dict):
            own = match_annotations(nnx.state(made["optimizer"]), mesh, axes or DEFAULT_AXES)
    else:
        leaves = named_leaves(nnx.state(model))
        table = as_rules(rules if rules is not None else partition_rules(model), axes, model_layers(model))
        table = table.without_single_layers(leaves, model)
        match = match_leaves(table, leaves, mesh=mesh, min_size=min_size)
    if not isinstance(made, dict):
        return match
    rest = match_optimizer(made["optimizer"], model, match.specs, table, mesh, min_size=min_size, over=over, own=own)
    return match._replace(
        specs=match.specs + rest.specs,
        findings=match.findings + rest.findings,
        replicated=match.replicated + rest.replicated,
    )


def abstract_model(make: Make) -> Any:
    """The abstract module that `make()` returns, or {"model": ..., "optimizer": ...}; nothing is allocated."""
    with short_tracer_errors():
        return nnx.eval_shape(lambda: _made(make))


def init_state(make: Make, abstract: nnx.State) -> nnx.State:
    """The state of `make()` as arrays, initialized directly with the shardings of `abstract`.

    One compilation initializes model and optimizer. No device stores more than its own shards and the temporaries that
    initialize them. Random initializers return the same bits on every mesh (JAX's threefry is partitionable).

    Raises:
        ShardingError: `abstract` is not the state of `make()`, or was made for an AbstractMesh.
    """
    _check_same(abstract, nnx.state(abstract_model(make)))
    shardings = [leaf.sharding for leaf in jax.tree.leaves(abstract)]
    if any(isinstance(s.mesh, AbstractMesh) for s in shardings):
        raise ShardingError(
            "init_state needs a mesh of devices, but the abstract state was made for an AbstractMesh. Make it with a "
            "mesh from create_mesh(...)."
        )
    with short_tracer_errors():
        leaves = jax.jit(lambda: jax.tree.leaves(nnx.state(_made(make))), out_shardings=shardings)()
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def init_model(make: Make, abstract: nnx.State) -> Any:
    """The model, or (model, optimizer), initialized directly with the shardings of `abstract`.

    Args:
        make: Returns an nnx.Module or (model, nnx.Optimizer); the function that `abstract` was made from.
        abstract: The layout, from `abstract_state(make, mesh, ...)`.

    Returns:
        What `make()` returns, with arrays that are placed on the mesh. See `init_state`, which returns the state.

    Raises:
        ShardingError: `abstract` is not the state of `make()`, or was made for an AbstractMesh.

    Example:
        >>> make = lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0))
        >>> model = fm.init_model(make, fm.abstract_state(make, fm.create_mesh(), rules="fsdp"))
        >>> model.kernel.sharding.spec, model.kernel.addressable_shards[0].data.shape
        (P(None, 'fsdp'), (64, 32))
    """
    graphdef = nnx.graphdef(abstract_model(make))
    made = nnx.merge(graphdef, init_state(make, abstract))
    return (made["model"], made["optimizer"]) if isinstance(made, dict) else made


def _made(make: Make) -> Any:
    # Flax would shard annotated variables when they are created, which needs a mesh and fails for unmapped names.
    with nnx.use_eager_sharding(False):
        made = make()
    return dict(zip(("model", "optimizer"), made, strict=True)) if isinstance(made, tuple) else made


def _check_same(abstract: nnx.State, made: nnx.State) -> None:
    want, have = dict(named_leaves(abstract)), dict(named_leaves(made))
    problems = [f"{p}: only in the abstract state" for p in want if p not in have]
    problems += [f"{p}: only in the state of make()" for p in have if p not in want]
    for path in want.keys() & have.keys():
        a, b = want[path], have[path]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"{path}: abstract {array_text(a)}, make() returns {array_text(b)}")
    if problems:
        raise ShardingError(
            "make() and the abstract state must have the same arrays; these differ:\n"
            + "\n".join(path_lines(sorted(problems)))
        )
