"""The router of a mixture of experts: scores of the experts, the K best of each token, and their weights.

Shape letters: T tokens, D hidden, E experts, K experts per token, L experts of a device or of a group, G groups.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SCORES = ("softmax", "sigmoid")
Aux = dict[str, jax.Array]
LayersAux = Aux | Sequence[Aux]  # with a leading layer dim, or of each layer


class Routing(NamedTuple):
    """How logits become weights.

    scores: the scores of the experts, "softmax" over all of them or a "sigmoid" of each
    normalize: whether the weights are the scores divided by their sum over the chosen experts, or the scores
    groups: consecutive experts form that many groups, and a token is routed to experts of its `top_groups` best ones
    scale: a factor of all weights
    """

    scores: str = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def route(
    x_TD: jax.Array,
    router_DE: jax.Array,
    k: int,
    routing: Routing = Routing(),  # noqa: B008
    bias_E: jax.Array | None = None,
    counted_T: jax.Array | None = None,
    balance_E: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Aux]:
    """Weights (T, K) float32, experts (T, K) int32 by descending score, and sums over the tokens of a mask, or all.

    `balance_E` is added to the scores for the choice of the experts, not for their weights (DeepSeek-V3).
    """
    # Full float32 on every backend, since one bit can change which expert a token is routed to.
    logits_TE = jnp.dot(x_TD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
    if bias_E is not None:
        logits_TE = logits_TE + bias_E
    probability_TE = jax.nn.softmax(logits_TE)
    scores_TE = probability_TE if routing.scores == "softmax" else jax.nn.sigmoid(logits_TE)
    if balance_E is None and routing.groups == 1:
        top_TK, experts_TK = jax.lax.top_k(scores_TE, k)
    else:
        experts_TK = jax.lax.top_k(_choice(jax.lax.stop_gradient(scores_TE), routing, balance_E), k)[1]
        top_TK = jnp.take_along_axis(scores_TE, experts_TK, axis=1)
    counted_T1 = None if counted_T is None else counted_T[:, None]
    assigned_A = None if counted_T is None else jnp.repeat(counted_T.astype(jnp.int32), k)
    sums = {
        "expert_tokens": jnp.bincount(experts_TK.reshape(-1), assigned_A, length=router_DE.shape[1]),
        "router_probability": jnp.sum(probability_TE, axis=0, where=counted_T1),
        "router_z": jnp.sum(jax.nn.logsumexp(logits_TE, axis=-1) ** 2, where=counted_T),
    }
    if routing.normalize:
        top_TK = top_TK / (jnp.sum(top_TK, axis=-1, keepdims=True) + 1e-20)
    return top_TK if routing.scale == 1 else top_TK * routing.scale, experts_TK, sums


def _choice(scores_TE: jax.Array, routing: Routing, balance_E: jax.Array | None) -> jax.Array:
    """The scores by which experts are chosen; -inf outside of the best groups.

    The score of a group is its largest score, or with a balancing bias the sum of its two largest ones (DeepSeek).
    """
    scores_TE = scores_TE if balance_E is None else scores_TE + balance_E
    if routing.groups == 1:
        return scores_TE
    scores_TGL = scores_TE.reshape(len(scores_TE), routing.groups, -1)
    best_TG = jnp.sum(jax.lax.top_k(scores_TGL, 1 if balance_E is None else 2)[0], axis=-1)
    groups_TN = jax.lax.top_k(best_TG, routing.top_groups)[1]
    is_best_TG = jnp.any(groups_TN[..., None] == np.arange(routing.groups), axis=1)
    return jnp.where(is_best_TG[..., None], scores_TGL, -jnp.inf).reshape(scores_TE.shape)


def stacked(aux: LayersAux) -> Aux:
    """Statistics with a leading layer dim, {} without experts."""
    return aux if isinstance(aux, dict) else jax.tree.map(lambda *leaves: jnp.stack(leaves), *aux)


def router_losses(aux: Aux) -> dict[str, jax.Array]:
    """Losses and load of the router of each layer, (layers,) each; leaves of `aux` have a leading layer dim.

    With f the fraction of all assignments that an expert got, and P its mean probability over the T counted tokens:

    load_balance_loss  E sum_e f_e P_e; 1 if balanced, E / K if K experts get all tokens
                       (Fedus et al. 2022, equations 4 to 6; f counts assignments, as K may be above 1)
    router_z_loss      mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5)
    expert_load_max    E max_e f_e; 1 if balanced, E / K if one expert gets every token
    """
    k, num_experts = aux["experts"].shape[-1], aux["expert_tokens"].shape[-1]
    # Without a single counted token the sums are 0, and so are the losses.
    assigned_L1 = jnp.maximum(jnp.sum(aux["expert_tokens"], axis=-1, keepdims=True), 1)
    share_LE = aux["expert_tokens"] / assigned_L1
    mean_LE = aux["router_probability"] / (assigned_L1 / k)
    return {
        "load_balance_loss": num_experts * jnp.sum(share_LE * mean_LE, axis=-1),
        "router_z_loss": aux["router_z"] / (assigned_L1[:, 0] / k),
        "expert_load_max": num_experts * jnp.max(share_LE, axis=-1),
    }


def balanced_capacity(num_tokens: int, k: int, per_device: int, num_devices: int) -> int | None:
    """Rows per device that a balanced router needs, or None if that saves less than a quarter of all tokens.

    A token with K uniformly drawn experts has none on a device with probability C(E - L, K) / C(E, K). The result is a
    quarter above the expectation, the slack of a capacity factor of 1.25 (Fedus et al. 2022).
    """
    num_experts = per_device * num_devices
    share = 1 - math.comb(num_experts - per_device, k) / math.comb(num_experts, k)
    capacity = math.ceil(1.25 * share * num_tokens)
    return capacity if capacity <= 0.75 * num_tokens else None
