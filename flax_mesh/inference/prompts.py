"""Prompts: texts, or a file with a prompt in every line. All mistakes are reported at once."""

import codecs
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flax_mesh.errors import ConfigError
from flax_mesh.fields import path_problem, read_file
from flax_mesh.inference.tokenizer import Tokenizer
from flax_mesh.models.generation.generate import prompt_problems
from flax_mesh.text import at_most

JSON_LINES = (".jsonl", ".ndjson")
JSON = ".json"
PASS_IDS = 'pass token ids, --prompts FILE.jsonl with lines {"tokens": [1, 2, 3]}'
FORM = 'a JSON object {"prompt": TEXT} or {"tokens": [ID, ...]}'


class Prompt(NamedTuple):
    """A text or token ids; `name` is where it was read, for messages."""

    name: str
    text: str | None
    tokens: list[int] | None = None  # of a file, not yet checked


def read_prompts(texts: Sequence[str], file: str | None) -> list[Prompt]:
    """The prompts of the command line and of a file, in this order."""
    names = ["--prompt"] if len(texts) == 1 else [f"--prompt number {n}" for n in range(1, len(texts) + 1)]
    prompts = [Prompt(name, text) for name, text in zip(names, texts, strict=True)]
    problems = unicode_problems(prompts)
    if file is not None:
        try:
            prompts += _read_file(file)
        except ConfigError as error:
            problems += error.lines
    if problems:
        raise ConfigError(problems)
    if not prompts:
        where = f"--prompts {file} has no line" if file else "there is no prompt"
        raise ConfigError(f"{where}; pass --prompt TEXT, or --prompts FILE with a prompt in every line")
    return prompts


def unicode_problems(prompts: Sequence[Prompt]) -> list[str]:
    """One line for every text that has no UTF-8, as a text that Python reads from a command line with other bytes."""
    return [f"{prompt.name} is not UTF-8; use other characters" for prompt in prompts if not _is_unicode(prompt.text)]


def _is_unicode(text: str | None) -> bool:
    return text is None or not any("\ud800" <= char <= "\udfff" for char in text)


def _read_file(file: str) -> list[Prompt]:
    if problem := path_problem(file):
        raise ConfigError(f"--prompts {file[:80]}: this text {problem}")
    if file.lower().endswith(JSON):
        raise ConfigError(f"--prompts {file}: a file has a prompt in every line; name it .jsonl if these are {FORM}")
    try:
        data = read_file(file).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(f"--prompts {file} cannot be read: {error.strerror}") from error
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        name = f"--prompts {file}, line {number}"
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError:
            problems.append(f"{name} is not UTF-8 text; convert the file")
            continue
        prompt = _parse(name, text) if file.lower().endswith(JSON_LINES) else Prompt(name, text)
        if isinstance(prompt, str):
            problems.append(prompt)
        else:
            prompts.append(prompt)
    if problems:
        raise ConfigError(at_most(problems))
    return prompts


def _parse(name: str, line: str) -> Prompt | str:
    """The prompt in a line of JSON, or the problem with it."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return f"{name} must be {FORM}, got {line[:60]!r}"
    if not isinstance(data, dict) or data.keys() not in ({"prompt"}, {"tokens"}):
        got = f"the keys {', '.join(map(repr, data))[:80] or 'none'}" if isinstance(data, dict) else repr(line[:60])
        return f"{name} must be {FORM}, got {got}"
    if "tokens" in data:
        tokens = data["tokens"]
        if not isinstance(tokens, list) or not all(type(token) is int and abs(token) < 2**31 for token in tokens):
            return f"{name}: tokens must be a list of token ids, got {repr(tokens)[:60]}"
        return Prompt(name, None, tokens)
    if not isinstance(data["prompt"], str) or not _is_unicode(data["prompt"]):
        return f"{name}: prompt must be text, got {repr(data['prompt'])[:60]}"
    return Prompt(name, data["prompt"])


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, vocab_size: int, advice: str = PASS_IDS
) -> list[np.ndarray]:
    """Token ids of every prompt, (P,) each. ConfigError if the model cannot read one, or has no tokenizer for a text.

    `advice` is how to pass token ids.
    """
    texts = [prompt.name for prompt in prompts if prompt.text is not None]
    if tokenizer is None and texts:
        raise ConfigError(
            f"{texts[0]} is text, but the model has no tokenizer: it was not trained on text files, and there is no "
            f"tokenizer.json; {advice}"
        )
    rows = [_encode(prompt, tokenizer) for prompt in prompts]
    if problems := prompt_problems(rows, vocab_size, [prompt.name for prompt in prompts]):
        raise ConfigError(problems)
    return rows


def _encode(prompt: Prompt, tokenizer: Tokenizer | None) -> np.ndarray:
    if prompt.text is None:
        return np.array(prompt.tokens, np.int64)
    assert tokenizer is not None
    return tokenizer.encode(prompt.text).tokens


def stop_ids(stops: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int, option: str = "--stop") -> list[int]:
    """The ids of `option`: an id, or a text that is one token. One ConfigError for all that are neither."""
    ids_of, problems = [], []
    for stop in stops:
        if stop.isdecimal() and stop.isascii() and len(stop) < 19:
            ids: Sequence[int] = [int(stop)]
        elif tokenizer is None:
            problems.append(f"{option} {stop!r} must be a token id: the model has no tokenizer")
            continue
        else:
            ids = tokenizer.encode(stop, special=False).tokens.tolist() if _is_unicode(stop) else []
        if len(ids) != 1:
            problems.append(f"{option} {stop!r} must be one token, got {len(ids)}; pass one of its tokens, or an id")
        elif not 0 <= ids[0] < vocab_size:
            problems.append(f"{option} {stop} is no token; the ids of this model are 0 to {vocab_size - 1}")
        else:
            ids_of.append(ids[0])
    if problems:
        raise ConfigError(problems)
    return ids_of
