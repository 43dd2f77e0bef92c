"""Continue prompts with a decoder: one program reads the prompts, another one computes a token of every row at a time.

Shape letters: B batch, P slots of the prompts, T slots of the cache, V vocab.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from flax_mesh.axes import DEFAULT_AXES
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import integer_problems, require_types
from flax_mesh.mesh.context import current_mesh, in_mesh
from flax_mesh.models.cache import KVCache, bucket_slots, cache_shape, round_up, row_multiple, slot_multiple
from flax_mesh.models.decoder import Decoder
from flax_mesh.models.ops.sampling import Sampling, choose_tokens
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.text import at_most, count_text
from flax_mesh.tree import PyTree

_Leaves = list[jax.Array]  # of the state of a model
_Chosen = tuple[PyTree, ...]  # a token of every row, its log-probability, and the cache if it has changed


class Generated(NamedTuple):
    """The continuation of one prompt.

    Attributes:
        tokens: Generated ids, int32; a stop token is the last one.
        log_probs: Their log-probabilities in nats, float32, as the model predicts them: without temperature, top_k and
            top_p.
        stopped: Whether a stop token ended it, not `max_tokens`.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    stopped: bool


def generate(
    model: Decoder,
    prompts: Sequence[ArrayLike | Sequence[int]],
    *,
    max_tokens: int = 64,
    sampling: Sampling = Sampling(),  # noqa: B008 (a frozen value)
    stop_tokens: Iterable[int] = (),
    seed: int = 0,
    batch_size: int = 8,
    cache_length: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_result: Callable[[int, Generated], None] | None = None,
) -> list[Generated]:
    """Continue prompts of any lengths, with the model on the devices and in the sharding of its parameters.

    Prompts are computed in batches. The keys and values of all tokens are stored, in the sharding that the
    `generation_*` fields of the model's `PartitionAxis` define. Two programs are compiled for every number of slots of
    the prompts (a power of two) and of the cache, whatever the lengths of the prompts and `sampling` are.

    Args:
        model: A `Decoder`, or another model with its methods `prefill` and `decode`.
        prompts: Token ids of every prompt, at least one each.
        max_tokens: Number of tokens to generate for each prompt.
        sampling: Temperature, top_k and top_p; greedy by default.
        stop_tokens: Ids after which a continuation ends.
        seed: Token i of prompt n depends on (seed, n, i), the model and the prompt, not on other prompts or the batch.
        batch_size: Number of prompts that are computed together.
        cache_length: Slots of the cache, for a prompt and its continuation. Default: as many as the longest needs.
        on_token: Called as `on_token(prompt, token)` for each generated token, in the order in which they are computed.
        on_result: Called as `on_result(prompt, generated)` for each prompt, in their order, when its batch is complete.

    Returns:
        The continuation of every prompt.

    Raises:
        ConfigError: An argument is out of its limits, a prompt is empty, has an id outside of the vocabulary or does
            not fit in the cache. The error lists all of them.

    Example:
        >>> from flax_mesh.models import DecoderConfig, generate, make_decoder
        >>> model = make_decoder(DecoderConfig(num_layers=2, hidden_size=64, mlp_size=96, head_dim=8), nnx.Rngs(0))
        >>> one, other = generate(model, [[1, 2, 3], [4]], max_tokens=5)
        >>> one.tokens.shape, one.log_probs.dtype, one.stopped
        ((5,), dtype('float32'), False)
    """
    functions = {"on_token": on_token, "on_result": on_result}
    require_types(generate, prompts=prompts, stop_tokens=stop_tokens, sampling=sampling, **functions)
    rows, stop_tokens = [_as_row(prompt) for prompt in prompts], tuple(stop_tokens)
    _check_values(model, rows, sampling, stop_tokens, seed, max_tokens, batch_size, cache_length)
    programs = Programs(model, seed, sampling)
    run = partial(_continue_batch, programs, max_tokens=max_tokens, stop_tokens=frozenset(stop_tokens))
    sizes = {"max_tokens": max_tokens, "batch_size": batch_size, "cache_length": cache_length}
    shape = cache_shape(model.axes, programs.mesh, list(map(len, rows)), **sizes)
    generated: list[Generated] = []
    for first in range(0, len(rows), batch_size):
        generated += run(rows[first : first + batch_size], first, *shape, on_token=on_token)
        for n in range(first, len(generated)):
            if on_result is not None:
                on_result(n, generated[n])
    return generated


