"""Pairs of a chosen and a rejected completion as packed batches, with their log-probabilities under a reference."""

import hashlib
import io
import logging
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from flax_mesh.checkpoint.find import find_step
from flax_mesh.checkpoint.hf.kept import CONFIG
from flax_mesh.data.chats import SAID_EVERY_S, Arrays, Chats, Dataset, Row, read_rows
from flax_mesh.data.config import ChatConfig
from flax_mesh.data.evaluation import Evaluate, TracedEvaluate
from flax_mesh.data.rows.kinds import BadRowError, Message
from flax_mesh.data.rows.tokens import Encoder, Line, num_equal
from flax_mesh.data.user_batches import RowHashes, hash_rows
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types
from flax_mesh.processes.agree import assert_equal, decide_at_process_0
from flax_mesh.store import StorePath, model_folder, stored_path
from flax_mesh.text import count_text

ANSWERS = ("chosen", "rejected")
FORMATS = (("prompt", *ANSWERS), ANSWERS)
FILE = "reference.npz"
LOGGER = logging.getLogger(__name__)
LogProbs = Callable[[Arrays], np.ndarray]  # of a batch: (B, S)


class Preferences(Chats):
    """The pairs of all rows. Batches have the "reference" too: the log-probability of a document at its last token."""

    def __init__(
        self,
        config: ChatConfig,
        rows: Sequence[Row],
        description: str,
        log_probs: Callable[[], LogProbs],
        folder: Path,
        key: Callable[[], str],
    ):
        super().__init__(config, rows, description)
        self._log_probs, self._file, self._key = log_probs, folder / FILE, key

    def batches(self, seed: int) -> Dataset:
        """As of `Chats`. The log-probabilities of the reference are computed, or read, for the first batch."""
        iterator, size = super().batches(seed), (self.config.batch_size, self.config.sequence_length)
        names = ("inputs", "targets", "segment_ids", "reference")
        iterator.flax_mesh_shapes = {
            x: jax.ShapeDtypeStruct(size, np.float32 if x == names[-1] else np.int32) for x in names
        }
        return iterator

    def metrics(self, evaluate: Evaluate) -> dict[str, float]:
        """As of `Chats`, with "_" in the place of "/" in names. Pass the argument of the evaluation function itself."""
        # A trace uses no values: they are not computed for a report, which may be made on another machine.
        arrays = self.tokens if isinstance(evaluate, TracedEvaluate) else self.arrays
        return {name.replace("/", "_"): value for name, value in self.evaluated(evaluate, arrays).items()}

    def hashes(self) -> RowHashes:
        """The reference is one of the data: a run that is resumed with another one is refused."""
        rows = zip(self.rows, self.reference, strict=True)
        return hash_rows([[*(x for document in row for x in document), reference] for row, reference in rows])

    @cached_property
    def reference(self) -> np.ndarray:
        """Log-probabilities of the trained tokens of all pairs, (rows, 2) float32; the same in all processes."""
        content = super().hashes().content
        assert_equal("preferences", {"rows of data.source": content})
        key = hashlib.sha256(f"{content}\n{self._key()}".encode()).hexdigest()
        kept = _read(self._file, key)
        is_kept = decide_at_process_0("reference", str(kept is not None), lambda texts: str("False" not in texts))
        reference = kept if kept is not None and is_kept == "True" else self._computed()
        assert_equal("reference", {f"values of {self._file}": hashlib.sha256(reference.tobytes()).hexdigest()})
        if reference is not kept and jax.process_index() == 0:
            _write(self._file, key, reference)
        return reference

    def _computed(self) -> np.ndarray:
        log_probs, sums, said, done = self._log_probs(), np.zeros((len(self.rows), 2)), time.monotonic(), 0
        LOGGER.info("data: the reference computes %s", count_text(len(sums), "pair"))
        for packed in self.packed(range(len(sums)), self.tokens):
            batch, used = super().batch(packed), packed["trained"].astype(bool)
            rows, documents = packed["row"][used], packed["document"][used]
            np.add.at(sums, (rows, documents), log_probs(batch)[used])
            done += len(np.unique(rows))
            if time.monotonic() > said + SAID_EVERY_S:
                said = time.monotonic()
                LOGGER.info("data: the reference has computed %s", count_text(done, "pair"))
        if wrong := np.flatnonzero(~np.isfinite(sums).all(axis=1)).tolist():
            which = f"{count_text(len(wrong), 'pair')}, the first of row {wrong[0] + 1} of the encoded ones"
            raise ConfigError(f"the log-probabilities of the reference must be finite, but are not in {which}")
        return sums.astype(np.float32)

    def tokens(self, index: int) -> Arrays:
        tokens = super().tokens(index)
        like = tokens["inputs"]
        return tokens | {"row": np.full_like(like, index), "reference": np.zeros(len(like), np.float32)}

    def arrays(self, index: int) -> Arrays:
        arrays = self.tokens(index)
        arrays["reference"][np.cumsum([len(x.ids) - 1 for x in self.rows[index]]) - 1] = self.reference[index]
        return arrays

    def batch(self, packed: Arrays) -> Arrays:
        return super().batch(packed) | {"reference": packed["reference"]}


