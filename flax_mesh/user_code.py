"""Exceptions that are raised by a user's recipe, model or loss, as one line with the line of that code."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flax_mesh.errors import ConfigError, Problem, ShardingError

LIBRARIES = {"flax_mesh", "jax", "jaxlib", "flax", "optax", "orbax", "numpy"} | sys.stdlib_module_names
INSTALLED = ("/site-packages/", "/dist-packages/")
OF_INPUT = (ValueError, SyntaxError, OSError, RecursionError, MemoryError)  # raised for source code and return values
MAX_TEXT = 300  # characters of the text of an exception


@contextmanager
def user_code(subject: str, place: str = "") -> Generator[None]:
    """Convert an exception of the user's code to a ConfigError: `subject`, the line of that code, and the exception.

    The line is the innermost line of the traceback that is in a file of the user. If there is none, because a file
    cannot be compiled or a return value is refused, `place` is used instead. Errors that this library raises with a
    repair, and errors that occur outside the user's code, are raised unchanged.
    """
    try:
        yield
    except (ConfigError, ShardingError):
        raise
    except (Exception, SystemExit) as error:  # code of a user may raise anything
        if line := _place_of_error(error):
            raise ConfigError(Problem(subject, f": {line}: {_named(error)}{_hint(error, line)}")) from error
        if not place or not isinstance(error, OF_INPUT):
            raise
        raise ConfigError(Problem(subject, f": {place}: {_first_line(error)}")) from error


def caught(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """(the result, None), or (None, the exception) if the user's function raises one."""
    try:
        return function(*args), None
    except (Exception, SystemExit) as error:  # code of a user may raise anything
        return None, error


def check_arguments(subject: str, function: Callable[..., Any], *names: str) -> None:
    """Raise a ConfigError with the line of a user's function if it cannot be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        wanted = f"be callable with the arguments ({', '.join(names)})" if names else "not need arguments"
        raise ConfigError(joined(subject, place_of(function), f"it must {wanted}: {error}")) from error
    except ValueError:  # a function of C without a signature
        pass


def joined(*parts: str) -> str:
    """`make_batches: FILE, line 3: PROBLEM`; empty parts, such as an unknown place, are left out."""
    return ": ".join(filter(None, parts))


def place_of(function: Callable[..., Any] | None) -> str:
    """`FILE, line N` of the definition of a user's function or class, or of the class of a callable object.

    "" for functions and classes of a library.
    """
    while hasattr(function, "func"):  # functools.partial
        function = function.func  # pyright: ignore[reportFunctionMemberAccess, reportOptionalMemberAccess]
    if not callable(function) or _is_library(getattr(function, "__module__", "") or ""):
        return ""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code is not None else _place_of_class(function)


def _place_of_class(x: Any) -> str:
    kind = x if isinstance(x, type) else type(x)
    try:
        return f"{inspect.getsourcefile(kind)}, line {inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError, SyntaxError):  # it was defined in no file, or the file has changed
        return ""


def _named(error: BaseException) -> str:
    """`NameError: name 'x' is not defined`."""
    return joined(type(error).__name__, _first_line(error))


def _first_line(error: BaseException) -> str:
    text = str(getattr(error, "msg", error)).strip().partition("\n")[0]  # a SyntaxError appends its file to its msg
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _place_of_error(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):  # the traceback ends in the import
        return f"{error.filename}, line {error.lineno}" if error.lineno else str(error.filename)
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_library(frame.f_globals.get("__name__", ""))
    ]
    # If every frame is in an installed package, the user's model may be installed too.
    of_user = [frame for frame in frames if not any(folder in frame[0] for folder in INSTALLED)] or frames
    return f"{of_user[-1][0]}, line {of_user[-1][1]}" if of_user else ""


def _hint(error: BaseException, place: str) -> str:
    """The remedy if a module is not found although it is in the folder of the file that imports it."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    folder = Path(place.rpartition(", line ")[0]).absolute().parent
    module = folder / error.name.partition(".")[0]
    if not module.is_dir() and not module.with_suffix(".py").is_file():
        return ""
    return f". It is in {folder}, which Python does not search: set PYTHONPATH={folder}"


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES
