"""Parameters that a model reads only in a lower dtype: they are cast once, and not again for every token."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from flax_mesh.program.follow import Rules, follow
from flax_mesh.program.program import Eqn, trace


class _Uses(Rules[int | None]):
    """The parameter that a value is; `dtypes` to which the uses of each parameter cast it, None for any other use."""

    unknown = None

    def __init__(self):
        self.dtypes: defaultdict[int | None, set[jnp.dtype | None]] = defaultdict(set)

    def through(self, eqn: Eqn, facts: Sequence[int | None]) -> Sequence[int | None]:
        to = eqn.params["new_dtype"] if eqn.primitive.name == "convert_element_type" else None
        for leaf in facts:
            self.dtypes[leaf].add(to)
        return [None] * len(eqn.outvars)

    def join(self, a: int | None, b: int | None) -> int | None:
        if a == b:
            return a
        for leaf in (a, b):
            self.dtypes[leaf].add(None)
        return None


def lower_dtypes(
    function: Callable[[list[jax.Array]], object], leaves: Sequence[jax.ShapeDtypeStruct]
) -> list[jnp.dtype | None]:
    """The lower dtype to which `function` casts each leaf in all of its uses; None if it has another use, or none."""
    uses = _Uses()
    program, _ = trace(function, list(leaves))
    for leaf in follow(program, range(len(leaves)), uses).outputs:
        uses.dtypes[leaf].add(None)
    common = [next(iter(uses.dtypes[n])) if len(uses.dtypes[n]) == 1 else None for n in range(len(leaves))]
    return [to if to and to.itemsize < x.dtype.itemsize else None for to, x in zip(common, leaves, strict=True)]
