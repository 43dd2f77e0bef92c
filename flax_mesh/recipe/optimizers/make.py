"""The optimizer of a config, by name, as an optax transformation."""

# pyright: reportMissingTypeStubs=false, reportUnknownLambdaType=false

import re
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Transformation
from optax import Schedule
from optax.contrib import MuonDimensionNumbers

from flax_mesh.recipe.optimizers.config import OptimizerConfig, momentum_of
from flax_mesh.recipe.optimizers.groups import Group, first_match, parse_groups, parse_matrices
from flax_mesh.recipe.optimizers.schedules import make_learning_rate_schedule
from flax_mesh.step.optimizer import wide
from flax_mesh.text import group_paths, listed
from flax_mesh.tree import PyTree, in_stack, map_named, named_leaves

MATRICES = r"^(?!.*(embed|head)).*kernel$"
MUON_RMS = 0.2  # of an update; equal to AdamW's, so that both use one learning rate (Liu et al. 2025, arXiv:2502.16982)


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule | None = None, layers: Sequence[str] = ()
) -> Transformation:
    """The clip of the global norm, then the optimizer `config.name` on every parameter group.

    `schedule` replaces the learning rate schedule of the config. `layers` are the paths of layer lists or scanned
    stacks; Muon treats the layers of a stack as separate matrices.
    """
    rate = make_learning_rate_schedule(config) if schedule is None else schedule
    groups = [group for group in parse_groups(config.groups)[0] if not group.is_frozen]
    build = partial(OPTIMIZERS[config.name], config, layers)
    rest = build(rate, config.weight_decay)
    if not groups:
        return optax.chain(clip_by_global_norm(config.clip_norm), rest)
    parts = {f"group_{at}": build(_scaled(rate, settings), config.weight_decay * settings.weight_decay)
             for at, settings in enumerate(groups)}  # fmt: skip

    def label(path: str, _: object) -> str:
        group = first_match(path, groups)
        return "rest" if group is None else f"group_{groups.index(group)}"

    every = optax.partition({**parts, "rest": rest}, partial(map_named, label))
    return optax.chain(clip_by_global_norm(config.clip_norm), every)


