"""States of any layout as the arrays that a checkpoint has of them, taken apart by numpy alone."""

import re
from typing import Any

import numpy as np

from flax_mesh import named_leaves
from flax_mesh.train import TrainState


def by_layer(state: Any) -> dict[str, np.ndarray]:
    """path on disk -> array, with stacks, and a stage's part of one, taken apart."""
    found = {}
    for path, leaf in named_leaves(state.to_nnx() if isinstance(state, TrainState) else state):
        head, layers, tail = path.partition("layers/")
        start = re.fullmatch(r"(.*)/from (\d+)", tail)
        if layers and not tail[0].isdigit():
            name, first = (start[1], int(start[2])) if start else (tail, 0)
            found |= {f"{head}layers/{i}/{name}": part for i, part in enumerate(np.asarray(leaf), first)}
        else:
            found[path] = np.asarray(leaf)
    return found


def check_same(a: Any, b: Any) -> None:
    a, b = by_layer(a), by_layer(b)
    assert a.keys() == b.keys() and any("/layers/2/" in path for path in a)
    for path in a:
        assert a[path].dtype == b[path].dtype and np.array_equal(a[path], b[path]), path
