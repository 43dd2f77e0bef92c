"""Follows the weights of a model through its traced program to their matrix products."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.jax_compat import JIT, REMAT, evaluate, scan_sizes
from flax_mesh.lora.weight import Weight
from flax_mesh.mpmd.split.interpret import inline
from flax_mesh.program.program import Eqn, Program, body, evaluate_with, is_var, program_of
from flax_mesh.step.parameter_flow import flow

# Operations that change no element but by rounding: a weight behind them is the same weight.
CASTS = frozenset({"convert_element_type", "copy", "copy_p", "name", "reduce_precision", "sharding_constraint"})
CUSTOM = frozenset({"custom_vjp_call", "custom_jvp_call"})

# Addition to a product: (equation, values of its operands, index of the operand that is a Weight) -> the array to add
# to the result, or None.
OnProduct = Callable[[Eqn, Sequence[Any], int], Any]
# Any other use of a weight.
OnOther = Callable[[Eqn, Weight], None]


class Products:
    """Evaluates programs in which some values are Weights.

    Args:
        on_product: Returns the array that is added to the matrix product of a weight.
        on_other: Called with each use of a weight that is neither a product nor moves it there; it has no other effect.
    """

    def __init__(self, on_product: OnProduct, on_other: OnOther):
        self.on_product, self.on_other = on_product, on_other

    def run(self, program: Program, args: Sequence[Any]) -> list[Any]:
        """The outputs of a program; Weights that it returns unchanged are Weights."""
        return evaluate_with(program, args, self._outputs)

    def _plain(self, program: Program, returned: dict[int, Weight], *args: Any) -> list[Any]:
        """The outputs as arrays; `returned` receives those that were Weights."""
        outs = self.run(program, args)
        returned |= {at: x for at, x in enumerate(outs) if isinstance(x, Weight)}
        return [plain(x) for x in outs]

    def _same(self, eqn: Eqn, values: Sequence[Any], outs: Sequence[Any], returned: Mapping[int, Weight]) -> list[Any]:
        """`outs`, with the Weights among the operands that a loop, a branch or a remat returns unchanged.

        A Weight that it returns in another form, such as one of two Weights, would be lost: that is another use of it.
        """
        named = {atom: at for at, (atom, x) in enumerate(zip(eqn.invars, values, strict=True)) if isinstance(x, Weight)}
        atoms = list(dict.fromkeys(filter(is_var, eqn.invars)))
        flows = flow([eqn], atoms, eqn.outvars, [named.get(atom) for atom in atoms])
        for at, weight in returned.items():
            if not isinstance(flows[at], int):
                self.on_other(eqn, weight)
        return [values[at] if isinstance(at, int) else out for at, out in zip(flows, outs, strict=True)]

    def _outputs(self, eqn: Eqn, values: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if not any(isinstance(x, Weight) for x in values):
            return evaluate(eqn, values)
        if name in JIT:
            return self.run(body(eqn), values)
        if name in REMAT:
            returned: dict[int, Weight] = {}
            options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
            outs = jax.checkpoint(partial(self._plain, body(eqn), returned), **options)(*values)
            return self._same(eqn, values, outs, returned)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "cond":
            returned = {}
            branches = [partial(self._plain, program_of(each), returned) for each in eqn.params["branches"]]
            return self._same(eqn, values, jax.lax.switch(values[0], branches, *values[1:]), returned)
        if name == "dot_general" and not all(isinstance(x, Weight) for x in values):
            return [self._product(eqn, values, evaluate(eqn, [plain(x) for x in values])[0])]
        if name in CUSTOM and (product := _only_product(eqn)) is not None:
            before, dot = product
            (result,) = evaluate(eqn, [plain(x) for x in values])
            return [self._product(dot, self.run(before, values), result)]
        outs = evaluate(eqn, [plain(x) for x in values])
        if (moved := _moved(eqn, values[0], outs)) is not None:
            return moved
        for x in values:
            if isinstance(x, Weight):
                self.on_other(eqn, x)
        return outs

    def _product(self, eqn: Eqn, values: Sequence[Any], result: Any) -> Any:
        if not any(isinstance(x, Weight) for x in values):
            return result
        with _axes_of(result):
            added = self.on_product(eqn, values, int(isinstance(values[1], Weight)))
            return result if added is None else result + added

    def _scan(self, eqn: Eqn, values: Sequence[Any]) -> list[Any]:
        num_consts, num_carry = scan_sizes(eqn)
        split = num_consts + num_carry
        consts, carry, rows = values[:num_consts], values[num_consts:split], values[split:]
        program = program_of(eqn.params["jaxpr"])
        for x in rows:  # a loop over a dim of the products, of which one factor has no rows
            if isinstance(x, Weight) and any(f is not None and f.shape[0] != x.value.shape[0] for f in (x.a, x.b)):
                self.on_other(eqn, x)
        given = [at if isinstance(x, Weight) else None for at, x in enumerate(values)]
        flows = flow(program.eqns, program.inputs, program.outputs, given)
        # A weight that every iteration passes on is a constant of the loop.
        fixed = {at: x for at, x in enumerate(carry) if isinstance(x, Weight) and flows[at] == num_consts + at}
        for at, x in enumerate(carry):
            if isinstance(x, Weight) and at not in fixed:
                self.on_other(eqn, x)

        returned: dict[int, Weight] = {}

        def step(loop: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            loop = [fixed.get(at, x) for at, x in enumerate(loop)]
            rows = [x.row() if isinstance(x, Weight) else x for x in rows]
            outs = self._plain(program, returned, *consts, *loop, *rows)
            return outs[:num_carry], outs[num_carry:]

        options = {key: eqn.params[key] for key in ("reverse", "length", "unroll")}
        after, stacked = jax.lax.scan(step, [plain(x) for x in carry], list(rows), **options)
        return self._same(eqn, values, [*after, *stacked], returned)


def plain(x: Any) -> Any:
    """The array of a Weight; any other value as it is."""
    return x.value if isinstance(x, Weight) else x


def _axes_of(x: Any) -> AbstractContextManager[Any]:
    """Context of equations on `x`: `jax.sharding.auto_axes` changes the types of mesh axes in a part of a program."""
    mesh = jax.typeof(x).sharding.mesh
    return nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh)


def _only_product(eqn: Eqn) -> tuple[Program, Eqn] | None:
    """The product in a function with a custom derivative, and the program of its operands; None for other functions."""
    inner = inline(program_of(eqn.params["call_jaxpr"]))
    if not inner.eqns:
        return None
    *before, last = inner.eqns
    if last.primitive.name != "dot_general" or tuple(last.outvars) != inner.outputs:
        return None
    if any(each.primitive.name not in CASTS for each in before):
        return None
    return inner._replace(eqns=tuple(before), outputs=tuple(last.invars)), last


def _moved(eqn: Eqn, weight: Any, outs: Sequence[Any]) -> list[Any] | None:
    """The Weights that an operation makes of one by a cast, or by moving or selecting its dims; None for any other."""
    if not isinstance(weight, Weight):
        return None
    with _axes_of(outs[0]):
        return _moved_in_context(eqn, weight, outs)


def _moved_in_context(eqn: Eqn, weight: Weight, outs: Sequence[Any]) -> list[Any] | None:
    name, params = eqn.primitive.name, eqn.params
    if name in CASTS:
        return [weight.changed(outs[0], lambda x: x)]
    if name == "reshard":
        return [weight.changed(outs[0], partial(_placed, like=outs[0]))]
    if name == "transpose":
        order = params["permutation"]
        return [weight.changed(outs[0], lambda x: x.transpose(*order, x.ndim - 1), [weight.dims[d] for d in order])]
    if name == "squeeze":
        gone = params["dimensions"]
        kept = [dim for d, dim in enumerate(weight.dims) if d not in gone]
        return [weight.changed(outs[0], lambda x: x.squeeze(gone), kept)]
    if name == "split":
        axis, outputs, first = params["axis"], [], 0
        for out, size in zip(outs, params["sizes"], strict=True):
            part = partial(jax.lax.slice_in_dim, start_index=first, limit_index=first + size)
            outputs.append(weight.cut(out, lambda x, dim, part=part: part(x, axis=dim), [axis]))
            first += size
        return outputs
    if name == "slice" and params["strides"] is None:
        limits = dict(enumerate(zip(params["start_indices"], params["limit_indices"], strict=True)))
        cut = [d for d, limit in limits.items() if limit != (0, weight.value.shape[d])]
        return [weight.cut(outs[0], lambda x, dim: jax.lax.slice_in_dim(x, *limits[dim], axis=dim), cut)]
    return None


def _placed(factor: Any, like: Any) -> Any:
    """A factor with the sharding, and the types of mesh axes, of its weight, on the dims that both have."""
    sharding = jax.typeof(like).sharding
    spec = [entry if factor.shape[d] > 1 else None for d, entry in enumerate(sharding.spec)]
    return jax.sharding.reshard(factor, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
