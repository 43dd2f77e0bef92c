"""The fields of a config: their types, their text, and the limits in their metadata. Also the types of arguments.

    b1: float = field(default=0.9, metadata={"at_least": 0, "below": 1})

The metadata of a field may contain:

    at_least, above, at_most, below     limits of a number, which must then be finite in float32 too
    also = (value, "its meaning")       a value outside of these limits that is accepted, such as inf for no clipping
    one_of                              the accepted texts
    path                                True: the text is a path of this machine, "" for none
    changes_result                      False: a run may be resumed with another value
    added                               True: earlier versions lacked the field and behaved like its default
    of_user                             True: a dataclass of the user, in which only fields with limits are checked
"""

import collections.abc
import dataclasses
import errno
import functools
import inspect
import numbers
import operator
import os
import re
import stat
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from flax_mesh.errors import ConfigError, Problem
from flax_mesh.text import shortened

SAME_RESULT = {"changes_result": False}
ADDED = {"added": True}
MAX_SIZE = 2**31 - 1  # indices and counters are int32
MAX_FLOAT32 = 3.4028234663852886e38
MOST_BYTES = 2**30  # size limit of a file that a user names
_CALLABLE: Any = typing.get_origin(Callable[..., Any])  # collections.abc.Callable, whose type is not known
_Function = TypeVar("_Function", bound=Callable[..., Any])
MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255  # limits of Linux for a path and for one name in a path
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?=/)")  # gs://bucket, or gs:/bucket after Path(...)

_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "at_most": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A type of values that have a text form."""

    name: str  # description of a valid value
    accepts: Any  # the type of its values
    parse: Callable[[str, Any], object]  # (text, annotation) -> value, or a ValueError
    name_of_text: str = ""  # description of a valid text, if it differs from `name`


def changed_repr(self: Any) -> str:
    """The `__repr__` of a config: only the fields that are not the defaults."""
    values = {item.name: (repr(getattr(self, item.name)), repr(item.default)) for item in dataclasses.fields(self)}
    changed = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
    return f"{type(self).__name__}({', '.join(changed)})"


def type_problems(config: Any, prefix: str = "", *, only_limited: bool = False) -> list[Problem]:
    """One line for every field, also of nested dataclasses, whose value is not of its annotated type.

    With `only_limited`, and in a field that is `of_user`, fields without limits may contain anything.
    """
    problems: list[Problem] = []
    hints = field_types(config)
    for item in dataclasses.fields(config):
        key, value, hint = f"{prefix}{item.name}", getattr(config, item.name), hints[item.name]
        if not (only_limited and not _is_limited(item.metadata)) and not _is_a(value, hint):
            problems.append(Problem(key, f"must be {_expected(hint)}, got {_short(value)}"))
        elif _is_config(value):
            problems += type_problems(value, f"{key}.", only_limited=only_limited or "of_user" in item.metadata)
    return problems


def value_problems(config: Any, prefix: str = "") -> list[Problem]:
    """One line for every field, also of nested dataclasses, whose value its metadata does not allow."""
    problems: list[Problem] = []
    hints = field_types(config)
    for item in dataclasses.fields(config):
        key, value = f"{prefix}{item.name}", getattr(config, item.name)
        if _is_config(value):
            problems += value_problems(value, f"{key}.")
        elif value is not None and _is_limited(item.metadata) and _is_a(value, hints[item.name]):
            problems += [Problem(key, problem) for problem in _problems(value, item.metadata)]
    return problems


def check_types(function: _Function) -> _Function:
    """Decorator of a public function: `require_types` for all arguments of a call.

    A keyword that is no field of `**keywords: Unpack[...]` is a TypeError with near names. The arguments live as long
    as the call. A function that frees them calls `require_types` itself.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        try:
            values = signature.bind(*arguments, **keywords).arguments
        except TypeError:  # the call itself raises the error that Python users know
            return function(*arguments, **keywords)
        if keywords:
            _check_keywords(function, signature.parameters, values)
        require_types(function, **values)
        return function(*arguments, **keywords)

    return cast(_Function, checked)


