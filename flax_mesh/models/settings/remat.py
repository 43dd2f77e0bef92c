"""Remat of layers: which values of each layer are saved for its backward pass, as the text of `model.remat`.

    remat = RUN,RUN,...           runs of layers, from the first layer on
    RUN   = KIND or KIND:LAYERS   one run may lack its number of layers: it takes those that are left
    KIND  = none                  everything that the backward pass needs is saved
          | full                  only the input of the layer is saved, the rest is computed again
          | a policy of JAX       such as dots_with_no_batch_dims_saveable
          | NAME+NAME+...         only the input and these values are saved; NAME@host: in the memory of the host

Example for 32 layers:

    full:16,none                  layers 0 to 15 recompute everything, layers 16 to 31 nothing
    attention+mlp_up@host         all layers save two values, the second one in the memory of the host

A scanned stack stays one stack: each run is a scan over its part of it.
"""

# JAX and NumPy have no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flax_mesh.text import count_text, listed
from flax_mesh.tree import PyTree

_ON_HOST = "@host"
# The other names of jax.checkpoint_policies are functions that return a policy.
_POLICIES = tuple(n for n in dir(jax.checkpoint_policies) if n.endswith("saveable") or n.startswith("checkpoint_"))

_Policy = Callable[..., bool] | None  # of jax.checkpoint
_CallLayer = Callable[..., tuple[jax.Array, PyTree]]  # of a layer, its input, and its kind


class RematRun(NamedTuple):
    """Consecutive layers with the same remat."""

    kind: str
    layers: int | None  # None: all that are left


@lru_cache
def parse_remat(text: str) -> tuple[RematRun, ...]:
    """The runs of a text that `remat_problems` accepts."""
    parts = (part.strip().partition(":") for part in text.split(","))
    return tuple(RematRun(kind, int(count) if colon else None) for kind, colon, count in parts)


@lru_cache
def names_of(text: str) -> frozenset[str]:
    """The names of values in a text, without names of kinds."""
    kinds = [run.kind for run in parse_remat(text) if run.kind not in ("none", "full", *_POLICIES)]
    return frozenset(name.removesuffix(_ON_HOST) for kind in kinds for name in kind.split("+"))


def remat_problems(text: str, num_layers: int, names: Sequence[str], block: int = 1) -> list[str]:
    """The problems of a text, for a model with `num_layers` layers whose values have `names`, one line each.

    With `block` above 1, a stack of blocks with so many layers, which cannot be divided.
    """
    problems, total, without = [], 0, 0
    for part in text.split(","):
        kind, colon, count = part.strip().partition(":")
        problems += _kind_problems(kind, names)
        if not colon:
            without += 1
        elif re.fullmatch("0*[1-9][0-9]{0,17}", count):
            total += int(count)
        else:
            problems.append(
                f"model.remat: {part.strip()!r} must have a number of layers after the colon, such as {kind}:2"
            )
    if not problems and without > 1:
        problems.append(f"model.remat={text}: only one run may be without a number of layers, such as full:2,none")
    if num_layers < 1:  # reported elsewhere
        return problems
    if not problems and (total > num_layers or (total < num_layers and not without)):
        repair = "remove some" if total > num_layers else "add a run for the others, such as none"
        layers = count_text(total, "layer")
        problems.append(f"model.remat={text} is for {layers}, model.num_layers={num_layers}; {repair}")
    if not problems and total == num_layers and without:
        problems.append(f"model.remat={text}: no layer is left for the run without a number; remove it")
    if not problems and any((run.layers or 0) % block for run in parse_remat(text)):
        problems.append(
            f"model.remat={text}: runs must have a multiple of {block} layers, the repetition of model.layer_pattern, "
            "or set model.scan=False"
        )
    return problems


def _kind_problems(kind: str, names: Sequence[str]) -> list[str]:
    if kind in ("none", "full", *_POLICIES):
        return []
    parts = [part.removesuffix(_ON_HOST) for part in kind.split("+")]
    twice = sorted({name for name in parts if parts.count(name) > 1})
    if set(parts) <= set(names) and not twice:
        return []
    if twice:
        return [f"model.remat: {kind!r} has {listed(twice)} twice"]
    return [
        f"model.remat must be none, full or a policy of JAX ({listed(_POLICIES)}), or names joined by + "
        f"({listed(names)}), got {kind!r}"
    ]


def named(x: jax.Array, name: str, text: str) -> jax.Array:
    """`x`, with a name for the policies of `text` if it has this name."""
    return checkpoint_name(x, name) if name in names_of(text) else x


def _with_remat(call: _CallLayer, kind: str, *, also: _Policy = None) -> _CallLayer:
    """`call` with one kind of remat. Policies that save dots also save the values of the policy `also`."""
    if kind == "none":
        return call
    if kind == "full":
        return jax.checkpoint(call)
    policies = jax.checkpoint_policies
    if kind in _POLICIES:
        policy = getattr(policies, kind)
        if kind.startswith("dots") and also is not None:
            policy = policies.save_from_both_policies(policy, also)
        return jax.checkpoint(call, policy=policy)
    names = kind.split("+")
    on_host = [name.removesuffix(_ON_HOST) for name in names if name.endswith(_ON_HOST)]
    if not on_host:
        return jax.checkpoint(call, policy=policies.save_only_these_names(*names))
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in names if not name.endswith(_ON_HOST)],
        names_which_can_be_offloaded=on_host,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(call, policy=policy)


