"""Hashes of encoded rows, which a checkpoint keeps, and the differences between the rows of two runs."""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from flax_mesh.text import count_text

BYTES = 4  # of the hash of a row: enough to find the rows that changed, where `content` shows that some have


class RowHashes(NamedTuple):
    """SHA-256 of all rows, and a short hash of each of them in base64."""

    content: str
    each: str


def hash_rows(rows: Iterable[Sequence[np.ndarray]]) -> RowHashes:
    digests = [hashlib.sha256(b"".join(x.tobytes() for x in row)).digest() for row in rows]
    each = b"".join(digest[:BYTES] for digest in digests)
    return RowHashes(hashlib.sha256(b"".join(digests)).hexdigest(), base64.b64encode(each).decode())


def is_hashes(text: object) -> bool:
    """Whether a value from a file can be the `each` of RowHashes."""
    try:
        return isinstance(text, str) and len(base64.b64decode(text, validate=True)) % BYTES == 0
    except ValueError:
        return False


def _hashes(content: bytes) -> list[bytes]:
    return [content[i : i + BYTES] for i in range(0, len(content), BYTES)]


def row_changes(saved: str, now: str) -> tuple[str, list[str]]:
    """The number of rows before, and for each kind of change the number of rows now and of those that changed.

    >>> rows = [hash_rows([[np.arange(i)] for i in sizes]).each for sizes in ([1, 2, 3], [1, 5, 3, 4])]
    >>> row_changes(*rows)
    ('3 rows', ['4 rows, 1 changed, the first difference at row 2', '4 rows, 1 added, the first difference at row 2'])
    """
    old, new = (_hashes(base64.b64decode(text)) for text in (saved, now))
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False), 1) if a != b), min(len(old), len(new)) + 1)
    gone, come = (Counter(a) - Counter(b) for a, b in ((old, new), (new, old)))
    changed = min(gone.total(), come.total())
    counts = {"changed": changed, "added": come.total() - changed, "removed": gone.total() - changed}
    texts = [f"{count} {kind}" for kind, count in counts.items() if count] or ["in another order"]
    size = count_text(len(new), "row")
    return count_text(len(old), "row"), [f"{size}, {text}, the first difference at row {first}" for text in texts]
