"""The options of a step and of the layout of its state, which the plain step and a pipeline have in common."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.axes import Layout, PartitionAxis, axes_of_spec
from flax_mesh.blockwise.transform import FORMS, MODES, choose
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import chip_of
from flax_mesh.kernels import platform_of
from flax_mesh.program.program import Program
from flax_mesh.sharding.rules import Rules
from flax_mesh.step.batch import microbatch_spec
from flax_mesh.tree import PyTree

UNKNOWN_CHIP = 2**30  # bytes of scores per device with which auto changes nothing, if the chip is not known
SHARE = 8  # otherwise this part of its memory

Attention = Literal["auto", "kernel", "blockwise", "as_written"] | tuple[str, ...]


@dataclass(frozen=True)
class StepOptions:
    """Options of a train step.

    Attributes:
        seed: Seed of the random streams.
        learning_rate: Schedule that is evaluated at the step count and reported as the metric "learning_rate". It does
            not change the optimizer.
        compiler_options: Options of XLA, as in `jax.jit`.
        skip_nonfinite: Whether a step returns the state unchanged if its loss or its gradient norm is NaN or infinite;
            its metric "skipped" is then 1, otherwise 0. The step accepts a third argument, the largest loss and the
            largest gradient norm whose update is applied: step(state, batch, (10.0, 5.0)).
        attention: "kernel": every attention of the loss function that is found and is not small is computed by the
            kernel of the devices, or it is an error. "blockwise": every attention is computed in blocks, with memory
            that is linear in the length of sequences, as by `flax_mesh.blockwise_attention`. "as_written": none is
            changed. "auto": by the kernel if it computes the same; else in blocks if the scores, as written, take more
            than an eighth of the memory of a device, or 1 GiB if that is unknown. A tuple, the `attention_forms` of an
            earlier step: these forms again, as far as that is possible.
    """

    seed: int = 0
    learning_rate: optax.Schedule | None = None
    compiler_options: Mapping[str, object] | None = None
    skip_nonfinite: bool = False
    attention: Attention = "auto"


@dataclass(frozen=True)
class StateLayout:
    """How the leaves of a state are sharded, as in `abstract_state`: `abstract_state(make, mesh, **vars(layout))`.

    Attributes:
        rules: A rule table, a PartitionRules, or mesh axes such as "fsdp". None: the table or the annotations of the
            model.
        axes: The mesh axes of each logical axis. None: the axes of the table.
        shard_optimizer_over: Mesh axes for ZeRO stage 1.
        optimizer_memory: Where the optimizer's arrays are stored between steps, "device" or "pinned_host".
    """

    rules: Rules | None = None
    axes: PartitionAxis | None = None
    shard_optimizer_over: str | tuple[str, ...] = ()
    optimizer_memory: str = "device"


class StepKeywords(TypedDict, total=False):
    """The fields of StepOptions as keyword arguments."""

    seed: int
    learning_rate: optax.Schedule | None
    compiler_options: Mapping[str, object] | None
    skip_nonfinite: bool
    attention: Attention


class PipelineKeywords(StepKeywords, total=False):
    """The fields of StepOptions and of StateLayout as keyword arguments."""

    rules: Rules | None
    axes: PartitionAxis | None
    shard_optimizer_over: str | tuple[str, ...]
    optimizer_memory: str


def with_keywords(
    layout: StateLayout, options: StepOptions, keywords: PipelineKeywords
) -> tuple[StateLayout, StepOptions]:
    """Both with the fields that are given as keywords. Raises a TypeError for any other keyword."""
    of_layout = {name: value for name, value in keywords.items() if name in vars(layout)}
    of_step: Any = {name: value for name, value in keywords.items() if name not in of_layout}
    return replace(layout, **of_layout), replace(options, **of_step)


Rewrite = Callable[[Program], Callable[..., list[jax.Array]] | None]


class AttentionOption:
    """Applies the option to traces. `lines` and `forms` describe the last trace."""

    def __init__(self, attention: str | tuple[str, ...], mesh: Mesh | AbstractMesh | None, axes: PartitionAxis):
        if not (attention in MODES or (isinstance(attention, tuple) and all(x in [*FORMS] for x in attention))):
            known = f"{', '.join(MODES)}, and no tuple of {', '.join(FORMS)}"
            raise ConfigError([f"attention={attention!r} is none of {known}"])
        self.attention, self.mesh, self.axes = attention, mesh, axes
        self.limit = score_limit(mesh)
        self.lines: tuple[str, ...] = ()
        self.forms: tuple[str, ...] = ()

    def layouts(self, arrays: Iterable[object], like: Iterable[object]) -> dict[int, Layout]:
        """The axes of the dims of traced arrays, by id, from arrays `like` them with shardings."""
        pairs = zip(arrays, like, strict=True)
        return {id(x): axes for x, y in pairs if (axes := _layout(y)) is not None}

    def of_batch(self, batch: PyTree) -> dict[int, Layout]:
        if self.mesh is None:
            return {}
        return {
            id(x): axes_of_spec(microbatch_spec(x.shape, self.mesh, self.axes), x.ndim) for x in jax.tree.leaves(batch)
        }

    def rewrite(self, inputs: Iterable[Layout | None], others: Mapping[int, Layout]) -> Rewrite:
        """For a trace whose inputs have these layouts, and which closes over the arrays of `others`."""

        def chosen(program: Program) -> Callable[..., list[jax.Array]] | None:
            layouts, platform = list(inputs), platform_of(self.mesh)
            choice = choose(program, self.attention, layouts, lambda const: others.get(id(const)), self.limit, platform)
            self.lines, self.forms = choice.lines, choice.forms
            return choice.call

        return chosen


def _layout(x: object) -> Layout | None:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and isinstance(x.sharding, NamedSharding):
        return axes_of_spec(x.sharding.spec, x.ndim)
    return None


def score_limit(mesh: Mesh | AbstractMesh | None) -> int:
    """Bytes of scores on one device up to which auto leaves attention as it is written."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        kind = "" if device is None else device.device_kind
    else:
        kind = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).device_kind
    chip = chip_of(kind)
    return UNKNOWN_CHIP if chip is None or kind == "cpu" else int(chip.memory / SHARE)
