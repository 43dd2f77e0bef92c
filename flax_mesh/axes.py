"""PartitionAxis: the mapping from logical axes (batch, heads, vocab, experts ...) to mesh axes."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mesh.errors import ShardingError
from flax_mesh.text import shown

AxisName = str | tuple[str, ...] | None  # one mesh axis, several mesh axes that shard one dim together, or none
Axes: TypeAlias = tuple[str, ...]  # the mesh axes that shard a dim
Layout: TypeAlias = tuple[Axes, ...]  # of every dim
Mode = Literal["train", "prefill", "decode"]


@dataclass(frozen=True, repr=False)
class _Follow:
    mesh_axis_fields: tuple[str, ...]

    def __repr__(self) -> str:
        return "<its mesh axis>"


_follow: Any = _Follow  # Any, because these are the defaults of fields of the type AxisName
_FOLLOW_DATA = _follow(("fully_sharded_data_parallel_axis", "data_parallel_axis"))
_FOLLOW_TENSOR = _follow(("tensor_parallel_axis",))
_FOLLOW_SEQUENCE = _follow(("sequence_parallel_axis",))
_FOLLOW_EXPERT = _follow(("expert_parallel_axis",))
_FOLLOWED = (_FOLLOW_DATA, _FOLLOW_TENSOR, _FOLLOW_SEQUENCE, _FOLLOW_EXPERT)
_MESH_AXIS_FIELDS = tuple(name for follow in _FOLLOWED for name in follow.mesh_axis_fields)

# Logical axis -> field; `layers` (the leading dim of a scanned stack) is never sharded.
LOGICAL_AXES = {
    "batch": "batch_axis",
    "sequence": "sequence_axis",
    "query_sequence": "query_sequence_axis",
    "key_sequence": "key_sequence_axis",
    "hidden": "hidden_state_axis",
    "embed": "fully_sharded_data_parallel_axis",
    "heads": "head_axis",
    "kv_heads": "head_axis",
    "head_dim": "attention_dim_axis",
    "mlp": "mlp_intermediate_axis",
    "vocab": "vocab_axis",
    "experts": "expert_axis",
    "expert_gate": "expert_gate_axis",
    "layers": None,
}

_IN_DECODE = {
    "batch": "generation_batch_axis",
    "query_sequence": "generation_query_sequence_axis",
    "heads": "generation_head_axis",
    "kv_heads": "generation_head_axis",
    "key_sequence": "generation_key_sequence_axis",
    "head_dim": "generation_attention_dim_axis",
}


class Lost(NamedTuple):
    """A mesh axis that `dim` requested but that an earlier dim of the same array already uses."""

    dim: int
    logical: str
    mesh_axis: str


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis:
    """Maps logical axes to mesh axes.

    The five `*_parallel_axis` fields hold the names of the mesh axes. The other fields assign a mesh axis, a tuple of
    mesh axes, or None (not sharded) to each logical axis. A field that is not passed follows its mesh axis: with
    `tensor_parallel_axis="model"`, `head_axis` is "model" too. A mesh without an axis that only the defaults name is
    used as if the axis had size 1. Instances are immutable and hashable, and are static in pytrees.

    Args:
        data_parallel_axis: Mesh axis of replicas of the parameters. Default "dp".
        fully_sharded_data_parallel_axis: Mesh axis over which parameters and batch are sharded. Default "fsdp"; the
            logical axis "embed" maps to it.
        tensor_parallel_axis: Default "tp". Heads, hidden state, mlp and vocab follow it.
        sequence_parallel_axis: Default "sp". The sequence axes follow it.
        expert_parallel_axis: Default "ep". `expert_axis` follows it.
        batch_axis: Default: the fully sharded and the data parallel axis together, `("fsdp", "dp")`.
        generation_batch_axis: One of the five `generation_*` fields, which replace their counterparts in mode "decode".
        extra: Additional logical axes, as a mapping from name to mesh axis. An entry overrides a built-in logical axis
            of the same name: `extra={"kv_heads": None}`.

    Raises:
        TypeError: A field is not a string, a tuple of strings or None.

    Example:
        >>> axes = fm.PartitionAxis(tensor_parallel_axis="model", extra={"patches": "sp"})
        >>> axes.resolve(("batch", "patches", "heads"))
        P(('fsdp', 'dp'), 'sp', 'model')
        >>> axes.resolve(("embed", "mlp"))
        P('fsdp', 'model')
    """

    data_parallel_axis: AxisName = "dp"
    fully_sharded_data_parallel_axis: AxisName = "fsdp"
    tensor_parallel_axis: AxisName = "tp"
    sequence_parallel_axis: AxisName = "sp"
    expert_parallel_axis: AxisName = "ep"
    batch_axis: AxisName = _FOLLOW_DATA
    sequence_axis: AxisName = _FOLLOW_SEQUENCE
    query_sequence_axis: AxisName = _FOLLOW_SEQUENCE
    key_sequence_axis: AxisName = _FOLLOW_SEQUENCE
    head_axis: AxisName = _FOLLOW_TENSOR
    hidden_state_axis: AxisName = _FOLLOW_TENSOR
    mlp_intermediate_axis: AxisName = _FOLLOW_TENSOR
    vocab_axis: AxisName = _FOLLOW_TENSOR
    expert_axis: AxisName = _FOLLOW_EXPERT
    expert_gate_axis: AxisName = None
    attention_dim_axis: AxisName = None
    bias_head_sequence_axis: AxisName = None
    bias_key_sequence_axis: AxisName = None
    generation_batch_axis: AxisName = None
    generation_query_sequence_axis: AxisName = None
    generation_attention_dim_axis: AxisName = None
    generation_head_axis: AxisName = _FOLLOW_TENSOR
    generation_key_sequence_axis: AxisName = _FOLLOW_SEQUENCE
    extra: Mapping[str, AxisName] | tuple[tuple[str, AxisName], ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, _Follow):
                value = as_entry(getattr(self, source) for source in value.mesh_axis_fields)
            if field.name != "extra":
                object.__setattr__(self, field.name, _axis_name(field.name, value))
        try:
            extra = sorted(dict(self.extra).items())
        except (TypeError, ValueError) as error:
            extra = shown(self.extra)
            raise TypeError(f"extra must map logical axes to mesh axes, as {{'rows': 'dp'}}, got {extra}.") from error
        object.__setattr__(self, "extra", tuple((k, _axis_name(f"extra[{k!r}]", v)) for k, v in extra))

    def __repr__(self) -> str:
        """Only the fields that are not the defaults."""
        changed = self._changed | ({"extra": dict(self.extra)} if self.extra else {})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def mesh_axes(self, logical: str | None, mode: Mode = "train") -> tuple[str, ...]:
        """Mesh axes of one logical axis; () for None and for an axis that is not sharded."""
        if mode not in ("train", "prefill", "decode"):
            raise ValueError(f"mode must be 'train', 'prefill' or 'decode', got {shown(mode)}.")
        if logical is None:
            return ()
        extra = dict(self.extra)
        if logical in extra:
            return as_tuple(extra[logical])
        if logical not in LOGICAL_AXES:
            raise ShardingError(
                f"unknown logical axis {shown(logical)}. Known: {', '.join([*LOGICAL_AXES, *extra])}. "
                f"Add it with PartitionAxis(extra={{{shown(logical)}: MESH_AXIS_OR_NONE}})."
            )
        field = (_IN_DECODE if mode == "decode" else LOGICAL_AXES).get(logical, LOGICAL_AXES[logical])
        return as_tuple(getattr(self, field)) if field else ()

    def resolve_and_report(
        self, logical_axes: Iterable[str | None], mode: Mode = "train"
    ) -> tuple[PartitionSpec, tuple[Lost, ...]]:
        """The spec of an array with dims `logical_axes`, and the mesh axes that later dims lost to earlier ones."""
        taken: set[str] = set()
        dims: list[AxisName] = []
        lost: list[Lost] = []
        for dim, logical in enumerate(logical_axes):
            granted: list[str] = []
            for axis in self.mesh_axes(logical, mode):
                if axis in taken:
                    lost.append(Lost(dim, str(logical), axis))
                else:
                    taken.add(axis)
                    granted.append(axis)
            dims.append(as_entry(granted))
        return PartitionSpec(*dims), tuple(lost)

    def resolve(
        self,
        logical_axes: Iterable[str | None],
        mode: Mode = "train",
        *,
        on_duplicate: Literal["keep_first", "error"] = "keep_first",
    ) -> PartitionSpec:
        """The spec of an array whose dims have the names `logical_axes`.

        If two dims request the same mesh axis, the earlier one gets it (`resolve_and_report` also returns the
        axes that later dims lost). With `on_duplicate="error"` a duplicate raises a ShardingError instead.

        >>> PartitionAxis().resolve(("batch", "sequence", "heads", None))
        P(('fsdp', 'dp'), 'sp', 'tp', None)
        """
        logical_axes = tuple(logical_axes)
        spec, lost = self.resolve_and_report(logical_axes, mode)
        if lost and on_duplicate == "error":
            each = "; ".join(f"dim {d} ({name!r}) resolves to mesh axis {axis!r}" for d, name, axis in lost)
            raise ShardingError(f"{logical_axes} uses a mesh axis twice: {each}, which an earlier dim already uses.")
        return spec

    @functools.cached_property
    def default_names(self) -> frozenset[str]:
        """Mesh axes that only default values name. A mesh without such an axis is used as if the axis had size 1."""
        explicit = [*self._changed.values(), *(axis for _, axis in self.extra)]
        used = {name for field in _MESH_AXIS_FIELDS for name in as_tuple(getattr(self, field))}
        return frozenset(used - {name for axis in explicit for name in as_tuple(axis)})

    @functools.cached_property
    def _changed(self) -> dict[str, AxisName]:
        """The fields, without `extra`, whose values are neither the default nor the mesh axis that they follow."""
        followed = PartitionAxis(**{name: getattr(self, name) for name in _MESH_AXIS_FIELDS})
        defaults = {
            field.name: field.default if field.name in _MESH_AXIS_FIELDS else getattr(followed, field.name)
            for field in dataclasses.fields(self)
            if field.name != "extra"
        }
        return {name: value for name, default in defaults.items() if (value := getattr(self, name)) != default}

    def validate(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises one ShardingError that lists every field, including defaults, whose mesh axis is not in `mesh`."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        named |= {f"extra[{name!r}]": axis for name, axis in self.extra}
        missing = [(k, axis) for k, value in named.items() for axis in as_tuple(value) if axis not in mesh.axis_names]
        if missing:
            each = ", ".join(f"{k}={axis!r}" for k, axis in missing)
            raise ShardingError(
                f"PartitionAxis names mesh axes that the mesh {dict(mesh.shape)} lacks: {each}. "
                "Add them to the mesh with size 1, or set these fields to None."
            )


def num_parts(axes: PartitionAxis, sizes: Mapping[str, int], *logical: str, mode: Mode = "train") -> int:
    """The number of parts into which a mesh with axes of these sizes splits dims of these logical axes together."""
    names = {name for axis in logical for name in axes.mesh_axes(axis, mode)}
    return math.prod(sizes.get(name, 1) for name in names)


def as_tuple(axis: AxisName) -> tuple[str, ...]:
    """The mesh axes of one PartitionSpec entry."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def as_entry(axes: Iterable[AxisName]) -> AxisName:
    """The PartitionSpec entry for these mesh axes together."""
    flat = tuple(name for axis in axes for name in as_tuple(axis))
    return flat[0] if len(flat) == 1 else flat or None


