"""`blockwise_attention(fn)`: the same function with every attention in blocks, and lines about each of them."""

# JAX has no types for some functions and arrays.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend import core as jex
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mesh.axes import Layout, axes_of_spec
from flax_mesh.blockwise.attend import Attention
from flax_mesh.blockwise.fused import Fused
from flax_mesh.blockwise.guard import Guarded, guarded
from flax_mesh.blockwise.masks.mask import Bands, NoFormulaError
from flax_mesh.blockwise.place import follow, mesh_of, place
from flax_mesh.blockwise.squares import unrecognized
from flax_mesh.blockwise.traced.dims import known_value
from flax_mesh.blockwise.traced.find import FEWEST, NotFoundError, Uses, are_scores, find_softmax, uses_of
from flax_mesh.blockwise.traced.graph import Level, Op, Value, all_levels, around, build, needed_ops, repeats, run
from flax_mesh.blockwise.traced.region import Region, region_of
from flax_mesh.errors import ConfigError
from flax_mesh.fields import check_types, integer_problems
from flax_mesh.jax_compat import kernels_without_devices, source_line
from flax_mesh.kernels import KERNELS, OF_PLATFORM
from flax_mesh.modes import traced_call
from flax_mesh.program.program import Program, program_of
from flax_mesh.text import array_text, bytes_text, count_text, first_line, listed, shown
from flax_mesh.tree import num_bytes

BLOCK, BLOCK_ON_GPUS = 512, 1024  # of queries and of keys; on an H100, 1024 take 0.6 to 0.7 of the time of 512
MODES = ("auto", "kernel", "blockwise", "as_written")
# The form of one attention -> its text.
FORMS = {name: f"by {x.title}" for name, x in KERNELS.items()} | {"blockwise": "in blocks", "as_written": "as written"}
LayoutOf: TypeAlias = Callable[[object], Layout | None]  # of an array that a function closes over
SMALL = f"it has fewer than {FEWEST} queries or keys, or fewer scores than a block"


class Left(NamedTuple):
    """An array whose size is the square of the length of sequences, and which stays."""

    array: Value
    op: Op  # of the line of the code
    reason: str

    @property
    def line(self) -> str:
        times, inside = repeats(self.op.level)
        count = f"{times} times " if times > 1 and not inside else ""
        place, aval = source_line(self.op.eqn), self.array.aval
        where = f"{place}: " if place else ""
        return f"{where}{count}{array_text(aval)}, {bytes_text(num_bytes(aval))}, stays: {self.reason}"


def _find(top: Level, block: int) -> tuple[list[Region], list[Left], dict[int, str]]:
    """The attentions of a function, the scores of those that are recognized and stay, and why small ones stay.

    The latter by the ids of their exps: they have a line only if other dims make their arrays large.
    """
    regions: list[Region] = []
    left: list[Left] = []
    small: dict[int, str] = {}
    for level in all_levels(top):
        uses = uses_of(level)
        for op in level.ops:
            if op.name != "exp":
                continue
            pairs = itertools.combinations(op.outputs[0].shape, 2)
            is_large = any(are_scores(n, m, block) for n, m in pairs)
            try:
                attentions = _regions(op, uses, block) if is_large else []
                regions += attentions
                if not attentions:
                    small[id(op)] = SMALL
            except NotFoundError as error:
                if str(error) and is_large:
                    left.append(Left(op.outputs[0], op, str(error)))
    for region in regions:
        for x, labels in region.leaves.values():
            if {region.q, region.k} <= {*labels}:
                reason = f"{x.op.name} is not evaluated on blocks" if x.op else "it is an argument or a constant"
                left.append(Left(x, x.op or region.softmax.product, reason))
    return regions, left, small


def _regions(exp: Op, uses: Uses, block: int) -> list[Region]:
    """The attentions around an exp, if they have more scores than one block has."""
    if 0 in exp.outputs[0].shape:
        return []
    softmaxes = find_softmax(exp, uses)
    if not are_scores(*softmaxes[0].lengths, block):
        return []
    if closed := [op.name for op in around(exp.level) if op.is_closed]:
        raise NotFoundError(f"it is inside of {closed[-1]}")
    if exp.outputs[0].aval.dtype == np.float64:
        raise NotFoundError("blocks are computed in float32")
    regions = [region_of(each) for each in softmaxes]
    if any(0 in x.shape for each in regions for x in (each.out, *(x for x, _ in each.leaves.values()))):
        raise NotFoundError("an operand of its products has no elements")
    return regions


