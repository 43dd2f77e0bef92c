"""A trained decoder that continues texts and is evaluated, by the functions that the commands use."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack, overload

import numpy as np
from jax.sharding import Mesh

from flax_mesh.errors import ConfigError, Mistakes, Problem
from flax_mesh.fields import integer_problems, path_problem
from flax_mesh.inference.evaluate import Evaluation, evaluate, length_problems, read_set
from flax_mesh.inference.prompts import Prompt, encode_prompts, stop_ids, unicode_problems
from flax_mesh.inference.source import Source
from flax_mesh.inference.tokenizer import Tokenizer, text_of
from flax_mesh.models import Decoder, DecoderConfig, Generated, Sampling, generate
from flax_mesh.models.generation.generate import length_problems as cache_length_problems
from flax_mesh.models.generation.generate import option_problems
from flax_mesh.models.generation.memory import check_cache

PASS_IDS = "pass token ids to flax_mesh.models.generate"
GREEDY = Sampling()
BIN_DTYPES = ("uint16", "uint32")


class _Options(TypedDict, total=False):
    max_tokens: int
    sampling: Sampling
    stop: Sequence[str | int]
    seed: int
    batch_size: int
    cache_length: int | None


@dataclass(frozen=True)
class TrainedModel:
    """A decoder on the devices of a mesh, as `open_trained` returns it.

    Attributes:
        model: The decoder, an `nnx.Module`, with its arrays on the devices.
        config: Its config.
        mesh: The mesh of its arrays.
        tokenizer: Text to token ids and back; None if the model has none.
        stop_tokens: Ids that end a text: `eos_token_id` of a Hugging Face model.
        source: The folder that it was read from, its step, and the length of the sequences of its training run.
        description: The path, and the step that was read, or the family of a Hugging Face model.

    `flax_mesh.models.generate(trained.model, ...)` continues prompts that are token ids. The example of `open_trained`
    calls both methods.
    """

    model: Decoder
    config: DecoderConfig
    mesh: Mesh
    tokenizer: Tokenizer | None
    stop_tokens: tuple[int, ...]
    source: Source
    description: str

    @overload
    def generate(self, prompts: str, **options: Unpack[_Options]) -> str: ...

    @overload
    def generate(self, prompts: Sequence[str], **options: Unpack[_Options]) -> list[str]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stop: Sequence[str | int] = (),
        seed: int = 0,
        batch_size: int = 8,
        cache_length: int | None = None,
    ) -> str | list[str]:
        """Continue one text or several, as `flax-mesh generate` does.

        Args:
            prompts: A text, or several, of any lengths.
            max_tokens: Number of tokens to generate for each prompt.
            sampling: Temperature, top_k and top_p; greedy by default.
            stop: Tokens that end a text and are not part of it: ids, or texts that are one token each. A text of digits
                is an id. The ids of `stop_tokens` always end it.
            seed: Seed of the sampling, as of `flax_mesh.models.generate`.
            batch_size: Number of prompts that are computed together.
            cache_length: Tokens of a prompt and its text that the cache can store. Default: as many as the longest
                needs.

        Returns:
            The text that the tokens add to the prompt: a text for a text, a list for a list.

        Raises:
            ConfigError: The model has no tokenizer, a prompt is empty, an argument is out of its limits, or the cache
                does not fit in memory. The error has a line for every mistake, and nothing has been compiled.
        """
        sizes = {"max_tokens": max_tokens, "batch_size": batch_size, "cache_length": cache_length}
        rows, stops = self._checked(prompts, sampling, stop, seed, **sizes)
        check_cache(self.config, self.mesh, list(map(len, rows)), **sizes)
        results = generate(self.model, rows, sampling=sampling, stop_tokens=stops, seed=seed, **sizes)
        if warning := finite_problem(_names(prompts), results):
            warnings.warn(f"{warning}; try the setting model.dtype=float32, or another step", stacklevel=2)
        texts = [
            text_of(result.tokens.tolist(), frozenset(stops), self.tokenizer, row.tolist())
            for row, result in zip(rows, results, strict=True)
        ]
        return texts[0] if isinstance(prompts, str) else texts

    def _checked(
        self,
        prompts: str | Sequence[str],
        sampling: Sampling,
        stop: Sequence[str | int],
        seed: int,
        *,
        max_tokens: int,
        batch_size: int,
        cache_length: int | None,
    ) -> tuple[list[np.ndarray], list[int]]:
        """Token ids of every prompt, and the ids that end a text. One error has a line for every mistake."""
        vocab_size, mistakes = self.config.vocab_size, Mistakes()
        rows: list[np.ndarray] = []
        stops = list(self.stop_tokens)
        options = option_problems(max_tokens, seed, batch_size, cache_length, (), vocab_size)
        mistakes.problems += [*sampling.problems(), *options]
        with mistakes:
            # An id as its digits, which is how a command line has it.
            texts = [stop] if isinstance(stop, str) else list(map(str, stop))
            stops += stop_ids(texts, self.tokenizer, vocab_size, "stop")
        with mistakes:
            named = _named(prompts)
            rows = encode_prompts(named, self.tokenizer, vocab_size, PASS_IDS)
            if cache_length is not None and not options:
                names = [prompt.name for prompt in named]
                mistakes.problems += cache_length_problems(rows, max_tokens, cache_length, names)
        mistakes.raise_if_any()
        return rows, stops

    def evaluate(
        self,
        source: str | Path,
        sequence_length: int | None = None,
        batch_size: int = 8,
        max_tokens: int | None = None,
        *,
        bin_dtype: str = "uint16",
    ) -> Evaluation:
        """Measure the loss on a text or on tokens, as `flax-mesh evaluate` does.

        Every token but the first is predicted once, from the tokens before it in its window.

        Args:
            source: A text file, a token file (.npy, .bin), a folder, a glob or "stdlib", as the setting `data.source`.
            sequence_length: Tokens per window. Default: the length of the training run, or for a Hugging Face folder
                the length that its config.json allows, at most 1024.
            batch_size: Number of windows per batch.
            max_tokens: Only the first tokens of `source`, that many. Default: all.
            bin_dtype: Type of the ids in .bin files: "uint16" or "uint32".

        Returns:
            The mean loss in nats per token, the perplexity and, of text, the bits per byte.

        Raises:
            ConfigError: The file does not exist, the model has no tokenizer for text, a token is not one of the model,
                or an argument is out of its limits. Nothing has been compiled.
        """
        options = {"sequence_length": sequence_length, "max_tokens": max_tokens}
        given = {"batch_size": batch_size} | {name: value for name, value in options.items() if value is not None}
        name, problems = str(source), list(integer_problems(given))
        length = self.source.evaluation_length if sequence_length is None else sequence_length
        if bin_dtype not in BIN_DTYPES:
            problems.append(Problem("bin_dtype", f"must be one of {', '.join(BIN_DTYPES)}, got {bin_dtype!r}"))
        if problem := path_problem(name) or ("" if name else "is empty"):
            problems.append(Problem(f"source {name[:80]!r}", f": this text {problem}"))
        if problems := problems or length_problems(self.config, self.mesh, length):
            raise ConfigError(problems)
        files = {"label": f"source {name}", "bin_dtype": bin_dtype}
        text = read_set(name, lambda: self.tokenizer, self.config.vocab_size, most=max_tokens, **files)
        sizes = {"sequence_length": length, "batch_size": batch_size}
        return dict(evaluate(self.model, self.mesh, {name: text}, **sizes))[name]


def finite_problem(names: Sequence[str], results: Sequence[Generated]) -> str:
    """A line if the probabilities of some tokens are not finite, so that their texts mean nothing; "" if all are."""
    wrong = [name for name, result in zip(names, results, strict=True) if not np.isfinite(result.log_probs).all()]
    if not wrong:
        return ""
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"the text after {wrong[0]}{others} means nothing: numbers of the model are not finite"


def _names(prompts: str | Sequence[str]) -> list[str]:
    """The names of prompts that `flax_mesh.models.generate` uses in its messages."""
    return ["the prompt"] if isinstance(prompts, str) else [f"prompt {n}" for n in range(len(prompts))]


def _named(prompts: str | Sequence[str]) -> list[Prompt]:
    texts = dict(zip(_names(prompts), [prompts] if isinstance(prompts, str) else prompts, strict=True))
    wrong = {name: type(text).__name__ for name, text in texts.items() if not isinstance(text, str)}
    if wrong:
        raise ConfigError([f"{name} must be text, got {kind}; {PASS_IDS}" for name, kind in wrong.items()])
    named = [Prompt(name, text) for name, text in texts.items()]
    if problems := unicode_problems(named):
        raise ConfigError(problems)
    return named
