"""Patterns of layers that differ in their attention, or have none.

A pattern is a text of kinds, joined by commas, each with a number of layers or for one layer:

    local:5,global       five layers with the sliding window, one without, and so on (Gemma 3)
    global:3,global_nope every fourth layer has no rotary positions (SmolLM3)
    delta:3,global       three gated delta nets, one layer with attention, and so on (Qwen3-Next)

The last repetition may be incomplete, unless some layers are delta nets: these have other parameters than attention,
and the model is then a list or a stack of blocks, each of them one repetition.

A scanned stack is one loop over the repetitions.
"""

import re
from functools import lru_cache
from typing import NamedTuple


class LayerKind(NamedTuple):
    """Whether the attention of a layer has the sliding window, and rotary positions; or the layer is a delta net."""

    local: bool
    rope: bool = True
    delta: bool = False

    def __str__(self) -> str:
        if self.delta:
            return "delta"
        return ("local" if self.local else "global") + ("" if self.rope else "_nope")


_KINDS = {str(kind): kind for kind in (LayerKind(local, rope) for local in (True, False) for rope in (True, False))}
_KINDS["delta"] = LayerKind(local=False, rope=False, delta=True)


def pattern_problem(text: str) -> str:
    """The problem of a pattern, "" if it is valid."""
    for part in text.split(","):
        kind, colon, count = part.strip().partition(":")
        if kind not in _KINDS or (colon and not re.fullmatch("[1-9][0-9]{0,5}", count)):
            names = ", ".join(_KINDS)
            return f"must be kinds of layers ({names}) joined by commas, such as local:5,global; got {part.strip()!r}"
    return ""


@lru_cache
def parse_pattern(text: str) -> tuple[LayerKind, ...]:
    """The kinds of the layers of one repetition."""
    kinds: list[LayerKind] = []
    for part in text.split(","):
        kind, colon, count = part.strip().partition(":")
        kinds += [_KINDS[kind]] * (int(count) if colon else 1)
    return tuple(kinds)