def _as_row(prompt: object) -> np.ndarray:
    try:
        return np.asarray(prompt)
    except ValueError:  # NumPy's, for nested lists of unequal lengths
        return np.asarray(prompt, object)


def _check_model(model: object) -> None:
    missing = [name for name in ("prefill", "decode") if not callable(getattr(model, name, None))]
    if missing:
        raise ConfigError(
            f"generate needs a model with the methods prefill and decode, as models.Decoder has, got "
            f"{type(model).__name__} without {' and '.join(missing)}"
        )


def _check_values(
    model: Decoder,
    rows: Sequence[np.ndarray],
    sampling: Sampling,
    stop_tokens: Sequence[int],
    seed: int,
    max_tokens: int,
    batch_size: int,
    cache_length: int | None,
) -> None:
    _check_model(model)
    options = option_problems(max_tokens, seed, batch_size, cache_length, stop_tokens, model.config.vocab_size)
    problems = [*sampling.problems(), *options, *prompt_problems(rows, model.config.vocab_size)]
    if cache_length is not None and not options:
        problems += length_problems(rows, max_tokens, cache_length)
    if problems:
        raise ConfigError(problems)


def prompt_problems(rows: Sequence[np.ndarray], vocab_size: int, names: Sequence[str] = ()) -> list[str]:
    """Prompts that a model cannot read, one line each; `names` replace "prompt 0", "prompt 1" ..."""
    problems = []
    for row, name in zip(rows, names or _names(rows), strict=True):
        if row.size == 0:
            problems.append(f"{name} is empty; it must have at least one token")
        elif row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            problems.append(f"{name} must be a list of token ids, got an array {row.dtype}{list(row.shape)}")
        elif (wrong := row[(row < 0) | (row >= vocab_size)]).size:
            problems.append(f"{name} has the token {wrong[0]}; the ids of this model are 0 to {vocab_size - 1}")
    return at_most(problems)


def _names(rows: Sequence[np.ndarray]) -> list[str]:
    return [f"prompt {n}" for n in range(len(rows))]


def option_problems(
    max_tokens: object,
    seed: object,
    batch_size: object,
    cache_length: object,
    stop_tokens: Sequence[object],
    vocab_size: int,
) -> list[Problem]:
    counts = {"max_tokens": max_tokens, "batch_size": batch_size}
    counts |= {} if cache_length is None else {"cache_length": cache_length}
    problems = [*integer_problems(counts), *integer_problems({"seed": seed}, 0, 2**32 - 1)]
    wrong = [t for t in stop_tokens if integer_problems({"": t}, 0, vocab_size - 1)]
    ids = f": the ids of this model are 0 to {vocab_size - 1}"
    return problems + [Problem(f"stop token {t!r}", ids) for t in wrong]


class Programs:
    """The two programs of a model: `prefill` and `decode`. Both return a token of every row and its log-probability."""

    def __init__(self, model: Decoder, seed: int, sampling: Sampling):
        graphdef, state = nnx.split(model, graph=True)
        self._leaves, tree = jax.tree.flatten(state)
        self.mesh = _mesh_of(self._leaves) or current_mesh()
        self.rows = row_multiple(model.axes, self.mesh)
        self.slots = slot_multiple(model.axes, self.mesh)
        self._prefill, self._decode = _compiled(graphdef, tree)
        self._options = (np.uint32(seed), np.float32(sampling.temperature), np.int32(sampling.top_k))
        self._options += (np.float32(sampling.top_p),)

    def prefill(self, tokens_BP: np.ndarray, lengths_B: np.ndarray, ids_B: np.ndarray, num_slots: int) -> _Chosen:
        with in_mesh(self.mesh), jax.transfer_guard_host_to_device("allow"):
            return self._prefill(self._leaves, tokens_BP, lengths_B, ids_B, *self._options, num_slots=num_slots)

    def decode(self, tokens_B: jax.Array, cache: KVCache, ids_B: np.ndarray) -> _Chosen:
        with in_mesh(self.mesh), jax.transfer_guard_host_to_device("allow"):
            return self._decode(self._leaves, tokens_B, cache, ids_B, *self._options)


