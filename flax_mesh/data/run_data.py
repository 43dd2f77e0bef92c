"""The data of a run, with one interface for tokens of files and for batches of the recipe."""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_mesh.axes import PartitionAxis
from flax_mesh.data.batches import batch_rows, make_batch_fn, make_eval_fn, num_eval_batches, prefetch
from flax_mesh.data.config import DataConfig
from flax_mesh.data.corpus import Corpus
from flax_mesh.data.evaluation import token_metrics
from flax_mesh.data.user_batches import UserBatches
from flax_mesh.step.batch import put_batch
from flax_mesh.tree import PyTree

PROMPT_BYTES = 64
TEXT, TOKENS, BATCHES = "text", "tokens", "batches"  # bytes of text, ids in files, batches of the recipe


@dataclass(frozen=True)
class RunData:
    """The batches of a run, and the record of them in its checkpoints."""

    name: str  # of the content that `content_hash` hashes
    description: str  # one line, printed by the run
    content_hash: str
    kind: str  # TEXT, TOKENS or BATCHES: checkpoints record it, and it decides the tokenizer
    first: Callable[[], PyTree]  # the batch of step 0 on the host
    batch: Callable[..., PyTree]  # step -> global arrays on the devices; the steps of a run in order
    check_unchanged: Callable[[], None] = lambda: None  # raises ConfigError if files changed under the run
    # (state -> sums of a batch) -> metrics of the held-out tokens; None without them.
    held_out: Callable[[Callable[[PyTree], Mapping[str, jax.Array]]], dict[str, float | None]] | None = None
    prompt: np.ndarray | None = None  # the first bytes of the held-out text, for sampling
    user_batches: UserBatches | None = None

    def batches(
        self, start: int, stop: int, model: Callable[[], nnx.Module]
    ) -> Generator[tuple[int, PyTree, float], None, None]:
        """(step, batch, seconds waited for it) of every step; a thread makes the next batch meanwhile.

        Rollouts are made between the steps, by the result of `model` before each of them.
        """
        if self.user_batches is None or self.user_batches.rollouts is None:
            yield from prefetch(self.batch, start, stop)
            return
        for step in range(start, stop):
            began = time.perf_counter()
            batch = self.batch(step, model)
            yield step, batch, time.perf_counter() - began

    def record(self, step: int) -> dict[str, object]:
        """The field "data" of the metadata of the checkpoint of `step`."""
        record = {name: getattr(self, name) for name in ("name", "kind", "description", "content_hash")}
        # The position is the step, since batches are a function of the step.
        return {**record, "position": step, **({} if self.user_batches is None else self.user_batches.record(step))}

    def resume(self, step: int, saved: Mapping[str, Any]) -> str:
        """Continue after `step` steps, from the field "data" of a checkpoint.

        Returns one line if the last batch before them has changed since.
        """
        return "" if self.user_batches is None else self.user_batches.resume(step, saved)


def user_data(batches: UserBatches, mesh: Mesh, axes: PartitionAxis) -> RunData:
    first = batches.first  # before anything is on the devices

    def batch(step: int, *model: Callable[[], nnx.Module]) -> PyTree:
        return put_batch(batches(step, *model), mesh, axes, batches.own_rows)

    return RunData(
        "rows of data.source" if batches.rows else "first batch of make_batches",
        batches.description,
        batches.content_hash,
        BATCHES,
        first=lambda: first,
        batch=batch,
        user_batches=batches,
    )


def token_data(
    corpus: Corpus, config: DataConfig, seed: int, sharding: NamedSharding, vocab_size: int | None, *, evaluates: bool
) -> RunData:
    """The tokens of files. Raises ConfigError if they are evaluated, and the held-out part has no full batch."""

    def held_out(sums: Callable[[PyTree], Mapping[str, jax.Array]]) -> dict[str, float | None]:
        return token_metrics((jax.device_get(sums(eval_fn(k))) for k in range(count)), corpus.bytes_per_token)

    if evaluates:
        eval_fn = make_eval_fn(corpus.held_out, config=config, sharding=sharding, vocab_size=vocab_size)
        count = num_eval_batches(corpus.held_out, config)
    is_text = corpus.bytes_per_token == 1
    return RunData(
        "content of data.source",
        corpus.description,
        corpus.content_hash,
        TEXT if is_text else TOKENS,
        first=lambda: batch_rows(corpus.train, seed, config, 0, vocab_size=vocab_size),
        batch=make_batch_fn(corpus.train, seed=seed, config=config, sharding=sharding, vocab_size=vocab_size),
        check_unchanged=corpus.check_unchanged,
        held_out=held_out if evaluates else None,
        prompt=np.asarray(corpus.held_out[:PROMPT_BYTES], np.int32) if is_text else None,
    )
