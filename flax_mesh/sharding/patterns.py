"""Patterns that cannot tell one layer from another, so that the layers of a model are matched once."""

import re

# What a pattern needs to tell digits apart: a digit, a character by its name, or a back-reference.
_TELLS_DIGITS = re.compile(r"[0-9]|\\N|\(\?P=")
# Words, groups and a few classes: digits stand behind the letters of a word, in them and nowhere else.
_WORDS = re.compile(r"(?:[A-Za-z_]\w*+|\((?:\?[:=!]|(?!\?))|[)|/$^.*+?-]|\\[.dw]|\[\^/\]|\[0-9\])*+", re.ASCII)


def ignores_numbers(pattern: str) -> bool:
    """Whether `pattern` finds the same in any two paths with the same `without_numbers`; False where unsure.

    A search sees the characters of a path through literals, sets and back-references. Without a digit, a `\\N{...}`
    and a back-reference in its text a pattern treats all digits alike. Nor is a number seen by a digit that belongs
    to a word, as in `block_0/kernel`: what it is compared to stands behind a letter, and in a number none does.
    """
    return not _TELLS_DIGITS.search(pattern) or _WORDS.fullmatch(pattern) is not None


def has_numbers(path: str) -> bool:
    """Whether a part of `path` is a number."""
    return any(map(_is_number, path.split("/")))


def without_numbers(path: str) -> str:
    """`path` with zeros for the digits of its numbers: "layers/12/block_0/kernel" -> "layers/00/block_0/kernel"."""
    return "/".join(["0" * len(part) if _is_number(part) else part for part in path.split("/")])


def _is_number(part: str) -> bool:
    return part.isdigit() and part.isascii()