def _check_keywords(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]
) -> None:
    """Raise a TypeError for keywords that are not fields of the TypedDict in `**keywords: Unpack[TypedDict]`."""
    for name, parameter in parameters.items():
        hint = _hints(function).get(name) if parameter.kind is parameter.VAR_KEYWORD else None
        if typing.get_origin(hint) is typing.Unpack:
            others = [key for key, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
            known = [*others, *typing.get_type_hints(typing.get_args(hint)[0])]
            require_names(function.__qualname__.removesuffix(".__init__"), given.get(name, ()), known)


def require_names(called: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise a TypeError that names all keywords of a call of the function `called` that it does not know."""
    if unknown := [key for key in given if key not in known]:
        near = [get_close_matches(key, known, n=1) for key in unknown]
        texts = [f"{key!r} (near: {x[0]})" if x else repr(key) for key, x in zip(unknown, near, strict=True)]
        raise TypeError(f"{called}: unknown keywords {', '.join(texts)}. The keywords are {', '.join(known)}.")


def require_types(function: Callable[..., Any], /, **arguments: Any) -> None:
    """Raise a TypeError that names all `arguments` of a function whose values are not of the annotated types.

    Otherwise they would fail later, in the middle of other code. Annotations of types that this module does not know
    accept anything.
    """
    hints = _hints(function)
    if wrong := [key for key, value in arguments.items() if key in hints and not _fits(value, hints[key])]:
        lines = [f"{key} must be {_expected(hints[key])}, got {_short(arguments[key])}" for key in wrong]
        raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}: {'; '.join(lines)}.")


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _fits(value: Any, hint: Any) -> bool:
    """Whether an argument may be of an annotated type: False only if it cannot be."""
    origin, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in items)
    if origin in (None, types.NoneType):
        return value is None
    if origin is typing.Literal:
        return any(isinstance(value, type(each)) for each in items)
    if origin in _SCALARS:
        return _SCALARS[origin](value)
    if origin in _CONTAINERS:
        is_listed = is_sized(value) and items[1:] in ((), (...,))
        return _CONTAINERS[origin](value) and not (is_listed and items and not all(_fits(x, items[0]) for x in value))
    if origin is _CALLABLE:
        return callable(value)
    if typing.Protocol in getattr(origin, "__bases__", ()):
        members = cast("Mapping[str, object]", vars(origin))
        return all(hasattr(value, name) for name in members if name == "__call__" or name[0] != "_")
    if hint is Any or not isinstance(hint, type) or typing.get_origin(hint) or hint.__name__ in ("Array", "ndarray"):
        return True  # other types may replace arrays
    return isinstance(value, hint)


def is_index(value: object) -> bool:
    """Whether a value is an integer, also an integer of numpy."""
    return _succeeds(lambda: operator.index(cast(int, value)))


def is_sized(value: Any) -> bool:
    """Whether a value has a length and items; an array without dims does not."""
    return _succeeds(lambda: (len(value), iter(value)))


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except (TypeError, ValueError, AttributeError):  # a ShapeDtypeStruct raises an AttributeError
        return False
    return True


def integer_problems(values: Mapping[str, Any], at_least: int = 1, at_most: int = MAX_SIZE) -> list[Problem]:
    """One problem for every name whose value is not an integer within the limits."""
    return [
        Problem(name, f"must be an integer from {at_least} to {at_most}, got {_short(value)}")
        for name, value in values.items()
        if not _is_a(value, int) or not at_least <= value <= at_most
    ]


def field_types(config: object) -> dict[str, Any]:
    """Name -> evaluated annotation of every field of a dataclass."""
    try:
        return _hints(type(config))
    except (NameError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the annotations of {type(config).__qualname__} cannot be evaluated: {error}. Define the names that they "
            "use at the top of the file of the class"
        ) from error


def parse_value(text: str, annotation: Any) -> Any:
    """Parse `text` as a value of the annotated type. The text of the ValueError describes a valid value."""
    kinds = _kinds_of(annotation)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    tried = [(kinds[plain], kind) for plain, kind in _KINDS.items() if plain in kinds]
    for each, kind in tried:
        with suppress(ValueError):
            return kind.parse(text, each)
    names = [kind.name_of_text or kind.name for _, kind in tried]
    raise ValueError(" or ".join([*names, "none"] if types.NoneType in kinds else names))


def value_to_text(value: object) -> str:
    """The inverse of `parse_value`."""
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        return ",".join(map(value_to_text, items)) + ("," if len(items) < 2 else "")
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def has_text(annotation: Any) -> bool:
    """Whether every value of the annotation has a text form."""
    kinds = _kinds_of(annotation)
    if tuple in kinds:
        item, *others = typing.get_args(kinds[tuple]) or (Any,)
        if others != [...] or not has_text(item):
            return False
    return all(kind is types.NoneType or kind in _KINDS for kind in kinds)


def path_problem(text: str) -> str:
    """Why a text cannot be a path of this machine; "" if it can.

    Such a text would raise an exception wherever it is used, or, as an address, name a folder `s3:` here.
    """
    if "\0" in text or "\n" in text:
        return "contains a null byte or a line break"
    if address := _ADDRESS.match(text):
        return f"is an address ({address[0]}), but must be a path of this machine"
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        return f"names a user without a home folder, {text.split('/')[0]!r}"
    if (size := len(os.fsencode(expanded))) > MAX_PATH_BYTES:
        return f"is too long for a path: {size} bytes, at most {MAX_PATH_BYTES} are possible"
    if (longest := max(len(os.fsencode(name)) for name in expanded.split("/"))) > MAX_NAME_BYTES:
        return f"contains a name of {longest} bytes, at most {MAX_NAME_BYTES} are possible"
    return ""


def user_path(path: str | os.PathLike[str]) -> Path:
    """`path` with ~ and ~USER replaced. ConfigError for a text that cannot be a path of this machine."""
    text = os.fspath(path)
    if problem := path_problem(text):
        raise ConfigError(f"{shortened(text, 80)!r} {problem}")
    path = Path(os.path.expanduser(text))
    # Path removes the "./" with which ./gs: and ./~ are names here, and the result may be passed here again.
    return path.absolute() if path_problem(str(path)) or str(path).startswith("~") else path


def read_file(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a file that a user names.

    Raises the ConfigError of `user_path`, and an OSError, whose `strerror` has the repair, unless it is a regular file
    of at most `most` bytes: a command must not wait for a pipe.
    """
    path = user_path(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "it must be a file, but is a folder; name a file in it", path)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            reason = "it must be a regular file, but is a pipe or a device; write its content to a file"
            raise OSError(errno.EINVAL, reason, path)
        if status.st_size > most:
            reason = f"it must have at most {most:,} bytes, but has {status.st_size:,}; use a smaller file"
            raise OSError(errno.EFBIG, reason, path)
        return file.read()


def _problems(value: Any, metadata: Mapping[str, Any]) -> list[str]:
    if "one_of" in metadata:
        names = ", ".join(metadata["one_of"])
        return [] if value in metadata["one_of"] else [f"must be one of {names}, got {_short(value)}"]
    if "path" in metadata:
        problem = path_problem(value) if metadata["path"] is True else metadata["path"](value)
        return [f"{problem}: {_short(value)}; use another path"] if problem else []
    special, meaning = metadata.get("also", (None, ""))
    broken = [f"{text} {metadata[name]}" for name, (holds, text) in _LIMITS.items()
              if name in metadata and not holds(value, metadata[name])]  # fmt: skip
    if not isinstance(value, numbers.Integral) and not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        broken.append("finite")
    if value == special or not broken:
        return []
    return [f"must be {' and '.join(broken)}{meaning and f', or {special} for {meaning}'}, got {_short(value)}"]


def _is_limited(metadata: Mapping[str, Any]) -> bool:
    return bool({*_LIMITS, "one_of", "path"} & metadata.keys())


def _is_config(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _kinds_of(hint: Any) -> dict[Any, Any]:
    """Origin -> annotation: `str | tuple[int, ...] | None` -> {str: str, tuple: tuple[int, ...], NoneType: ...}."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return {typing.get_origin(option) or option: option for option in options}


def _is_a(value: object, hint: Any) -> bool:
    kinds = [kind for kind in _kinds_of(hint) if kind is not Any and isinstance(kind, type)]
    if len(kinds) < len(_kinds_of(hint)) or (isinstance(value, bool) and bool in kinds):
        return True
    is_of = tuple(_KINDS[kind].accepts if kind in _KINDS else kind for kind in kinds)
    return isinstance(value, is_of) and not (isinstance(value, bool) and not {object, bool} & {*kinds})


def _expected(hint: Any) -> str:
    """The description of a valid value: `an integer or none`."""
    kinds = [option if kind is typing.Literal else kind for kind, option in _kinds_of(hint).items()]
    return " or ".join(dict.fromkeys(map(_name_of, kinds)))


def _name_of(kind: Any) -> str:
    if values := typing.get_args(kind):  # of a Literal
        return f"one of {', '.join(map(repr, values))}"
    name = f"a {getattr(kind, '__name__', None) or kind}"
    return _KINDS[kind].name if kind in _KINDS else _NAMES.get(kind, name.lower() if kind in _CONTAINERS else name)


def _short(value: object) -> str:
    return text if len(text := " ".join(repr(value).split())) <= 80 else f"{text[:80]}..."


def _parse_bool(text: str, _: type) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _parse_tuple(text: str, annotation: Any) -> tuple[object, ...]:
    if "," not in text:
        raise ValueError
    return tuple(parse_value(part, typing.get_args(annotation)[0]) for part in text.split(",") if part)


_KINDS: dict[Any, _Kind] = {  # parsed in this order: every text is a str
    int: _Kind("an integer", numbers.Integral, lambda text, _: int(text)),
    float: _Kind("a number", numbers.Real, lambda text, _: float(text)),
    bool: _Kind("true or false", bool, _parse_bool),
    tuple: _Kind("a tuple", tuple, _parse_tuple, "values joined by commas"),
    str: _Kind("text", str, lambda text, _: text),
}
_NAMES: dict[Any, str] = {  # descriptions that differ from the name of the class
    types.NoneType: "none",
    _CALLABLE: "a function",
    collections.abc.Iterable: "an iterable",
    Path: "a path",
    os.PathLike: "a path",
}
_SCALARS: dict[Any, Callable[[Any], bool]] = {
    int: is_index,
    float: lambda v: isinstance(v, numbers.Real) or (getattr(v, "ndim", None) == 0 and _succeeds(lambda: float(v + 0))),
    bool: lambda value: type(value).__name__ == "bool" or is_index(value),  # numpy's class has the same name
    str: lambda value: isinstance(value, str),
    **dict.fromkeys((Path, os.PathLike), lambda value: isinstance(value, str | os.PathLike)),
}
_CONTAINERS: dict[Any, Callable[[Any], bool]] = {
    collections.abc.Sequence: is_sized,
    collections.abc.Collection: is_sized,
    collections.abc.Iterable: lambda value: is_sized(value) or isinstance(value, collections.abc.Iterator),
    collections.abc.Mapping: lambda value: isinstance(value, collections.abc.Mapping),
    tuple: is_sized,
    list: lambda value: isinstance(value, list),
}
