"""An iterator as a function of the step, and the state of one with `get_state` and `set_state` as JSON."""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from flax_mesh.errors import ConfigError
from flax_mesh.text import first_line
from flax_mesh.tree import PyTree, path_of
from flax_mesh.user_code import joined, user_code

METHODS = ("__next__", "get_state", "set_state")
WHAT = "the iterator of make_batches"
KEPT = 3  # newest states: the prefetch thread is one batch ahead of the step that is saved

ProblemsOf = Callable[[PyTree], Sequence[str]]  # of a batch
State = dict[str, Any]  # {"json": value} or {"base64": text}


class StreamBatches:
    """The batches of an iterator in order. It is called by one thread at a time."""

    def __init__(self, iterator: Any, place: str):
        self._iterator, self._place = iterator, place
        self._drawn = 0
        self._kept: list[PyTree] = []  # the first batch, until its step

    def first(self, problems_of: ProblemsOf = lambda batch: ()) -> PyTree:
        """The first batch, which is not consumed."""
        self._kept = [self._draw()]
        return self._kept[0]

    def __call__(self, step: int) -> PyTree:
        """The batch of `step`, which must be 1 more than in the previous call."""
        if step != self._drawn:
            raise RuntimeError(f"batch {step} of an iterator is requested, but its next one is {self._drawn}")
        batch = self._kept.pop() if self._kept else self._draw()
        self._drawn += 1
        return batch

    def _draw(self) -> PyTree:
        with user_code(f"make_batches: batch {self._drawn} of its iterator", self._place):
            try:
                return next(self._iterator)
            except StopIteration:
                pass
        problem = (
            f"the iterator ended before batch {self._drawn}; it must return one batch for each of the run.steps. "
            "Repeat the data (.repeat() in grain), or reduce run.steps"
        )
        raise ConfigError(joined("make_batches", self._place, problem))


class IteratorBatches(StreamBatches):
    """The batches of an iterator with `get_state` and `set_state`, and the state right after each of them.

    A state is encoded as soon as it is read: the iterator may change the object that it returned.
    """

    def __init__(self, iterator: Any, place: str):
        super().__init__(iterator, place)
        self._states = {0: self._read_state()}

    def first(self, problems_of: ProblemsOf = lambda batch: ()) -> PyTree:
        """The next batch, which is not consumed. ConfigError if `set_state` does not lead back to it.

        A batch with problems, which the caller reports, is not compared: its values may have no equality.
        """
        state = self._states[self._drawn]
        first = self._draw()
        self._set_state(state)
        if problems_of(first):
            return first
        first = jax.tree.map(np.copy, first)  # the iterator may fill the same arrays again
        second = self._draw()
        self._set_state(state)
        if not _equal(first, second):
            problem = (
                "after set_state(get_state()) the iterator returns another batch than before; a run could not be "
                "resumed. set_state must restore everything that the next batch depends on"
            )
            raise ConfigError(joined("make_batches", self._place, problem))
        return first

    def __call__(self, step: int) -> PyTree:
        batch = super().__call__(step)
        self._states[self._drawn] = self._read_state()
        self._states = {drawn: state for drawn, state in self._states.items() if drawn > self._drawn - KEPT}
        return batch

    def state(self, step: int) -> State:
        """The state after `step` batches."""
        return self._states[step]

    def resume(self, step: int, state: State | None) -> None:
        """Continue with the batch of `step`. Without a state, with the batch that the iterator returns next."""
        if state is not None:
            self._set_state(state)
        self._drawn = step
        self._states = {step: self._read_state()}

    def _read_state(self) -> State:
        with user_code(f"get_state of {WHAT}", self._place):
            state = self._iterator.get_state()
        return encode(state)

    def _set_state(self, state: State) -> None:
        with user_code(f"set_state of {WHAT}", self._place):
            self._iterator.set_state(decode(state))


def encode(state: object) -> State:
    """ConfigError if `state` is neither bytes nor equal to its value read back from JSON, as with tuples and NaN."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    try:
        text = json.dumps(state)
        if json.loads(text) == state:
            return {"json": json.loads(text)}
        reason = "JSON reads it back as another value; tuples, NaN and keys that are not text have no JSON"
    except (TypeError, ValueError, RecursionError) as error:
        reason = first_line(error)
    raise ConfigError(f"get_state of {WHAT} must return bytes or a value of JSON, got {type(state).__name__}: {reason}")


def decode(state: State) -> object:
    return base64.b64decode(state["base64"], validate=True) if "base64" in state else state["json"]


def _equal(first: PyTree, second: PyTree) -> bool:
    def known(batch: PyTree) -> list[object]:
        named = jax.tree_util.tree_flatten_with_path(batch)[0]
        return [(path_of(path), *_content(x)) for path, x in named]

    return known(first) == known(second)


def _content(x: Any) -> tuple[object, ...]:
    return (x.shape, str(x.dtype), x.tobytes()) if hasattr(x, "tobytes") else (repr(x),)
