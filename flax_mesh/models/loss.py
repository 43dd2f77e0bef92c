"""Losses of a decoder on the next tokens, its log-probabilities, and its FLOPs.

Shape letters: B batch, S sequence, D hidden, V vocab.
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flax_mesh.errors import ConfigError
from flax_mesh.models.config import DecoderConfig
from flax_mesh.models.cross_entropy import cross_entropy, distillation, project, token_losses
from flax_mesh.models.decoder import Decoder
from flax_mesh.models.ops.divergence import DIRECTIONS, Divergence
from flax_mesh.models.ops.router import Aux, LayersAux, router_losses, stacked
from flax_mesh.models.ops.scores import soft_cap
from flax_mesh.models.parts import token_dims
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.text import array_text
from flax_mesh.tree import PyTree

_Result = TypeVar("_Result")


def _tokens_of(batch: object, function: str) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets; ConfigError if a recipe's own batches do not have them."""
    arrays = batch if isinstance(batch, Mapping) else {}
    tokens = [arrays.get(name) for name in ("inputs", "targets")]
    if any(x is None or x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.integer) for x in tokens):
        names = {name: array_text(x) for name, x in arrays.items() if hasattr(x, "dtype")} or type(batch).__name__
        raise ConfigError(
            f"{function} takes a batch with 'inputs' and 'targets', integers of shape (batch, sequence), got {names}; "
            "write a loss_fn for other batches"
        )
    return tokens[0], tokens[1]  # pyright: ignore[reportReturnType] (neither is None)


def next_token_loss(model: Decoder, batch: dict[str, jax.Array]) -> tuple[PyTree, ...]:
    """(summed cross-entropy in nats, number of tokens) of targets (B, S).

    Negative targets do not count, whether -1, -100 or another number. A target at or above the size of the vocabulary
    makes the loss NaN, as an input does.

    If the batch has "segment_ids", integers (B, S), tokens attend only to tokens with the same id: documents that are
    packed into one row do not see each other. The target of the last token of a document is then best set to -1. The id
    of padding is 0.

    With experts (loss_sum, weight, metrics):

        loss_sum = cross-entropy sum + weight * sum over layers of (a load_balance_loss + z router_z_loss)

    with the coefficients a and z of these names in the config, and the values of `router_losses`. Divided by the summed
    weight of all microbatches it is the mean over microbatches, weighted by their number of targets. The metrics are
    weighted likewise: the cross-entropy alone, both losses as means over layers, and expert_load_max of the worst
    layer. Tokens without a target count in the losses of the router, padding (segment 0) does not.

    With `prediction_layers` the sum also has `prediction_loss` times the cross-entropy of the tokens after the next
    one, the mean over the modules, which is the metric "prediction_loss"; their routers count as further layers.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
        >>> model = make_decoder(DecoderConfig(num_layers=1), nnx.Rngs(0))
        >>> tokens = jnp.zeros((2, 8), int)
        >>> loss_sum, weight = next_token_loss(model, {"inputs": tokens, "targets": tokens.at[0].set(-1)})
        >>> int(weight)  # negative targets do not count
        8
    """
    losses = partial(_entropies, model, batch)
    (entropy, later, of_later), targets_BS, aux = _of_targets(losses, model, batch, "next_token_loss")
    weight, loss = jnp.sum(targets_BS >= 0, dtype=jnp.float32), entropy
    metrics: dict[str, jax.Array] = {}
    if model.config.prediction_layers:
        loss, metrics = loss + model.config.prediction_loss * later, {"prediction_loss": later}
    if model.config.num_experts:
        loss, of_routers = _with_routers(loss, model, aux, weight, of_later)
        metrics |= of_routers
    return (loss, weight, {"cross_entropy": entropy, **metrics}) if metrics else (loss, weight)


def _entropies(
    model: Decoder,
    batch: dict[str, jax.Array],
    x_BSD: jax.Array,
    weights_DV: jax.Array,
    targets_BS: jax.Array,
    **options: Any,
) -> tuple[jax.Array, jax.Array, list[Aux]]:
    """Cross-entropies of the next tokens and of those after them, the mean over the modules, whose statistics follow.

    The second one is divided by the number of next tokens too, as in equation 24 of DeepSeek-V3.
    """
    entropy = cross_entropy(x_BSD, weights_DV, targets_BS, **options)
    if not (count := model.config.prediction_layers):
        return entropy, jnp.float32(0), []
    states, targets, aux = model.predict(x_BSD, batch["inputs"], targets_BS, batch.get("segment_ids"))
    pairs = zip(states, targets, strict=True)
    each = [cross_entropy(x_BSD, weights_DV, later_BS, **options) for x_BSD, later_BS in pairs]
    return entropy, sum(each[1:], each[0]) / count, aux


