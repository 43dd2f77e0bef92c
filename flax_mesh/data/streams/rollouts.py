"""Batches that a run makes with its own model, such as completions of prompts with their rewards."""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingTypeArgument=false

import hashlib
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.processes.agree import assert_equal
from flax_mesh.tree import PyTree

_NONE = -1  # the number of a rollout


class Rollouts:
    """Batches made by the model of the run, to be returned by `make_batches`: a function of the step and the model.

    They are made between the steps, so `data_wait_seconds` of a row of metrics is the time that they take. A run
    resumes bit for bit: the batch is a function of its number and of the parameters, and a checkpoint contains the
    batches that are made, and that later steps train on.

    Args:
        make: `make(model, number) -> batch`, a pytree of numpy arrays, the same in all processes, or a function without
            arguments that returns it. `model` has the parameters of the run in the layout of its mesh, and its
            adapters; its arrays are valid during the call of `make`, and not when that function is called.
        shapes: The shapes of every batch, a pytree of `jax.ShapeDtypeStruct`.
        updates: The number of successive steps that train on each batch.
        ahead: Whether `make` is called for each batch before the first step on the one before it. A function that it
            returns is called in a thread while these steps are computed.
        rows: The hashes of the rows that batches are made from, as `read_prompts(...).hashes` returns them.
        description: A text for the line in which a run describes its data.

    Example:
        >>> from flax_mesh.train import Rollouts
        >>> shapes = {"x": jax.ShapeDtypeStruct((2,), np.float32)}
        >>> rollouts = Rollouts(lambda model, number: {"x": np.full(2, number, np.float32)}, shapes, updates=3)
        >>> [rollouts(step, lambda: None)["x"].tolist() for step in (0, 2, 3)]
        [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    """

    @check_types
    def __init__(
        self,
        make: Callable[[nnx.Module, int], PyTree],
        shapes: PyTree,
        *,
        updates: int = 1,
        ahead: bool = False,
        rows: Callable[[], object] | None = None,
        description: str = "",
    ):
        if updates < 1:
            raise ConfigError(f"updates must be at least 1, got {updates}")
        # As of the iterators of `read_chats` and `read_preferences`.
        self.flax_mesh_shapes, self.flax_mesh_rows, self.description = shapes, rows, description
        self._make, self._updates, self._ahead = make, updates, ahead
        self._made: dict[int, PyTree] = {}  # number -> batch, or its Future
        self._agreed = _NONE  # the newest batch that is known to be the same in all processes
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, step: int, model: Callable[[], nnx.Module]) -> PyTree:
        """The batch of a step; `model` returns the model before it, and is called if a new batch is made."""
        number = step // self._updates
        self._made = {n: x for n, x in self._made.items() if n >= number}
        for n in self._numbers(step):
            if n not in self._made:
                rollout = self._make(model(), n)
                finish = rollout if callable(rollout) else lambda rollout=rollout: rollout
                self._made[n] = self._pool.submit(finish) if self._ahead else finish()
        batch = _finished(self._made[number])
        if number != self._agreed:
            digest = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(batch)))
            assert_equal(f"rollout {number}", {f"values of rollout {number}": digest.hexdigest()})
            self._agreed = number
        return batch

    @property
    def example(self) -> PyTree:
        """A batch of ones."""
        return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), self.flax_mesh_shapes)

    def state(self, step: int) -> bytes:
        """Of the checkpoint of a step: the batches that are made, and that the next steps train on.

        A batch that cannot be finished is left out: its step raises the error, and a resumed run makes it again.
        """
        batches: list[PyTree] = []
        for number in self._numbers(step) if step % self._updates or self._ahead else ():
            rollout = self._made.get(number)
            if rollout is None or (isinstance(rollout, Future) and rollout.exception()):
                break
            batches.append(_finished(rollout))
        if not batches:
            return b""
        file = io.BytesIO()
        np.savez_compressed(file, *jax.tree.leaves(batches))
        return file.getvalue()

    def resume(self, step: int, state: object) -> None:
        """Continue with the batches of `step`, from the state of its checkpoint.

        If the run resumes with settings that change the shapes, new batches replace the saved ones.
        """
        if not (step % self._updates or self._ahead) or not isinstance(state, bytes) or not state:
            return
        with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
            leaves = [arrays[name] for name in arrays.files]
        shapes, structure = jax.tree.flatten(self.flax_mesh_shapes)
        count, wanted = len(shapes), [(x.shape, x.dtype) for x in shapes]
        batches = [leaves[i : i + count] for i in range(0, len(leaves), count)]
        if all([(x.shape, x.dtype) for x in batch] == wanted for batch in batches):
            trees = (jax.tree.unflatten(structure, batch) for batch in batches)
            self._made = dict(zip(self._numbers(step), trees, strict=False))
            self._agreed = step // self._updates

    def _numbers(self, step: int) -> range:
        """The batches that are made before a step."""
        return range(first := step // self._updates, first + 1 + self._ahead)


def _finished(rollout: PyTree) -> PyTree:
    return rollout.result() if isinstance(rollout, Future) else rollout
