"""OptimizerConfig: the optimizer, its learning rate schedule and its parameter groups as settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flax_mesh.fields import MAX_SIZE, SAME_RESULT, changed_repr
from flax_mesh.recipe.optimizers.groups import parse_groups, parse_matrices, pattern_problem

NAMES = ("adamw", "muon", "adafactor", "sgd")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
USERS = {  # setting -> the optimizers that use it
    "matrices": ("muon",),
    "momentum": ("muon", "sgd", "adafactor"),
    **dict.fromkeys(("b1", "b2", "epsilon"), ("adamw", "muon")),
}
MOMENTUM = {"muon": 0.95, "sgd": 0.9, "adafactor": 0.0}  # its default
AT_LEAST_0, AT_LEAST_1 = {"at_least": 0, "at_most": MAX_SIZE}, {"at_least": 1, "at_most": MAX_SIZE}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of a run, after clipping by the global norm.

    The learning rate rises linearly to `learning_rate` during `warmup_steps`, follows `schedule` until step
    `decay_steps`, and is constant from there. It does not depend on `run.steps`, so a run can be extended.

    The weight decay is decoupled for every optimizer: a step subtracts learning rate * weight_decay * parameter.

    Attributes:
        name: "adamw" (Loshchilov and Hutter 2019), "muon" (Jordan et al. 2024) for matrices with AdamW for all other
            parameters, "adafactor" (Shazeer and Stern 2018), or "sgd".
        schedule: "cosine" or "linear" decay to `end_learning_rate` after the warm-up, "constant", or "wsd": constant
            until `decay_start`, then linear (warmup, stable, decay: Hu et al. 2024).
        decay_steps: Step at which the decay ends, counted from step 0, the warm-up included.
        decay_start: Of wsd: step at which the decay begins. None: at 90% of decay_steps.
        b1: Of adamw and muon's AdamW: decay of the first moment.
        b2: Of adamw and muon's AdamW: decay of the second moment.
        epsilon: Of adamw and muon.
        momentum: Of muon, sgd and adafactor. None: 0.95, 0.9 and no momentum. With 0, sgd and adafactor store none.
        moment_dtype: dtype of the first moment or momentum. "parameter": the dtype of the parameter, but float32 for
            the momentum of adafactor. Second moments have the dtype of the parameter, because bfloat16 cannot represent
            the small changes of one step.
        no_decay: Pattern of the paths of parameters without weight decay. "": none.
        groups: Parameter groups, "PATTERN WORDS; PATTERN WORDS": a parameter belongs to the first group whose pattern
            is found in its path. The words are factors, learning_rate*0.1 and weight_decay*0, or "frozen": these
            parameters are not trained and have no moments.
        matrices: Of muon: the parameters that are matrices, "PATTERN DIMS; PATTERN DIMS". DIMS such as 0>1,2 are input
            and output dims of an array of more than two dims, without the leading dim of a scanned stack; other dims
            belong to separate matrices, such as experts. "": the table of the model's config, else every "kernel" of
            two dims except embeddings and heads.
        clip_norm: Maximum global norm of the gradients; inf disables clipping.
        ema: Decay of a moving average of the parameters after every step, in float32, which evaluation, samples and
            exports use in the place of the parameters. 0: none.
        shard_over: Comma-separated mesh axes over which the optimizer's moments are sharded although the parameters are
            replicated there, such as "dp" (ZeRO stage 1). "": none.
        memory: Where the moments are stored between steps: "device", or "pinned_host", the memory of the host. A step
            copies them to the devices and back.
    """

    __repr__ = changed_repr

    name: str = field(default="adamw", metadata={"one_of": NAMES})
    schedule: str = field(default="cosine", metadata={"one_of": SCHEDULES})
    learning_rate: float = field(default=3e-4, metadata={"at_least": 0})
    end_learning_rate: float = field(default=3e-5, metadata={"at_least": 0})
    warmup_steps: int = field(default=100, metadata=AT_LEAST_0)
    decay_steps: int = field(default=1000, metadata=AT_LEAST_1)
    decay_start: int | None = field(default=None, metadata=AT_LEAST_0)
    b1: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    b2: float = field(default=0.95, metadata={"at_least": 0, "below": 1})
    epsilon: float = field(default=1e-8, metadata={"above": 0})
    momentum: float | None = field(default=None, metadata={"at_least": 0, "below": 1})
    moment_dtype: str = field(default="parameter", metadata={"one_of": ("parameter", "float32", "bfloat16")})
    weight_decay: float = field(default=0.1, metadata={"at_least": 0})
    no_decay: str = r"(^|/)(scale|bias)$"
    groups: str = ""
    matrices: str = ""
    clip_norm: float = field(default=1.0, metadata={"above": 0, "also": (math.inf, "no clipping")})
    ema: float = field(default=0.0, metadata={"at_least": 0, "below": 1})
    shard_over: str = field(default="", metadata=SAME_RESULT)
    memory: str = field(default="device", metadata=SAME_RESULT | {"one_of": ("device", "pinned_host")})

    def problems(self, *, own_optimizer: bool = False, own_schedule: bool = False) -> list[str]:
        """One line for every mistake in the texts of settings, and in settings that depend on each other.

        `own_optimizer` and `own_schedule`: whether the recipe has `make_optimizer` and `make_schedule`. They may read
        any setting, so a setting that no optimizer or schedule with a name uses is accepted then.
        """
        problems = [] if own_optimizer or own_schedule else self._schedule_problems()
        problems += [] if own_optimizer else self._unused()
        if problem := pattern_problem(self.no_decay):
            problems.append(f"optimizer.no_decay: {problem}")
        return [*problems, *parse_groups(self.groups)[1], *parse_matrices(self.matrices)[1]]

    def _schedule_problems(self) -> list[str]:
        problems: list[str] = []
        if self.schedule != "constant" and self.warmup_steps >= self.decay_steps:
            problems.append(
                f"optimizer.warmup_steps={self.warmup_steps} must be below optimizer.decay_steps={self.decay_steps}, "
                "which includes the warm-up"
            )
        if self.decay_start is None:
            return problems
        if self.schedule != "wsd":
            problems.append(_unused_text("decay_start", self.decay_start, "schedule", self.schedule, ("wsd",)))
        elif not self.warmup_steps <= self.decay_start < self.decay_steps:
            problems.append(
                f"optimizer.decay_start={self.decay_start} must be at least optimizer.warmup_steps={self.warmup_steps} "
                f"and below optimizer.decay_steps={self.decay_steps}"
            )
        return problems

    def _unused(self) -> list[str]:
        """One line for every setting, other than its default, that the optimizer by name does not use."""
        problems = [
            _unused_text(name, value, "name", self.name, users)
            for name, users in USERS.items()
            if self.name not in users and (value := getattr(self, name)) != getattr(OptimizerConfig, name)
        ]
        if (
            self.moment_dtype != OptimizerConfig.moment_dtype
            and self.name in ("sgd", "adafactor")
            and not momentum_of(self)
        ):
            problems.append(
                f"optimizer.moment_dtype={self.moment_dtype} has no effect with optimizer.name={self.name} without "
                "momentum; remove it, or set optimizer.momentum"
            )
        return problems


def momentum_of(config: OptimizerConfig) -> float:
    """The momentum of muon, sgd or adafactor; 0: none."""
    return MOMENTUM[config.name] if config.momentum is None else config.momentum


def _unused_text(name: str, value: object, of: str, chosen: str, users: Sequence[str]) -> str:
    text = " ".join(str(value).split())  # without line breaks
    problem = f"optimizer.{name}={text} has no effect with optimizer.{of}={chosen}"
    return f"{problem}, only with {' or '.join(users)}; remove it"