@lru_cache(maxsize=4)  # compiled programs of that many models
def _compiled(graphdef: nnx.GraphDef, tree: object) -> tuple[Callable[..., _Chosen], Callable[..., _Chosen]]:
    def model_of(leaves: _Leaves) -> Decoder:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))

    def prefill(leaves: _Leaves, tokens_BP: jax.Array, lengths_B: jax.Array, ids_B: jax.Array, *choice, num_slots: int):
        logits_BV, cache = model_of(leaves).prefill(tokens_BP, lengths_B, num_slots)
        return *_choose(logits_BV, cache, ids_B, *choice), cache

    def decode(leaves: _Leaves, tokens_B: jax.Array, cache: KVCache, ids_B: jax.Array, *options: jax.Array) -> _Chosen:
        logits_BV, cache = model_of(leaves).decode(tokens_B, cache)
        return *_choose(logits_BV, cache, ids_B, *options), cache

    return jax.jit(prefill, static_argnames="num_slots"), jax.jit(decode, donate_argnums=2)


def _choose(logits_BV: jax.Array, cache: KVCache, ids_B: jax.Array, seed: jax.Array, *sampling: jax.Array) -> _Chosen:
    """The next token of every row, and its log-probability, replicated."""
    key, index = jax.random.key(seed), cache.used - cache.prompt
    keys_B = jax.vmap(lambda n: jax.random.fold_in(jax.random.fold_in(key, n), index))(ids_B)

    def choose(logits_BV: jax.Array, keys_B: jax.Array, *sampling: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens_B = choose_tokens(logits_BV, keys_B, *sampling)
        log_probs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), tokens_B[:, None], axis=-1)[:, 0]
        return constrain(tokens_B, (), axes=DEFAULT_AXES), constrain(log_probs_B, (), axes=DEFAULT_AXES)

    return on_auto_axes(choose, logits_BV, keys_B, *sampling, out=[(), ()], axes=DEFAULT_AXES)


def _continue_batch(
    programs: Programs,
    rows: Sequence[np.ndarray],
    first: int,
    num_rows: int,
    num_slots: int,
    *,
    max_tokens: int,
    stop_tokens: frozenset[int],
    on_token: Callable[[int, int], None] | None,
) -> list[Generated]:
    """Continue prompts `first`, `first` + 1, ... in a batch with `num_rows` rows and a cache with `num_slots` slots."""
    most = (num_slots - max_tokens) // programs.slots * programs.slots
    bucket = min(bucket_slots(max(map(len, rows)), programs.slots), most)
    tokens_BP, lengths_B = np.zeros((num_rows, bucket), np.int32), np.ones(num_rows, np.int32)
    for b, row in enumerate(rows):
        tokens_BP[b, : len(row)], lengths_B[b] = row, len(row)
    ids_B = np.arange(first, first + num_rows, dtype=np.int32)
    tokens, log_probs = [[] for _ in rows], [[] for _ in rows]
    going = set(range(len(rows)))
    tokens_B, log_probs_B, cache = programs.prefill(tokens_BP, lengths_B, ids_B, num_slots)
    for i in range(max_tokens):
        # Dispatched before the tokens are read, so that the devices do not wait for the host.
        following = programs.decode(tokens_B, cache, ids_B) if i + 1 < max_tokens else None
        for b, token, log_prob in zip(range(len(rows)), *jax.device_get((tokens_B, log_probs_B)), strict=False):
            if b not in going:
                continue
            tokens[b].append(int(token))
            log_probs[b].append(log_prob)
            if on_token is not None:
                on_token(first + b, int(token))
            if int(token) in stop_tokens:
                going.remove(b)
        if following is None or not going:
            break
        tokens_B, log_probs_B, cache = following
    return [
        Generated(np.asarray(ids, np.int32), np.asarray(scores, np.float32), b not in going)
        for b, (ids, scores) in enumerate(zip(tokens, log_probs, strict=True))
    ]