def distillation_loss(
    model: Decoder,
    teacher: Decoder,
    batch: dict[str, jax.Array],
    *,
    direction: str = "forward",
    temperature: float = 1.0,
    alpha: float = 0.0,
) -> tuple[PyTree, ...]:
    """(loss_sum, number of tokens, metrics) of a student that learns the probabilities of a teacher.

    The batch is as for `next_token_loss`. The loss of a token with a target is

        (1 - alpha) temperature^2 KL + alpha cross-entropy

    where KL is the sum over the vocabulary of p log(p / q) ("forward") or of q log(q / p) ("reverse"), with the
    probabilities p of the teacher and q of the student, softmax(logits / temperature). The metrics are the sums of
    "cross_entropy" and of "kl", with its factor temperature^2. Losses of routers of `model` are added, as in
    `next_token_loss`. With `loss_chunk` of the config of `model`, only the logits of that many tokens per device exist
    at a time, of both. The teacher has no gradient; its vocabulary must be the student's.

    Source: Hinton et al. 2015 (temperature and alpha), Gu et al. 2024 (reverse).

    Example:
        >>> from flax_mesh.models import DecoderConfig, distillation_loss, make_decoder
        >>> model, teacher = (make_decoder(DecoderConfig(num_layers=n), nnx.Rngs(n)) for n in (1, 2))
        >>> tokens = jnp.zeros((2, 8), int)
        >>> loss_sum, weight, metrics = distillation_loss(model, teacher, {"inputs": tokens, "targets": tokens})
        >>> int(weight), bool(loss_sum > 0), bool(loss_sum == metrics["kl"])
        (16, True, True)
    """
    problems = [] if direction in DIRECTIONS else [f"direction must be forward or reverse, got {direction!r}"]
    if (size := model.config.vocab_size) != (other := teacher.config.vocab_size):
        text = f"must have the same vocabulary, got {size} and {other} tokens"
        problems.append(f"student and teacher {text}; choose a teacher with the tokenizer of the student")
    if not 0 < temperature < math.inf:
        problems.append(f"temperature must be above 0 and finite, got {temperature}")
    if not 0 <= alpha <= 1:
        problems.append(f"alpha, the weight of the cross-entropy, must be from 0 to 1, got {alpha}")
    if problems:
        raise ConfigError(problems)
    inputs_BS, _ = _tokens_of(batch, "distillation_loss")
    of_teacher = teacher.hidden(inputs_BS, segment_ids=batch.get("segment_ids"))[:2]
    losses = partial(
        distillation,
        teacher=of_teacher,
        divergence=Divergence(direction, temperature, alpha),
        teacher_cap=teacher.config.logit_softcap,
    )
    (loss, entropy, kl), targets_BS, aux = _of_targets(losses, model, batch, "distillation_loss")
    weight = jnp.sum(targets_BS >= 0, dtype=jnp.float32)
    loss, metrics = _with_routers(loss, model, aux, weight) if model.config.num_experts else (loss, {})
    return loss, weight, {"cross_entropy": entropy, "kl": kl, **metrics}


