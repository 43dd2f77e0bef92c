"""The errors a user can make; all are ValueErrors, so that one `except` catches them."""

from collections.abc import Sequence


class ShardingError(ValueError):
    """A tree, a rule table and a mesh do not fit together; the message lists every offender."""


class ConfigError(ValueError):
    """A recipe, an override or a run folder is wrong; `problems` holds one line per mistake."""

    def __init__(self, problems: Sequence[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