def _also_used(region: Region, needed: set[int]) -> list[Left]:
    """Arrays between the products of an attention in blocks that something else needs complete."""
    both = {region.q, region.k}
    inside = {id(op): op for op, labels in region.steps_labels() if both <= {*labels}}
    inside |= {id(region.softmax.exp): region.softmax.exp}
    users = [op for op in region.softmax.exp.level.ops if id(op) in needed and id(op) not in inside]
    used = [(x, op) for op in users for x in (op.inputs if op.leaves is None else op.leaves)]
    uses = [(x, op) for x, op in used if isinstance(x, Value) and id(x.op) in inside]
    return [Left(x, op, f"{op.name} needs all of it") for x, op in uses]


class Rewritten(NamedTuple):
    """A function with its attentions in kernels and in blocks."""

    call: Callable[..., list[Any]] | None  # None: nothing is changed
    lines: tuple[str, ...]  # about the attentions that are changed
    stays: tuple[str, ...]  # about the arrays that stay
    saved: int  # bytes of scores, per device, that attentions without a kernel keep as written
    left: int  # bytes of the arrays that stay
    unfit: tuple[str, ...]  # about the attentions that the kernel does not compute
    forms: tuple[str, ...]  # of FORMS, for each attention in the order of the program


def rewrite(
    program: Program,
    layouts: Sequence[Layout | None],
    of_const: LayoutOf,
    block: int | None = None,
    kernel: str = "",
    limit: int = -1,
    platform: str = "",
    forms: Sequence[str] = (),
) -> Rewritten:
    """`layouts`: of the inputs on a mesh with Auto axes, as far as they are known.

    Attentions that the `kernel` does not compute on devices of `platform` are in blocks, if their scores take more than
    `limit` bytes; or each has the form of `forms`, unless this is a kernel that does not compute it.
    """
    top = build(program)
    regions, left, small = _find(top, block or BLOCK)
    mesh, cache = jax.sharding.get_abstract_mesh(), {}
    known = {} if mesh.empty or not regions else follow(top, layouts, of_const, mesh)
    fused, blocks = dict[int, Fused | Guarded](), dict[int, Attention]()
    reasons, wanted, bands = dict[int, str](), dict[int, str](), Bands()
    for n, region in enumerate(regions):
        static, product = {key: known_value(x, cache) for key, (x, _) in region.leaves.items()}, region.softmax.product
        placement = place(region, known, mesh_of(region.out, mesh))
        in_blocks = functools.partial(Attention, region, static, placement, known, block or _default_block())
        wanted[id(product)] = form = forms[n] if forms else kernel
        try:
            if form in KERNELS:
                of_kernel = Fused(region, static, placement, form, platform or _platform(), bands)
                fused[id(product)] = guarded(of_kernel, in_blocks)
        except NoFormulaError as error:
            reasons[id(product)] = error.reason
        if id(product) not in fused:
            blocks[id(product)] = in_blocks()
    saved = _saved(blocks.values())
    large = {key: x for key, x in blocks.items() if (wanted[key] != "as_written" if forms else saved > limit)}
    attentions: dict[int, Fused | Guarded | Attention] = {**fused, **large}
    for attention in attentions.values():
        attention.region.softmax.product.leaves = attention.leaves
    needed = needed_ops(top)
    if saved == 0 or saved > limit:
        left += [each for x in attentions.values() for each in _also_used(x.region, needed)]
        named = {id(op) for x, op, _ in left for op in (x.op, op)}
        left += [Left(x, op, why) for x, op, why in unrecognized(top, needed, named, small, block or BLOCK)]

    def attend(product: Op, values: Sequence[jax.Array]) -> jax.Array:
        mesh = mesh_of(product.outputs[0], jax.sharding.get_abstract_mesh())
        with jax.sharding.use_abstract_mesh(mesh), jax.named_scope("blockwise_attention"):
            return attentions[id(product)](values)

    def call(*args: Any) -> list[Any]:
        env = {id(v): x for v, x in zip(top.inputs, args, strict=True)}
        return run(top, env, needed, attend)

    stays = tuple(dict.fromkeys(each.line for each in left))
    of_left = sum(num_bytes(each.array.aval) for each in left)
    unfit = {key: x for key, x in blocks.items() if key in reasons}
    lines = _lines(attentions, reasons)
    chosen = tuple(x.name if (x := attentions.get(key)) else "as_written" for key in wanted)
    return Rewritten(call if attentions else None, lines, stays, saved, of_left, _lines(unfit, reasons), chosen)


def _lines(attentions: Mapping[int, Fused | Guarded | Attention], reasons: Mapping[int, str]) -> tuple[str, ...]:
    """One for each kind of attention."""
    kinds: dict[str, int] = {}
    for key, attention in attentions.items():
        text = f"{attention.text}; no kernel: {reasons[key]}" if key in reasons else attention.text
        kinds[text] = kinds.get(text, 0) + repeats(attention.region.softmax.exp.level)[0]
    return tuple(f"{count_text(count, 'attention')}, {text}" for text, count in kinds.items())


