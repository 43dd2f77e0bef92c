"""Log-probabilities of the ends of texts, and whether a greedy continuation has the same tokens.

Shape letters: B batch, S sequence, T picked tokens of a row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from flax_mesh.axes import num_parts
from flax_mesh.inference.evaluate import fitted, window_length
from flax_mesh.mesh.context import in_mesh
from flax_mesh.models import Decoder
from flax_mesh.models.loss import scores_at
from flax_mesh.step.batch import put_batch


class _Row(NamedTuple):
    inputs: tuple[int, ...]
    picks: list[tuple[int, int, int]]  # the last input before a token, the token, and its text


def score(
    model: Decoder,
    mesh: Mesh,
    texts: Sequence[Sequence[int]],
    counts: Sequence[int],
    batch_size: int,
    on_batch: Callable[[int], object],
) -> list[tuple[float, bool]]:
    """The sum of the log-probabilities of the last `counts[n]` tokens of every text, and whether each is the largest.

    Texts whose inputs are the beginning of other inputs share a row: all answers of one token to a question do.
    `on_batch` is called with the number of rows of each batch that is complete, in the order of their lengths.
    """
    rows = sorted(rows_of(texts, counts), key=lambda row: (len(row.inputs), len(row.picks)), reverse=True)
    size = fitted(batch_size, len(rows), num_parts(model.axes, mesh.shape, "batch", "experts"))
    sums, is_greedy = [0.0] * len(texts), [True] * len(texts)
    graphdef, state = nnx.split(model, graph=True)

    def dispatched(batch: Sequence[_Row]) -> tuple[jax.Array, jax.Array]:
        # Few different sizes, since a program is compiled for each.
        most, picks = min(bucket(len(batch[0].inputs), 16), len(rows[0].inputs)), max(len(row.picks) for row in batch)
        tokens_BS = np.zeros((size, window_length(model.config, mesh, 2**31, most)), np.int32)
        positions_BT, targets_BT = np.zeros((2, size, bucket(picks)), np.int32)
        for b, row in enumerate(batch):
            tokens_BS[b, : len(row.inputs)] = row.inputs
            positions_BT[b, : len(row.picks)], targets_BT[b, : len(row.picks)], _ = zip(*row.picks, strict=True)
        with in_mesh(mesh):
            inputs = put_batch({"inputs": tokens_BS}, mesh, model.axes)["inputs"]
            return _scored(graphdef, state, inputs, positions_BT, targets_BT)

    batches = [rows[first : first + size] for first in range(0, len(rows), size)]
    pending = [dispatched(batch) for batch in batches[:1]]
    for n, batch in enumerate(batches):
        pending += [dispatched(later) for later in batches[n + 1 : n + 2]]  # while the devices compute this batch
        for row, log_probs, largest in zip(batch, *jax.device_get(pending.pop(0)), strict=False):
            for pick, log_prob, is_largest in zip(row.picks, log_probs.tolist(), largest.tolist(), strict=False):
                sums[pick[2]] += log_prob
                is_greedy[pick[2]] &= is_largest
        on_batch(len(batch))
    return list(zip(sums, is_greedy, strict=True))


def rows_of(texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[_Row]:
    """The inputs that no other text begins with, and the tokens that are picked after them."""
    rows, inputs = list[_Row](), [tuple(text[:-1]) for text in texts]
    # In this order, the inputs before others begin with them if any inputs do.
    for n in sorted(range(len(texts)), key=inputs.__getitem__, reverse=True):
        if not rows or rows[-1].inputs[: len(inputs[n])] != inputs[n]:
            rows.append(_Row(inputs[n], []))
        start = len(texts[n]) - counts[n]
        rows[-1].picks.extend((start + i - 1, token, n) for i, token in enumerate(texts[n][start:]))
    return rows


def bucket(count: int, smallest: int = 1) -> int:
    """`count`, rounded up to a power of two."""
    return max(smallest, 1 << (count - 1).bit_length())


@partial(jax.jit, static_argnums=0)
def _scored(graphdef: nnx.GraphDef, state: nnx.State, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    return scores_at(nnx.merge(graphdef, state), *arrays)
