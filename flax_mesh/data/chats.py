"""Rows of a file or a dataset as packed batches for fine-tuning, in a stream that resumes exactly."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from flax_mesh.data.config import ChatConfig, check_data_config
from flax_mesh.data.evaluation import Evaluate, mean_metrics
from flax_mesh.data.rows.tokens import BadRowError, Encoder, Line, Tokens
from flax_mesh.data.sources import open_rows
from flax_mesh.data.tokenizers.chat import EXTRA, open_tokenizer
from flax_mesh.data.user_batches import RowHashes, hash_rows
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types
from flax_mesh.text import count_text

OPEN_ROWS = 64  # that documents are packed into at a time: 90% are filled by lengths up to a row, 99% by short ones
SAID_EVERY_S = 10.0
LOGGER = logging.getLogger(__name__)  # of progress, which the command line prints
Dataset: TypeAlias = Any  # of grain, and its iterator
Arrays = dict[str, np.ndarray]
Row = tuple[Tokens, ...]  # the documents that one line of the file has


class Chats:
    """The tokens of all rows, in memory: 5 bytes each. A share of the rows, from the end of the file, is held out.

    Every row has as many documents as the first one. They share a row of a batch, next to each other.
    """

    def __init__(self, config: ChatConfig, rows: Sequence[Row], description: str):
        self.config, self.rows, self._description = config, rows, description
        self._num_trained = len(rows) - int(len(rows) * config.held_out)

    def batches(self, seed: int) -> Dataset:
        """An iterator of grain, in an order that depends on `data.seed`, or on `seed` without it, and on the epoch."""
        seed = (seed if self.config.seed is None else self.config.seed) % 2**32
        trained, held_out = range(self._num_trained), len(self.rows) - self._num_trained
        share = np.mean(next(iter(self.packed(trained, self.tokens, seed)))["inputs_segment_ids"] > 0)
        iterator: Dataset = iter(self.packed(trained, self.arrays, seed).map(self.batch))
        held_out = f"{held_out:,} of them held out; {share:.1%} of the first batch is filled"
        iterator.description = f"{self._description}, {held_out}"
        iterator.flax_mesh_rows = self.hashes
        return iterator

    def hashes(self) -> RowHashes:
        """Of all that batches are made from."""
        return hash_rows([[x for document in row for x in document] for row in self.rows])

    def metrics(self, evaluate: Evaluate) -> dict[str, float]:
        """`mean_metrics` of at most `data.eval_batches` batches of the rows that are held out."""
        return self.evaluated(evaluate, self.arrays)

    def evaluated(self, evaluate: Evaluate, arrays: Callable[[int], Arrays]) -> dict[str, float]:
        held_out = range(self._num_trained, len(self.rows))
        if not held_out:
            share, rows = self.config.held_out, count_text(len(self.rows), "row")
            raise ConfigError(f"data.held_out={share} of {rows} is no row; raise it, or set run.eval_every=0")
        batches = self.packed(held_out, arrays).map(self.batch)
        return mean_metrics(evaluate, islice(batches, self.config.eval_batches))

    def tokens(self, index: int) -> Arrays:
        """The documents of a row. The first token of each is not a target, so that it is not predicted from another."""
        row = self.rows[index]
        documents = {
            "inputs": [x.ids[:-1] for x in row],
            "targets": [x.ids[1:] for x in row],
            "trained": [x.trained[1:] for x in row],
            "document": [np.full(len(x.ids) - 1, i, np.int32) for i, x in enumerate(row)],
        }
        return {name: np.concatenate(parts) for name, parts in documents.items()}

    arrays = tokens

    def packed(self, indices: Sequence[int], arrays: Callable[[int], Arrays], seed: int | None = None) -> Dataset:
        """A dataset of grain: batches without end; without a seed each row once, in order, and rows of padding."""
        try:
            import grain
        except ImportError as error:
            raise ConfigError(f"packing {EXTRA.format('grain')}") from error
        config, rows = self.config, grain.MapDataset.source(indices).map(arrays)
        if seed is not None:
            rows = rows.seed(seed).shuffle().repeat()
        packed = grain.experimental.FirstFitPackIterDataset(
            rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            length_struct=dict.fromkeys(self.tokens(indices[0]), config.sequence_length),
            num_packing_bins=OPEN_ROWS,
            max_sequences_per_bin=None if config.packing else 1,
            shuffle_bins=False,  # the rows are shuffled
        )
        pad = partial(grain.experimental.batch_and_pad, batch_size=config.batch_size)
        return packed.batch(config.batch_size, batch_fn=pad)

    def batch(self, packed: Arrays) -> Arrays:
        targets = np.where(packed["trained"], packed["targets"], np.int32(-1))  # which do not count
        number, each = packed["inputs_segment_ids"], len(self.rows[0])
        segment_ids = np.where(number > 0, (number - 1) * each + packed["document"] + 1, 0)
        return {"inputs": packed["inputs"], "targets": targets, "segment_ids": segment_ids}


def fitted(row: Row, length: int) -> Row:
    """The documents, whose ends are cut off so that all fit in `length` tokens: each has at least an equal share.

    Raises a BadRowError if one of them has no token to train on.
    """
    sizes = [len(x.ids) - 1 for x in row]
    most = [max(length // len(row), length - (sum(sizes) - size)) + 1 for size in sizes]
    cut = tuple(Tokens(x.ids[:n], x.trained[:n]) for x, n in zip(row, most, strict=True))
    for before, after in zip(row, cut, strict=True):
        if not after.trained[1:].any():
            is_cut = len(after.ids) < len(before.ids)
            raise BadRowError("has no token to train on" + f" in its first {len(after.ids)}" * is_cut)
    return cut


@check_types
def read_chats(config: ChatConfig, folder: str, vocab_size: int) -> Chats:
    """Read the rows of `data.source`, a file or a dataset, with the tokenizer of a Hugging Face folder or id.

    All rows have the format of the first one: {"messages": [...]}, {"prompt": text, "completion": text}, both of which
    may be lists of messages, or {"text": text}. A recipe trains on `batches(seed)` of the result, and evaluates its
    `metrics(evaluate)`. Raises a ConfigError with a line for every row that has no tokens to train on, or too many (see
    `ChatConfig`).
    """
    return Chats(config, *read_rows(config, folder, vocab_size, lambda encoder, line: (encoder(line),)))


def read_rows(
    config: ChatConfig,
    folder: str,
    vocab_size: int,
    encode: Callable[[Encoder, Line], Row],
    fit: Callable[[Row, int], Row] = fitted,
) -> tuple[list[Row], str]:
    """The documents of all rows, which `encode` makes from their lines, and a description of them.

    Raises a ConfigError with a line for every row that cannot be used.
    """
    if problems := check_data_config(config):
        raise ConfigError(problems)
    path, given = open_rows(config)
    encoder = Encoder(open_tokenizer(folder, vocab_size), config.train_on, add_bos=config.add_bos)
    rows, stop, skipped, truncated, said = [], [], [], 0, time.monotonic()
    for number, line in given:
        if time.monotonic() > said + SAID_EVERY_S:
            said = time.monotonic()
            LOGGER.info("data: %s of %s are encoded", count_text(number - 1, "row"), path)
        try:
            row = encode(encoder, line)
            size, most = sum(len(x.ids) for x in row), config.sequence_length + len(row)
            if size > most and config.on_long_row == "stop":
                repair = "raise data.sequence_length, or set data.on_long_row=truncate"
                stop.append(f"{path}, row {number}: has {size} tokens, but at most {most} fit; {repair}")
                continue
            rows.append(fit(row, config.sequence_length))
            truncated += size > most
        except BadRowError as error:
            (stop if config.on_bad_row == "stop" else skipped).append(f"{path}, row {number}: {error}")
    if stop:
        raise ConfigError(stop, repair="Repair them; data.on_bad_row=skip leaves out rows without valid tokens.")
    notes = [f"{count_text(len(skipped), 'row')} skipped, the first: {skipped[0]}"] if skipped else []
    notes += [f"{count_text(truncated, 'row')} truncated"] if truncated else []
    notes += encoder.notes()
    if not rows:
        raise ConfigError(Problem("data.source", ", ".join(["has no row to train on", *notes]), value=path))
    text = f"{path}: {count_text(len(rows), 'row')} of {' and '.join(encoder.names)}"
    return rows, ", ".join([text, *notes])