def length_problems(
    rows: Sequence[np.ndarray],
    max_tokens: int,
    cache_length: int,
    names: Sequence[str] = (),
    options: tuple[str, str] = ("cache_length", "max_tokens="),
) -> list[str]:
    """Prompts that do not fit in the cache, one line each; `names` as in `prompt_problems`, `options` of the two."""
    length, tokens = options
    return at_most(
        [
            f"{name} has {count_text(len(row), 'token')} and needs a {length} of {len(row) + max_tokens} with "
            f"{tokens}{max_tokens}, got {cache_length}"
            for row, name in zip(rows, names or _names(rows), strict=True)
            if row.ndim and len(row) + max_tokens > cache_length
        ]
    )


def _mesh_of(leaves: Sequence[Any]) -> Mesh | None:
    meshes = {x.sharding.mesh for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)}
    if len(meshes) > 1:
        raise ConfigError(
            "generate needs a model whose arrays are all on one mesh, got arrays on several, as in a pipeline; use "
            "pipeline.model(state)"
        )
    return next(iter(meshes), None)


def sample(
    model: Decoder,
    prompt: jax.Array,
    num_tokens: int,
    key: jax.Array,
    temperature: float | np.floating | jax.Array = 0.8,
) -> jax.Array:
    """Continue `prompt` (P,) int32 by `num_tokens` sampled ids; returns all (P + num_tokens,) ids. It may be traced.

    Temperature 0 is greedy: every id has the largest logit. A negative temperature or nan raises ConfigError; if
    it is traced, the sampled ids are -1. `generate` continues several prompts, with more options.

    Example:
        >>> from flax_mesh.models import DecoderConfig, make_decoder, sample
        >>> model = make_decoder(DecoderConfig(num_layers=1), nnx.Rngs(0))
        >>> sample(model, jnp.array([1, 2, 3]), 5, jax.random.key(0)).shape
        (8,)
    """
    if not isinstance(temperature, Tracer) and not temperature >= 0:
        raise ConfigError(f"temperature must be at least 0 (0: greedy), got {temperature}")
    if num_tokens < 0:
        raise ConfigError(f"num_tokens must be at least 0, got {num_tokens}")
    start = prompt.shape[0]
    if not start:
        raise ConfigError("the prompt is empty; it must have at least one token")
    mesh = current_mesh()
    num_rows, unit = row_multiple(model.axes, mesh), slot_multiple(model.axes, mesh)
    bucket = round_up(start, unit)
    tokens_BP = jnp.broadcast_to(jnp.pad(prompt, (0, bucket - start)).astype(jnp.int32), (num_rows, bucket))
    prefilled = model.prefill(tokens_BP, jnp.full(num_rows, start), round_up(bucket + num_tokens, unit))
    tokens = jnp.zeros(start + num_tokens, jnp.int32).at[:start].set(prompt)

    def add_token(i: jax.Array, carry: PyTree) -> PyTree:
        tokens, (logits_BV, cache) = carry
        keys_B = jnp.broadcast_to(jax.random.fold_in(key, i), num_rows)
        chosen_B = choose_tokens(logits_BV, keys_B, temperature)
        token = jnp.where(temperature >= 0, chosen_B[0], -1)
        return tokens.at[i].set(token), model.decode(jnp.broadcast_to(token, num_rows), cache)

    return jax.lax.fori_loop(start, start + num_tokens, add_token, (tokens, prefilled))[0]