def call_layers(
    call: _CallLayer,
    layers: PyTree,
    x: jax.Array,
    text: str,
    *,
    also: _Policy = None,
    scan: bool = False,
    kinds: Sequence[object] = (None,),
    in_blocks: bool = False,
) -> tuple[jax.Array, PyTree]:
    """The output of the last layer, and the other results of each layer: of a stack with a leading layer dim.

    `layers` is a list, or with `scan` one module whose variables have a leading layer dim; `in_blocks` of blocks with
    one layer `each` of `kinds`. `call(layer, x, kind)` calls one layer, whose kind is the next of `kinds`, which
    repeat; `also` is passed to `_with_remat`.
    """
    size = len(kinds) if in_blocks else 1
    if in_blocks and not scan:
        layers = [layer for block in layers for layer in block.each]
    depth = size * jax.tree.leaves(layers)[0].shape[0] if scan else len(layers)
    runs = parse_remat(text)
    left = depth - sum(run.layers or 0 for run in runs)
    sizes = [left if run.layers is None else run.layers for run in runs]
    each, first = [], 0
    parts = split_stack(layers, [count // size for count in sizes]) if scan else runs
    for run, count, part in zip(runs, sizes, parts, strict=True):
        of_kind = {kind: _with_remat(partial(call, kind=kind), run.kind, also=also) for kind in dict.fromkeys(kinds)}
        calls = [of_kind[kinds[(first + i) % len(kinds)]] for i in range(min(count, len(kinds)))]
        if scan and in_blocks:
            x, outputs = scan_blocks(calls, x, part)
            each.append(jax.tree.map(lambda *leaves: _flat(jnp.stack(leaves, axis=1)), *outputs))
        elif scan:
            x, aux = scan_layers(calls, x, part)
            each.append(aux)
        else:
            for i, layer in enumerate(layers[first : first + count]):
                x, aux = calls[i % len(kinds)](layer, x)
                each.append(aux)
        first += count
    return x, _concatenated(each) if scan else each


def remat_parts(text: str, num_layers: int, first: int) -> list[str]:
    """The texts for the first layers and for the others; the text itself if `first` is 0."""
    if not first:
        return [text]
    runs = parse_remat(text)
    left = num_layers - sum(run.layers or 0 for run in runs)
    kinds = [run.kind for run in runs for _ in range(left if run.layers is None else run.layers)]
    runs_of = lambda kinds: [f"{kind}:{len(list(run))}" for kind, run in groupby(kinds)]  # noqa: E731
    return [",".join(runs_of(kinds[:first])), ",".join(runs_of(kinds[first:]))]


def scan_layers(
    calls: Sequence[Callable[..., tuple[PyTree, PyTree]]], carry: PyTree, stack: PyTree
) -> tuple[PyTree, PyTree]:
    """Call the layers of a stack, the i-th with the i-th of `calls`, which repeat: one loop over the repetitions.

    Results are the last carry, and the other results of the layers with a leading layer dim. The layers after the
    last complete repetition follow the loop.
    """
    if len(calls) == 1:
        return jax.lax.scan(lambda carry, layer: calls[0](layer, carry), carry, stack)
    depth, period = jax.tree.leaves(stack)[0].shape[0], len(calls)
    rest = depth % period
    whole, *others = split_stack(stack, [depth - rest, rest] if rest else [depth])

    def run(carry: PyTree, layers: PyTree, count: int = period) -> tuple[PyTree, PyTree]:
        outputs = []
        for i in range(count):
            carry, output = calls[i](jax.tree.map(lambda leaf, i=i: leaf[i], layers), carry)
            outputs.append(output)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    periods = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), whole)
    carry, outputs = jax.lax.scan(run, carry, periods)
    each = [jax.tree.map(_flat, outputs)]
    for part in others:
        carry, outputs = run(carry, part, rest)
        each.append(outputs)
    return carry, _concatenated(each)


def scan_blocks(
    calls: Sequence[Callable[..., tuple[PyTree, PyTree]]],
    carry: PyTree,
    stack: PyTree,
    layers_of: Callable[[PyTree], Sequence[PyTree]] = lambda block: block.each,
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Likewise for a stack of blocks, whose layers are called in turn: results of each of these with a leading dim."""

    def run(carry: PyTree, block: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        outputs = []
        for call, layer in zip(calls, layers_of(block), strict=True):
            carry, output = call(layer, carry)
            outputs.append(output)
        return carry, tuple(outputs)

    return jax.lax.scan(run, carry, stack)


def _flat(leaf: jax.Array) -> jax.Array:
    return leaf.reshape(-1, *leaf.shape[2:])


def _concatenated(each: Sequence[PyTree]) -> PyTree:
    return each[0] if len(each) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)


def split_stack(stack: PyTree, sizes: Sequence[int]) -> list[PyTree]:
    """A scanned stack as consecutive stacks. Their gradients are concatenated, not padded and added."""
    if len(sizes) == 1:
        return [stack]
    leaves, tree = jax.tree.flatten(stack)
    parts = [jax.lax.split(leaf, sizes) for leaf in leaves]
    return [jax.tree.unflatten(tree, [part[i] for part in parts]) for i in range(len(sizes))]
