"""Assigns the equations of a traced forward pass to pipeline stages.

1. `label`: the parameters of the layer that is called r-th have rank r. An equation has the largest rank among its
   dependencies, so it never depends on an equation of a later rank. Equations without a layer have a negative label.
2. `stages/bounds.py`: stages are contiguous ranges of ranks, with equal FLOPs and without boundaries of many bytes.
3. `cut_stages` repeats 4 and 5 until every stage that reads a variable returns its new value.
4. `settle`: equations without a layer are assigned to the first stage that uses them, except cheap ones that depend
   only on the batch or only on parameters. Every stage that uses such an equation computes it, so its results are not
   sent.
5. `stage_programs`: the values that a stage receives from earlier stages are a minimum cut in bytes, see `min_cut.py`.

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

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jex

from flax_mesh.errors import ConfigError
from flax_mesh.jax_compat import REMAT
from flax_mesh.mpmd.split.min_cut import minimum_cut, recomputed
from flax_mesh.program.follow import all_equations
from flax_mesh.program.program import Eqn, Program, Var, is_var, needed, variables
from flax_mesh.tree import num_bytes

# Labels of equations that depend on no layer: on no input, only on variables of the model, only on the batch, on both.
CONSTANT, VARIABLES, DATA, OUTSIDE = -4, -3, -2, -1
# Primitives that are never repeated in a second stage to avoid a transfer.
EXPENSIVE = {"dot_general", "conv_general_dilated", "scan", "while", "cond", *REMAT, "sort", "shard_map", "top_k"}
EXPENSIVE |= {"ragged_dot_general", "triangular_solve", "cholesky", "lu", "qr", "geqrf", "householder_product", "eig"}
EXPENSIVE |= {"eigh", "svd"}
# Nor are those with a custom_vjp rule: it need not be linear, so it must run once, on the sum of the gradients of all
# stages. The rules of custom_jvp are linear.
RUN_ONCE = EXPENSIVE | {"custom_vjp_call"}

_NO_UPDATES: Mapping[int, int] = {}

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
    frozen: frozenset[Var] = frozenset()  # values in `received` and `sent` that depend on no trained parameter

    def call(self, program: Program, *values: Sequence[Any]) -> list[Any]:
        """Evaluate F, B or W. `values` has one sequence per group of `arguments`; trailing groups may be omitted."""
        known: dict[Var, Any] = {}
        for names, given in zip(self.arguments, values, strict=False):
            known |= zip(names, given, strict=True)
        return program.call(*(known[v] for v in program.inputs))


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
    ranks, feeds = list(labels), {}
    for i in reversed(range(len(ranks))):
        eqn = program.eqns[i]
        calls = [feeds[v] for v in eqn.outvars if v in feeds]
        call = eqn.params["call"] if eqn.primitive is mark_p else min(calls, default=None)
        if call is None:
            continue
        ranks[i] = call if ranks[i] == OUTSIDE else ranks[i]
        feeds |= {v: min(feeds.get(v, call), call) for v in variables(eqn.invars)}
    return ranks


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


def cut_stages(
    program: Program, stages: Sequence[int], num_stages: int, updates: Mapping[int, int], is_data: Sequence[bool]
) -> tuple[StageProgram, ...]:
    """The stages of a program. `stages` has the stage of every equation, or its negative label.

    `updates` maps positions of outputs to the inputs whose new values they are, such as batch statistics. `is_data`
    marks the inputs that belong to the batch.

    Every stage that reads a variable also returns its new value, which it computes or receives, so that it has the
    value in the next microbatch. That requires a value that no later stage computes; otherwise a stage of the result
    reads a variable that it does not return. Which stages read a variable depends on where new values are returned, so
    the stages are found again until no variable has a further reader.
    """
    returned: dict[int, frozenset[int]] = dict.fromkeys(updates, frozenset())
    computed_in = {v: max(stage, 0) for eqn, stage in zip(program.eqns, stages, strict=True) for v in eqn.outvars}
    while True:
        settled, targets = settle(program, stages, num_stages, returned)
        programs = stage_programs(program, settled, targets, num_stages, is_data, updates)
        grown = {}
        for out, at in updates.items():
            readers = {k for k, stage in enumerate(programs) if at in stage.inputs}
            first = computed_in.get(program.outputs[out], 0)
            # A stage before `first` cannot return the value, so the result is a reader that does not return it.
            grown[out] = returned[out] | {max(k, first) for k in readers}
        if grown == returned:
            grown |= _stages_of_unread(program, stages, settled, programs, updates, returned)
        if grown == returned:
            return programs
        returned = grown


def settle(
    program: Program, stages: Sequence[int], num_stages: int, returned: Mapping[int, Collection[int]]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Assign the equations without a layer. Returns (stage of every equation, stages that return every output).

    OUTSIDE equations are assigned to the first stage that uses them. So are equations with a lower label that are
    expensive, have a custom_vjp rule or have effects. Cheap ones, such as a mask or the cast of a tied weight, keep
    their label: every stage that needs them computes them. Output 0, the loss, is returned by the last stage, and the
    new value of a variable by the stages that `returned` has for the output. No stage returns any other output that is
    an input or a literal.
    """
    computed = {v for eqn in program.eqns for v in eqn.outvars}
    last = (num_stages - 1,)
    targets = [
        tuple(sorted(returned.get(at, last))) if at == 0 or (is_var(atom) and atom in computed) else ()
        for at, atom in enumerate(program.outputs)
    ]
    settled = _at_first_use(program, stages, num_stages, targets)
    stage_of = {v: stage for eqn, stage in zip(program.eqns, settled, strict=True) for v in eqn.outvars}
    for at, atom in enumerate(program.outputs):
        if at > 0 and at not in returned and targets[at] and stage_of[atom] >= 0:
            targets[at] = (stage_of[atom],)
    return settled, targets


