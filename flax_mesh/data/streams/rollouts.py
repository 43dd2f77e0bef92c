"""Batches that a run makes with its own model, such as completions of prompts with their rewards."""

# JAX and Flax have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false, reportMissingTypeArgument=false

import hashlib
import io
from collections.abc import Callable

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
    resumes bit for bit: the batch is a function of its number and of the parameters, and the checkpoint of a step
    between two steps of one batch contains the batch.

    Args:
        make: `make(model, number) -> batch`, a pytree of numpy arrays, the same in all processes. `model` has the
            parameters of the run in the layout of its mesh, and its adapters; its arrays are valid during the call.
        shapes: The shapes of every batch, a pytree of `jax.ShapeDtypeStruct`.
        updates: The number of successive steps that train on each batch.
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
        rows: Callable[[], object] | None = None,
        description: str = "",
    ):
        if updates < 1:
            raise ConfigError(f"updates must be at least 1, got {updates}")
        # As of the iterators of `read_chats` and `read_preferences`.
        self.flax_mesh_shapes, self.flax_mesh_rows, self.description = shapes, rows, description
        self._make, self._updates = make, updates
        self._number, self._batch = _NONE, None

    def __call__(self, step: int, model: Callable[[], nnx.Module]) -> PyTree:
        """The batch of a step; `model` returns the model before it, and is called if a new batch is made."""
        number = step // self._updates
        if number != self._number:
            self._number, self._batch = _NONE, self._make(model(), number)
            digest = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(self._batch)))
            assert_equal(f"rollout {number}", {f"values of rollout {number}": digest.hexdigest()})
            self._number = number
        return self._batch

    @property
    def example(self) -> PyTree:
        """A batch of ones."""
        return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), self.flax_mesh_shapes)

    def state(self, step: int) -> bytes:
        """Of the checkpoint of a step: the batch, if the next step trains on it too."""
        if step % self._updates == 0 or self._number != step // self._updates:
            return b""
        file = io.BytesIO()
        np.savez_compressed(file, *jax.tree.leaves(self._batch))
        return file.getvalue()

    def resume(self, step: int, state: object) -> None:
        """Continue with the batch of `step`, from the state of its checkpoint.

        If the run resumes with settings that change the shapes, a new batch replaces the saved one.
        """
        if step % self._updates == 0 or not isinstance(state, bytes) or not state:
            return
        with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
            leaves = [arrays[name] for name in arrays.files]
        wanted, structure = jax.tree.flatten(self.flax_mesh_shapes)
        if [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in wanted]:
            self._number, self._batch = step // self._updates, jax.tree.unflatten(structure, leaves)
