"""The best layouts of a search, compiled one after another until one fits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax_mesh.errors import ConfigError
from flax_mesh.plan.compile import Compiled, compile_recipe
from flax_mesh.plan.search.search import LayoutSearch, Planned
from flax_mesh.plan.search.space import overrides
from flax_mesh.text import first_line

MOST = 3  # layouts to compile


class Confirmation(NamedTuple):
    """A layout and its compiled step; `problem` is the error of the compiler, "" if there is none."""

    planned: Planned
    compiled: Compiled | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.compiled is not None and self.compiled.fits is not False


def confirm(
    search: LayoutSearch,
    recipe: str,
    settings: Sequence[str],
    *,
    limit: float,
    most: int = MOST,
    say: Callable[[str], None] = lambda text: None,
) -> list[Confirmation]:
    """Compile the layouts of a search that fit by their plans, best first, until one fits by the compiler.

    `settings` are the settings that the search was called with; `limit` is passed to `compile_recipe` for each layout.
    """
    confirmed: list[Confirmation] = []
    for planned in [each for each in search.planned if each.plan.fits is not False][:most]:
        words = [*settings, *overrides(planned.settings)]
        try:
            compiled = compile_recipe(recipe, words, search.topology.text, limit=limit, say=say)
        except ConfigError as error:
            confirmed.append(Confirmation(planned, None, first_line(error)))
        else:
            confirmed.append(Confirmation(planned, compiled))
        if confirmed[-1].fits:
            break
    return confirmed
