"""Tracing of large models in time that grows with their size, not with its square."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.interpreters import partial_eval

_lock = threading.Lock()
_depth = 0


@contextmanager
def short_tracer_errors() -> Iterator[None]:
    """Within it, JAX errors about traced values do not tell which operations the value came from.

    Flax asks the count of a random stream for its `sharding` at every use; on a traced value JAX answers with an
    AttributeError, for whose text it walks all operations traced so far. Flax drops the error, and with it 120 of the
    130 s that tracing a decoder of 126 layers takes. A JAX that has moved this method keeps its own behaviour.
    """
    global _depth
    tracer: Any = getattr(partial_eval, "DynamicJaxprTracer", None)
    if tracer is None or "_origin_msg" not in vars(tracer):
        yield
        return
    with _lock:  # threads may overlap: the first one in replaces the method, the last one out puts it back
        _depth += 1
        if _depth == 1:
            _saved.append(tracer._origin_msg)
            tracer._origin_msg = lambda self: ""
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                tracer._origin_msg = _saved.pop()


_saved: list[Any] = []
