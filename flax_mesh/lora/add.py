"""LoRA (Hu et al. 2021, arXiv:2106.09685) for any model: each weight W of a product becomes W + alpha / rank * A B.

The model is unmodified: which weights are multiplied, and along which dims, is found in the traced program of the loss.
"""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types
from flax_mesh.lora.adapters import owner_of, set_adapter, variables_of
from flax_mesh.lora.call import use_text
from flax_mesh.lora.products import evaluate_products
from flax_mesh.lora.weight import Weight
from flax_mesh.modes import user_modes
from flax_mesh.program.program import Eqn, shape_of, trace
from flax_mesh.sharding.abstract import abstract_split, model_layers
from flax_mesh.step.batch import shapes_of
from flax_mesh.step.loss import Batch, LossFn
from flax_mesh.text import at_most, listed
from flax_mesh.tree import Constant, in_stack, layer_path, named_leaves
from flax_mesh.user_code import check_arguments


class _Product(NamedTuple):
    """The dims of a weight: batch dims (one matrix per index), dims that the product contracts, dims of its result."""

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]


@check_types
def add_lora(
    make: Callable[[], Any],
    loss_fn: LossFn,
    batch: Batch,
    *,
    rank: int,
    modules: str | Iterable[str],
    alpha: float | None = None,
    seed: int = 0,
) -> Callable[[], Any]:
    """A function that returns the model of `make` with adapters, the nnx.LoRAParams A and B, of some of its weights.

    A weight is adapted where it is an operand of a matrix product: in einsum, matmul and dot_general, in the layers of
    Flax, and in jit, remat, loops and branches. Layers of a stack, and matrices of a batch, have an A and a B each. B
    is zero at the start, so that the adapted model is the model itself.

    Args:
        make: Function without arguments that returns an nnx.Module. It is traced only.
        loss_fn: A loss function of the model.
        batch: A batch of it, of arrays or ShapeDtypeStructs.
        rank: The size of the dim between A and B.
        modules: One or several patterns; `re.search` finds them in the paths of the weights to adapt, as
            "attention/(q|v)/kernel". Arrays with one dim, such as biases and scales, are never adapted.
        alpha: The change of a weight is alpha / rank * A B. None: alpha = rank.
        seed: Seed of the initial values of A, uniform up to 1 / sqrt(the size that the product contracts).

    Returns:
        The function. Train its model with `with_lora(loss_fn)` and `nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)`.

    Raises:
        ConfigError: A pattern matches no weight of a product, or a weight is used by something else than products.
            Lists all of them.

    Example:
        >>> from flax_mesh.lora import add_lora, with_lora
        >>> make = lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
        >>> x = jnp.ones((8, 64))
        >>> model = add_lora(make, loss_fn, x, rank=4, modules="kernel")()
        >>> model.kernel_lora_a.shape, model.kernel_lora_b.shape
        ((64, 4), (4, 256))
        >>> bool(with_lora(loss_fn)(model, x) == loss_fn(make(), x))
        True
    """
    patterns = [modules] if isinstance(modules, str) else list(modules)
    if problems := _problems(loss_fn, rank, alpha, patterns):
        raise ConfigError(problems)
    check_arguments("loss_fn", loss_fn, "model", "batch")
    shapes_of(batch)
    products = _Search(make, loss_fn, batch, patterns).products()
    scale = (rank if alpha is None else alpha) / rank
    return lambda: _with_adapters(make(), products, rank, scale, seed)


def _with_adapters(model: Any, products: Mapping[str, _Product], rank: int, scale: float, seed: int) -> Any:
    layers = model_layers(model)
    for path, weight in variables_of(model).items():
        if path in products:
            owner, name = owner_of(model, path)
            product, shape = products[path], weight.shape
            a = _initial_a(path, shape, product, layers, rank, seed)
            b = jnp.zeros((*(shape[d] for d in product.batch), rank, *(shape[d] for d in product.free)))
            dims = (*product.batch, *product.contracted, None), (*product.batch, None, *product.free)
            set_adapter(owner, name, a, b, dims, scale)
    return model


def _initial_a(
    path: str, shape: Sequence[int], product: _Product, layers: Sequence[str], rank: int, seed: int
) -> jax.Array:
    """A with one key per layer: each layer of a stack has the same key as in a list of layers."""
    sizes = [shape[d] for d in product.contracted]
    limit = 1 / math.sqrt(math.prod(sizes))
    stack, count = in_stack(path, layers), math.prod(shape[d] for d in product.batch)
    paths = [layer_path(path, stack, i) if stack else f"{path}/{i}" for i in range(count)] if product.batch else [path]
    numbers = jnp.array([zlib.crc32(each.encode()) for each in paths], jnp.uint32)
    keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.key(seed), number))(numbers)
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (*sizes, rank), minval=-limit, maxval=limit))(keys)
    return drawn.reshape(*(shape[d] for d in product.batch), *sizes, rank)


