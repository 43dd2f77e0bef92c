"""OptimizerConfig: the optimizer and its learning rate schedule as settings."""

import math
from dataclasses import dataclass, field

from flax_mesh.settings import MAX_SIZE, SAME_RESULT

AT_LEAST_0, AT_LEAST_1 = {"at_least": 0, "at_most": MAX_SIZE}, {"at_least": 1, "at_most": MAX_SIZE}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW after clipping by the global norm.

    The learning rate rises linearly to `learning_rate` during `warmup_steps`, decays by a cosine to `end_learning_rate`
    at step `decay_steps`, and is constant from there. It does not depend on `run.steps`, so a run can be extended.

    Attributes:
        decay_steps: Step at which the decay ends, counted from step 0, the warm-up included.
        clip_norm: Maximum global norm of the gradients; inf disables clipping.
        shard_over: Comma-separated mesh axes over which the optimizer's moments are sharded although the parameters are
            replicated there, such as "dp" (ZeRO stage 1). "": none.
        memory: Where the moments are stored between steps: "device", or "pinned_host", the memory of the host. A step
            copies them to the devices and back.
    """

    learning_rate: float = field(default=3e-4, metadata={"at_least": 0})
    end_learning_rate: float = field(default=3e-5, metadata={"at_least": 0})
    warmup_steps: int = field(default=100, metadata=AT_LEAST_0)
    decay_steps: int = field(default=1000, metadata=AT_LEAST_1)
    b1: float = field(default=0.9, metadata={"at_least": 0, "below": 1})
    b2: float = field(default=0.95, metadata={"at_least": 0, "below": 1})
    epsilon: float = field(default=1e-8, metadata={"above": 0})
    weight_decay: float = field(default=0.1, metadata={"at_least": 0})
    clip_norm: float = field(default=1.0, metadata={"above": 0, "also": (math.inf, "no clipping")})
    shard_over: str = field(default="", metadata=SAME_RESULT)
    memory: str = field(default="device", metadata=SAME_RESULT | {"one_of": ("device", "pinned_host")})
