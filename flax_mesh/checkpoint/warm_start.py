"""Partial restore: the arrays that a checkpoint and a state have in common, with a report of all others."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flax_mesh.checkpoint.layout import Reader, Target, disk_target, fits, from_disk
from flax_mesh.errors import ConfigError
from flax_mesh.text import array_text, path_lines
from flax_mesh.tree import Shaped


@dataclass(frozen=True)
class RestoreReport:
    """The result of `Checkpointer.restore_partial`, by paths on disk.

    restored: arrays read from the checkpoint
    unchanged: path of an array of the state -> why the checkpoint has no value for it
    unused: arrays that only the checkpoint contains
    """

    restored: tuple[str, ...]
    unchanged: Mapping[str, str]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{len(self.restored)} arrays, {len(self.unchanged)} unchanged, {len(self.unused)} unused"
        unchanged = path_lines(f"{path}: {why}" for path, why in self.unchanged.items())
        lines = [f"  unchanged {line}" for line in unchanged] + [f"  unused {path}" for path in path_lines(self.unused)]
        return "\n".join([f"restored {counts}", *lines])


def restore_partial(
    named: Sequence[tuple[str, Shaped]],
    stored: Mapping[str, Shaped],
    reader: Callable[[Target], Reader],
    stacks: Mapping[str, list[str]],
    include: str,
    cast: bool,
) -> tuple[list[Shaped], RestoreReport]:
    """`Checkpointer.restore_partial` on (path, leaf) pairs; `reader(target)` returns a function that reads paths.

    Raises ConfigError if no array can be restored.
    """
    target = disk_target(named, stacks)
    included = {path for path in target if re.match(include, path)}
    unchanged = {path: why for path in target if path in included and (why := _mismatch(stored, path, target, cast))}
    # A stack is one array in memory, so it is restored only if all its layers can be.
    for parts in stacks.values():
        if first := next((part for part in parts if part in unchanged or part not in included), None):
            why = f"{first} of the same stack is {'unchanged' if first in unchanged else 'not included'}"
            unchanged |= {part: why for part in parts if part in included and part not in unchanged}
    restored = [path for path in target if path in included and path not in unchanged]
    if not restored:
        why = [f"{path}: {reason}" for path, reason in unchanged.items()] or [f"no path starts with {include!r}"]
        raise ConfigError(path_lines(why), head="no array of the checkpoint matches one of the state:")
    read = {path: target[path] for path in restored}
    chosen = [(path, leaf) for path, leaf in named if any(part in read for part in stacks.get(path, [path]))]
    values = dict(zip((path for path, _ in chosen), from_disk(reader(read), chosen, stacks), strict=True))
    unused = tuple(path for path in stored if re.match(include, path) and path not in target)
    return [values.get(path, leaf) for path, leaf in named], RestoreReport(tuple(restored), unchanged, unused)


def _mismatch(stored: Mapping[str, Shaped], path: str, target: Target, cast: bool) -> str:
    if path not in stored:
        return "not in the checkpoint"
    if not fits(stored[path], target[path], cast=cast):
        return f"checkpoint {array_text(stored[path])}, state {array_text(target[path])}"
    return ""
