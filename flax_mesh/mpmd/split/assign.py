"""The cut of a forward pass into pipeline stages, by forward labels.

A parameter of the layer called r-th carries rank r; an equation carries the largest rank among what it depends on, so
that nothing can flow backwards. Stages are ranges of ranks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from jax.extend import core as jex

from flax_mesh.errors import ConfigError
from flax_mesh.mpmd.split.jaxpr import Eqn, Program, Var, bodies, flops, is_var, num_bytes, variables
from flax_mesh.mpmd.split.min_cut import cheapest_cut, to_make

# Labels of what depends on no layer: on nothing at all, on variables of the model alone, on the batch alone, on both.
CONSTANT, VARIABLES, DATA, OUTSIDE = -4, -3, -2, -1
# Never made twice to save a transfer.
EXPENSIVE = {"dot_general", "conv_general_dilated", "scan", "while", "cond", "checkpoint", "sort", "shard_map", "top_k"}

mark_p = jex.Primitive("layer_mark")  # identity on the outputs of the call number `call` of a layer
mark_p.multiple_results = True
mark_p.def_abstract_eval(lambda *avals, call: list(avals))
mark_p.def_impl(lambda *values, call: list(values))


class CutError(ConfigError):
    """The model cannot be cut as asked."""


class StageProgram(NamedTuple):
    """One stage of a traced loss function: its forward pass F, and once differentiated its backward pass, B and W.

    `arguments` names the inputs of these programs: of F the values of `inputs` and of what is received; of B and W also
    cotangents, residuals (made by F) and the carry from B to W. Each program takes those that it uses.
    """

    inputs: tuple[int, ...]  # positions among the inputs of the loss function's program
    received: tuple[Var, ...]  # its variables that earlier stages make
    sent: tuple[Var, ...]  # those that are made here for later stages
    outputs: tuple[int, ...]  # positions among its outputs of what is made here
    arguments: tuple[tuple[Var, ...], ...]
    forward: Program  # -> sent, outputs, residuals
    backward: Program | None = None  # -> gradients of floats_in, those of trained unless there is a W, carry
    weights: Program | None = None  # -> gradients of trained
    trained: tuple[int, ...] = ()  # those of `inputs` that are differentiated
    floats_in: tuple[int, ...] = ()  # indices into `received` of what is differentiated
    floats_out: tuple[int, ...] = ()  # indices into `sent` of what has a cotangent

    def call(self, program: Program, *values: Sequence[Any]) -> list[Any]:
        """The outputs of F, B or W for the values of `arguments`, in groups as there; later groups may be left out."""
        known: dict[Var, Any] = {}
        for names, given in zip(self.arguments, values, strict=False):
            known |= zip(names, given, strict=True)
        return program.call(*(known[v] for v in program.inputs))


def layer_order(program: Program, layer_of: Mapping[Var, Any], data: Iterable[Var]) -> list[Any]:
    """Layers, anything that sorts, in the order of their first use: the first equation that mixes one with the batch.

    A loss may add up the weights of all layers before it calls the model: these sums are no use. Layers that never meet
    the batch come last.
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
    """The rank of every equation, or its label below 0. `rank_of` holds that of every input."""
    known, labels = dict(rank_of), []
    for eqn in program.eqns:
        among = {known.get(v, CONSTANT) for v in variables(eqn.invars)}
        rank = OUTSIDE if max(among, default=CONSTANT) == DATA and VARIABLES in among else max(among, default=CONSTANT)
        if eqn.primitive is mark_p:
            rank = max(rank, eqn.params["call"])
        labels.append(rank)
        after = min(rank + 1, num_ranks - 1) if eqn.primitive is mark_p else rank
        known |= dict.fromkeys(eqn.outvars, after)
    return _with_marked(program, labels)


def _with_marked(program: Program, labels: Sequence[int]) -> list[int]:
    """What is OUTSIDE and feeds marks belongs to the first of these calls: shared parameters carry no rank."""
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
    """FLOPs of the forward pass by rank, the first and last with what precedes and follows the layers."""
    found = [0] * num_ranks
    for eqn, rank in zip(program.eqns, labels, strict=True):
        found[max(rank, 0)] += flops(eqn)
    return found