def stage_programs(
    program: Program,
    stages: Sequence[int],
    output_stages: Sequence[Collection[int]],
    num_stages: int,
    is_data: Sequence[bool],
    updates: Mapping[int, int] = _NO_UPDATES,
) -> tuple[StageProgram, ...]:
    """The stages of a program, from the results of `settle`. `cut_stages` documents the other arguments."""
    producer = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outvars}
    position = {v: i for i, v in enumerate(program.inputs)}
    outputs = [tuple(at for at, owners in enumerate(output_stages) if k in owners) for k in range(num_stages)]
    # Equations that lead only to new values of variables; a later stage that returns the value may repeat them.
    for_updates = {*range(len(program.eqns))}
    for_updates -= {*needed(program.eqns, [x for at, x in enumerate(program.outputs) if at not in updates])[0]}
    eqns_of: list[list[int]] = [[] for _ in range(num_stages)]
    for i, stage in enumerate(stages):
        if stage >= 0:
            eqns_of[stage].append(i)
    received: list[tuple[Var, ...]] = [()] * num_stages
    indices: list[list[int]] = [[]] * num_stages  # equations of every stage
    sent_by: list[set[Var]] = [set() for _ in range(num_stages)]
    for stage in reversed(range(num_stages)):
        results = [program.outputs[at] for at in outputs[stage]]
        used, _ = needed([program.eqns[i] for i in eqns_of[stage]], [*results, *sent_by[stage]])
        used = {eqns_of[stage][at] for at in used}
        run = [i for i in eqns_of[stage] if i in used or i not in for_updates]
        required = [v for i in run for v in program.eqns[i].invars] + results
        copies, crossing = _copies_and_crossing(program, required, stages, stage, producer, position)
        # Of the inputs, a stage always has the batch and the current values of the variables that it returns.
        current = {updates[at] for at in outputs[stage] if at in updates}
        available = [is_data[at] or at in current for at in range(len(program.inputs))]
        activations, repeated = _stage_boundary(program, crossing, stages, producer, position, available)
        received[stage] = tuple(activations)
        indices[stage] = sorted({*run, *copies, *repeated})
        for v in activations:
            sent_by[stages[producer[v]]].add(v)
    programs = []
    for stage in range(num_stages):
        eqns = tuple(program.eqns[i] for i in indices[stage])
        results = [program.outputs[at] for at in outputs[stage]]
        used = {*variables(atom for eqn in eqns for atom in eqn.invars), *variables(results)}
        inputs = tuple(sorted(position[v] for v in used if v in position))
        arguments = tuple(program.inputs[at] for at in inputs), received[stage]
        sent = variables(v for others in received for v in others if v in sent_by[stage])
        forward = Program(eqns, (*arguments[0], *arguments[1]), (*sent, *results), program.consts)
        programs.append(StageProgram(inputs, received[stage], tuple(sent), outputs[stage], arguments, forward))
    return tuple(programs)


