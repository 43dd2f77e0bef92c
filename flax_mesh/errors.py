"""The errors a user can meet; those that a user made are ValueErrors, so that one `except` catches them."""

from collections.abc import Sequence


class ShardingError(ValueError):
    """A tree, a rule table and a mesh do not fit together; the message lists every offender."""


class ConfigError(ValueError):
    """A recipe, an override or a run folder is wrong; `problems` holds one line per mistake."""

    def __init__(self, problems: Sequence[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointCorruptedError(ConfigError):
    """Files of a checkpoint are missing or are not what was written; `problems` names them."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are whole."""


class PeerError(RuntimeError):
    """Something that all processes do together has failed in another one, which the message names."""
