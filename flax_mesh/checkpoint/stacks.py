"""Scanned stacks of layers that no `layers` names: found before they are saved as one array for all layers."""

from collections.abc import Collection, Sequence
from itertools import accumulate
from posixpath import dirname
from typing import Any

from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.step.state import TrainState
from flax_mesh.text import array_text
from flax_mesh.tree import in_stack, named_leaves, path_and_start, path_of

MODEL = "model/"
# Layers of Flax -> number of dims of their variables. One dim more is that of nnx.vmap or nnx.scan.
DIMS: dict[type[nnx.Module], dict[str, int]] = {
    nnx.Linear: {"kernel": 2, "bias": 1},
    nnx.Embed: {"embedding": 2},
    nnx.LayerNorm: {"scale": 1, "bias": 1},
    nnx.RMSNorm: {"scale": 1},
    nnx.BatchNorm: {"scale": 1, "bias": 1, "mean": 1, "var": 1},
}


def check_stacks_are_named(state: Any, layers: Sequence[str]) -> None:
    """Raise one ConfigError that lists the arrays of all stacks that `layers` does not name.

    Certain ones only: the chunks of a stack in a pipeline and, of a TrainState, whose modules are known, layers of
    Flax with one dim more than their class makes.
    """
    named = dict(named_leaves(state.to_nnx() if isinstance(state, TrainState) else state))
    if any(path.startswith(MODEL) for path in named):
        named = {path.removeprefix(MODEL): leaf for path, leaf in named.items() if path.startswith(MODEL)}
    unnamed = {path for path in named if path_and_start(path)[0] != path}
    if isinstance(state, TrainState):
        unnamed |= _unnamed_arrays(state.merge()[0], layers)
    unnamed = sorted(path for path in unnamed if not in_stack(path, layers))
    if not unnamed:
        return
    names = list(dict.fromkeys([*layers, *(_stack_of(path, unnamed, named) for path in unnamed)]))
    raise ConfigError(
        [
            "these arrays hold a stack of layers that is not named, and would be saved as they are, which a model with "
            "a list of layers cannot restore; nothing was written:",
            *(f"  {path}: {array_text(named[path])}" for path in unnamed),
            f"  Name the stacks: layers={names} of Checkpointer, or of @partitioned at the class of the model.",
        ]
    )


def _stack_of(path: str, unnamed: Collection[str], named: Collection[str]) -> str:
    """The highest folder of `path` that has nothing in it but arrays of unnamed stacks."""
    folders = accumulate(dirname(path_and_start(path)[0]).split("/"), "{}/{}".format)
    return next(top for top in folders if all(one in unnamed for one in named if one.startswith(f"{top}/")))


def _unnamed_arrays(model: nnx.Module, layers: Sequence[str]) -> set[str]:
    """Paths of the arrays in stacks that nnx.vmap or nnx.scan has made.

    A layer of Flax below a list counts for none: a layer of that list may hold a stack of experts. Nor do those of a
    model that nnx.vmap has made as a whole, such as an ensemble.
    """
    shapes = {path: leaf.shape for path, leaf in named_leaves(nnx.state(model))}
    tops: set[tuple[str, tuple[int, ...]]] = set()  # (first name of the path, (number of layers,)) of every stack
    unnamed: set[tuple[str, tuple[int, ...]]] = set()  # those that `layers` does not name
    others = False  # whether some layer of Flax is in no stack
    for at, module in nnx.iter_modules(model):
        ranks = {path: rank for name, rank in _ranks(module).items() if (path := path_of((*at, name))) in shapes}
        extra = {(len(shapes[path]) - rank, shapes[path][:1]) for path, rank in ranks.items()}
        dims, size = extra.pop() if len(extra) == 1 else (0, ())
        if dims < 1:
            others |= bool(ranks)
            shapes |= dict.fromkeys(ranks, ())  # a leading dim of the same size says nothing
        elif dims == 1 and at and not any(str(name).isdecimal() for name in at):
            tops.add((str(at[0]), size))
            unnamed |= {(str(at[0]), size) for path in ranks if not in_stack(path, layers)}
    is_ensemble = not others and len(tops) > 1 == len({size for _, size in tops})
    return set() if is_ensemble else {path for path in shapes if (path.split("/")[0], shapes[path][:1]) in unnamed}


def _ranks(module: nnx.Module) -> dict[str, int]:
    """Names of the variables that a layer of Flax makes, with their numbers of dims; none for any other class."""
    if type(module) is nnx.Conv:
        return {"kernel": len(module.kernel_size) + 2, "bias": 1}
    return DIMS.get(type(module), {})
