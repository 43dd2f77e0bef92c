"""Why a model cannot be split into stages: the checks of split_stages, whose errors name lines of the model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_mesh.jax_compat import source_line
from flax_mesh.mpmd.split.assign import CutError
from flax_mesh.mpmd.split.trace import Forward, Layer, ModelLeaf
from flax_mesh.program.follow import all_equations
from flax_mesh.program.program import Eqn, Program, Var, flops, variables
from flax_mesh.text import at_most, count_text, listed, path_lines, paths_text, plural
from flax_mesh.tree import PyTree, is_single_layer, module_at

MOST = 12  # items of a list in a message


def _stages_text(stages: Iterable[int]) -> str:
    """`stage 1`, `stages 0, 2`."""
    numbers = sorted(stages)
    return f"{plural('stage', len(numbers))} {listed(numbers)}"


def modules_text(model: PyTree) -> str:
    """The lists and stacks of the model that `layers=` may name."""
    lists = sorted(
        "/".join(map(str, path))
        for path, node in nnx.iter_graph(model, graph=True)
        if isinstance(node, nnx.List) and len(cast("nnx.List[Any]", node))
    )
    children = _children(model)
    modules = f" It has modules at {_quoted(sorted(children))}." if children else ""
    if lists:
        return f"It has lists at {_quoted(lists)}.{modules}"
    if len(children) < 2:
        return f"It has no list: put the layers into an nnx.List.{modules}"
    return f"It has no list.{modules} Each module may be one layer; name several in the order of their calls."


def check_effects(program: Program) -> None:
    """CutError for effects that are ordered over all stages: programs of different groups run in no fixed order."""
    ordered = sorted({eqn.primitive.name for eqn in program.eqns if any("Ordered" in str(e) for e in eqn.effects)})
    if ordered:
        raise CutError(
            f"the model has ordered effects ({', '.join(ordered)}), and the stages of a pipeline run at the same time. "
            "Use ordered=False, or take the callback out of the model."
        )


def check_references(program: Program) -> None:
    """CutError for mutable references: an equation writes to them, so no value can be sent to another stage.

    A reference inside of a loop is a part of one equation.
    """
    references = [eqn for eqn in program.eqns if any(type(v.aval).__name__ == "AbstractRef" for v in eqn.outvars)]
    if references:
        raise CutError(
            "the stages of a pipeline must not use mutable references (jax.new_ref), but the model makes some:\n"
            + "\n".join(at_most([*dict.fromkeys(source_line(eqn) or eqn.primitive.name for eqn in references)]))
            + "\nUse a value and assign it anew, or an nnx.Variable, whose changes a pipeline keeps."
        )


def check_meshes(eqns: Iterable[Eqn]) -> None:
    """CutError for shardings on a mesh of devices: each stage runs on the mesh of its group."""
    texts: dict[str, str] = {}
    for eqn in all_equations(eqns):
        # jit and device_put have shardings in tuples.
        items = [
            cast("Sequence[object]", value) if isinstance(value, tuple | list) else (value,)
            for value in eqn.params.values()
        ]
        named = [x for values in items for x in values if isinstance(x, NamedSharding)]
        # A reshard has the mesh of its sharding as `concrete_mesh`, shard_map has `mesh`.
        params = [eqn.params.get(name) for name in ("concrete_mesh", "mesh")]
        meshes = [x for x in [*params, *(sharding.mesh for sharding in named)] if isinstance(x, Mesh)]
        if meshes:
            what = f"{named[0].spec}" if named else eqn.primitive.name
            texts.setdefault(source_line(eqn), f"{what} on {meshes[0].size} devices")
    if texts:
        lines = [f"{line}: {what}" for line, what in texts.items()]
        raise CutError(
            "the model constrains arrays to a mesh of devices, but every stage runs on the mesh of its own group:\n"
            + "\n".join(at_most(lines))
            + "\nPass the spec without a mesh, with_sharding_constraint(x, PartitionSpec(...)), and shard_map without "
            "mesh=: they then refer to the mesh of the stage. Where a mesh is needed, as for out_shardings of jit in a "
            "constructor, pass flax_mesh.current_mesh()."
        )


def filter_text(wrt: object) -> str:
    return str(getattr(wrt, "__name__", wrt))


def check_trained(leaves: Sequence[ModelLeaf], wrt: object) -> None:
    if not any(leaf.trained for leaf in leaves):
        raise CutError(
            f"wrt={filter_text(wrt)} must match a variable of the model; it matches none, and nothing would be trained."
        )


def check_layers(
    model: PyTree, leaves: Sequence[ModelLeaf], layers: Sequence[str], order: Sequence[Layer], num_stages: int
) -> None:
    """CutError unless the loss calls as many layers as there are stages."""
    if num_stages < 1:
        raise CutError(f"num_stages must be at least 1, got {num_stages}.")
    if len(order) >= num_stages:
        return
    name = f"layers={', '.join(layers)}"
    have = len({leaf.layer for leaf in leaves if leaf.layer is not None})
    children = [f"{layers[0]}/{child}" for child in _children(module_at(model, layers[0]))] if len(layers) == 1 else []
    if have == 0:
        problem = f"{name} has no variables, so no part of the loss belongs to its layers."
    elif not order:
        problem = f"{name} has {count_text(have, 'layer')}, of which the loss uses none."
    elif have == 1 and len(children) > 1 and is_single_layer(module_at(model, layers[0])):
        raise CutError(
            f"{name} is one layer, since it is neither a list nor a stack, whose arrays have the layers as dim 0: too "
            f"few for {num_stages} stages. If its modules are the layers, name them in the order of their calls: "
            f"layers=({_quoted(children)}). {modules_text(model)}"
        )
    else:
        if len(order) > 1:
            repair = f"Use at most {len(order)} stages, or name another list of layers."
        else:
            repair = f"Name another list of layers. {modules_text(model)}"
        raise CutError(
            f"{name} has {count_text(have, 'layer')}, of which the loss calls {len(order)}: too few for {num_stages} "
            f"stages. {repair}"
        )
    raise CutError(f"{problem} Name the list of layers that the model calls. {modules_text(model)}")


def check_states(
    forward: Forward, model: PyTree, layers: Sequence[str], ranks: Mapping[Layer, int], bounds: Sequence[int]
) -> None:
    """CutError unless every stage computes something, and has the new value of every variable that it reads."""
    problems = _unavailable_variables(forward, model, layers)
    empty = [k for k, stage in enumerate(forward.stages) if not stage.forward.eqns]
    if empty:
        problems.append(_empty_stages(forward, empty, ranks, bounds))
    if problems:
        raise CutError("\n".join(problems))


def _unavailable_variables(forward: Forward, model: PyTree, layers: Sequence[str]) -> list[str]:
    """One line per group of variables that a stage reads before a later stage has computed their new value."""
    stages, updates = forward.stages, forward.updates
    rows: list[tuple[ModelLeaf, int, tuple[int, ...], str, str]] = []
    for out, at in updates.items():
        owners = {k for k, stage in enumerate(stages) if out in stage.outputs}
        before = tuple(k for k, stage in enumerate(stages) if at in stage.inputs and k not in owners)
        if owners and before:  # without an owner it does not change
            written = _line_of(forward.program.eqns, lambda eqn, out=out: forward.program.outputs[out] in eqn.outvars)
            v = forward.program.inputs[at]
            read = _line_of(stages[before[0]].forward.eqns, lambda eqn, v=v: v in eqn.invars)
            rows.append((forward.leaves[at], min(owners), before, written, read))
    if not rows:
        return []
    lines = path_lines(
        f"{leaf.path} changes in stage {stage}{written} and is read in {_stages_text(before)}{read}"
        for leaf, stage, before, written, read in rows
    )
    outside = [leaf.path for leaf, *_ in rows if leaf.layer is None]
    others = [path for path in _lists_around(model, outside) if path not in layers]
    hint = f" Only {listed(layers)} is split: if {_quoted(others)} has the layers, name it (layers=)." if others else ""
    lines.append(
        "An earlier stage cannot see a value that a later one computes from the previous microbatch. Read and change a "
        f"variable in one layer, or move the cut (cuts=).{hint}"
    )
    return ["\n".join(lines)]


def _empty_stages(forward: Forward, empty: Sequence[int], ranks: Mapping[Layer, int], bounds: Sequence[int]) -> str:
    """Why the stages `empty` compute nothing: the equation that takes their layers together with later ones."""
    ends = {rank: bounds[k + 1] for k in empty for rank in range(bounds[k], bounds[k + 1])}
    leaf_of = dict(zip(forward.program.inputs, forward.leaves, strict=False))
    # The layers that a value depends on, for values that depend on variables alone.
    taken: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v, leaf in leaf_of.items() if leaf.layer in ranks}
    head = f"{_stages_text(empty)} {'computes' if len(empty) == 1 else 'compute'} nothing"
    for eqn in forward.program.eqns:
        inputs = variables(eqn.invars)
        among = frozenset[Var]().union(*(taken.get(v, ()) for v in inputs))
        of_layers = {ranks[layer] for v in among if (layer := leaf_of[v].layer) is not None}
        if any(rank in ends and max(of_layers) >= ends[rank] for rank in of_layers):
            paths = paths_text(sorted({leaf_of[v].path for v in among}))
            return (
                f"{head}: {eqn.primitive.name}{_at(eqn)} takes the variables of several layers at once, {paths}, and "
                "what follows depends on the last of them. Call the layers one after another, or scan a stack with "
                "nnx.scan; do not stack or index their variables and do not loop over them with fori_loop."
            )
        if all(v in taken for v in inputs):
            taken |= dict.fromkeys(eqn.outvars, among)
    return (
        f"{head}: no result depends on the layers there. Name a list of layers that the model calls, or a stack that "
        "it scans (layers=)."
    )


def imbalance(forward: Forward, model: PyTree, layers: Sequence[str], stages: Mapping[Var, int]) -> str:
    """Why one stage has more than 1.5 times the FLOPs of a mean stage, and how to repair it; or "".

    Two causes count, if they are more than half of the stage: calls of layers of earlier stages, and equations that
    depend on no layer. A heavy layer or head does not cause a warning, because the cut has weighed it. `stages` has
    the stage of each input that belongs to a layer.
    """
    computed = _work(forward, stages)
    total = [sum(flops(eqn) for eqn in stage.forward.eqns) for stage in forward.stages]
    limit = 1.5 * sum(total) / len(total)
    k = total.index(max(total))
    again, outside = 0, 0
    paths: set[str] = set()
    for eqn in forward.stages[k].forward.eqns:
        stage, read = computed[id(eqn)]
        again += flops(eqn) if stage is not None and stage < k else 0
        outside += flops(eqn) if stage is None else 0
        paths |= read if stage is None else set()
    if total[k] <= limit or 2 * max(again, outside) <= total[k]:
        return ""
    share = [f"{x / sum(total):.0%}" for x in total]
    text = f"the stages have {listed(share)} of the FLOPs: stage {k} has more than 1.5 times the mean."
    if again > outside:
        return (
            f"{text} Most of it are calls of layers of earlier stages: a layer that is called after a later one runs "
            "in the stage of the later one. If the model calls the whole list several times, list the layers once per "
            "call, as in nnx.List([*layers, *layers]); or move the cut (cuts=, in a recipe pipeline.cut)."
        )
    others = _lists_around(model, sorted(paths))
    names = f", such as layers=({_quoted([*layers, *others])})" if others else ""
    return (
        f"{text} Most of it depends on none of {_quoted(layers)}, so it runs where it is first used. Name its layers "
        f"as well{names}; or move the cut (cuts=, in a recipe pipeline.cut)."
    )


def _work(forward: Forward, of_inputs: Mapping[Var, int]) -> dict[int, tuple[int | None, set[str]]]:
    """Maps the id of each equation to (stage of its layer, if any; paths of the variables that it reads).

    An equation is a part of the layer whose variables it reads, or else of the layers that computed its inputs. If it
    combines those with a variable of no layer, as a head does, it is a part of the stage that runs it, and the number
    here is larger than in any stage.
    """
    stages = dict(of_inputs)
    # Of values that depend on variables alone.
    paths = {v: {leaf.path} for v, leaf in zip(forward.program.inputs, forward.leaves, strict=False)}
    work: dict[int, tuple[int | None, set[str]]] = {}
    for eqn in forward.program.eqns:
        inputs = variables(eqn.invars)
        read = {path for v in inputs for path in paths.get(v, ())}
        of_layers = [stages[v] for v in inputs if v in stages and v in paths]
        stage = max(of_layers or [stages[v] for v in inputs if v in stages], default=None)
        if stage is not None and not of_layers and not paths.keys().isdisjoint(inputs):
            stage = len(forward.stages)
        work[id(eqn)] = stage, read
        stages |= dict.fromkeys(eqn.outvars, stage) if stage is not None else {}
        paths |= dict.fromkeys(eqn.outvars, read) if inputs and all(v in paths for v in inputs) else {}
    return work


def _line_of(eqns: Iterable[Eqn], has: Callable[[Eqn], bool]) -> str:
    return next((_at(eqn) for eqn in eqns if has(eqn)), "")


def _at(eqn: Eqn) -> str:
    """` (model.py:12)`, or nothing if the line is unknown."""
    line = source_line(eqn)
    return f" ({line})" if line else ""


def _children(module: PyTree) -> list[str]:
    """Names of the attributes, or of the entries of an nnx.Dict, that are modules but no lists."""
    return [
        name
        for name, value in cast("Mapping[str, object]", vars(module)).items()
        if isinstance(value, nnx.Pytree) and not isinstance(value, nnx.List | nnx.Rngs | nnx.RngStream)
    ]


def _lists_around(model: PyTree, paths: Sequence[str]) -> list[str]:
    """The outermost lists of the model that contain one of `paths`."""
    lists = ["/".join(map(str, path)) for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, nnx.List)]
    around = (min((x for x in lists if path.startswith(f"{x}/")), key=len, default=None) for path in paths)
    return list(dict.fromkeys(path for path in around if path is not None))


def _quoted(items: Sequence[str]) -> str:
    """`'a', 'b'`, or the first of them and their number."""
    rest = f", and {len(items) - MOST} more" if len(items) > MOST else ""
    return listed(map(repr, items[:MOST])) + rest
