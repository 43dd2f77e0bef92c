"""The optimizer of a config, by name, as an optax transformation."""

from typing import Any

import optax

from flax_mesh.train.optimizers.config import OptimizerConfig
from flax_mesh.tree import map_named


def make_learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, cosine to `end_learning_rate` at `decay_steps`, constant from there. Step 0 already learns."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        end_value=config.end_learning_rate,
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) behind a clip of the global norm; scales and biases are not decayed."""

    def decayed(params: Any) -> Any:
        return map_named(lambda path, _: path.rsplit("/", 1)[-1] not in ("scale", "bias"), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_learning_rate_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
