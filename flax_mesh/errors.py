"""Public exceptions. Errors in user input are ValueErrors, so that one `except` clause catches them."""

from collections.abc import Sequence


class ShardingError(ValueError):
    """A tree, a rule table and a mesh are inconsistent; the message lists every offending entry."""


class ConfigError(ValueError):
    """A recipe, an override or a run folder is invalid; `problems` contains one line per mistake."""

    def __init__(self, problems: Sequence[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CheckpointCorruptedError(ConfigError):
    """Files of a checkpoint are missing or differ from what was written; `problems` names them."""


class StepDeletedError(ConfigError):
    """A step of a run was deleted or renamed while it was read; it may have been valid."""


class UnreadableError(ConfigError):
    """The system refused to read files of a checkpoint (rights, an I/O error); they may be valid."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier checkpoints remain valid."""


class PeerError(RuntimeError):
    """A collective operation failed in another process; the message names the process."""