def clip_by_global_norm(most: float) -> Transformation:
    """`optax.clip_by_global_norm`, with its sums and products in float32 or wider also for gradients in half types."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        norm = optax.tree.norm(jax.tree.map(wide, updates))

        def clip(x: jax.Array) -> jax.Array:
            scaled = wide(x) / norm.astype(wide(x).dtype) * most
            return jax.lax.select(norm < most, x, scaled.astype(x.dtype))

        return jax.tree.map(clip, updates), state

    return Transformation(lambda params: optax.EmptyState(), update)


def parameter_problems(config: OptimizerConfig, parameters: PyTree, layers: Sequence[str]) -> list[str]:
    """One line for every pattern that selects no parameter, and for every matrix whose dims are not known.

    `parameters` are the trained ones, abstract or not.
    """
    named = named_leaves(parameters)
    patterns = [("groups", entry.pattern) for entry in parse_groups(config.groups)[0] if not entry.is_frozen]
    if config.no_decay != OptimizerConfig.no_decay:  # the default selects nothing in a model without norms and biases
        patterns.append(("no_decay", config.no_decay))
    matrices = parse_matrices(config.matrices or MATRICES)[0] if config.name == "muon" else []
    patterns += [("matrices", entry.pattern) for entry in matrices if config.matrices]
    problems = [
        f"optimizer.{setting}: no trained parameter has {pattern!r} in its path; the paths are such as {_paths(named)}"
        for setting, pattern in patterns
        if pattern and not any(re.search(pattern, path) for path, _ in named)
    ]
    if config.name != "muon":
        return problems
    sizes = {path: x.ndim - bool(in_stack(path, layers)) for path, x in named}
    chosen = {path: row for path in sizes if (row := first_match(path, matrices))}
    wrong = [path for path, row in chosen.items() if not _fits(sizes[path], row.inputs, row.outputs)]
    for pattern, at in group_paths(wrong, [sizes[path] for path in wrong]):
        problems.append(
            f"optimizer.matrices: {pattern} has {sizes[wrong[at[0]]]} dims; write which are inputs and which outputs, "
            "such as kernel 0>1,2, or choose another pattern"
        )
    if not chosen:
        problems.append(
            f"optimizer.name=muon: no trained parameter is a matrix; set optimizer.matrices to a pattern of the paths, "
            f"which are such as {_paths(named)}"
        )
    return problems


def _paths(named: Sequence[tuple[str, object]]) -> str:
    return listed([path for path, _ in named[:3]] or ["(none)"])


def _fits(num_dims: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
    return max((*inputs, *outputs)) < num_dims if inputs else num_dims == 2


def _scaled(rate: Schedule, group: Group) -> Schedule:
    return lambda count: group.learning_rate * rate(count)


# --- one function per name: (config, layers, learning rate schedule, weight decay) -> transformation ---


def _adamw(config: OptimizerConfig, layers: Sequence[str], rate: Schedule, weight_decay: float) -> Transformation:
    return optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        mu_dtype=_moment_dtype(config),
        weight_decay=weight_decay,
        mask=_decayed(config),
    )


def _muon(config: OptimizerConfig, layers: Sequence[str], rate: Schedule, weight_decay: float) -> Transformation:
    rows = parse_matrices(config.matrices or MATRICES)[0]

    def dims(path: str, _: object) -> MuonDimensionNumbers:
        row, first = first_match(path, rows), int(bool(in_stack(path, layers)))
        inputs, outputs = (row.inputs, row.outputs) if row and row.inputs else ((0,), (1,))
        return MuonDimensionNumbers(tuple(i + first for i in inputs), tuple(i + first for i in outputs))

    muon = optax.contrib.muon(
        rate,
        beta=momentum_of(config),
        eps=config.epsilon,
        weight_decay=weight_decay,
        weight_decay_mask=_decayed(config),
        mu_dtype=_moment_dtype(config),
        muon_weight_dimension_numbers=partial(map_named, dims),
        consistent_rms=MUON_RMS,
    )
    label = partial(map_named, lambda path, _: "muon" if first_match(path, rows) else "adamw")
    return optax.partition({"muon": muon, "adamw": _adamw(config, layers, rate, weight_decay)}, label)


def _adafactor(config: OptimizerConfig, layers: Sequence[str], rate: Schedule, weight_decay: float) -> Transformation:
    return optax.adafactor(
        rate,
        momentum=momentum_of(config) or None,  # for 0, optax would store a momentum
        dtype_momentum=_moment_dtype(config) or jnp.float32,
        weight_decay_rate=lambda count: weight_decay * rate(count),  # optax does not multiply it by the learning rate
        weight_decay_mask=_decayed(config),
    )


def _sgd(config: OptimizerConfig, layers: Sequence[str], rate: Schedule, weight_decay: float) -> Transformation:
    # For 0, optax.trace would store the gradients. With the identity, the paths of the other states are the same.
    momentum = momentum_of(config)
    trace = optax.trace(momentum, accumulator_dtype=_moment_dtype(config)) if momentum else optax.identity()
    return optax.chain(
        trace,
        optax.add_decayed_weights(weight_decay, _decayed(config)),
        optax.scale_by_learning_rate(rate),
    )


OPTIMIZERS = {"adamw": _adamw, "muon": _muon, "adafactor": _adafactor, "sgd": _sgd}


def _moment_dtype(config: OptimizerConfig) -> jnp.dtype | None:
    return None if config.moment_dtype == "parameter" else jnp.dtype(config.moment_dtype)


def _decayed(config: OptimizerConfig) -> Callable[[PyTree], PyTree]:
    pattern = config.no_decay
    return partial(map_named, lambda path, _: not (pattern and re.search(pattern, path)))
