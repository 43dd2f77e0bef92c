"""Generated text as it is printed: token by token for one prompt, prompt by prompt for several. And its JSON."""

import time
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_mesh.checkpoint.read import finite, plain
from flax_mesh.inference.prompts import Prompt
from flax_mesh.inference.tokenizer import TextStream, Tokenizer, text_of
from flax_mesh.models import Generated
from flax_mesh.text import count_text, shortened

BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
PROMPT_CHARACTERS = 100  # of a prompt that is printed beside its text


def printable(text: str) -> str:
    """`text` with an escape for every character that could change the state of the terminal or the order of a line.

    These are the control characters but tabs and line breaks, and the controls of bidirectional text. `plain`, for
    names, escapes more: no-break spaces and the joiners of emojis too.
    """
    return "".join(plain(char) if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    return char not in "\n\t" and (unicodedata.category(char) == "Cc" or char in BIDIRECTIONAL)


def json_of(prompt: Prompt, row: np.ndarray, result: Generated, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One line of JSON; the text of a model without a tokenizer is null."""
    stops = frozenset(result.tokens[-1:].tolist() if result.stopped else ())
    before, tokens = row.tolist(), result.tokens.tolist()
    return finite(
        {
            "prompt": prompt.text,
            "prompt_tokens": before,
            "text": None if tokenizer is None else text_of(tokens, stops, tokenizer, before),
            "tokens": tokens,
            "log_probs": result.log_probs.tolist(),
            "stopped": result.stopped,
        }
    )


class Printer:
    """Prints tokens as they are generated, as `on_token` of `generate`, and measures their rate.

    The text of a single prompt is printed token by token, the texts of several prompts when each is complete.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rows: Sequence[np.ndarray],
        tokenizer: Tokenizer | None,
        stops: frozenset[int],
        max_tokens: int,
        quiet: bool,
    ):
        self._prompts, self._rows, self._tokenizer, self._stops = prompts, rows, tokenizer, stops
        self._max_tokens, self._quiet = max_tokens, quiet
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._stream = None if tokenizer is None else TextStream(tokenizer, rows[0].tolist())  # for one prompt
        self._start, self._first_at = time.perf_counter(), 0.0
        self._is_first, self._num_first = True, 0  # tokens that are computed together with the first one

    def token(self, prompt: int, token: int) -> None:
        tokens = self._tokens[prompt]
        tokens.append(token)
        if not self._first_at:
            self._first_at = time.perf_counter()
        self._is_first = self._is_first and len(tokens) == 1
        self._num_first += self._is_first
        if self._quiet:
            return
        is_end = token in self._stops
        if len(self._prompts) == 1:
            self._print_token(token, is_end, is_end or len(tokens) == self._max_tokens)
        elif is_end or len(tokens) == self._max_tokens:
            row = self._rows[prompt].tolist()
            head = self._prompts[prompt].text or count_text(len(row), "token")
            print(f"[{prompt + 1}] {shortened(plain(head), PROMPT_CHARACTERS)}")
            print(printable(text_of(tokens, self._stops, self._tokenizer, row)), end="\n\n", flush=True)

    def _print_token(self, token: int, is_stop: bool, is_last: bool) -> None:
        if self._stream is None:
            text = "" if is_stop else f"{token} "
        else:
            text = "" if is_stop else self._stream.add(token)
            text += self._stream.end() if is_last else ""
        print(printable(text), end="\n" if is_last else "", flush=True)

    def summary(self) -> str:
        """Number of prompts and tokens, seconds to the first token, and the rate after it."""
        total, after = sum(map(len, self._tokens)), time.perf_counter() - self._first_at
        line = (
            f"{count_text(len(self._prompts), 'prompt')}, {count_text(total, 'token')}: first token after "
            f"{self._first_at - self._start:.2f} s, with compilation"
        )
        rest = total - self._num_first
        return f"{line}; then {rest / after:,.1f} tokens/s" if rest and after > 0 else line
