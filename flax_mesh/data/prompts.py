"""Prompts of a JSONL file, of which a model makes completions, and the functions that reward these."""

# NumPy has no types for some functions.
# pyright: reportUnknownMemberType=false

import json
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flax_mesh.checkpoint.hf.kept import end_tokens
from flax_mesh.data.chats import Row, read_rows
from flax_mesh.data.config import ChatConfig
from flax_mesh.data.rows.tokens import BadRowError, Encoder, Line, Tokens
from flax_mesh.data.user_batches import RowHashes, hash_rows
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import check_types, path_problem, user_path
from flax_mesh.text import at_most, count_text, listed, shown
from flax_mesh.user_code import check_arguments, place_of, user_code

SETTING = "data.rewards"
ARGUMENTS = ("prompts", "completions", "rows")


class Prompts(NamedTuple):
    """The prompts of a file, as `read_prompts` returns them.

    Attributes:
        rows: The JSON object of each row; its "prompt" is a text or messages.
        tokens: The tokens of each prompt, (n,) int32.
        end_tokens: The ids that end a completion: the end token of the tokenizer, and `eos_token_id` of
            generation_config.json, or else of config.json.
        decode: The text of tokens, without special ones.
        description: A line about the file.
    """

    rows: Sequence[Mapping[str, object]]
    tokens: Sequence[np.ndarray]
    end_tokens: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    description: str

    def hashes(self) -> RowHashes:
        """Of tokens and of the other keys, for `Rollouts`."""
        texts = (np.frombuffer(json.dumps(row, sort_keys=True, default=str).encode(), np.uint8) for row in self.rows)
        return hash_rows(zip(self.tokens, texts, strict=True))


@check_types
def read_prompts(config: ChatConfig, folder: str, vocab_size: int, *, max_tokens: int) -> Prompts:
    """Read the prompts of `data.source`, a .jsonl or .jsonl.gz file, with the tokenizer of a Hugging Face folder.

    A row has the key "prompt", a text or a list of messages, and may have "tools" and others. Messages end with the
    beginning of an answer, as the chat template renders it. A prompt and its completion of `max_tokens` must fit in
    data.sequence_length + 1 tokens. Raises a ConfigError with a line for every row with a mistake or a longer prompt.
    """
    most = config.sequence_length + 1 - max_tokens
    rows: list[Mapping[str, object]] = []
    encoders: list[Encoder] = []  # one, for all rows
    if most < 1:
        text = f"must be at most data.sequence_length={config.sequence_length}, for prompts of a token"
        raise ConfigError(Problem("data.max_tokens", text, value=max_tokens))

    def encode(encoder: Encoder, line: Line) -> Row:
        row = encoder.read(line, (("prompt",),))
        ids = encoder.question(row["prompt"], row.get("tools"))
        if not 0 < len(ids) <= most:
            limits = f"a prompt must have 1 to {most}, so that data.max_tokens={max_tokens} fit after it"
            raise BadRowError(f"has {count_text(len(ids), 'token')}; {limits} (data.sequence_length)")
        rows.append(row)
        encoders[:] = [encoder]
        return (Tokens(ids, np.ones(len(ids), bool)),)

    tokens, description = read_rows(config, folder, vocab_size, encode, fit=lambda row, length: row)
    tokenizer = encoders[0].tokenizer
    ends = {tokenizer.eos_token_id, *end_tokens(tokenizer.path, vocab_size)} - {None}
    return Prompts(rows, [ids for ((ids, _),) in tokens], sorted(ends), tokenizer.decode, description)


class Rewards(NamedTuple):
    """Functions and their weights by name, as `read_rewards` returns them."""

    functions: Mapping[str, Callable[..., object]]
    weights: Mapping[str, float]

    def __call__(
        self, prompts: Sequence[object], completions: Sequence[str], rows: Sequence[Mapping[str, object]]
    ) -> dict[str, np.ndarray]:
        """The rewards of all completions by the name of the function, (N,) float32.

        Raises a ConfigError with a line for every function that does not return a finite number for each.
        """
        rewards: dict[str, np.ndarray] = {}
        problems: list[str] = []
        for name, function in self.functions.items():
            with user_code(f"reward {name}", place_of(function)):
                result = function(list(prompts), list(completions), list(rows))
            values = _numbers(result)
            if values is None or len(values) != len(completions):
                got = shown(result) if values is None else f"{len(values)} of them"
                problems.append(f"reward {name} must return a list of {len(completions)} floats, got {got}")
            elif len(wrong := np.flatnonzero(~np.isfinite(values))):
                others = f", and {len(wrong) - 1} more that are not" * (len(wrong) > 1)
                which = f"{values[wrong[0]]} for {completions[wrong[0]][:60]!r}{others}"
                problems.append(f"reward {name} must return finite floats, got {which}")
            else:
                rewards[name] = values
        if problems:
            raise ConfigError(problems)
        return rewards


@check_types
def read_rewards(text: str) -> Rewards:
    """Reward functions of a Python file, such as "rewards.py:correct*1,short*0.2": their names and weights, 1 without.

    A function is called as `function(prompts, completions, rows)` with lists: the prompts as in the file, the texts of
    their completions, and the JSON objects of the file. It returns a finite float for every completion. Raises a
    ConfigError with a line for every mistake.

    Example:
        >>> from pathlib import Path
        >>> from flax_mesh.train import read_rewards
        >>> code = "short = lambda prompts, completions, rows: [-len(text) for text in completions]"
        >>> _ = Path("rewards.py").write_text(code)
        >>> rewards = read_rewards("rewards.py:short*0.5")
        >>> rewards(["a"], ["bc"], [{}]), rewards.weights
        ({'short': array([-2.], dtype=float32)}, {'short': 0.5})
    """
    file, _, names = text.rpartition(":")
    path = user_path(file) if file and not path_problem(file) else None
    if path is None or not path.is_file():
        reason = "must be FILE.py:NAME*WEIGHT,NAME*WEIGHT with the path of a Python file"
        raise ConfigError(Problem(SETTING, reason, value=text or "''"))
    with user_code(SETTING, str(path)):
        module = runpy.run_path(str(path))
    functions: dict[str, Callable[..., object]] = {}
    weights: dict[str, float] = {}
    problems: list[str] = []
    for part in names.split(","):
        name, _, weight = (x.strip() for x in part.partition("*"))
        if not callable(module.get(name)):
            known = [name for name, x in module.items() if callable(x) and not name.startswith("_")]
            problems.append(f"{SETTING}: {path} has no function {name!r}; it has {listed(at_most(known, 8)) or 'none'}")
            continue
        if name in functions:
            problems.append(f"{SETTING}: {name!r} occurs twice")
        try:
            check_arguments(f"reward {name}", module[name], *ARGUMENTS)
        except ConfigError as error:
            problems += error.problems
        functions[name], weights[name] = module[name], _number(weight or "1")
        if not math.isfinite(weights[name]):
            problems.append(f"{SETTING}: the weight of {name} must be a finite number, got {weight!r}")
    if problems:
        raise ConfigError(problems)
    return Rewards(functions, weights)


def _numbers(result: object) -> np.ndarray | None:
    """(N,) float32; None if it is another value, such as one number or texts."""
    try:
        values = np.asarray(result)
    except ValueError:  # NumPy's, for nested lists of unequal lengths
        return None
    is_numeric = values.dtype.kind in "fiub" and values.ndim == 1
    return values.astype(np.float32) if is_numeric else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
