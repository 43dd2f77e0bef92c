"""Learning rate schedules by name."""

# pyright: reportMissingTypeStubs=false

import optax

from flax_mesh.recipe.optimizers.config import OptimizerConfig

STABLE_PART = 0.9  # of decay_steps, for wsd (Hu et al. 2024, arXiv:2404.06395, decay over the last 10%)


def make_learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """A linear warm-up, then `config.schedule` until `decay_steps`, then constant. Step 0 already learns."""
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=config.learning_rate / (config.warmup_steps + 1),
            peak_value=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            end_value=config.end_learning_rate,
        )
    first = config.learning_rate / (config.warmup_steps + 1)
    warmup = optax.linear_schedule(first, config.learning_rate, max(config.warmup_steps, 1))
    return optax.join_schedules([warmup, _after_warmup(config)], [config.warmup_steps])


def decay_start(config: OptimizerConfig) -> int:
    """The step at which the learning rate begins to fall."""
    if config.schedule != "wsd":
        return config.warmup_steps
    default = max(config.warmup_steps, int(STABLE_PART * config.decay_steps))
    return default if config.decay_start is None else config.decay_start


def _after_warmup(config: OptimizerConfig) -> optax.Schedule:
    """The schedule from the end of the warm-up on, as a function of the steps since then."""
    if config.schedule == "constant":
        return optax.constant_schedule(config.learning_rate)
    start = decay_start(config)
    return optax.linear_schedule(
        config.learning_rate, config.end_learning_rate, config.decay_steps - start, start - config.warmup_steps
    )
