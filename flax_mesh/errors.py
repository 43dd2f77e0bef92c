"""Public exceptions, and the problems they list. Errors in user input are ValueErrors: one `except` catches them."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from flax_mesh.text import plural, shortened

MOST = 2000  # characters of a line, and of a message
SHORTEST = 200  # characters of a line whose end a message leaves out


class Problem(str):
    """One problem of a user's input as a line of text, with the parts that the line is made of.

    Code that needs a part reads the field, and never the line:

    >>> problem = Problem("model.num_heads", "is not divisible by 4 (tp=4)", "use a multiple", value="6")
    >>> problem
    'model.num_heads=6 is not divisible by 4 (tp=4); use a multiple'
    >>> problem.renamed("--num-heads")
    '--num-heads=6 is not divisible by 4 (tp=4); use a multiple'

    Attributes:
        setting: The setting, option, file or function that is invalid; "" if the problem belongs to none of these.
        text: The condition that must hold, and the value that was found.
        repair: How to repair it; "" if the text states it.
        value: The value of the setting, if the line shows it after the name.
        general: The text without the sizes of one mesh, by which a search counts problems; by default the line.
        can_ignore: Whether the user may accept the problem by `ignore`, such as an array of a file that has no effect.
    """

    setting: str
    text: str
    repair: str
    value: str
    general: str
    can_ignore: bool

    def __new__(
        cls,
        setting: str,
        text: str,
        repair: str = "",
        *,
        value: object = "",
        general: str = "",
        can_ignore: bool = False,
    ) -> Self:
        name = f"{setting}={shortened(str(value), MOST // 2)}" if str(value) else setting
        head = name if not name or text.startswith(":") else f"{name} "
        tail = repair and f"; {repair}"
        line = super().__new__(cls, f"{head}{shortened(text, MOST - len(head) - len(tail))}{tail}")
        line.setting, line.text, line.repair, line.value = setting, text, repair, str(value)
        line.general, line.can_ignore = general or str(line), can_ignore
        return line

    def __getnewargs_ex__(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """For copies: the arguments of a new Problem, not only its line."""
        options = {"value": self.value, "general": self.general, "can_ignore": self.can_ignore}
        return (self.setting, self.text, self.repair), options

    def renamed(self, setting: str) -> "Problem":
        """The same problem of the value under another name, such as an option of a command."""
        return Problem(setting, self.text, self.repair, value=self.value, can_ignore=self.can_ignore)

    def within(self, setting: str) -> "Problem":
        """`data.source: FILE does not exist`, for the problem of a file that a setting names."""
        return Problem(setting, f": {self}", can_ignore=self.can_ignore)


def as_problem(line: str) -> Problem:
    return line if isinstance(line, Problem) else Problem("", shortened(line, MOST))


def limited(lines: Sequence[str], *, end: str = "") -> list[str]:
    """The lines, and `end`, with at most MOST characters. A line states how many of `lines` are left out."""
    tail = [shortened(end, MOST // 2)] if end else []
    room = MOST - sum(len(line) + 1 for line in tail)
    if sum(len(line) + 1 for line in lines) <= room + 1:
        return [*lines, *tail]
    kept: list[str] = []
    room -= 40  # for the line that counts the others
    for line in lines:
        if len(line) >= room:
            kept += [shortened(line, room - 1)] if room > SHORTEST else []
            break
        kept.append(line)
        room -= len(line) + 1
    left = len(lines) - len(kept)
    return [*kept, *([f"and {left:,} more {plural('line', left)}"] if left else []), *tail]


class ShardingError(ValueError):
    """A tree, a rule table and a mesh are inconsistent; the message lists every offending entry."""

    def __init__(self, text: str):
        super().__init__("\n".join(limited(text.split("\n"))))


class ConfigError(ValueError):
    """A recipe, an override or a run folder is invalid.

    Attributes:
        problems: One line per problem, each a `Problem`.
        head: A line before the problems, which are then indented; "" for no such line.
        repair: A line after the problems, which states how to repair all of them; "" for no such line.
        lines: All lines of the message, including lines that a long message omits.
        shown: The lines of the message.
    """

    def __init__(self, problems: Sequence[str] | str, *, head: str = "", repair: str = ""):
        lines = [problems] if isinstance(problems, str) else problems
        self.problems = [as_problem(line) for line in lines]
        self.head, self.repair = head, repair
        indent = "  " if head else ""
        self.lines = [*filter(None, [head]), *(indent + line for line in self.problems)]
        self.lines += [f"  {repair}"] if repair else []
        shown = self.lines[:-1] if repair else self.lines
        self.shown = limited(shown, end=self.lines[-1] if repair else "")
        super().__init__("\n".join(self.shown))

    @property
    def can_ignore(self) -> bool:
        """Whether `ignore` accepts one of the problems."""
        return any(problem.can_ignore for problem in self.problems)


class CheckpointCorruptedError(ConfigError):
    """Files of a checkpoint are missing or differ from the written files; `problems` names them."""


class StepDeletedError(ConfigError):
    """A step of a run was deleted or renamed while it was read; it may have been valid."""


class UnreadableError(ConfigError):
    """The system refused to read files of a checkpoint (rights, an I/O error); they may be valid."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier checkpoints remain valid."""


class PeerError(RuntimeError):
    """A collective operation failed in another process; the message names the process."""


class Mistakes:
    """Collects the mistakes of several checks, to report all of them at once.

    >>> with mistakes:
    ...     check()  # a ConfigError ends the block, not the command
    >>> mistakes.raise_if_any()
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._kinds: list[type[BaseException]] = []

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.problems += error.lines
        self._kinds.append(type(error))
        return True

    def raise_if_any(self) -> None:
        """Raise one error with all lines: a CheckpointCorruptedError if one of the errors was."""
        if self.problems:
            damaged = any(issubclass(kind, CheckpointCorruptedError) for kind in self._kinds)
            raise (CheckpointCorruptedError if damaged else ConfigError)(list(dict.fromkeys(self.problems)))


@contextmanager
def labelled(label: str) -> Generator[None]:
    """Begin every line of a ConfigError with the setting, the option or the file that it belongs to."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([f"{label}: {problem}" for problem in error.lines]) from error