def _with_routers(
    loss: jax.Array, model: Decoder, aux: LayersAux, weight: jax.Array, of_later: Sequence[Aux] = ()
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`loss` with the losses of the routers, and their metrics; changes the biases of the choice of experts."""
    config = model.config
    if config.router_balance_rate:
        _balance(model, aux, of_later)
    parts = [router_losses(stacked(part)) for part in (aux, of_later) if part]
    losses = {name: jnp.concatenate([part[name] for part in parts]) for name in parts[0]}
    metrics: dict[str, jax.Array] = {}
    for name, combine in (("load_balance_loss", jnp.mean), ("router_z_loss", jnp.mean), ("expert_load_max", jnp.max)):
        metrics[name] = weight * combine(losses[name])
    for name in ("load_balance_loss", "router_z_loss"):
        loss = loss + weight * getattr(config, name) * jnp.sum(losses[name])
    return loss, metrics


def _balance(model: Decoder, aux: LayersAux, of_later: Sequence[Aux]) -> None:
    """Change the biases of the choice of experts by the tokens that each expert got (Wang et al. 2024).

    In a list, the change of a layer depends on its statistics alone: the stage of a pipeline computes it.
    """
    layers = [(model.layers, aux)] if isinstance(aux, dict) else [*zip(model.layers, aux, strict=True)]
    later = zip((module.layer for module in model.predictions), of_later, strict=True)
    for layer, of_layer in [*layers, *(later if of_later else ())]:
        tokens = of_layer["expert_tokens"]
        change = jnp.sign(jnp.mean(tokens, axis=-1, keepdims=True) - tokens)
        layer.moe.balance[...] += model.config.router_balance_rate * change


def token_log_probs(model: Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """Logarithms of the probabilities of the targets, (B, S) float32; 0 where the target is negative.

    The batch is as for `next_token_loss`, and minus the sum is its cross-entropy. Losses of whole completions are made
    from it, such as the loss of recipes/dpo.py. With `model.loss_chunk`, only the logits of that many tokens per device
    exist at a time; the backward pass computes them again. The losses of routers are not part of it.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, token_log_probs
        >>> model = make_decoder(DecoderConfig(num_layers=1), nnx.Rngs(0))
        >>> tokens = jnp.zeros((2, 8), int)
        >>> log_probs = token_log_probs(model, {"inputs": tokens, "targets": tokens.at[0].set(-1)})
        >>> log_probs.shape, (log_probs < 0).sum(axis=1).tolist()
        ((2, 8), [0, 8])
    """
    return -_of_targets(token_losses, model, batch, "token_log_probs")[0]


def scores_at(
    model: Decoder, tokens_BS: jax.Array, positions_BT: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities (B, T) float32 of targets after the tokens at positions, and whether they are the largest."""
    axes, dims = model.config.axes, token_dims("decode")  # no mesh axis splits the second one

    def scores(x_BSD: jax.Array, weights_DV: jax.Array, positions_BT: jax.Array, targets_BT: jax.Array) -> PyTree:
        x_BTD = jnp.take_along_axis(x_BSD, positions_BT[..., None], axis=1)
        x_BTD = constrain(x_BTD, (*dims, "hidden"), axes=axes, mode="decode")
        logits_BTV = soft_cap(project(x_BTD, weights_DV, axes, "decode"), model.config.logit_softcap)
        is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
        log_probs_BT = jnp.sum(logits_BTV, axis=-1, where=is_target_BTV) - jax.nn.logsumexp(logits_BTV, axis=-1)
        return log_probs_BT, jnp.argmax(logits_BTV, axis=-1) == targets_BT

    arrays = *model.hidden(tokens_BS)[:2], positions_BT, targets_BT
    return on_auto_axes(scores, *arrays, out=[dims, dims], axes=axes, mode="decode")


def _of_targets(
    losses: Callable[..., _Result], model: Decoder, batch: dict[str, jax.Array], name: str
) -> tuple[_Result, jax.Array, LayersAux]:
    """`losses` of the targets of a batch for the function `name`, the targets, and the statistics of the routers."""
    inputs_BS, targets_BS = _tokens_of(batch, name)
    # Not passed as None, since a subclass may not take them.
    packed: dict[str, jax.Array] = {key: batch[key] for key in ("segment_ids",) if key in batch}
    x_BSD, weights_DV, aux = model.hidden(inputs_BS, **packed)  # pyright: ignore[reportArgumentType]
    config = model.config
    options = {"axes": config.axes, "chunk": config.loss_chunk, "cap": config.logit_softcap}
    return losses(x_BSD, weights_DV, targets_BS, **options), targets_BS, aux


def flops_per_token(config: DecoderConfig, num_parameters: int, sequence_length: int) -> float:
    """FLOPs of forward and backward for one token: 6 (N - N_idle) + 6 L D S + 18 M, with causal attention.

    N_idle are the parameters that a token does not multiply: the embedding of a model with an untied head, and the
    experts that the token is not routed to. A head that predictions multiply too counts once more for each. S is the
    sequence length, D = heads * head_dim, the mean of the head dims of keys and values, and L the layers with
    attention. M are the numbers of the states of all delta nets, which a token decays and reads, changes, and reads
    again. Recomputation is not counted: this is the numerator of MFU, not of hardware utilization (PaLM, appendix B).

    Example:
        >>> from flax_mesh.models import DecoderConfig, flops_per_token
        >>> f"{flops_per_token(DecoderConfig(), num_parameters=1_000_000, sequence_length=128):.2e}"
        '6.79e+06'
    """
    idle = (int(not config.tied) - config.prediction_layers) * config.vocab_size * config.hidden_size
    layers = config.num_layers + config.prediction_layers
    if config.num_experts:
        expert = 3 * config.hidden_size * config.mlp_size
        idle += (layers - config.dense_layers) * (config.num_experts - config.experts_per_token) * expert
    width = (config.head_dim + config.value_size) / 2
    attention = 6 * (config.num_of(delta=False) + config.prediction_layers) * config.num_heads * width * sequence_length
    state = config.delta_value_heads * config.delta_key_dim * config.delta_value_dim
    return 6.0 * (num_parameters - idle) + attention + 18 * config.num_of(delta=True) * state
