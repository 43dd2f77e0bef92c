"""A case of the fuzzer as text: a model, how it is split, and how it is run. Random cases."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from flax_mesh.mpmd.runtime.pipeline import REMAT_MODES
from flax_mesh.mpmd.schedules import Schedule, make_schedule
from flax_mesh.mpmd.schedules.schedule import SCHEDULE_NAMES
from tests.mpmd.fuzz.operations import OPERATIONS, RULES, WITH_PARAMETERS, WRAPPERS

VARIANTS = 4  # consecutive seeds have the same model, so that its run on one device is computed once
HEADS, LOSSES, OPTIMIZERS = ("linear", "tied"), ("sum", "metrics", "scalar"), ("momentum", "clip")
TWO_STAGES_PER_GROUP = {"interleaved-1f1b", "v-min", "v-half", "zb-v", "dualpipe-v"}


@dataclass(frozen=True)
class Layer:
    """Operations, and the control flow around them. Prints as `remat:linear+norm`."""

    operations: tuple[str, ...]
    wrapper: str = ""

    def __str__(self) -> str:
        return f"{self.wrapper}:{'+'.join(self.operations)}" if self.wrapper else "+".join(self.operations)

    @staticmethod
    def parse(text: str) -> "Layer":
        wrapper, _, names = text.rpartition(":")
        return Layer(tuple(names.split("+")), wrapper)


@dataclass(frozen=True)
class Case:
    """Prints as `layers=linear,remat:norm head=tied ... cuts=1`; `Case.parse` is the inverse.

    Fields with their default value are not printed.
    """

    layers: tuple[Layer, ...]
    before: tuple[str, ...] = ()  # operations outside of the layers
    after: tuple[str, ...] = ()
    table: str = "identity"  # the rule for the table that embedding, layers and a tied head share
    head: str = "linear"
    loss: str = "sum"
    optimizer: str = "momentum"
    microbatches: int = 2
    groups: int = 2
    schedule: str = "1f1b"
    cuts: tuple[int, ...] = ()  # (): chosen by split_stages
    remat: str = "none"

    def __str__(self) -> str:
        defaults = Case(())
        parts = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return " ".join(f"{n}={_text(value)}" for n, value in parts if value != getattr(defaults, n))

    @staticmethod
    def parse(text: str) -> "Case":
        found = dict(part.split("=", 1) for part in text.split())
        read: dict[str, Callable[[str], object]] = {
            "layers": lambda value: tuple(map(Layer.parse, value.split(","))),
            "before": lambda value: tuple(value.split(",")),
            "after": lambda value: tuple(value.split(",")),
            "cuts": lambda value: tuple(map(int, value.split(","))),
            "microbatches": int,
            "groups": int,
        }
        return Case(**{name: read.get(name, str)(value) for name, value in found.items()})  # pyright: ignore

    @property
    def num_stages(self) -> int:
        return self.groups * (2 if self.schedule in TWO_STAGES_PER_GROUP else 1)

    @property
    def operations(self) -> tuple[str, ...]:
        return (*self.before, *(name for layer in self.layers for name in layer.operations), *self.after)

    @property
    def features(self) -> set[str]:
        rules = {RULES[self.table][0]} | ({"tied"} if self.head == "tied" else set())
        wrappers = {WRAPPERS[layer.wrapper].feature for layer in self.layers}
        return {OPERATIONS[name].feature for name in self.operations} | wrappers | rules

    @property
    def on_one_device(self) -> "Case":
        """The same model without a pipeline, which many cases have in common."""
        return replace(self, groups=1, schedule="1f1b", cuts=(), remat="none")

    def make_schedule(self) -> Schedule:
        return make_schedule(self.schedule, num_groups=self.groups, num_microbatches=self.microbatches)

    def fits(self) -> bool:
        """Whether there are enough layers, and the schedule is defined for these sizes."""
        cuts_fit = not self.cuts or (len(self.cuts) == self.num_stages - 1 and max(self.cuts) < len(self.layers))
        try:
            self.make_schedule()
        except ValueError:
            return False
        return cuts_fit and self.num_stages <= len(self.layers)


def random_case(seed: int) -> Case:
    model = _random_model(random.Random(f"model {seed // VARIANTS}"))
    return _random_pipeline(random.Random(f"pipeline {seed}"), model)


def _random_model(rng: random.Random) -> Case:
    favoured = rng.sample(sorted({e.feature for e in OPERATIONS.values()}), 3)  # so that related operations meet
    names = list(OPERATIONS)
    likely = [name for name in names if OPERATIONS[name].feature in favoured]

    def draw(count: int) -> tuple[str, ...]:
        return tuple(rng.choice(likely if rng.random() < 0.6 else names) for _ in range(count))

    layers = []
    for _ in range(rng.choice((2, 3, 4, 4, 4, 5, 6))):
        first = rng.choice(WITH_PARAMETERS)
        operations = tuple(rng.sample(ops := (first, *draw(rng.choice((0, 1, 1, 2)))), len(ops)))
        wrapper = rng.choice(list(WRAPPERS)) if rng.random() < 0.35 else ""
        if any(OPERATIONS[name].changes for name in operations) and not WRAPPERS[wrapper].permits_changes:
            wrapper = ""
        layers.append(Layer(operations, wrapper))
    return Case(
        layers=tuple(layers),
        before=draw(rng.choice((0, 0, 0, 1))),
        after=draw(rng.choice((0, 0, 0, 1))),
        table=rng.choice(list(RULES)) if rng.random() < 0.4 else "identity",
        head=rng.choice(HEADS),
        loss=rng.choice(LOSSES),
        optimizer=rng.choice(OPTIMIZERS),
        microbatches=rng.choice((4, 4, 4, 2, 3, 1)),
    )


def _random_pipeline(rng: random.Random, model: Case) -> Case:
    kinds = [replace(model, schedule=name, groups=groups) for name in SCHEDULE_NAMES for groups in (2, 3)]
    case = rng.choice([kind for kind in kinds if kind.fits()])
    if rng.random() < 0.7:
        cuts = tuple(sorted(rng.sample(range(1, len(case.layers)), case.num_stages - 1)))
        case = replace(case, cuts=cuts)
    return replace(case, remat=rng.choice(REMAT_MODES))


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
