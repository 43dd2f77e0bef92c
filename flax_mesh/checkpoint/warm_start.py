"""A warm start: as much of a state as a checkpoint of a similar model holds, and a report of what it did not."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flax_mesh.checkpoint.layout import disk_target, fits, from_disk, stacked_paths
from flax_mesh.errors import ConfigError
from flax_mesh.text import array_text


@dataclass(frozen=True)
class RestoreReport:
    """What a warm start did, by paths on disk."""

    filled: tuple[str, ...]
    kept: Mapping[str, str]  # path of the state -> why it keeps its value
    unused: tuple[str, ...]  # only in the checkpoint

    def __str__(self) -> str:
        lines = [f"filled {len(self.filled)} arrays, {len(self.kept)} keep their values, {len(self.unused)} unused"]
        lines += [f"  kept {path}: {why}" for path, why in self.kept.items()]
        return "\n".join([*lines, *(f"  unused {path}" for path in self.unused)])


def restore_partial(
    named: Sequence[tuple[str, Any]],
    stored: Mapping[str, Any],
    reader: Callable[[Mapping[str, Any]], Callable[[list[str]], Mapping[str, Any]]],
    layers: Sequence[str],
    include: str,
    cast: bool,
) -> tuple[list[Any], RestoreReport]:
    """`Checkpointer.restore_partial` of (path, leaf) pairs: leaves as `reader(target)` reads them, or unchanged.

    A ConfigError where nothing at all can be filled.
    """
    stacks = stacked_paths(named, layers)
    target = disk_target(named, stacks)
    wanted = {path for path in target if re.match(include, path)}
    kept = {path: why for path in target if path in wanted and (why := _why_kept(stored.get(path), target[path], cast))}
    for parts in stacks.values():  # a stack is filled whole or not at all
        if first := next((part for part in parts if part in kept or part not in wanted), None):
            why = f"{first} of the same stack is {'kept' if first in kept else 'not asked for'}"
            kept |= {part: why for part in parts if part in wanted and part not in kept}
    filled = [path for path in target if path in wanted and path not in kept]
    if not filled:
        why = [f"  {path}: {reason}" for path, reason in kept.items()] or [f"  no path starts with {include!r}"]
        raise ConfigError(["nothing in the checkpoint fits the state:", *why])
    read = {path: target[path] for path in filled}
    chosen = [(path, leaf) for path, leaf in named if any(part in read for part in stacks.get(path, [path]))]
    values = dict(zip((path for path, _ in chosen), from_disk(reader(read), chosen, stacks), strict=True))
    unused = tuple(path for path in stored if re.match(include, path) and path not in target)
    return [values.get(path, leaf) for path, leaf in named], RestoreReport(tuple(filled), kept, unused)


def _why_kept(stored: Any, target: Any, cast: bool) -> str:
    if stored is None:
        return "not in the checkpoint"
    if not fits(stored, target, cast=cast):
        return f"{array_text(stored)} in the checkpoint, {array_text(target)} here"
    return ""
