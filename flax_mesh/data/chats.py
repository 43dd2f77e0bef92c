"""Rows of a JSONL file as packed batches for fine-tuning, in a stream that resumes exactly."""

import gzip
import logging
import time
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flax_mesh.data.chat_tokens import BadRowError, Encoder, Tokens
from flax_mesh.data.config import ChatConfig, check_data_config
from flax_mesh.data.evaluation import Evaluate, mean_metrics
from flax_mesh.data.tokenizers.chat import EXTRA, open_tokenizer
from flax_mesh.data.user_batches import hash_rows
from flax_mesh.errors import ConfigError, Problem, labelled
from flax_mesh.fields import check_types, user_path
from flax_mesh.text import count_text

OPEN_ROWS = 64  # that documents are packed into at a time: 90% are filled by lengths up to a row, 99% by short ones
SAID_EVERY_S = 10.0
LOGGER = logging.getLogger(__name__)  # of progress, which the command line prints
Arrays = dict[str, np.ndarray]


class Chats:
    """The tokens of all rows, in memory: 5 bytes each. A share of them, from the end of the file, is held out."""

    def __init__(self, config: ChatConfig, documents: Sequence[Tokens], description: str):
        self._config, self._description = config, description
        first = len(documents) - int(len(documents) * config.held_out)
        self._trained, self._held_out = documents[:first], documents[first:]
        self._rows = hash_rows(documents)

    def batches(self, seed: int) -> Any:
        """An iterator of grain, in an order that depends on `data.seed`, or on `seed` without it, and on the epoch."""
        seed = seed if self._config.seed is None else self._config.seed
        dataset = _batches(self._config, self._trained, seed % 2**32)
        share = np.mean(next(iter(dataset))["segment_ids"] > 0)
        iterator: Any = iter(dataset)
        held_out = f"{len(self._held_out):,} of them held out; {share:.1%} of the first batch is filled"
        iterator.description = f"{self._description}, {held_out}"
        iterator.rows = self._rows
        return iterator

    def metrics(self, evaluate: Evaluate) -> dict[str, float]:
        """`mean_metrics` of at most `data.eval_batches` batches of the rows that are held out."""
        if not self._held_out:
            share, rows = self._config.held_out, count_text(len(self._trained), "row")
            raise ConfigError(f"data.held_out={share} of {rows} is no row; raise it, or set run.eval_every=0")
        return mean_metrics(evaluate, islice(_batches(self._config, self._held_out), self._config.eval_batches))


@check_types
def read_chats(config: ChatConfig, folder: str, vocab_size: int) -> Chats:
    """Read the rows of `data.source`, a .jsonl or .jsonl.gz file, with the tokenizer of a Hugging Face folder.

    All rows have the format of the first one: {"messages": [...]}, {"prompt": text, "completion": text}, both of which
    may be lists of messages, or {"text": text}. A recipe trains on `batches(seed)` of the result, and evaluates its
    `metrics(evaluate)`. Raises a ConfigError with a line for every row that has no tokens to train on, or too many (see
    `ChatConfig`).
    """
    if problems := check_data_config(config):
        raise ConfigError(problems)
    with labelled("data.source"):
        most, path = config.sequence_length + 1, user_path(config.source)
    if not path.is_file() or not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(Problem("data.source", "must be a .jsonl or .jsonl.gz file", value=config.source))
    encode = Encoder(open_tokenizer(folder, vocab_size), config.train_on, add_bos=config.add_bos)
    documents, stop, skipped, truncated, said = [], [], [], 0, time.monotonic()
    for number, line in ((i, line) for i, line in enumerate(_lines(path), 1) if line.strip()):
        if time.monotonic() > said + SAID_EVERY_S:
            said = time.monotonic()
            LOGGER.info("data: %s of %s are encoded", count_text(number - 1, "row"), path)
        try:
            ids, trained = encode(line)
            if len(ids) > most and config.on_long_row == "stop":
                repair = "raise data.sequence_length, or set data.on_long_row=truncate"
                stop.append(f"{path}, row {number}: has {len(ids)} tokens, but at most {most} fit; {repair}")
                continue
            if not trained[1:most].any():
                raise BadRowError("has no token to train on" + f" in its first {most}" * (len(ids) > most))
            documents.append(Tokens(ids[:most], trained[:most]))
            truncated += len(ids) > most
        except BadRowError as error:
            (stop if config.on_bad_row == "stop" else skipped).append(f"{path}, row {number}: {error}")
    if stop:
        raise ConfigError(stop, repair="Repair them; data.on_bad_row=skip leaves out rows without valid tokens.")
    notes = [f"{count_text(len(skipped), 'row')} skipped, the first: {skipped[0]}"] if skipped else []
    notes += [f"{count_text(truncated, 'row')} truncated"] if truncated else []
    notes += encode.notes()
    if not documents:
        raise ConfigError(Problem("data.source", ", ".join(["has no row to train on", *notes]), value=path))
    rows = f"{path}: {count_text(len(documents), 'row')} of {' and '.join(encode.names)}"
    return Chats(config, documents, ", ".join([rows, *notes]))


def _lines(path: Path) -> Iterable[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"data.source={path} cannot be read: {error}") from error


def _batches(config: ChatConfig, documents: Sequence[Tokens], seed: int | None = None) -> Iterable[Arrays]:
    """A dataset of grain: batches without end; without a seed each document once, in order, and rows of padding."""
    try:
        import grain
    except ImportError as error:
        raise ConfigError(f"packing {EXTRA.format('grain')}") from error
    # The first token of a document is not a target, so that it is not predicted from another one.
    rows = grain.MapDataset.source(documents).map(
        lambda x: {"inputs": x.ids[:-1], "targets": x.ids[1:], "trained": x.trained[1:]}
    )
    if seed is not None:
        rows = rows.seed(seed).shuffle().repeat()
    packed = grain.experimental.FirstFitPackIterDataset(
        rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct=dict.fromkeys(("inputs", "targets", "trained"), config.sequence_length),
        num_packing_bins=OPEN_ROWS,
        max_sequences_per_bin=None if config.packing else 1,
        shuffle_bins=False,  # the documents are shuffled
    )
    pad = partial(grain.experimental.batch_and_pad, batch_size=config.batch_size)
    return packed.batch(config.batch_size, batch_fn=pad).map(_batch)


def _batch(packed: Arrays) -> Arrays:
    targets = np.where(packed["trained"], packed["targets"], np.int32(-1))  # which do not count
    return {"inputs": packed["inputs"], "targets": targets, "segment_ids": packed["inputs_segment_ids"]}
