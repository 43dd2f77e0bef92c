"""Callbacks in the programs of a step (jax.pure_callback, jax.debug.callback): an exception must not end one device.

The other devices would wait for it in a collective operation until XLA aborts the process. So a callback that raises
an exception records it and returns zeros, and the host raises the exception later.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from flax_mesh.jax_compat import source_line
from flax_mesh.user_code import caught, user_code

CALLBACKS = ("pure_callback", "debug_callback", "io_callback")  # the primitives with a parameter `callback`


class CallbackErrors:
    """The exceptions that callbacks of a step raised since the last check, with the line that called each callback."""

    def __init__(self) -> None:
        self._found: list[tuple[BaseException, str]] = []  # callbacks run in threads of XLA

    def check(self) -> None:
        """Raise the first exception, as a ConfigError with its line in the user's code, and forget the others."""
        if self._found:
            error, place = self._found[0]
            self._found.clear()
            with user_code("a callback of the step", place):
                raise error

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, to be traced, with callbacks that record their exceptions."""

        def evaluate(*args: Any) -> Any:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            outs = jex.jaxpr_as_fun(self._body(closed))(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), outs)

        return evaluate

    def recording(self, eqns: Iterable[Any]) -> list[Any]:
        """The equations, with callbacks that record their exceptions; the others are the same objects."""
        return [self._recording(eqn) if has_callbacks([eqn]) else eqn for eqn in eqns]

    def _body(self, body: Any) -> Any:
        """A jaxpr, closed or not; from JAX 0.12 on both are the same class."""
        jaxpr = getattr(body, "jaxpr", body)
        recorded = jaxpr.replace(eqns=self.recording(jaxpr.eqns))
        return recorded if jaxpr is body else body.replace(jaxpr=recorded)

    def _recording(self, eqn: Any) -> Any:
        def replaced(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return type(value)(map(replaced, value)) if _bodies(value) else value
            return self._body(value) if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr) else value

        params = {name: replaced(value) for name, value in eqn.params.items()}
        if eqn.primitive.name in CALLBACKS:
            params["callback"] = self._callback(eqn)
        return eqn.replace(params=params)

    def _callback(self, eqn: Any) -> Callable[..., list[np.ndarray]]:
        callback, place, types = eqn.params["callback"], source_line(eqn), [v.aval for v in eqn.outvars]

        def call(*args: Any) -> list[np.ndarray]:
            outs = [np.asarray(x) for x in callback(*args)]
            _check_types(outs, types)
            return outs

        def recorded(*args: Any) -> list[np.ndarray]:
            outs, error = caught(call, *args)
            if error is None:
                return outs
            self._found.append((error, place))
            return [np.zeros(x.shape, x.dtype) for x in types]

        return recorded


def callbacks_in(eqns: Iterable[Any]) -> Iterator[Any]:
    """The equations that are callbacks, also those in bodies."""
    for eqn in eqns:
        if eqn.primitive.name in CALLBACKS:
            yield eqn
        for body in _bodies([*eqn.params.values()]):
            yield from callbacks_in(body.eqns)


def has_callbacks(eqns: Iterable[Any]) -> bool:
    return any(True for _ in callbacks_in(eqns))


def _bodies(values: Sequence[Any]) -> list[Any]:
    """The jaxprs among the values of parameters, and in tuples of them."""
    flat = [x for value in values for x in (value if isinstance(value, tuple | list) else (value,))]
    return [getattr(x, "jaxpr", x) for x in flat if isinstance(x, jex.ClosedJaxpr | jex.Jaxpr)]


def _check_types(outs: Sequence[np.ndarray], types: Sequence[Any]) -> None:
    """Raise a ValueError for results that JAX would refuse in the thread of the callback."""
    types_of_outs = [f"{jax.dtypes.canonicalize_dtype(x.dtype)}{list(x.shape)}" for x in outs]
    wanted = [f"{x.dtype}{list(x.shape)}" for x in types]
    if types_of_outs != wanted:
        texts = [" and ".join(each) or "nothing" for each in (wanted, types_of_outs)]
        raise ValueError(f"it must return {texts[0]}, but it returned {texts[1]}")