def _saved(attentions: Iterable[Attention]) -> int:
    """Bytes of scores that are kept for a backward pass: in a remat, of one attention at a time."""
    saved = most = 0
    for attention in attentions:
        times, inside = repeats(attention.region.softmax.exp.level)
        if inside:
            most = max(most, attention.saved)
        else:
            saved += attention.saved * times
    return saved + most


@check_types
def blockwise_attention(
    fn: Callable[..., Any], *, in_specs: Any = None, block: int | None = None, say: Callable[[str], None] | None = None
) -> Callable[..., Any]:
    """`fn` with every attention in blocks: memory is linear in the length of sequences, and results are the same.

    Like `jax.checkpoint`, it transforms any function, such as a loss, a model or one layer. The function is traced.
    Attention is a softmax whose result is contracted, along the dim of the softmax, with other data: from `jax.nn`, of
    NNX, or written by hand. The equations between its two products are evaluated on blocks of queries and keys, with
    an online softmax; the backward pass computes them again. So masks, biases, soft caps, dropout and dtypes are those
    of `fn`. Blocks that a mask leaves empty are skipped: by positions at trace time, by data such as segment ids at run
    time. Forward mode and second derivatives compute the attention as it was written.

    On a mesh in context, every device computes its own queries and heads, and all keys and values are gathered once
    for both passes. On Explicit axes the types state how the values are split, on Auto axes `in_specs`.

    Args:
        fn: A function of pytrees of arrays and NNX modules, whose changes are kept.
        in_specs: A PartitionSpec per positional argument, or a prefix of their pytrees, as in `jax.shard_map`.
        block: The length of blocks of queries and keys; shorter for many heads. Attentions that are smaller than one
            block stay as they are. Default: 512, on GPUs 1024.
        say: Is called, when the function is traced, with a line for each kind of attention, and for each array
            that grows with the square of the length and stays, with the line of the code and the reason.

    Returns:
        A function with the arguments and results of `fn`.

    Raises:
        ConfigError: `block` is no positive integer; or, when the function is traced, `in_specs` does not fit the
            arguments, or names axes that the mesh in context lacks.

    Example:
        >>> attention = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
        >>> q = jax.ShapeDtypeStruct((1, 4096, 2, 8), "float32")
        >>> jax.eval_shape(fm.blockwise_attention(attention, say=print), q, q, q).shape
        1 attention, q 4096 k 4096, 36 of 64 blocks
        (1, 4096, 2, 8)
    """

    if block is not None and (problems := integer_problems({"block": block})):
        raise ConfigError(problems)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        def evaluate(closed: jex.ClosedJaxpr, inputs: Any) -> list[Any]:
            program = program_of(closed)
            rewritten = rewrite(program, _layouts(in_specs, *inputs), lambda const: None, block)
            if say is not None:
                for line in (*rewritten.lines, *rewritten.stays):
                    say(line)
            return (rewritten.call or program.call)(*jax.tree.leaves(inputs))

        return traced_call(fn, args, kwargs, evaluate)

    return wrapped


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _default_block() -> int:
    return BLOCK_ON_GPUS if _platform() == "gpu" else BLOCK


def _layouts(in_specs: Any, args: Sequence[Any], kwargs: Any) -> list[Layout | None]:
    if in_specs is None:
        return [None] * len(jax.tree.leaves((args, kwargs)))
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    try:
        specs = jax.tree.leaves(jax.tree.broadcast(tuple(in_specs), tuple(args), is_leaf=is_spec), is_leaf=is_spec)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "in_specs must be a sequence with a PartitionSpec for every argument, or a prefix of their pytrees, "
            f"got {shown(in_specs)}: {first_line(error)}"
        ) from error
    leaves, mesh = jax.tree.leaves(tuple(args)), jax.sharding.get_abstract_mesh()
    if problems := [text for each in zip(specs, leaves, strict=True) if (text := _spec_problem(*each, mesh))]:
        raise ConfigError(list(dict.fromkeys(problems)))
    layouts = [axes_of_spec(spec or (), np.ndim(x)) for spec, x in zip(specs, leaves, strict=True)]
    return [*layouts, *[None] * len(jax.tree.leaves(kwargs))]


