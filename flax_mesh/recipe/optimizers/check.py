"""Calls a recipe's make_optimizer, and traces the init and the update of the result: optax checks neither."""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.step.optimizer import call_update
from flax_mesh.text import array_text, first_line, listed, path_lines, shortened
from flax_mesh.tree import PyTree, Shaped, named_leaves
from flax_mesh.user_code import joined, place_of, user_code

NAME = "make_optimizer"
REPAIR = "make_optimizer(config, parameters) must return an optax transformation for these parameters"


def own_optimizer(make: Callable[[PyTree], object], parameters: PyTree) -> optax.GradientTransformation:
    """The result of `make(parameters)`, which are ShapeDtypeStructs.

    A state that is one array, for which an nnx.Optimizer has no place, becomes a tuple of one array. Raises a
    ConfigError unless the updates are like the parameters, and the state after an update is like the one before.
    """
    place = place_of(make)
    with _errors_of("", place):
        optimizer = make(parameters)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            joined(NAME, place, f"it must return an optax transformation, got {type(optimizer).__name__}")
        )
    with _errors_of("the init of its optimizer", place):
        state = nnx.as_pure(jax.eval_shape(optimizer.init, parameters))
    pure = nnx.as_pure(parameters)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    with _errors_of("the update of its optimizer", place):
        result: PyTree = jax.eval_shape(partial(call_update, optimizer), pure, state, pure, loss)
    if problems := _problems(pure, state, result):
        head = "the update of its optimizer must return (updates, state), like the parameters and like the state before"
        raise ConfigError(joined(NAME, place, f"{head}: {listed(path_lines(problems))}; {REPAIR}"))
    return optax.chain(optimizer) if jax.tree.structure(state) == jax.tree.structure(0) else optimizer


def _problems(parameters: PyTree, state: PyTree, result: PyTree) -> list[str]:
    if not isinstance(result, tuple) or len(result) != 2:
        return [f"it returns an object of type {type(result).__name__}"]
    updates = _differences("updates", parameters, result[0], lambda x: str(x.shape))  # optax casts them
    return updates + _differences("arrays of the state", state, nnx.as_pure(result[1]), array_text)


def _differences(what: str, before: PyTree, after: PyTree, text: Callable[[Shaped], str]) -> list[str]:
    """One text for every array whose `text` changes, or one for trees of another structure."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return [f"the {what} have another structure"]
    pairs = zip(named_leaves(before), jax.tree.leaves(after), strict=True)
    texts = [(path or "the state", text(old), text(new)) for (path, old), new in pairs]
    return [f"{path}: {old} becomes {new}" for path, old, new in texts if old != new]


@contextmanager
def _errors_of(part: str, place: str) -> Generator[None]:
    """Report errors of libraries as well, such as optax's errors for arguments of another kind."""
    try:
        with user_code(joined(NAME, part), place):
            yield
    except ConfigError:
        raise
    except Exception as error:  # code of a user may make a library raise anything
        cause = joined(type(error).__name__, shortened(first_line(error)))
        raise ConfigError(f"{joined(NAME, place, part, cause)}; {REPAIR}") from error
