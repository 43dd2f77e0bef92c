"""Calls a model with adapters: the products of adapted weights in its traced program add their low-rank part."""

# Flax has no types for some functions.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex

from flax_mesh.fields import check_types
from flax_mesh.jax_compat import source_line
from flax_mesh.lora.adapters import adapters_of
from flax_mesh.lora.products import evaluate_products
from flax_mesh.lora.weight import Weight, with_factors
from flax_mesh.modes import traced_call, user_modes
from flax_mesh.program.program import Eqn, program_of
from flax_mesh.tree import named_leaves

MARK = "is_adapted"  # attribute of a function that `with_lora` returned


@check_types
def with_lora(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(model, *args, **kwargs)` of a model with adapters: a product x W becomes x W + alpha / rank * (x A) B.

    The gradient of W, an array of its shape, is never computed. Without adapters the result is the same as of
    `function`. A function that `with_lora` returned is returned as it is: the low-rank part would be added twice.

    Raises:
        ValueError: An adapted weight is used by something else than a matrix product.

    Example:
        >>> from flax_mesh.lora import with_lora
        >>> step = make_train_step(with_lora(loss_fn), state)  # doctest: +SKIP
    """

    if hasattr(function, MARK):
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        with user_modes():
            return function(*args, **kwargs)

    @functools.wraps(function)
    def adapted(model: Any, *args: Any, **kwargs: Any) -> Any:
        def evaluate(closed: jex.ClosedJaxpr, inputs: Any) -> list[Any]:
            known = dict(named_leaves(inputs[0][0]))
            for path in known.keys() & adapters:
                each = adapters[path]
                factors, dims = (known[each.path_a], known[each.path_b]), (each.dims_a, each.dims_b)
                known[path] = with_factors(known[path], path, *factors, dims, each.scale)
            given = [*known.values(), *jax.tree.leaves(inputs)[len(known) :]]
            return evaluate_products(program_of(closed), given, _low_rank, _refuse)

        if not (adapters := adapters_of(nnx.state(model, graph=True))):
            return function(model, *args, **kwargs)
        return traced_call(called, (model, *args), kwargs, evaluate)

    setattr(adapted, MARK, True)
    return adapted


def use_text(eqn: Eqn) -> str:
    """The operation of an equation, with the line of the model that has it."""
    line = source_line(eqn)
    return f"{eqn.primitive.name} ({line})" if line else eqn.primitive.name


def _low_rank(eqn: Eqn, values: Sequence[Any], at: int) -> Any:
    return values[at].low_rank(values[1 - at], at, eqn)


def _refuse(eqn: Eqn, weight: Weight) -> None:
    raise ValueError(
        f"the adapted weight {weight.path} must be used by matrix products only, but it is used by {use_text(eqn)}. "
        "Leave it out of modules= of add_lora."
    )