def _strings(value: object) -> list[str] | None:
    """The items of a list or tuple of strings; None for any other value."""
    items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else (None,)
    strings = [item for item in items if isinstance(item, str)]
    return strings if len(strings) == len(items) else None


def _axis_name(field: str, value: object) -> AxisName:
    if value is None or isinstance(value, str):
        return value
    names = _strings(value)
    if names is not None:
        return as_entry(names)
    raise TypeError(f"PartitionAxis.{field} must be a mesh axis name, a tuple of them or None, got {shown(value)}.")


DEFAULT_AXES = PartitionAxis()


@dataclass(frozen=True)
class LargestDim:
    """Dims of a rule for arrays of any shape: shards the largest divisible dim over `mesh_axes`."""

    mesh_axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"largest dim over {'+'.join(self.mesh_axes)}"


def dims_text(dims: LargestDim | Iterable[AxisName] | None) -> str:
    """The entries of a spec or a rule as text, with `-` for None; an empty PartitionSpec prints as `P()`."""
    if isinstance(dims, LargestDim):
        return str(dims)
    text = ", ".join("+".join(as_tuple(entry)) or "-" for entry in dims or ())
    return f"P({text})" if isinstance(dims, PartitionSpec) and not text else text or "replicated"


def axes_of_spec(spec: Iterable[str | Iterable[str] | None], rank: int) -> Layout:
    """The mesh axes of every dim of an array; none for a dim that the spec leaves unconstrained."""
    given = [() if x in (None, PartitionSpec.UNCONSTRAINED) else (x,) if isinstance(x, str) else tuple(x) for x in spec]
    return (*given, *[()] * (rank - len(given)))
