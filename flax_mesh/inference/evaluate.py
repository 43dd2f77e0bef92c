"""Perplexity: the loss of every token of a text but the first, given at most `sequence_length` - 1 tokens before it.

    tokens    t0 t1 t2 t3 t4 t5      sequence_length = 3
    window 0  t0 t1 t2               targets t1 t2 t3
    window 1           t3 t4         targets       t4 t5, and padding without a target

Window w starts at token w * sequence_length, as in training (data/batches.py), but the last one is padded and no
window is left out.
"""

import codecs
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from flax_mesh.axes import num_parts
from flax_mesh.data.corpus import Documents, Tokens, load_documents
from flax_mesh.errors import ConfigError, Problem, as_problem, labelled
from flax_mesh.hardware import LANES
from flax_mesh.inference.tokenizer import Encoded, Tokenizer
from flax_mesh.mesh.context import in_mesh
from flax_mesh.models import Decoder, DecoderConfig, next_token_loss
from flax_mesh.step.batch import put_batch
from flax_mesh.step.loss import sums_of
from flax_mesh.text import count_text
from flax_mesh.tree import PyTree

NO_TARGET = -1
CHUNK = 2**24  # tokens whose largest id is determined at a time
SPARE = 256  # tokens that are encoded after the last one that is used
BYTES_PER_TOKEN = 8  # of text that is encoded first: about twice the usual number
LARGEST_EXPONENT = 709.0  # of a float


class TextSet(NamedTuple):
    """Tokens to evaluate; `num_bytes` is the size of the text of all of them but the first, None if it is not known."""

    tokens: Tokens
    num_bytes: int | None


