"""Callbacks in the programs of a step (jax.pure_callback, jax.debug.callback): an exception must not end one device.

The other devices would wait for it in a collective operation until XLA aborts the process. So a callback that raises
an exception records it and returns zeros, and the host raises the exception later.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from flax_mesh.jax_compat import evaluate, source_line
from flax_mesh.program.follow import all_equations
from flax_mesh.program.program import Eqn, Program, program_of, shape_of, trace, with_inputs
from flax_mesh.program.rewrite import Value, can_open, rewrite
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

        def recording(*args: Any) -> Any:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            outs = self._call(program_of(closed), jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), outs)

        return recording

    def recording(self, program: Program) -> Program:
        """The program, with the same inputs, and with callbacks that record their exceptions."""
        if not has_callbacks(program.eqns):
            return program
        recording, _ = trace(lambda *args: self._call(program, args), *(shape_of(v.aval) for v in program.inputs))
        return with_inputs(recording, program.inputs)

    def _call(self, program: Program, values: Sequence[Value]) -> list[Value]:
        return rewrite(program, values, self._rule, touches=lambda eqn, values: has_callbacks([eqn]))

    def _rule(self, eqn: Eqn, values: Sequence[Value]) -> Sequence[Value] | None:
        if eqn.primitive.name not in CALLBACKS:
            if not can_open(eqn):
                warnings.warn(
                    f"{eqn.primitive.name} ({source_line(eqn)}) calls a callback in which an exception ends the "
                    "process: flax_mesh cannot record it there. Call it outside.",
                    stacklevel=1,
                )
            return None
        return evaluate(eqn.replace(params={**eqn.params, "callback": self._callback(eqn)}), values)

    def _callback(self, eqn: Eqn) -> Callable[..., list[np.ndarray]]:
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


def callbacks_in(eqns: Iterable[Eqn]) -> Iterator[Eqn]:
    """The equations that are callbacks, also those in bodies."""
    return (eqn for eqn in all_equations(eqns) if eqn.primitive.name in CALLBACKS)


def has_callbacks(eqns: Iterable[Eqn]) -> bool:
    return any(True for _ in callbacks_in(eqns))


def _check_types(outs: Sequence[np.ndarray], types: Sequence[Any]) -> None:
    """Raise a ValueError for results that JAX would refuse in the thread of the callback."""
    types_of_outs = [f"{jax.dtypes.canonicalize_dtype(x.dtype)}{list(x.shape)}" for x in outs]
    wanted = [f"{x.dtype}{list(x.shape)}" for x in types]
    if types_of_outs != wanted:
        texts = [" and ".join(each) or "nothing" for each in (wanted, types_of_outs)]
        raise ValueError(f"it must return {texts[0]}, but it returned {texts[1]}")
