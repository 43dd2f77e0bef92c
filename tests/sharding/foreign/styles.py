"""Models of other projects, with the specs that their annotations or rules must result in."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import flax_mesh as fm
from tests.mpmd.zoo.base import Case, text
from tests.sharding.foreign import easydel, llm_examples, llm_explicit, maxtext, tunix


class Style(NamedTuple):
    """A case of the zoo, the axes of its meshes, its rules, and specs of some leaves if every axis has two devices."""

    case: Case
    mesh_axes: tuple[str, ...]
    specs: dict[str, P]
    axis_types: str = "auto"
    group: tuple[int, int, int] = (1, 1, 1)  # the mesh of one group of a pipeline
    rules: Any = None
    logical_rules: Any = ()  # of Flax
    batch: tuple[str, ...] = ()  # mesh axes of the rows


MAXTEXT = {"token_embedder/embedding": P("tensor", "fsdp"), "decoder_norm/scale": P("tensor")}
STYLES = [
    Style(
        Case("maxtext_scanned", maxtext.make, maxtext.loss_fn, maxtext.packed),
        maxtext.AXES,
        MAXTEXT
        | {
            "layers/query/kernel": P(None, "fsdp", "tensor", None),
            "layers/wi/kernel": P(None, "fsdp", None, "tensor"),
            "layers/pre_norm/scale": P(None, "tensor"),
            "layers/dropout/rngs/key": P(),
        },
        logical_rules=maxtext.LOGICAL_RULES,
        batch=("data", "fsdp"),
    ),
    Style(
        Case("maxtext_listed", functools.partial(maxtext.make, scan_layers=False), maxtext.loss_fn, maxtext.packed),
        maxtext.AXES,
        MAXTEXT | {"layers/1/out/kernel": P("tensor", None, "fsdp"), "layers/0/wo/kernel": P("tensor", "fsdp")},
        logical_rules=maxtext.LOGICAL_RULES,
        batch=("data", "fsdp"),
    ),
    Style(
        Case("tunix", tunix.make, tunix.loss_fn, tunix.masked, wrt=nnx.LoRAParam),
        ("dp", "fsdp", "tp"),
        {
            "embedder": P("tp", "fsdp"),
            "layers/1/attn/q_proj/qvalue": P("fsdp", "tp", None),
            "layers/1/attn/q_proj/scale": P(None, "tp", None),
            "layers/1/attn/q_proj/w_lora_a": P("fsdp", None),
            "layers/1/attn/q_proj/w_lora_b": P(None, "tp", None),
            "layers/0/attn/o_proj/w_lora_a": P("tp", None, None),
            "layers/0/attn/cache/k": P(),
        },
        batch=("fsdp", "dp"),
    ),
    Style(
        Case("easydel", easydel.make, easydel.loss_fn, text, layers="model/layers"),
        ("fsdp", "sp", "tp"),
        {
            "model/embed_tokens/embedding": P("tp", ("fsdp", "sp")),
            "model/layers/0/self_attn/o_proj/kernel": P("tp", ("fsdp", "sp")),
            "model/layers/1/block_sparse_moe/experts/expert_1/up_proj/kernel": P(("fsdp", "sp"), "tp"),
            "model/layers/0/block_sparse_moe/gate/kernel": P(None),
            "model/causal_mask": P(None),
        },
        rules=easydel.BaseConfig().get_partition_rules(),
        batch=("fsdp",),
    ),
    Style(
        Case("llm_examples", llm_examples.make, llm_examples.loss_fn, maxtext.packed, layers="weights/layers"),
        ("x", "y", "z"),
        {
            "weights/embedding": P(("y", "z"), "x"),
            "weights/layers/0/q": P("x", "y", None),
            "weights/layers/1/up/quant": P("x", ("y", "z")),
            "weights/layers/1/up/scale": P(("y", "z")),
        },
        batch=("x",),
    ),
    Style(
        Case("llm_explicit", llm_explicit.make, llm_explicit.loss_fn, maxtext.packed, layers="weights/layers"),
        ("x", "y", "z"),
        {
            "weights/embedding": P(("y", "z"), None),
            "weights/layers/0/q": P(None, ("y", "z"), None),
            "weights/layers/1/up/quant": P(None, ("y", "z")),
            "weights/layers/1/down/quant": P(("y", "z"), None),
        },
        axis_types="explicit",
        group=(2, 1, 2),
        batch=("x",),
    ),
]
BY_NAME = {style.case.name: style for style in STYLES}


def mesh_of(style: Style, shape: tuple[int, ...] = (2, 2, 2)) -> Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return fm.create_mesh(shape, style.mesh_axes, axis_types=style.axis_types, devices=devices)


@contextlib.contextmanager
def context_of(style: Style) -> Iterator[None]:
    """In which such a model is created and traced: with Flax's rules, and without placing arrays as it creates them."""
    with nnx.logical_axis_rules(style.logical_rules), nnx.use_eager_sharding(False):
        yield


def make_both(style: Style, optimizer) -> Callable[[], Any]:
    def make():
        model = style.case.make()
        return model, nnx.Optimizer(model, optimizer, wrt=style.case.wrt)

    return make