class Evaluation(NamedTuple):
    """The loss on a set of tokens.

    Attributes:
        num_tokens: Number of predicted tokens.
        num_bytes: Bytes of their text; None if it is not known.
        loss: Mean cross-entropy in nats per token.

    Example:
        >>> one = Evaluation(num_tokens=100, num_bytes=400, loss=2.0)
        >>> f"{one.perplexity:.4f} {one.bits_per_byte:.4f}"
        '7.3891 0.7213'
    """

    num_tokens: int
    num_bytes: int | None
    loss: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.inf if self.loss > LARGEST_EXPONENT else math.exp(self.loss)  # nan for a loss that is nan

    @property
    def bits_per_byte(self) -> float | None:
        """The loss of all tokens in bits, divided by the bytes of their text."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes if self.num_bytes else None

    def to_dict(self) -> dict[str, float | None]:
        """All numbers, with the names that `flax-mesh evaluate --json` prints."""
        derived = {"bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}
        return {"tokens": self.num_tokens, "bytes": self.num_bytes, "loss": self.loss, **derived}


def evaluate(
    model: Decoder, mesh: Mesh, sets: Mapping[str, TextSet], *, sequence_length: int, batch_size: int
) -> Iterator[tuple[str, Evaluation]]:
    """Yield the name and the evaluation of every set.

    One program is compiled. The rows of a batch are rounded up to a multiple for the mesh, and neither rows nor
    columns are more than the longest set has.
    """
    sums = _sums(model, mesh)
    longest = max((len(tokens) for tokens, _ in sets.values()), default=2)
    sequence_length = window_length(model.config, mesh, sequence_length, longest - 1)
    most = _count_of(longest, sequence_length)
    rows = fitted(batch_size, most, num_parts(model.axes, mesh.shape, "batch", "experts"))
    for name, (tokens, num_bytes) in sets.items():
        total, pending = 0.0, []
        for first in range(0, _count_of(len(tokens), sequence_length), rows):
            pending.append(sums(window_batch(tokens, first, rows, sequence_length)))
            if len(pending) > 1:  # the devices compute the next batch meanwhile
                total += float(pending.pop(0))
        total += sum(map(float, pending))
        yield name, Evaluation(len(tokens) - 1, num_bytes, total / (len(tokens) - 1))


def window_batch(tokens: Tokens, first: int, rows: int, sequence_length: int) -> dict[str, np.ndarray]:
    """Windows `first` to `first` + `rows` as inputs and targets; NO_TARGET after the last token."""
    inputs = np.zeros((rows, sequence_length), np.int32)
    targets = np.full((rows, sequence_length), NO_TARGET, np.int32)
    for row in range(rows):
        start = (first + row) * sequence_length
        window = tokens[start : start + sequence_length + 1].astype(np.int32)
        if len(window) > 1:
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
    return {"inputs": inputs, "targets": targets}


def _count_of(num_tokens: int, sequence_length: int) -> int:
    """The number of windows; the last window may be shorter."""
    return -(-(num_tokens - 1) // sequence_length)


def window_length(config: DecoderConfig, mesh: Mesh, sequence_length: int, most: int) -> int:
    """`sequence_length` or, if that is less, `most`, rounded up to a multiple for the mesh and splash attention."""
    parts = num_parts(config.axes, mesh.shape, "sequence")
    if config.attention == "splash":
        parts = math.lcm(parts, LANES * num_parts(config.axes, mesh.shape, "query_sequence"))
    return min(sequence_length, fitted(most, most, parts))


def fitted(size: int, most: int, multiple: int) -> int:
    """`size` or, if that is less, `most`, rounded up to a multiple."""
    return -(-min(size, most) // multiple) * multiple


def _sums(model: Decoder, mesh: Mesh) -> Callable[[PyTree], jax.Array]:
    """batch -> summed cross-entropy in nats of all targets."""
    graphdef, state = nnx.split(model, graph=True)

    def sums(batch: PyTree) -> jax.Array:
        with in_mesh(mesh):
            return _summed(graphdef, state, put_batch(batch, mesh, model.axes))

    return sums


@functools.partial(jax.jit, static_argnums=0)
def _summed(graphdef: nnx.GraphDef, state: nnx.State, batch: PyTree) -> jax.Array:
    loss, _, metrics = sums_of(next_token_loss(nnx.merge(graphdef, state), batch))
    return metrics.get("cross_entropy", loss)  # without the losses of routers


def length_problems(
    config: DecoderConfig, mesh: Mesh, sequence_length: int, name: str = "sequence_length"
) -> list[Problem]:
    """Why `mesh` cannot compute sequences of this length, one line each; `name` names the option."""
    problems = [as_problem(line) for line in config.problems_on(mesh, sequence_length)]
    problems = [problem.renamed(name) if problem.setting == "data.sequence_length" else problem for problem in problems]
    if sequence_length % (ways := num_parts(config.axes, mesh.shape, "sequence")):
        what = f"{sequence_length} is not divisible by the {ways} parts of a sequence"
        problems.append(Problem(name, what, "use a multiple"))
    return problems


def read_set(
    source: str,
    tokenizer: Callable[[], Tokenizer | None],
    vocab_size: int,
    *,
    label: str,
    most: int | None,
    bin_dtype: str,
    option: str = "bin_dtype",
) -> TextSet:
    """The first `most` tokens of the files of `source`; `tokenizer` opens the model's tokenizer, which text needs.

    Raises one ConfigError, whose lines begin with `label`, if a model with that many ids cannot be evaluated on them.
    """
    with labelled(label):
        documents = load_documents(source, bin_dtype, option=option)
        text = text_set(documents, tokenizer() if documents.is_text else None, most)
        if problems := set_problems(text.tokens, vocab_size):
            raise ConfigError(problems)
    return text


def text_set(documents: Documents, tokenizer: Tokenizer | None, most: int | None) -> TextSet:
    """The tokens of text or of token files, at most `most` of them.

    Files are separated by a zero byte if every token is a byte; with another tokenizer each is encoded separately.
    """
    if not documents.is_text:
        return TextSet(documents.join()[:most], None)
    if tokenizer is None:
        raise ConfigError(
            "text, but the model has no tokenizer: it was not trained on text files, and there is no tokenizer.json; "
            "use token files, .npy or .bin"
        )
    if tokenizer.is_bytes:
        first = {name: data[:most] for name, data in documents.tokens.items()}
        tokens = replace(documents, tokens=first).join()[:most]
        return TextSet(tokens, max(len(tokens) - 1, 0))
    parts, count = [], 0
    for name, data in documents.tokens.items():
        parts.append(_encoded(documents.paths[name], data, tokenizer, None if most is None else most - count))
        count += len(parts[-1].tokens)
        if most is not None and count >= most:
            break
    return _joined(parts, most)


def _encoded(path: Path, data: np.ndarray, tokenizer: Tokenizer, most: int | None) -> Encoded:
    """The tokens of a text, or at least the first `most` of them.

    Of a long text only the beginning is encoded, and twice as much until it has SPARE more tokens: the last ones differ
    from the tokens of the whole text, which goes on, and a tokenizer may add special ones. The beginning ends at a line
    or a word if there is one, so that tokens before these can differ only if they depend on text SPARE tokens away.
    """
    size = len(data) if most is None else (most + SPARE) * BYTES_PER_TOKEN
    while most is not None and size < len(data):
        part = data[:size].tobytes()
        ends = [at for mark in (b"\n", b" ") if (at := part.rfind(mark, size // 2)) > 0]
        encoding = tokenizer.encode(_decoded(path, part[: ends[0]] if ends else part, is_complete=False))
        if len(encoding.tokens) >= most + SPARE:
            return encoding
        size *= 2
    return tokenizer.encode(_decoded(path, data.tobytes(), is_complete=True))


def _decoded(path: Path, data: bytes, *, is_complete: bool) -> str:
    """The text of UTF-8; without an incomplete character at its end, unless it is complete."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=is_complete)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}); convert it") from error


def _joined(texts: list[Encoded], most: int | None) -> TextSet:
    """All tokens, and the bytes of the predicted ones: all but the first."""
    sizes = [np.diff(text.ends, prepend=0) for text in texts]  # bytes of every token
    tokens, size = np.concatenate([text.tokens for text in texts])[:most], np.concatenate(sizes)[:most]
    return TextSet(tokens, int(size[1:].sum()))


def set_problems(tokens: Tokens, vocab_size: int) -> list[str]:
    """Why a set cannot be evaluated, one line each."""
    if len(tokens) < 2:
        size = count_text(len(tokens), "token")
        return [f"it has {size}, of which the first is not predicted; at least 2 are required"]
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        wrong = part[(part < 0) | (part >= vocab_size)]
        if wrong.size:
            return [f"it has the token {wrong[0]}; the ids of this model are 0 to {vocab_size - 1}"]
    return []
