"""The compiled programs of generation: one reads prompts, another one computes several tokens of every row.

Shape letters: B rows of the batch, R rows that take new prompts, P slots of the prompts, G tokens of a group, S stop
tokens, V vocab. A row computes the prompt whose number `ids_B` has; -1: its continuation has ended.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_mesh.axes import DEFAULT_AXES
from flax_mesh.errors import ConfigError
from flax_mesh.mesh.context import AnyMesh, current_mesh, in_mesh
from flax_mesh.models.cache import KVCache, row_multiple, slot_multiple
from flax_mesh.models.decoder import Decoder
from flax_mesh.models.generation.casts import lower_dtypes
from flax_mesh.models.ops.sampling import Sampling, choose_tokens
from flax_mesh.program.program import shape_of
from flax_mesh.sharding.constrain import constrain
from flax_mesh.sharding.explicit import on_auto_axes
from flax_mesh.tree import PyTree

GROUP = 16  # the most tokens of a row in one dispatch
_STOPS = 16  # the number of stop tokens is padded to a multiple of this

_Leaves = list[jax.Array]  # of the state of a model
_ModelOf = Callable[[_Leaves], Decoder]
State = tuple[jax.Array, jax.Array, KVCache]  # the last token and the prompt of every row, and the cache


class Computed(NamedTuple):
    """Tokens and their log-probabilities, -1 after the last step, and the state. G is 1 for the first tokens."""

    tokens_GB: jax.Array
    log_probs_GB: jax.Array
    tokens_B: jax.Array
    ids_B: jax.Array
    cache: KVCache

    @property
    def state(self) -> State:
        return self.tokens_B, self.ids_B, self.cache


class Programs:
    """The programs of a model. Their state is donated to the next call."""

    def __init__(
        self,
        model: Decoder,
        seed: int,
        sampling: Sampling,
        stop_tokens: Iterable[int] = (),
        max_tokens: int = np.iinfo(np.int32).max,
    ):
        graphdef, state = nnx.split(model, graph=True)
        leaves, tree = jax.tree.flatten(state)
        self.mesh = _mesh_of(leaves) or current_mesh()
        self.rows = row_multiple(model.axes, self.mesh)
        self.slots = slot_multiple(model.axes, self.mesh)
        self.model, self.leaves = model, leaves
        dtype = getattr(getattr(model, "config", None), "dtype", None)  # another model may have none
        if dtype is not None and any(x.dtype.itemsize > jnp.dtype(dtype).itemsize for x in leaves):
            with in_mesh(self.mesh):
                casts = _casts(graphdef, tree, tuple(map(shape_of, leaves)), self.mesh, self.rows, self.slots)
                self.leaves = [x if to is None else x.astype(to) for x, to in zip(leaves, casts, strict=True)]
        self._prefill, self._insert, self._decode = _compiled(graphdef, tree)
        stops = sorted(set(stop_tokens))
        stops_S = np.array(stops + [-1] * (-len(stops) % _STOPS or _STOPS), np.int32)
        self._options = (stops_S, np.int32(max_tokens), np.uint32(seed), np.float32(sampling.temperature))
        self._options += (np.int32(sampling.top_k), np.float32(sampling.top_p))

    def prefill(
        self,
        tokens_BP: np.ndarray,
        lengths_B: np.ndarray,
        ids_B: np.ndarray,
        num_slots: int,
        start: int | None = None,
    ) -> Computed:
        """The first token of every row, and a new state. `start` is the slot of generated tokens, by default P."""
        slot = np.int32(tokens_BP.shape[1] if start is None else start)
        return self._call(self._prefill, tokens_BP, lengths_B, ids_B, slot, num_slots=num_slots)

    def insert(
        self, tokens_RP: np.ndarray, lengths_R: np.ndarray, ids_R: np.ndarray, rows_R: np.ndarray, state: State
    ) -> Computed:
        """Likewise for prompts that take rows of `state`; a row B is none."""
        return self._call(self._insert, tokens_RP, lengths_R, ids_R, rows_R, state)

    def decode(
        self,
        tokens_B: jax.Array,
        cache: KVCache,
        ids_B: jax.Array | np.ndarray,
        size: int = GROUP,
        is_waiting: bool = False,
    ) -> Computed:
        """At most `size` tokens of every row; none after all rows have ended, or with `is_waiting` one of them."""
        return self._call(self._decode, (tokens_B, ids_B, cache), np.int32(size), np.bool_(is_waiting))

    def _call(self, program: Callable[..., Computed], *arrays: PyTree, **static: int) -> Computed:
        with in_mesh(self.mesh), jax.transfer_guard_host_to_device("allow"):
            return program(self.leaves, self._options, *arrays, **static)


@lru_cache(maxsize=4)  # compiled programs of that many models
def _compiled(graphdef: nnx.GraphDef, tree: object) -> tuple[Callable[..., Computed], ...]:
    def model_of(leaves: _Leaves) -> Decoder:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))

    return (
        jax.jit(partial(_prefill, model_of), static_argnames="num_slots"),
        jax.jit(partial(_insert, model_of), donate_argnums=6),
        jax.jit(partial(_decode, model_of), donate_argnums=2),
    )


def _prefill(
    model_of: _ModelOf,
    leaves: _Leaves,
    options: PyTree,
    tokens_BP: jax.Array,
    lengths_B: jax.Array,
    ids_B: jax.Array,
    start: jax.Array,
    *,
    num_slots: int,
) -> Computed:
    logits_BV, cache = model_of(leaves).prefill(tokens_BP, lengths_B, num_slots)
    cache = replace(cache, prompt=start, used_B=jnp.full(lengths_B.shape, start))
    tokens_B, log_probs_B, ids_B = _choose(logits_BV, cache, ids_B, *options)
    return Computed(tokens_B[None], log_probs_B[None], tokens_B, ids_B, cache)


def _insert(
    model_of: _ModelOf,
    leaves: _Leaves,
    options: PyTree,
    tokens_RP: jax.Array,
    lengths_R: jax.Array,
    ids_R: jax.Array,
    rows_R: jax.Array,
    state: State,
) -> Computed:
    tokens_B, ids_B, cache = state
    new = _prefill(model_of, leaves, options, tokens_RP, lengths_R, ids_R, cache.prompt, num_slots=cache.num_slots)
    tokens_B = tokens_B.at[rows_R].set(new.tokens_B, mode="drop")
    ids_B = ids_B.at[rows_R].set(new.ids_B, mode="drop")
    cache = cache.with_rows(new.cache, rows_R, model_of(leaves).axes)
    return Computed(new.tokens_GB, new.log_probs_GB, tokens_B, ids_B, cache)


def _decode(
    model_of: _ModelOf, leaves: _Leaves, options: PyTree, state: State, size: jax.Array, is_waiting: jax.Array
) -> Computed:
    model = model_of(leaves)

    def goes_on(carry: tuple[jax.Array, Computed]) -> jax.Array:
        has_ended_B = carry[1].ids_B < 0
        return (carry[0] < size) & ~jnp.all(has_ended_B) & ~(is_waiting & jnp.any(has_ended_B))

    def add_token(carry: tuple[jax.Array, Computed]) -> tuple[jax.Array, Computed]:
        i, last = carry
        logits_BV, cache = model.decode(last.tokens_B, last.cache)
        # A row that has ended stays in its slot.
        cache = replace(cache, used_B=jnp.where(last.ids_B >= 0, cache.used_B, last.cache.used_B))
        tokens_B, log_probs_B, ids_B = _choose(logits_BV, cache, last.ids_B, *options)
        tokens_GB = jax.lax.dynamic_update_index_in_dim(last.tokens_GB, tokens_B, i, 0)
        log_probs_GB = jax.lax.dynamic_update_index_in_dim(last.log_probs_GB, log_probs_B, i, 0)
        return i + 1, Computed(tokens_GB, log_probs_GB, tokens_B, ids_B, cache)

    shape = (GROUP, len(state[0]))
    first = Computed(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32), *state)
    return jax.lax.while_loop(goes_on, add_token, (jnp.int32(0), first))[1]


@lru_cache(maxsize=4)
def _casts(
    graphdef: nnx.GraphDef,
    tree: object,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    mesh: AnyMesh | None,  # in context
    rows: int,
    slots: int,
) -> list[jnp.dtype | None]:
    def read(leaves: _Leaves) -> jax.Array:
        model, tokens_BP = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), jnp.zeros((rows, slots), jnp.int32)
        _, cache = model.prefill(tokens_BP, jnp.ones(rows, jnp.int32), 2 * slots)
        return model.decode(tokens_BP[:, 0], cache)[0]

    return lower_dtypes(read, leaves)


def _choose(
    logits_BV: jax.Array,
    cache: KVCache,
    ids_B: jax.Array,
    stops_S: jax.Array,
    max_tokens: jax.Array,
    seed: jax.Array,
    *sampling: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next token of every row, its log-probability and the prompt, -1 after its last token; replicated."""
    key, index_B = jax.random.key(seed), cache.used_B - cache.prompt
    keys_B = jax.vmap(lambda n, index: jax.random.fold_in(jax.random.fold_in(key, n), index))(ids_B, index_B)

    def choose(logits_BV: jax.Array, keys_B: jax.Array, ids_B: jax.Array, index_B: jax.Array, *sampling: jax.Array):
        tokens_B = choose_tokens(logits_BV, keys_B, *sampling)
        log_probs_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), tokens_B[:, None], axis=-1)[:, 0]
        is_last_B = jnp.any(tokens_B[:, None] == stops_S, axis=1) | (index_B + 1 >= max_tokens)
        chosen = tokens_B, log_probs_B, jnp.where(is_last_B, -1, ids_B)
        return tuple(constrain(x, (), axes=DEFAULT_AXES) for x in chosen)

    arrays = (logits_BV, keys_B, ids_B, index_B, *sampling)
    return on_auto_axes(choose, *arrays, out=[()] * 3, axes=DEFAULT_AXES)


def _mesh_of(leaves: Sequence[Any]) -> Mesh | None:
    meshes = {x.sharding.mesh for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)}
    if len(meshes) > 1:
        raise ConfigError(
            "generate needs a model whose arrays are all on one mesh, got arrays on several, as in a pipeline; use "
            "pipeline.model(state)"
        )
    return next(iter(meshes), None)
