"""The call of an optax transformation: its arguments, and the parameters that it never updates."""

# JAX, Flax and Optax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeArgument=false, reportMissingTypeStubs=false

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend import core as jex

from flax_mesh.errors import ConfigError
from flax_mesh.modes import promotions
from flax_mesh.program.follow import DEPENDS, Flow, Rules, follow
from flax_mesh.program.program import Eqn, program_of
from flax_mesh.text import count_text, paths_text
from flax_mesh.tree import PyTree, named_leaves

# Primitive -> whether its results are zero, from the operands that are.
_OF_FIRST = ("broadcast_in_dim", "convert_element_type", "copy", "div", "neg", "reshape", "sharding_constraint")
_ZERO_IF: dict[str, Callable[[Sequence[bool]], bool]] = {
    **dict.fromkeys(_OF_FIRST, lambda zeros: zeros[0]),
    **{"mul": any, "add": all, "sub": all, "select_n": lambda zeros: all(zeros[1:])},
}


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider: in a half type, sums of squares are rounded, and overflow in float16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def call_update(
    transformation: Any, grads: PyTree, state: PyTree, params: PyTree, loss: jax.Array, **others: object
) -> tuple[PyTree, PyTree]:
    """The updates and the new state. A transformation with further arguments receives the loss as `value`.

    Raises a ConfigError if it calls the loss function, as line searches do.
    """
    if isinstance(transformation, optax.GradientTransformationExtraArgs | optax.MultiSteps):
        given = {"value": loss, "grad": grads, "value_fn": _refuse, "obj_fn": _refuse}
        accepted = inspect.signature(transformation.update).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        others = {name: value for name, value in given.items() if takes_all or name in accepted} | others
    return transformation.update(grads, state, params, **others)


def _refuse(*arguments: object, obj_fn: object = None) -> NoReturn:
    """In the place of a loss function. Line searches require that it takes all arguments that they do not know."""
    raise ConfigError(
        "the optimizer must compute its update from the gradients, its state, the parameters and the loss of the step, "
        "but it calls the loss function (value_fn or obj_fn), whose batch is divided over microbatches and devices. "
        "Use one without a line search, such as optax.lbfgs(learning_rate, linesearch=None)."
    )


def update_parameters(optimizer: nnx.Optimizer, model: nnx.Pytree, grads: nnx.State, loss: jax.Array) -> list[bool]:
    """Calls `optimizer.update(model, grads)`. Returns for each leaf of `grads` whether its update is always zero.

    That is, in the trace of the update it depends on no gradient, as with `optax.set_to_zero`. A warning says how many.
    """
    transformation, is_zero = optimizer.tx, list[bool]()

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **others: object) -> tuple[PyTree, PyTree]:
        def call(*arguments: PyTree) -> tuple[PyTree, PyTree]:
            return call_update(transformation, *arguments, **others)

        arguments = grads, state, params, loss
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(*arguments)
        is_zero[:] = _zero_updates(closed, len(jax.tree.leaves(grads)), len(jax.tree.leaves(shapes[0])))
        return jax.tree.unflatten(jax.tree.structure(shapes), jex.jaxpr_as_fun(closed)(*jax.tree.leaves(arguments)))

    optimizer.tx = optax.GradientTransformationExtraArgs(transformation.init, cast(Any, update))
    try:
        with nnx.set_graph_mode(True), promotions():  # the model may share Variables; optax multiplies counts by floats
            optimizer.update(model, grads)
    finally:
        optimizer.tx = transformation
    if len(is_zero) != len(jax.tree.leaves(grads)):  # a subclass may call its transformation differently, or not at all
        is_zero = [False] * len(jax.tree.leaves(grads))
    if frozen := [path for (path, _), always in zip(named_leaves(grads), is_zero, strict=True) if always]:
        warnings.warn(
            f"the optimizer updates {len(frozen)} of {count_text(len(is_zero), 'trained array')} by zero, whatever the "
            f"gradients are: {paths_text(frozen)}. They count neither in grad_norm nor in limits of the step. Leave "
            "them out by wrt= of the optimizer, and their gradients are not computed.",
            stacklevel=2,
        )
    return is_zero


class _Zeros(Rules[bool]):
    """Whether all elements of a value are zero."""

    unknown = False

    def through(self, eqn: Eqn, facts: Sequence[bool]) -> Sequence[bool]:
        name = eqn.primitive.name
        return [name in _ZERO_IF and _ZERO_IF[name](facts)] * len(eqn.outvars)

    def join(self, a: bool, b: bool) -> bool:
        return a and b

    def constant(self, value: object) -> bool:
        is_number = isinstance(value, int | float | np.generic | np.ndarray) and np.ndim(value) == 0
        return is_number and bool(value == 0)


def _zero_updates(closed: jex.ClosedJaxpr, num_grads: int, num_updates: int) -> list[bool]:
    """Which of the first outputs depend on none of the first inputs, the gradients, and are zero."""
    program = program_of(closed)
    given = [DEPENDS] * num_grads + [None] * (len(program.inputs) - num_grads)
    flows = follow(program, given, Flow()).outputs[:num_updates]
    zeros = follow(program, [False] * len(program.inputs), _Zeros()).outputs
    return [by_gradient is None and is_zero for by_gradient, is_zero in zip(flows, zeros, strict=False)]
