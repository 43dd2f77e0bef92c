"""Schedules as text files, which a person can read and edit. Pure Python."""

import os

from flax_mesh.errors import ConfigError
from flax_mesh.fields import path_problem, read_file
from flax_mesh.mpmd.schedules.schedule import Schedule
from flax_mesh.mpmd.schedules.validate import check_schedule
from flax_mesh.text import lines_of

_MOST_BYTES = 2**27  # the largest file that is read: ten times the size of the largest schedule that can be made


def is_schedule_file(text: str) -> bool:
    """Whether a setting names a file: names of schedules contain neither "." nor a separator of folders."""
    return "." in text or "/" in text or os.sep in text


def schedule_text(schedule: Schedule, notes: str = "") -> str:
    """The content of a file; every line of `notes` becomes a comment."""
    head = "".join(f"# {line}\n" for line in notes.splitlines())
    return f"{head}# The name and the group of every stage, then a line of actions for each group.\n{schedule}\n"


def read_schedule(path: str) -> Schedule:
    """The schedule of a file that `schedule_text` has made or a person has edited.

    Raises a ConfigError that names the lines if the file does not contain a schedule, or the schedule is invalid.
    """
    if problem := path_problem(path):
        raise ConfigError(f"{path[:80]!r} {problem}")
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; write one with flax-mesh schedule NAME --out {path}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    try:
        schedule = Schedule.parse(text)
        check_schedule(schedule)
    except ValueError as error:
        raise ConfigError([f"{path}: {line}" for line in lines_of(error)]) from error
    return schedule
