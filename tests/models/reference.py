"""Small decoders with random parameters, and the same decoder in numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_mesh import PartitionAxis, create_mesh
from flax_mesh.models import DecoderConfig, make_decoder
from flax_mesh.tree import named_leaves

SMALL = DecoderConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48)
NATURAL = PartitionAxis(batch_axis=("fsdp", "dp", "ep"), hidden_state_axis=None)
REPLICATED = PartitionAxis(hidden_state_axis=None)  # the batch is replicated over the devices that share the experts
EXPERTS = DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, mlp_size=32)
EXPERTS = dataclasses.replace(EXPERTS, num_experts=8, scan=True, axes=NATURAL)


def with_random_parameters(make):
    """The module of `make()` with normal parameters, without compiling an initializer."""
    graphdef, abstract = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.tree.map(normal, abstract))


def normal(leaf):
    return jnp.asarray(np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32) * 0.2)


def small(config=SMALL, **change):
    return with_random_parameters(lambda: make_decoder(dataclasses.replace(config, **change), nnx.Rngs(0)))


def tokens_of(batch=2, seq=12, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, (batch, seq)).astype(np.int32)


def make_mesh(**sizes):
    shape = [sizes.get(name, 1) for name in ("dp", "fsdp", "ep", "tp", "sp")]
    return create_mesh(tuple(shape), devices=jax.devices()[: math.prod(shape)])


def numpy_decoder(model, tokens, **change):
    """Logits in float64, one sequence, one head and one pair of positions at a time; `change`: of the config.

    With modules of predictions (B, 1 + modules, S, V): at position i of the k-th one, of the token at i + 1 + k.
    """
    config = dataclasses.replace(model.config, **change)
    p = {path: np.asarray(leaf, np.float64) for path, leaf in named_leaves(nnx.state(model))}

    def norm(x, path):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_epsilon) * p[f"{path}/scale"]

    def scaled(length):  # a wavelength in positions
        scaling = config.rope_scaling
        longest = scaling.original_length / scaling.low_frequency_factor
        shortest = scaling.original_length / scaling.high_frequency_factor
        if length <= shortest:
            return length
        if length >= longest:
            return length * scaling.factor
        share = (scaling.original_length / length - scaling.low_frequency_factor) / (
            scaling.high_frequency_factor - scaling.low_frequency_factor
        )
        return 1 / (share / length + (1 - share) / (scaling.factor * length))

    def rotated(x, position):  # pairs (i, i + C/2) as complex numbers, rotated by position * theta^(-2i/C)
        half = len(x) // 2
        lengths = 2 * np.pi * config.rope_theta ** (2 * np.arange(half) / len(x))
        turn = np.exp(2j * np.pi * position / np.array([scaled(length) for length in lengths]))
        z = (x[:half] + 1j * x[half:]) * turn
        return np.concatenate([z.real, z.imag])

    def project(x, path, head):
        y = x @ p[f"{path}/kernel"][:, head]
        if config.qkv_bias:
            y = y + p[f"{path}/bias"][head]
        return norm(y, f"{path}_norm") if config.qk_norm and not path.endswith("v") else y

    def attention(x, path):
        out = np.zeros_like(x)
        for h in range(config.num_heads):
            group = h // (config.num_heads // config.num_kv_heads)
            q, k, v = project(x, f"{path}/q", h), *(project(x, f"{path}/{n}", group) for n in "kv")
            for i in range(len(x)):
                first = max(0, i + 1 - config.sliding_window) if config.sliding_window else 0
                scores = [rotated(q[i], i) @ rotated(k[j], j) / np.sqrt(config.head_dim) for j in range(first, i + 1)]
                weights = np.exp(scores) / np.sum(np.exp(scores))
                out[i] += weights @ v[first : i + 1] @ p[f"{path}/o/kernel"][h]
        return out

    def layer(x, path):
        x = x + attention(norm(x, f"{path}/attention_norm"), f"{path}/attention")
        h = norm(x, f"{path}/mlp_norm")
        gate, up = (h @ p[f"{path}/mlp/{n}/kernel"] for n in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ p[f"{path}/mlp/down/kernel"]

    table, logits = p["embed/embedding"], []
    head = table.T if config.tied else p["head/kernel"]
    for row in tokens:
        x = table[row]
        for i in range(config.num_layers):
            x = layer(x, f"layers/{i}")
        x = norm(x, "norm")
        logits.append([x @ head])
        for k in range(config.prediction_layers):
            path, later = f"predictions/{k}", table[np.roll(row, -k - 1)]
            both = norm(later, f"{path}/embedding_norm"), norm(x, f"{path}/hidden_norm")
            x = layer(np.concatenate(both, axis=-1) @ p[f"{path}/projection/kernel"], f"{path}/layer")
            logits[-1].append(norm(x, f"{path}/norm") @ head)
    return np.array(logits) if config.prediction_layers else np.array(logits)[:, 0]