def balance(weights: Sequence[int], num_stages: int) -> list[int]:
    """Boundaries [0, ..., len(weights)] of `num_stages` ranges, none empty, whose heaviest is as light as can be.

    Exact, by dynamic programming over (stages, layers).
    """
    total = [*accumulate(weights, initial=0)]
    best = {0: (0, [0])}
    for stage in range(1, num_stages + 1):
        # The stages that follow need a layer each; behind the last nothing may be left.
        ends = range(stage, len(weights) - (num_stages - stage) + 1) if stage < num_stages else [len(weights)]
        best = {
            end: min(
                (max(worst, total[end] - total[start]), [*cut, end])
                for start, (worst, cut) in best.items()
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
    """(stage of every equation, stage that makes every output).

    OUTSIDE equations go to their first user, and so do expensive ones and those with effects of the labels below. What
    is cheap keeps its label: whoever needs it makes it, be it a mask or the cast of a tied weight. Output 0, the loss,
    is made by the last stage. `updates` maps the position of an output to that of the input whose new value it is.
    None: an output that is an input or a literal.
    """
    homes = _output_homes(program, num_stages, _update_homes(program, stages, num_stages, updates))
    settled, _ = _first_uses(program, stages, num_stages, homes)
    makers = {v: stage for eqn, stage in zip(program.eqns, settled, strict=True) for v in eqn.outvars}
    return settled, [
        None if home is None else home if makers.get(atom, CONSTANT) < 0 or at == 0 else makers[atom]
        for at, (atom, home) in enumerate(zip(program.outputs, homes, strict=True))
    ]


def stage_programs(
    program: Program, stages: Sequence[int], makers: Sequence[int | None], num_stages: int, is_data: Sequence[bool]
) -> tuple[StageProgram, ...]:
    """The stages of a settled program. `is_data` tells of every input whether it belongs to the batch."""
    producer = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    position = {v: i for i, v in enumerate(program.inputs)}
    outputs = [tuple(at for at, maker in enumerate(makers) if maker == stage) for stage in range(num_stages)]
    received: list[tuple[Var, ...]] = []
    indices: list[list[int]] = []  # of the equations
    sent: list[dict[Var, None]] = [{} for _ in range(num_stages)]
    for stage in range(num_stages):
        own = [i for i, s in enumerate(stages) if s == stage]
        wanted = [v for i in own for v in program.eqns[i].invars] + [program.outputs[at] for at in outputs[stage]]
        copies, needed = _gather(program, wanted, stages, stage, producer, position)
        needed, again = _crossing(program, needed, stages, producer, position, is_data)
        received.append(tuple(needed))
        indices.append(sorted({*own, *copies, *again}))
        for v in needed:
            sent[stages[producer[v]]][v] = None
    found = []
    for stage in range(num_stages):
        eqns = tuple(program.eqns[i] for i in indices[stage])
        made = [program.outputs[at] for at in outputs[stage]]
        used = {*variables(atom for eqn in eqns for atom in eqn.invars), *variables(made)}
        inputs = tuple(sorted(position[v] for v in used if v in position))
        arguments = tuple(program.inputs[at] for at in inputs), received[stage]
        forward = Program(eqns, (*arguments[0], *arguments[1]), (*sent[stage], *made), program.consts)
        found.append(StageProgram(inputs, received[stage], tuple(sent[stage]), outputs[stage], arguments, forward))
    return tuple(found)


def _update_homes(
    program: Program, stages: Sequence[int], num_stages: int, updates: Mapping[int, int]
) -> dict[int, int | None]:
    """The stage in which every variable changes: where something else reads it, else where the new value is made of."""
    homes: dict[int, int | None] = dict.fromkeys(updates)
    while True:  # the new value of one may read another
        settled, use = _first_uses(program, stages, num_stages, _output_homes(program, num_stages, homes))
        read = {out: use.get(program.inputs[at]) for out, at in updates.items() if homes[out] is None}
        homes |= read
        if not any(home is not None for home in read.values()):
            break
    made = {
        v: settled[i]
        for i, eqn in enumerate(program.eqns)
        if stages[i] >= 0 or any(out in use for out in eqn.outvars)
        for v in eqn.outvars
    }
    producer = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    for out in (out for out, home in homes.items() if home is None):
        homes[out], todo, seen = 0, [program.outputs[out]], set()
        while todo:
            v = todo.pop()
            if not is_var(v) or v in seen:
                continue
            seen.add(v)
            if v in made:
                homes[out] = max(homes[out] or 0, made[v])
            elif v in producer:
                todo += producer[v].invars
    return homes


def _output_homes(program: Program, num_stages: int, homes: Mapping[int, int | None]) -> list[int | None]:
    """The stage in which every output is wanted, that of `homes` or the last; None where no equation makes it. The loss
    is made in every case."""
    made = {v for eqn in program.eqns for v in eqn.outvars}
    return [
        homes.get(at, num_stages - 1) if at == 0 or (is_var(atom) and atom in made) else None
        for at, atom in enumerate(program.outputs)
    ]


def _first_uses(
    program: Program, stages: Sequence[int], num_stages: int, homes: Sequence[int | None]
) -> tuple[list[int], dict[Var, int]]:
    """Stages with every OUTSIDE or expensive DATA equation at its first user, and the first user of every variable."""
    settled, use = list(stages), {}
    for atom, home in zip(program.outputs, homes, strict=True):
        if is_var(atom) and home is not None:
            use[atom] = min(use.get(atom, num_stages), home)
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


def _gather(program, wanted, stages, stage, producer, position) -> tuple[set[int], list[Var]]:
    """Cheap equations that a stage makes for itself, and what it receives from earlier ones."""
    copies: set[int] = set()
    received: list[Var] = []
    seen: set[Var] = set()
    todo = list(wanted)
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
                raise CutError(f"{v.aval} is made in stage {stages[i]} and used in stage {stage}, before it.")
            received.append(v)
    return copies, received


def _crossing(program, wanted, stages, producer, position, is_data) -> tuple[list[Var], set[int]]:
    """The fewest bytes from which a stage makes what it wants of earlier ones, without parameters or anything
    expensive; and the equations that it runs for that."""

    def parents(v: Var) -> list[Var] | None:
        if v in position:
            return [] if is_data[position[v]] else None
        eqn = program.eqns[producer[v]]
        if is_expensive(eqn) or eqn.effects:
            return None
        return [u for u in variables(eqn.invars) if u not in program.consts]

    def weight(v: Var) -> int | None:
        return num_bytes(v.aval) if v in producer and stages[producer[v]] >= 0 else None

    chosen = cheapest_cut(wanted, parents, weight)
    received = [v for i in sorted({producer[v] for v in chosen}) for v in program.eqns[i].outvars if v in chosen]
    again = {producer[v] for v in to_make(wanted, chosen, parents) if v in producer}
    return received, again


def is_expensive(eqn: Eqn, names: Collection[str] = EXPENSIVE) -> bool:
    """Whether it is one of `names`, or something inside it is."""
    return eqn.primitive.name in names or any(is_expensive(e, names) for body in bodies(eqn) for e in body.eqns)


def _aliased(alias: Mapping[Any, Any], atom: Any) -> Any:
    return alias.get(atom, atom) if is_var(atom) else atom
