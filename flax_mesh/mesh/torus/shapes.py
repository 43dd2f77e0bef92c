"""The TPU slices that exist: their sides, their numbers of chips, and their names in the cloud.

One rule holds for all slices: a side has 1 chip, 2 chips or a multiple of 4 chips, or it is a side of the pod.
"""

import math
import re
from collections.abc import Iterable, Iterator

from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CUBE, Chip
from flax_mesh.text import listed

MOST_UNEQUAL = 4  # the longest side of a slice over its shortest, if only the number of chips is given
FAR = 4096  # numbers of chips that are tried for the nearest slice
CLOUD_NAME = re.compile(r"(\w+)-([0-9]{1,12})(\*[0-9]{1,12})?")
# Beginning of a cloud name -> (chip, units per chip). The number in the name counts units: chips, or TensorCores
# (v5p-128 has 64 chips).
CLOUD_CHIPS = {
    "v3": ("v3", 2),
    "v4": ("v4", 2),
    "v5litepod": ("v5e", 1),
    "v5e": ("v5e", 1),
    "v5p": ("v5p", 2),
    "v6e": ("v6e", 1),
}


def is_side(chip: Chip, side: int) -> bool:
    """Whether a slice can have a side of this number of chips."""
    return side <= 2 or side % CUBE == 0 or side in chip.pod


def side_problem(chip: Chip, sides: tuple[int, ...]) -> str:
    """Why no slice has these sides, and which larger slice exists; "" if a slice has them."""
    wrong = [side for side in sides if not is_side(chip, side)]
    if not wrong:
        return ""
    larger = [next(n for n in range(side, side + CUBE) if is_side(chip, n)) for side in sides]
    name, exists = chip.name.lower(), math.prod(larger) <= math.prod(chip.pod)
    text = f"the sides of a slice of {name} must be 1, 2 or multiples of {CUBE} chips, got {listed(wrong)}"
    return f"{text}; the next larger slice is {name}:{'x'.join(map(str, larger))}" if exists else text


def best_shape(chip: Chip, count: int) -> tuple[int, ...] | None:
    """The sides of the slice with this number of chips: with rings if possible, and short. None if no slice has it."""

    def key(shape: tuple[int, ...]) -> tuple[bool, int, tuple[int, ...]]:
        return not all(chip.wraps(shape)), sum(shape), shape

    return min(_shapes(chip, count), key=key, default=None)


def nearest_counts(chip: Chip, count: float) -> list[int]:
    """The nearest numbers of chips, at most and at least `count`, for which a slice exists."""
    most = math.prod(chip.pod)
    below, above = min(math.floor(count), most), math.ceil(count)
    nearest = [
        _first(chip, range(below, max(0, below - FAR), -1)),
        _first(chip, range(max(1, above), min(most, above + FAR) + 1)),
    ]
    return [number for number in nearest if number is not None]


def _first(chip: Chip, counts: Iterable[int]) -> int | None:
    return next((count for count in counts if best_shape(chip, count)), None)


def without_cloud_name(text: str, known: dict[str, Chip]) -> str:
    """`v5p:4x4x4` for `v5p-128`, the name of a slice in the cloud; any other text as it is.

    Raises a ConfigError with the nearest names if no slice has this size.
    """
    match = CLOUD_NAME.fullmatch(text)
    if match is None or match[1] not in CLOUD_CHIPS:
        return text
    name, per_chip = CLOUD_CHIPS[match[1]]
    chip, number = known[name], int(match[2])
    shape = None if number % per_chip else best_shape(chip, number // per_chip)
    if shape is None:
        unit = "chips" if per_chip == 1 else f"TensorCores, {per_chip} per chip"
        nearest = [f"{match[1]}-{count * per_chip}" for count in nearest_counts(chip, number / per_chip)]
        raise ConfigError(
            f"no slice of {name} has the name {match[1]}-{number}, whose number counts {unit}; "
            f"the nearest: {listed(nearest)}"
        )
    return f"{name}:{'x'.join(map(str, shape))}{match[3] or ''}"


def _shapes(chip: Chip, count: int) -> Iterator[tuple[int, ...]]:
    """Ascending sides of slices with this number of chips."""
    largest = sorted(chip.pod)
    sides = [side for side in range(1, largest[-1] + 1) if count % side == 0 and is_side(chip, side)]

    def extend(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(shape) == chip.torus:
            fits = all(a <= b for a, b in zip(shape, largest, strict=True)) or chip.wrap != "pod"
            if math.prod(shape) == count and fits and shape[-1] <= MOST_UNEQUAL * shape[0]:
                yield shape
            return
        for side in sides:
            if not shape or side >= shape[-1]:
                yield from extend((*shape, side))

    yield from extend(()) if 0 < count <= math.prod(chip.pod) else ()
