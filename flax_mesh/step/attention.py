"""The option `attention` of a step: whether the attention of a traced loss function is computed in blocks."""

from collections.abc import Callable, Iterable, Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_mesh.axes import PartitionAxis
from flax_mesh.blockwise.place import Layout, axes_of_spec
from flax_mesh.blockwise.transform import MODES, choose
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import chip_of
from flax_mesh.program.program import Program
from flax_mesh.step.batch import microbatch_spec
from flax_mesh.tree import PyTree

UNKNOWN_CHIP = 2**30  # bytes of scores per device with which auto changes nothing, if the chip is not known
SHARE = 8  # otherwise this part of its memory

Rewrite = Callable[[Program], Callable[..., list[jax.Array]] | None]


class AttentionOption:
    """Applies the option to traces. `lines` describe the last trace."""

    def __init__(self, attention: str, mesh: Mesh | AbstractMesh | None, axes: PartitionAxis):
        if attention not in MODES:
            raise ConfigError([f"attention={attention!r} is none of {', '.join(MODES)}"])
        self.attention, self.mesh, self.axes = attention, mesh, axes
        self.limit = score_limit(mesh)
        self.lines: tuple[str, ...] = ()

    def layouts(self, arrays: Iterable[object], like: Iterable[object]) -> dict[int, Layout]:
        """The axes of the dims of traced arrays, by id, from arrays `like` them with shardings."""
        pairs = zip(arrays, like, strict=True)
        return {id(x): axes for x, y in pairs if (axes := _layout(y)) is not None}

    def of_batch(self, batch: PyTree) -> dict[int, Layout]:
        if self.mesh is None:
            return {}
        return {
            id(x): axes_of_spec(microbatch_spec(x.shape, self.mesh, self.axes), x.ndim) for x in jax.tree.leaves(batch)
        }

    def rewrite(self, inputs: Iterable[Layout | None], others: Mapping[int, Layout]) -> Rewrite:
        """For a trace whose inputs have these layouts, and which closes over the arrays of `others`."""

        def chosen(program: Program) -> Callable[..., list[jax.Array]] | None:
            choice = choose(program, self.attention, list(inputs), lambda const: others.get(id(const)), self.limit)
            self.lines = choice.lines
            return choice.call

        return chosen


def _layout(x: object) -> Layout | None:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct) and isinstance(x.sharding, NamedSharding):
        return axes_of_spec(x.sharding.spec, x.ndim)
    return None


def score_limit(mesh: Mesh | AbstractMesh | None) -> int:
    """Bytes of scores on one device up to which auto leaves attention as it is written."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        kind = "" if device is None else device.device_kind
    else:
        kind = (mesh.devices.flat[0] if mesh is not None else jax.devices()[0]).device_kind
    chip = chip_of(kind)
    return UNKNOWN_CHIP if chip is None or kind == "cpu" else int(chip.memory / SHARE)