def _stages_of_unread(
    program: Program,
    stages: Sequence[int],
    settled: Sequence[int],
    programs: Sequence[StageProgram],
    updates: Mapping[int, int],
    returned: Mapping[int, frozenset[int]],
) -> dict[int, frozenset[int]]:
    """The stage of every variable that is written and never read, and so is not in `returned`.

    It is the last stage that its new value depends on, or that returns a variable that its new value depends on.
    """
    runs = {id(eqn) for stage in programs for eqn in stage.forward.eqns}
    stage_of = {
        v: settled[i]
        for i, eqn in enumerate(program.eqns)
        if stages[i] >= 0 or (settled[i] >= 0 and id(eqn) in runs)
        for v in eqn.outvars
    }
    producer = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    update_of = {program.inputs[at]: out for out, at in updates.items()}
    last = {out: max(owners, default=0) for out, owners in returned.items()}
    unread, before = [out for out, owners in returned.items() if not owners], None
    while last != before:  # the new value of one variable may read another variable; stages only increase
        before = dict(last)
        for out in unread:
            todo, seen = [program.outputs[out]], set()
            while todo:
                v = todo.pop()
                if not is_var(v) or v in seen:
                    continue
                seen.add(v)
                if v in stage_of or v in update_of:
                    last[out] = max(last[out], stage_of[v] if v in stage_of else last[update_of[v]])
                elif v in producer:
                    todo += producer[v].invars
    return {out: frozenset([last[out]]) for out in unread}


def _at_first_use(
    program: Program, stages: Sequence[int], num_stages: int, targets: Sequence[Collection[int]]
) -> list[int]:
    """The stage of every equation: the stage of its first use, if it is OUTSIDE or is expensive with a lower label.

    One pass in reverse order is enough, because all uses of a variable come after the equation that computes it.
    """
    settled, use = list(stages), {}
    for atom, owners in zip(program.outputs, targets, strict=True):
        if is_var(atom) and owners:
            use[atom] = min(use.get(atom, num_stages), *owners)
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
    return settled


def _copies_and_crossing(program, required, stages, stage, producer, position) -> tuple[set[int], list[Var]]:
    """The cheap equations that a stage computes again, and the values of earlier stages that it uses."""
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


def _stage_boundary(program, required, stages, producer, position, available) -> tuple[list[Var], set[int]]:
    """The fewest bytes to receive, and the equations to run again to compute the `required` values from them.

    The stage repeats only cheap equations without effects and custom_vjp rules. It does not repeat equations on
    inputs that are not `available`: the parameters of an earlier stage would then have to be sent as well.
    """

    def parents(v: Var) -> list[Var] | None:
        if v in position:
            return [] if available[position[v]] else None
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
    return any(each.primitive.name in names for each in all_equations([eqn]))


def _aliased(alias: Mapping[Any, Any], atom: Any) -> Any:
    return alias.get(atom, atom) if is_var(atom) else atom
