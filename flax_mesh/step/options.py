"""The options of a step and of the layout of its state, which the plain step and a pipeline have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import optax

from flax_mesh.axes import PartitionAxis
from flax_mesh.sharding.rules import Rules

Attention = Literal["auto", "blockwise", "as_written"]


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
        attention: "blockwise": every attention of the loss function is computed in blocks, with memory that is linear
            in the length of sequences, as by `flax_mesh.blockwise_attention`. "as_written": none is. "auto": blockwise
            if the scores, as written, take more than an eighth of the memory of a device, or 1 GiB if that is unknown.
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