def _problems(loss_fn: object, rank: object, alpha: float | None, patterns: Sequence[str]) -> list[str]:
    problems: list[str] = []
    if isinstance(loss_fn, nnx.Module):
        problems.append(f"loss_fn must be a function of the model and a batch, got a {type(loss_fn).__name__}")
    if not isinstance(rank, int) or rank < 1:
        problems.append(f"rank must be an integer of at least 1, got {rank!r}")
    if alpha is not None and not 0 < alpha < math.inf:
        problems.append(f"alpha must be a number above 0, got {alpha!r}")
    if not patterns:
        problems.append("modules must be a pattern or a list of patterns, got none")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            problems.append(f"modules: {pattern!r} is not a regular expression: {error}")
    return problems


class _Search:
    """The products of the weights that patterns match, from a trace of the loss."""

    def __init__(self, make: Callable[[], Any], loss_fn: LossFn, batch: Batch, patterns: Sequence[str]):
        self.graphdef, self.state = abstract_split(make)
        self.loss_fn, self.batch, self.patterns = loss_fn, batch, patterns
        self.shapes = {path: x.shape for path, x in named_leaves(self.state)}
        weights = named_leaves(nnx.filter_state(self.state, nnx.Not(Constant)))
        self.chosen = {path for path, _ in weights if any(re.search(pattern, path) for pattern in patterns)}
        self.found: dict[str, set[_Product]] = {}
        self.others: dict[str, list[str]] = {}  # weights -> their uses besides products
        self.vectors: set[str] = set()

    def products(self) -> dict[str, _Product]:
        """path -> product. Raises ConfigError with all patterns and weights that do not work."""
        self._trace()
        problems = [*self._pattern_problems(), *self._weight_problems()]
        if problems:
            raise ConfigError(at_most(problems), head="modules must match weights of matrix products, but:")
        return {path: next(iter(each)) for path, each in self.found.items()}

    def _trace(self) -> None:
        leaves, tree = jax.tree.flatten(self.state)

        def call(leaves: list[Any], batch: Batch) -> list[Any]:
            model = nnx.merge(self.graphdef, jax.tree.unflatten(tree, leaves))
            with user_modes():
                return jax.tree.leaves(self.loss_fn(model, batch))

        program, _ = trace(call, leaves, self.batch)
        given = [
            Weight(x, None, None, path, tuple(range(len(x.shape)))) if path in self.chosen else x
            for path, x in named_leaves(self.state)
        ]
        batch = [shape_of(v.aval) for v in program.inputs[len(leaves) :]]
        run = partial(evaluate_products, program, on_product=self._on_product, on_other=self._on_other)
        jax.eval_shape(run, [*given, *batch])

    def _on_product(self, eqn: Eqn, values: Sequence[Any], at: int) -> None:
        weight: Weight = values[at]
        contract, batch = (tuple(weight.dims[d] for d in each[at]) for each in eqn.params["dimension_numbers"])
        free = [d for d in weight.dims if d not in (*contract, *batch)]
        rest = [d for d in range(len(self.shapes[weight.path])) if d not in (*contract, *free)]
        if weight.cuts & {*contract, *free}:
            self._on_other(eqn, weight)
        else:
            self.found.setdefault(weight.path, set()).add(
                _Product(tuple(rest), tuple(sorted(contract)), tuple(sorted(free)))
            )

    def _on_other(self, eqn: Eqn, weight: Weight) -> None:
        if weight.value.ndim < 2:
            self.vectors.add(weight.path)
        else:
            self.others.setdefault(weight.path, []).append(use_text(eqn))

    def _pattern_problems(self) -> Iterator[str]:
        for pattern in self.patterns:
            paths = [path for path in self.shapes if re.search(pattern, path)]
            if not paths:
                yield f"{pattern!r} matches none of {listed(list(self.shapes)[:8])}{' ...' * (len(self.shapes) > 8)}"
            elif not any(path in self.found or path in self.others for path in paths):
                yield f"{pattern!r} matches {listed(paths[:3])}{' ...' * (len(paths) > 3)}, which no product uses"

    def _weight_problems(self) -> Iterator[str]:
        for path in sorted(self.chosen):
            if path in self.others:
                uses = listed(dict.fromkeys(self.others[path]))
                yield f"{path} {self.shapes[path]} is used by {uses}, which is no product with whole rows of it"
            elif len(self.found.get(path, ())) > 1:
                yield f"{path} {self.shapes[path]} is used by products that contract different dims of it"
            elif path in self.found and path.split("/")[-1].isdigit():
                yield f"{path} must be an attribute of a module, which then has its adapter too, but it is an item"
