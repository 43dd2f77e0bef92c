"""Assigns the equations of a traced forward pass to pipeline stages.

1. `label`: the parameters of the layer that is called r-th have rank r. An equation has the largest rank among its
   dependencies, so it never depends on an equation of a later rank. Equations without a layer have a negative label.
2. `balance`: stages are contiguous ranges of ranks.
3. `settle`: equations without a layer are assigned to the first stage that uses them, except cheap ones that depend
   only on the batch or only on parameters. Every stage that uses those computes its own copy, so they are not sent.
4. `stage_programs`: what a stage receives from earlier stages is a minimum cut in bytes, see `min_cut.py`.

Example: four layers w0..w3 in two stages, with an embedding e that is also the output projection.

    equation                         depends on                 label       stage
    mask = tokens > 0                tokens                     DATA        a copy in 0 and in 1
    x0 = e[tokens]                   tokens, e                  OUTSIDE     0, the first that uses it
    x1 = x0 + mask * tanh(x0 @ w0)   tokens, e, w0              0           0
    x2 = x1 + mask * tanh(x1 @ w1)   tokens, e, w0, w1          1           0
    x3 = x2 + mask * tanh(x2 @ w2)   tokens, e, w0, w1, w2      2           1
    x4 = x3 + mask * tanh(x3 @ w3)   tokens, e, w0, ..., w3     3           1
    t = bfloat16(e)                  e                          VARIABLES   a copy in 1
    loss = sum(x4 @ t.T)             tokens, e, w0, ..., w3     3           1

    stage 0: mask x0 x1 x2  -- x2 -->  stage 1: mask x3 x4 t loss
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jax.extend import core as jex

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.split.jaxpr import Eqn, Program, Var, bodies, flops, is_var, num_bytes, variables
from flax_mesh.mpmd.split.min_cut import minimum_cut, recomputed

# Labels of equations that depend on no layer: on no input, only on variables of the model, only on the batch, on both.
CONSTANT, VARIABLES, DATA, OUTSIDE = -4, -3, -2, -1
# Primitives that are never repeated in a second stage to avoid a transfer.
EXPENSIVE = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "checkpoint", "sort", "shard_map", "top_k"}
EXPENSIVE |= {"ragged_dot_general", "triangular_solve", "cholesky", "lu", "geqrf", "householder_product", "eigh", "svd"}
# Nor are those with a custom_vjp rule: it need not be linear, so it must run once, on the sum of the gradients of all
# stages. The rules of custom_jvp are linear.
RUN_ONCE = EXPENSIVE | {"custom_vjp_call"}

mark_p = jex.Primitive("layer_mark")  # identity on the outputs of layer call number `call`
mark_p.multiple_results = True
mark_p.def_abstract_eval(lambda *avals, call: list(avals))
mark_p.def_impl(lambda *values, call: list(values))


class CutError(ConfigError):
    """The model cannot be split into stages as requested."""


class StageProgram(NamedTuple):
    """One stage of a traced loss function: the forward program F and, once differentiated, the backward programs B, W.

    `arguments` are the groups of inputs of these programs: for F, the values of `inputs` and `received`; for B and W
    also the cotangents, the residuals that F stores, and the values that B passes on to W. Each program takes only the
    arguments that it uses.
    """

    inputs: tuple[int, ...]  # positions in the inputs of the loss function's program
    received: tuple[Var, ...]  # activations from earlier stages
    sent: tuple[Var, ...]  # activations for later stages
    outputs: tuple[int, ...]  # positions in the outputs of the loss function's program
    arguments: tuple[tuple[Var, ...], ...]
    forward: Program  # returns sent, outputs, residuals
    backward: Program | None = None  # returns gradients of floats_in, gradients of trained unless W does, inputs of W
    weights: Program | None = None  # returns gradients of trained
    trained: tuple[int, ...] = ()  # the `inputs` that are differentiated
    floats_in: tuple[int, ...] = ()  # indices into `received`: the ones that have a gradient
    floats_out: tuple[int, ...] = ()  # indices into `sent`: the ones that have a cotangent

    def call(self, program: Program, *values: Sequence[Any]) -> list[Any]:
        """Evaluate F, B or W. `values` has one sequence per group of `arguments`; trailing groups may be omitted."""
        known: dict[Var, Any] = {}
        for names, given in zip(self.arguments, values, strict=False):
            known |= zip(names, given, strict=True)
        return program.call(*(known[v] for v in program.inputs))


def layer_order(program: Program, layer_of: Mapping[Var, Any], data: Iterable[Var]) -> list[Any]:
    """The layers, as sortable keys, in the order of their first use: the first equation on a layer and the batch.

    Equations on parameters alone are not a use, because a loss may compute the norm of all weights before it calls the
    model. Layers that are never combined with the batch come last.
    """
    mixed = set(data)
    layers: dict[Var, frozenset[Any]] = {v: frozenset([layer]) for v, layer in layer_of.items()}
    order: dict[Any, None] = {}
    for eqn in program.eqns:
        inputs = variables(eqn.invars)
        among = frozenset().union(*(layers.get(v, ()) for v in inputs))
        if mixed.isdisjoint(inputs):
            layers |= dict.fromkeys(eqn.outvars, among)
        else:
            order |= dict.fromkeys(sorted(among))
            mixed |= set(eqn.outvars)
    used = {layers[v] for eqn in program.eqns for v in eqn.invars if is_var(v) and v in layer_of}
    return list(order | dict.fromkeys(sorted(frozenset().union(*used))))


def label(program: Program, rank_of: Mapping[Var, int], num_ranks: int) -> list[int]:
    """The rank of every equation, or its negative label. `rank_of` contains the rank or label of every input."""
    known, labels = dict(rank_of), []
    for eqn in program.eqns:
        among = {known.get(v, CONSTANT) for v in variables(eqn.invars)}
        rank = OUTSIDE if max(among, default=CONSTANT) == DATA and VARIABLES in among else max(among, default=CONSTANT)
        # A mark is the last equation of its call: everything that uses its outputs belongs to the next call.
        if eqn.primitive is mark_p:
            rank = max(rank, eqn.params["call"])
        labels.append(rank)
        after = min(rank + 1, num_ranks - 1) if eqn.primitive is mark_p else rank
        known |= dict.fromkeys(eqn.outvars, after)
    return _label_before_marks(program, labels)


def _label_before_marks(program: Program, labels: Sequence[int]) -> list[int]:
    """`labels` where an OUTSIDE equation that leads to marks has the number of the first of these calls.

    Parameters of a layer that is called several times have no rank, so the equations of its first call are OUTSIDE.
    """
    found, feeds = list(labels), {}
    for i in reversed(range(len(found))):
        eqn = program.eqns[i]
        calls = [feeds[v] for v in eqn.outvars if v in feeds]
        call = eqn.params["call"] if eqn.primitive is mark_p else min(calls, default=None)
        if call is None:
            continue
        found[i] = call if found[i] == OUTSIDE else found[i]
        feeds |= {v: min(feeds.get(v, call), call) for v in variables(eqn.invars)}
    return found


def costs(program: Program, labels: Sequence[int], num_ranks: int) -> list[int]:
    """FLOPs of the forward pass per rank. The first rank includes equations before the layers, the last those after."""
    found = [0] * num_ranks
    for eqn, rank in zip(program.eqns, labels, strict=True):
        found[max(rank, 0)] += flops(eqn)
    return found


def balance(weights: Sequence[int], num_stages: int) -> list[int]:
    """Boundaries [0, ..., len(weights)] of `num_stages` non-empty ranges that minimize the weight of the heaviest one.

    Exact, by dynamic programming over (stages, layers): best[end] is the minimum for the first `stage` stages when they
    contain the first `end` layers.
    """
    total = [*accumulate(weights, initial=0)]
    best = {0: (0, [0])}
    for stage in range(1, num_stages + 1):
        # Each later stage needs at least one layer, and the last stage must end at the last layer.
        ends = range(stage, len(weights) - (num_stages - stage) + 1) if stage < num_stages else [len(weights)]
        best = {
            end: min(
                (max(heaviest, total[end] - total[start]), [*bounds, end])
                for start, (heaviest, bounds) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[len(weights)][1]


def drop_marks(program: Program, labels: Sequence[int]) -> tuple[Program, list[int]]:
    alias: dict[Any, Any] = {}
    eqns, kept = [], []
    for eqn, rank in zip(program.eqns, labels, strict=True):
        eqn = eqn.replace(invars=[_aliased(alias, atom) for atom in eqn.invars])
        if eqn.primitive is mark_p:
            alias |= dict(zip(eqn.outvars, eqn.invars, strict=True))
        else:
            eqns.append(eqn)
            kept.append(rank)
    outputs = tuple(_aliased(alias, atom) for atom in program.outputs)
    return program._replace(eqns=tuple(eqns), outputs=outputs), kept


def settle(
    program: Program, stages: Sequence[int], num_stages: int, updates: Mapping[int, int]
) -> tuple[list[int], list[int | None]]:
    """Assign the equations without a layer. Returns (stage of every equation, stage that returns every output).

    OUTSIDE equations are assigned to the first stage that uses them. So are equations with a lower label that are
    expensive, have a custom_vjp rule or have effects. Cheap ones, such as a mask or the cast of a tied weight, keep
    their label: every stage that needs them computes them. Output 0, the loss, is returned by the last stage. The stage
    of an output that is an input or a literal is None. `updates` maps positions of outputs to the inputs whose new
    values they are.
    """
    targets = _output_stages(program, num_stages, _update_stages(program, stages, num_stages, updates))
    settled, _ = _first_uses(program, stages, num_stages, targets)
    stage_of = {v: stage for eqn, stage in zip(program.eqns, settled, strict=True) for v in eqn.outvars}
    return settled, [
        None if target is None else target if stage_of.get(atom, CONSTANT) < 0 or at == 0 else stage_of[atom]
        for at, (atom, target) in enumerate(zip(program.outputs, targets, strict=True))
    ]


def stage_programs(
    program: Program,
    stages: Sequence[int],
    output_stages: Sequence[int | None],
    num_stages: int,
    is_data: Sequence[bool],
) -> tuple[StageProgram, ...]:
    """The stages of a program, from the results of `settle`. `is_data` marks the inputs that belong to the batch."""
    producer = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    position = {v: i for i, v in enumerate(program.inputs)}
    outputs = [tuple(at for at, owner in enumerate(output_stages) if owner == stage) for stage in range(num_stages)]
    received: list[tuple[Var, ...]] = []
    indices: list[list[int]] = []  # equations of every stage
    sent: list[dict[Var, None]] = [{} for _ in range(num_stages)]
    for stage in range(num_stages):
        own = [i for i, s in enumerate(stages) if s == stage]
        required = [v for i in own for v in program.eqns[i].invars] + [program.outputs[at] for at in outputs[stage]]
        copies, crossing = _copies_and_crossing(program, required, stages, stage, producer, position)
        activations, repeated = _stage_boundary(program, crossing, stages, producer, position, is_data)
        received.append(tuple(activations))
        indices.append(sorted({*own, *copies, *repeated}))
        for v in activations:
            sent[stages[producer[v]]][v] = None
    found = []
    for stage in range(num_stages):
        eqns = tuple(program.eqns[i] for i in indices[stage])
        results = [program.outputs[at] for at in outputs[stage]]
        used = {*variables(atom for eqn in eqns for atom in eqn.invars), *variables(results)}
        inputs = tuple(sorted(position[v] for v in used if v in position))
        arguments = tuple(program.inputs[at] for at in inputs), received[stage]
        forward = Program(eqns, (*arguments[0], *arguments[1]), (*sent[stage], *results), program.consts)
        found.append(StageProgram(inputs, received[stage], tuple(sent[stage]), outputs[stage], arguments, forward))
    return tuple(found)


def _update_stages(
    program: Program, stages: Sequence[int], num_stages: int, updates: Mapping[int, int]
) -> dict[int, int | None]:
    """The stage that updates every variable that changes, such as a batch statistic.

    It is the first stage in which anything else reads the old value, so that one stage both reads and stores it. A
    variable that nothing else reads is updated in the last stage that its new value depends on, or that updates a
    variable that its new value depends on.
    """
    found: dict[int, int | None] = dict.fromkeys(updates)
    while True:  # until nothing changes: the new value of one variable may read another variable
        settled, use = _first_uses(program, stages, num_stages, _output_stages(program, num_stages, found))
        read = {out: use.get(program.inputs[at]) for out, at in updates.items() if found[out] is None}
        found |= read
        if not any(stage is not None for stage in read.values()):
            break
    stage_of = {
        v: settled[i]
        for i, eqn in enumerate(program.eqns)
        if stages[i] >= 0 or any(out in use for out in eqn.outvars)
        for v in eqn.outvars
    }
    producer = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    update_of = {program.inputs[at]: out for out, at in updates.items()}
    unread = [out for out, stage in found.items() if stage is None]
    before, found = None, found | dict.fromkeys(unread, 0)
    while found != before:  # stages only increase
        before = dict(found)
        for out in unread:
            todo, seen = [program.outputs[out]], set()
            while todo:
                v = todo.pop()
                if not is_var(v) or v in seen:
                    continue
                seen.add(v)
                if v in stage_of or v in update_of:
                    stage = stage_of[v] if v in stage_of else found[update_of[v]]
                    found[out] = max(found[out] or 0, stage or 0)
                elif v in producer:
                    todo += producer[v].invars
    return found


def _output_stages(program: Program, num_stages: int, known: Mapping[int, int | None]) -> list[int | None]:
    """The stage that returns every output: `known`, else the last. None without an equation, except for the loss."""
    computed = {v for eqn in program.eqns for v in eqn.outvars}
    return [
        known.get(at, num_stages - 1) if at == 0 or (is_var(atom) and atom in computed) else None
        for at, atom in enumerate(program.outputs)
    ]


def _first_uses(
    program: Program, stages: Sequence[int], num_stages: int, targets: Sequence[int | None]
) -> tuple[list[int], dict[Var, int]]:
    """Returns (stage of every equation, first stage that uses every variable).

    OUTSIDE equations, and expensive equations with a lower label, are moved to the first stage that uses them. One pass
    in reverse order is enough, because all uses of a variable come after the equation that computes it.
    """
    settled, use = list(stages), {}
    for atom, target in zip(program.outputs, targets, strict=True):
        if is_var(atom) and target is not None:
            use[atom] = min(use.get(atom, num_stages), target)
    for i in reversed(range(len(settled))):
        eqn = program.eqns[i]
        first = min((use[v] for v in eqn.outvars if v in use), default=None)
        movable = settled[i] == OUTSIDE or (settled[i] < OUTSIDE and (is_expensive(eqn) or eqn.effects))
        if movable:
            settled[i] = num_stages - 1 if first is None else first
        here = first if movable else settled[i] if settled[i] >= 0 else first
        if here is not None:
            for v in variables(eqn.invars):
                use[v] = min(use.get(v, num_stages), here)
    return settled, use


def _copies_and_crossing(program, required, stages, stage, producer, position) -> tuple[set[int], list[Var]]:
    """The cheap equations of which a stage runs its own copy, and the values of earlier stages that it uses."""
    copies: set[int] = set()
    crossing: list[Var] = []
    seen: set[Var] = set()
    todo = list(required)
    while todo:
        v = todo.pop()
        if not is_var(v) or v in seen or v in position or v not in producer:
            continue
        seen.add(v)
        i = producer[v]
        if stages[i] < OUTSIDE:
            copies.add(i)
            todo.extend(program.eqns[i].invars)
        elif stages[i] != stage:
            if stages[i] > stage:
                raise CutError(
                    f"{v.aval} is computed in stage {stages[i]} but used in stage {stage}, which runs before it."
                )
            crossing.append(v)
    return copies, crossing


def _stage_boundary(program, required, stages, producer, position, is_data) -> tuple[list[Var], set[int]]:
    """The fewest bytes to receive, and the equations to run again to compute the `required` values from them.

    The stage repeats only cheap equations without effects and custom_vjp rules. It does not repeat equations on
    parameters, because the parameters of an earlier stage would then have to be sent as well.
    """

    def parents(v: Var) -> list[Var] | None:
        if v in position:
            return [] if is_data[position[v]] else None
        eqn = program.eqns[producer[v]]
        if is_expensive(eqn) or eqn.effects:
            return None
        return [u for u in variables(eqn.invars) if u not in program.consts]

    def weight(v: Var) -> int | None:
        return num_bytes(v.aval) if v in producer and stages[producer[v]] >= 0 else None

    chosen = minimum_cut(required, parents, weight)
    received = [v for i in sorted({producer[v] for v in chosen}) for v in program.eqns[i].outvars if v in chosen]
    return received, {producer[v] for v in recomputed(required, chosen, parents) if v in producer}


def is_expensive(eqn: Eqn, names: Collection[str] = RUN_ONCE) -> bool:
    """Whether the primitive of the equation, or of one in its body, is one of `names`."""
    return eqn.primitive.name in names or any(is_expensive(e, names) for body in bodies(eqn) for e in body.eqns)


def _aliased(alias: Mapping[Any, Any], atom: Any) -> Any:
    return alias.get(atom, atom) if is_var(atom) else atom