@check_types
def read_preferences(
    config: ChatConfig,
    folder: str,
    vocab_size: int,
    *,
    log_probs: Callable[[], LogProbs],
    keep_in: str,
    key: str = "",
) -> Preferences:
    """Read the pairs of `data.source`, a file or a dataset, with the tokenizer of a Hugging Face folder or id.

    All rows have the format of the first one: {"prompt", "chosen", "rejected"}, which are all texts or all lists of
    messages, or {"chosen", "rejected"}, lists of messages that begin with the same messages, the prompt. They are
    encoded as the prompts and completions of `read_chats`.

    A row of a batch contains whole pairs: segment 2k - 1 is the k-th chosen document of this row, segment 2k the
    rejected one. The array "reference", (B, S) float32, has the log-probability of a document at its last token.

    Args:
        config: The section `data` of the recipe. A pair may have sequence_length + 2 tokens.
        folder: The folder with the tokenizer and the parameters of the reference, `checkpoint.start_from`.
        vocab_size: The size of the vocabulary of the model.
        log_probs: Opens the reference, and returns a function of a batch without "reference", which returns the
            log-probabilities of its targets, (B, S). It is called before the first batch of a run.
        keep_in: A folder, such as `run.folder`, in which the file reference.npz keeps the results. A run that is
            resumed reads them; they are computed again if the rows, the parameters in `folder` or `key` differ.
        key: A text with everything else that the results depend on, such as the repr of the config of the model.

    Returns:
        A recipe trains on `batches(seed)` of it, and evaluates `metrics(evaluate)`.

    Raises:
        ConfigError: As of `read_chats`. A pair has a line too if its completions are equal.
    """
    if config.train_on == "all":
        reason = "must be assistant or last: the prompts of a pair are equal, and train nothing"
        raise ConfigError(Problem("data.train_on", reason, value=config.train_on))
    rows = read_rows(config, folder, vocab_size, _encoded)
    # A plan needs the rows, but no parameters of a model of the hub.
    facts = lambda: "\n".join([key, *_files(model_folder(folder))])  # noqa: E731
    return Preferences(config, *rows, log_probs, stored_path(keep_in), facts)


def _encoded(encoder: Encoder, line: Line) -> Row:
    row = encoder.read(line, FORMATS)
    named = {name: row[name] for name in ANSWERS}
    prompt, answers = (row["prompt"], named) if encoder.names == FORMATS[0] else _without_beginning(named)
    pair = []
    for name, answer in answers.items():
        try:
            pair.append(encoder.encode({"prompt": prompt, name: answer}, row.get("tools")))
        except BadRowError as error:
            raise BadRowError(f"{name}: {error}") from error
    if np.array_equal(pair[0].ids, pair[1].ids):
        raise BadRowError("'chosen' and 'rejected' have the same tokens, so that neither is preferred")
    return tuple(pair)


def _without_beginning(named: Message) -> tuple[Sequence[Message], Message]:
    """The messages with which both begin, and the others of each."""
    chosen, rejected = named.values()
    if not all(isinstance(x, list) for x in (chosen, rejected)):
        raise BadRowError("without 'prompt', 'chosen' and 'rejected' must be lists of messages")
    same, least = num_equal(chosen, rejected), min(len(chosen), len(rejected))
    if same in (0, least):
        reason = "one of them begins the other" if same == least else "they differ in the first"
        raise BadRowError(f"'chosen' and 'rejected' must begin with the same messages, and then differ, but {reason}")
    return chosen[:same], {name: messages[same:] for name, messages in named.items()}


def _files(folder: Path) -> list[str]:
    """A line for every file that changes if the parameters in a folder change."""
    try:
        files = [folder / CONFIG, *folder.glob("*.safetensors")] if (folder / CONFIG).is_file() else []
        files = sorted(files) or sorted(x for x in find_step(folder).iterdir() if x.is_file())
        return [f"{x.name} {(stat := x.stat()).st_size} {stat.st_mtime_ns}" for x in files]
    except OSError as error:
        raise ConfigError(f"checkpoint.start_from={folder} cannot be read: {error.strerror}") from error


def _read(file: Path, key: str) -> np.ndarray | None:
    """The results that were kept under `key`; None if there are none, or the file is damaged."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            return arrays["reference"] if arrays["key"] == key else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, key: str, reference: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, key=key, reference=reference)
    try:
        if isinstance(file, StorePath):
            file.write_bytes(content.getvalue())
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f".{file.name}.{os.getpid()}")
        written.write_bytes(content.getvalue())
        written.replace(file)
    except OSError as error:
        raise ConfigError(f"run.folder: {file} cannot be written ({error.strerror}); use another folder") from error