def _spec_problem(spec: Any, x: Any, mesh: AbstractMesh) -> str:
    if not (spec is None or isinstance(spec, PartitionSpec)):
        return f"in_specs must contain PartitionSpecs, got {shown(spec)}"
    if len(spec or ()) > np.ndim(x):
        return f"in_specs: {spec} has more dims than its array of shape {np.shape(x)}"
    names = {name for axes in axes_of_spec(spec or (), np.ndim(x)) for name in axes}
    if missing := sorted(names - set(mesh.axis_names)):
        known = f"has {listed(mesh.axis_names)}" if mesh.axis_names else "is missing; set it by jax.set_mesh"
        return f"in_specs: {spec} names {listed(missing)}, but the mesh in context {known}"
    return ""


class Choice(NamedTuple):
    """The function to call in the place of a traced one, None for itself, and lines about its attention."""

    call: Callable[..., list[Any]] | None
    lines: tuple[str, ...]
    forms: tuple[str, ...] = ()  # as in Rewritten


def choose(
    program: Program,
    attention: str | tuple[str, ...],
    layouts: Sequence[Layout | None],
    of_const: LayoutOf,
    limit: int,
    platform: str,
) -> Choice:
    """`attention` is one of MODES, or the forms of an earlier auto, which are kept if that is possible.

    With auto, attention without a kernel is in blocks from `limit` bytes of scores on. `platform` is the platform of
    the devices, "" if it is not known.
    """
    if attention == "as_written":
        return Choice(None, ())
    began, attention = ((), attention) if isinstance(attention, str) else (attention, "auto")
    kernel = {"auto": OF_PLATFORM.get(platform, ""), "kernel": OF_PLATFORM.get(platform, "splash")}.get(attention, "")
    rewrite_as = functools.partial(rewrite, program, layouts, of_const)
    rewritten = rewrite_as(kernel=kernel, limit=limit if attention == "auto" else -1)
    if attention == "kernel" and rewritten.unfit:
        raise ConfigError(
            ["attention=kernel needs a kernel for every attention; use attention=auto, or change:", *rewritten.unfit]
        )
    note: list[str] = []
    if began and began != rewritten.forms:
        again, problem = _as_it_began(rewrite_as, began, rewritten.forms, platform)
        before, here = _forms_text(began), _forms_text(rewritten.forms)
        if again is not None:
            note = [f"as the run began, {before}; auto would choose {here} here"]
            lines = (*note, *again.lines, *(again.stays if again.call else ()))
            return Choice(again.call, tuple(f"attention: {line}" for line in lines), again.forms)
        note = [f"the run began with {before}, which cannot be kept, because {problem}; auto chooses {here} here"]
    lines, stays = rewritten.lines, rewritten.stays
    if attention == "auto" and 0 < rewritten.saved <= limit:
        sizes = f"its scores take {bytes_text(rewritten.saved)} per device, and auto allows {bytes_text(limit)}"
        why = [line.rpartition("; ")[2] for line in rewritten.unfit]
        lines, stays = (*lines, "; ".join([f"as written, because {sizes}", *dict.fromkeys(why)])), ()
    elif attention == "auto" and not rewritten.saved and rewritten.left <= limit:
        stays = ()
    if attention == "auto" and not platform and rewritten.saved:
        lines += tuple(_elsewhere(rewrite_as, limit))
    return Choice(rewritten.call, tuple(f"attention: {line}" for line in (*note, *lines, *stays)), rewritten.forms)


def _as_it_began(
    rewrite_as: Callable[..., Rewritten], began: tuple[str, ...], here: tuple[str, ...], platform: str
) -> tuple[Rewritten | None, str]:
    """The program with these forms again, or None and the reason why that is impossible."""
    if len(began) != len(here):
        return None, "the program has others"
    for name in dict.fromkeys(began):
        if name in KERNELS and KERNELS[name].platform != platform:
            return None, f"{KERNELS[name].title} needs {KERNELS[name].platform.upper()}s"
    again = rewrite_as(forms=began)
    if again.forms == began:
        return again, ""
    return None, "; ".join(dict.fromkeys(line.rpartition("; no kernel: ")[2] for line in again.unfit))


def _forms_text(forms: Iterable[str]) -> str:
    counts = Counter(forms)
    return listed([f"{count_text(count, 'attention')} {FORMS[form]}" for form, count in counts.items()]) or "none"


def _elsewhere(rewrite_as: Callable[..., Rewritten], limit: int) -> Iterable[str]:
    """The choices of auto on the devices that have kernels, where the platform is not known."""
    for name, kernel in KERNELS.items():
        with kernels_without_devices():
            other = rewrite_as(kernel=name, limit=limit, platform=kernel.platform)
        lines = [*other.lines, *(line for line in other.unfit if line not in other.lines)]
        yield from (f"on {kernel.platform.upper()}s: {line}" for line in lines)
