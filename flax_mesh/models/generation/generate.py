"""Continue prompts with a decoder. `programs.py` has the compiled programs, `batches.py` decides what they compute.

Shape letters: B batch, P slots of the prompts, V vocab.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import integer_problems, require_types
from flax_mesh.mesh.context import current_mesh
from flax_mesh.models.cache import cache_shape, round_up, row_multiple, slot_multiple
from flax_mesh.models.decoder import Decoder
from flax_mesh.models.generation.batches import Batches, Generated
from flax_mesh.models.generation.programs import Programs
from flax_mesh.models.generation.report import SpeedReport
from flax_mesh.models.ops.sampling import Sampling, choose_tokens
from flax_mesh.text import at_most, count_text
from flax_mesh.tree import PyTree


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
    on_token: Callable[[int, int], bool | None] | None = None,
    on_result: Callable[[int, Generated], None] | None = None,
    on_report: Callable[[SpeedReport], object] | None = None,
) -> list[Generated]:
    """Continue prompts of any lengths, with the model on the devices and in the sharding of its parameters.

    Prompts are computed in batches; a prompt that waits takes the row of a continuation that has ended. The keys and
    values of all tokens are stored, in the sharding that the `generation_*` fields of the model's `PartitionAxis`
    define. One dispatch computes up to 16 tokens of each prompt.

    A program that reads prompts is compiled for every number of slots of the prompts (a power of two) and of the cache,
    and once more for prompts that take a row. A program that computes tokens is compiled for every number of slots of
    the cache. Lengths of the prompts, stop tokens and `sampling` compile nothing.

    Args:
        model: A `Decoder`, or another model with its methods `prefill` and `decode`.
        prompts: Token ids of every prompt, at least one each.
        max_tokens: Number of tokens to generate for each prompt.
        sampling: Temperature, top_k and top_p; greedy by default.
        stop_tokens: Ids after which a continuation ends.
        seed: Token i of prompt n depends on (seed, n, i), the model and the prompt, not on other prompts or the batch.
        batch_size: Number of prompts that are computed together.
        cache_length: Slots of the cache, for a prompt and its continuation. Default: as many as the longest needs.
        on_token: Called as `on_token(prompt, token)` for each token, in the order of computation; True ends the text.
        on_result: Called as `on_result(prompt, generated)` for each prompt, in their order, when it is complete.
        on_report: Called at the end, if there are prompts, with the speed and the least time that the memory needs.

    Returns:
        The continuation of every prompt.

    Raises:
        ConfigError: All arguments out of their limits, and all prompts that are empty, too long or have unknown ids.

    Example:
        >>> from flax_mesh.models import DecoderConfig, generate, make_decoder
        >>> model = make_decoder(DecoderConfig(num_layers=2, hidden_size=64, mlp_size=96, head_dim=8), nnx.Rngs(0))
        >>> one, other = generate(model, [[1, 2, 3], [4]], max_tokens=5)
        >>> one.tokens.shape, one.log_probs.dtype, one.stopped
        ((5,), dtype('float32'), False)
    """
    functions = {"on_token": on_token, "on_result": on_result, "on_report": on_report}
    require_types(generate, prompts=prompts, stop_tokens=stop_tokens, sampling=sampling, **functions)
    rows, stop_tokens = [_as_row(prompt) for prompt in prompts], tuple(stop_tokens)
    _check_values(model, rows, sampling, stop_tokens, seed, max_tokens, batch_size, cache_length)
    programs = Programs(model, seed, sampling, stop_tokens, max_tokens)
    sizes = {"max_tokens": max_tokens, "batch_size": batch_size, "cache_length": cache_length}
    shape = cache_shape(model.axes, programs.mesh, list(map(len, rows)), **sizes)
    if not rows:
        return []
    return Batches(programs, rows, *shape, max_tokens, frozenset(stop_tokens)).run(on_token, on_result, on_report)


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
