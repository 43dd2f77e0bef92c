"""Training steps whose estimate is compared with what XLA allocates and sends: models, meshes and settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.program import batch_sharding, train_program
from flax_mesh.recipe.resolve import derive
from flax_mesh.recipe.target import target_of
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.step.state import abstract_train_state
from flax_mesh.train import DataConfig, MeshConfig, PipelineConfig, RunConfig, TrainConfig, make_train_step

SMALL = DecoderConfig(
    vocab_size=4096, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=128, mlp_size=1536
)
LARGE = replace(SMALL, vocab_size=32768, hidden_size=2048, num_layers=8, num_heads=16, num_kv_heads=8, mlp_size=6144)
LARGE = replace(LARGE, dtype="bfloat16")
PLANNED = TrainConfig(
    make_decoder,
    next_token_loss,
    DecoderConfig(hidden_size=128, num_layers=4, mlp_size=256, scan=True),
    mesh=MeshConfig("fsdp:4,tp:2"),
    data=DataConfig(sequence_length=128, batch_size=32),
)

Step = tuple[Any, tuple[Any, ...]]  # a jitted step and its abstract arguments


def decoder_config(
    base: DecoderConfig = SMALL, batch: int = 32, seq: int = 512, pipeline: PipelineConfig | None = None, **model: Any
) -> TrainConfig:
    data = DataConfig(source="stdlib", sequence_length=seq, batch_size=batch)
    options = {"data": data, "pipeline": pipeline or PipelineConfig(), "mesh": MeshConfig()}
    options["run"] = RunConfig(attention="as_written")  # whatever the memory of the chip
    return TrainConfig(make_decoder, next_token_loss, replace(base, **model), **options)


def decoder(mesh: Any, *, microbatches: int = 1, **settings: Any) -> Step:
    """The step of a recipe with the decoder."""
    config = decoder_config(pipeline=PipelineConfig(num_microbatches=microbatches), **settings)
    program = train_program(derive(config, target_of(mesh)))
    rules = program.rules
    shape = config.data.batch_size, config.data.sequence_length
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh, rules.axes))
    return program.step, (program.layout, {"inputs": rows, "targets": rows})


class Block(nnx.Module):
    """Attention and an MLP, as in a ViT."""

    def __init__(self, width: int, heads: int, **options: Any):
        self.first, self.second = nnx.LayerNorm(width, **options), nnx.LayerNorm(width, **options)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class ViT(nnx.Module):
    """A vision transformer for images of 224 x 224."""

    def __init__(self, rngs: nnx.Rngs, *, width: int, depth: int, heads: int, patch: int = 16, dtype: Any = None):
        options: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
        self.patch = nnx.Conv(3, width, (patch, patch), strides=(patch, patch), **options)
        self.position = nnx.Param(jax.random.normal(rngs.params(), (1, (224 // patch) ** 2, width)) * 0.02)
        self.blocks = nnx.List([Block(width, heads, **options) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, **options)
        self.head = nnx.Linear(width, 1000, **options)

    def __call__(self, x):
        x = self.patch(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.position[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class UNet(nnx.Module):
    """Convolutions down to small images and up again, with a skip connection per size."""

    def __init__(self, rngs: nnx.Rngs, *, widths: tuple[int, ...], dtype: Any = None):
        conv = partial(nnx.Conv, rngs=rngs, dtype=dtype)
        before = (3, *widths)
        self.down = nnx.List([conv(a, b, (3, 3)) for a, b in zip(before, widths, strict=False)])
        self.middle = conv(widths[-1], widths[-1], (3, 3))
        above = (*widths[1:], widths[-1])
        self.up = nnx.List([conv(a + b, b, (3, 3)) for a, b in zip(above[::-1], widths[::-1], strict=True)])
        self.out = conv(widths[0], 3, (1, 1))

    def __call__(self, x):
        skips = []
        for conv in self.down:
            x = nnx.relu(conv(x))
            skips.append(x)
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.middle(x))
        for conv in self.up:
            b, h, w, c = x.shape
            x = jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest")
            x = nnx.relu(conv(jnp.concatenate([x, skips.pop()], -1)))
        return self.out(x)


def class_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).sum(), batch["y"].size


def image_loss(model, batch):
    return ((model(batch["x"]) - batch["x"]) ** 2).sum(), batch["x"].size


def images(
    mesh: Any, *, model: Callable[..., Any], loss: Callable[..., Any], size: int, batch: int, **settings: Any
) -> Step:
    """The step of a training loop of one's own; every array is split over the first axis of the mesh."""

    def make():
        made = model(nnx.Rngs(0), **settings)
        return made, nnx.Optimizer(made, optax.adamw(1e-3), wrt=nnx.Param)

    layout = abstract_train_state(make, abstract_state(make, mesh, mesh.axis_names[0]))
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    x = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32, sharding=split)
    y = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=split)
    return make_train_step(loss, layout), (layout, {"x": x, "y": y})


vit = partial(images, model=ViT, loss=class_loss, size=224)
unet = partial(images, model=UNet, loss=image_loss)


@dataclass(frozen=True, eq=False)
class Case:
    """One step, or with pp in its mesh the stages of a pipeline.

    `outside` says why the case has no bar: it is printed only. `differs` says why XLA sends other numbers of bytes over
    some axes, which have no bar. `quick` cases belong to the default suite.
    """

    name: str
    topology: str  # "cpu", or the name of a topology of TPUs
    mesh: str
    make: Callable[..., Step] = decoder
    settings: Mapping[str, Any] = field(default_factory=dict)
    outside: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False

    @property
    def platform(self) -> str:
        return "cpu" if self.topology == "cpu" else "tpu"

    @property
    def sizes(self) -> dict[str, int]:
        pairs = (part.split(":") for part in self.mesh.split(","))
        return {name: int(size) for name, size in pairs}

    @property
    def is_pipeline(self) -> bool:
        return "pp" in self.sizes


FIELDS = ("quick", "outside", "differs")


def cpu(name: str, mesh: str, make: Callable[..., Step] = decoder, **given: Any) -> Case:
    """A case from its fields and the settings of its step."""
    fields = {field: given.pop(field) for field in FIELDS if field in given}
    return Case(f"cpu {name}", "cpu", mesh, make, given, **fields)


def tpu(name: str, topology: str, mesh: str, make: Callable[..., Step] = decoder, **given: Any) -> Case:
    sizes = {"base": LARGE, "batch": 32, "seq": 2048} if make is decoder else {}
    return replace(cpu(name, mesh, make, **(sizes | given)), name=f"tpu {name}", topology=topology)


SCAN: dict[str, Any] = {"scan": True}
REMAT: dict[str, Any] = {"scan": True, "remat": "full"}
DOTS: dict[str, Any] = {"scan": True, "remat": "dots_saveable"}
PRODUCTS: dict[str, Any] = {"scan": True, "remat": "dots_with_no_batch_dims_saveable"}
HALF: dict[str, Any] = {"dtype": "bfloat16"}
SHORT_PIPELINE: dict[str, Any] = {"batch": 128, "seq": 128, "schedule": "1f1b", "stage_remat": "full", "scan": True}
SMALL_VIT: dict[str, Any] = {"width": 384, "depth": 6, "heads": 6, "batch": 64}
LARGE_MOE: dict[str, Any] = {"batch": 16, "mlp_size": 2048, "num_experts": 8}
LATENT: dict[str, Any] = {"latent_size": 128, "query_latent_size": 192}
LATER: dict[str, Any] = {"num_layers": 4, "prediction_layers": 1, "prediction_loss": 0.3}
DELTA: dict[str, Any] = {"layer_pattern": "delta:3,global", "delta_key_heads": 4, "delta_value_heads": 8}
DELTA |= {"batch": 16, "seq": 256, "mlp_size": 1024, "num_layers": 4}
DELTA |= {"delta_key_dim": 64, "delta_value_dim": 64, "delta_conv": 4}
SMALL_MOE: dict[str, Any] = {"batch": 16, "seq": 256, "mlp_size": 512, "num_experts": 8, "num_layers": 4}
LARGE_VIT: dict[str, Any] = {"width": 1024, "depth": 8, "heads": 8, "batch": 512, "dtype": jnp.bfloat16}
SMALL_UNET: dict[str, Any] = {"widths": (64, 128, 256), "batch": 32, "size": 64}
LARGE_UNET: dict[str, Any] = {"widths": (128, 256, 512), "batch": 256, "size": 128, "dtype": jnp.bfloat16}

RING = "XLA sends weight gradients around a ring in parts while it computes them, instead of a reduce-scatter"
ROUNDED = "XLA reduces the gradients of the embedding and of the logits in bfloat16, not in float32"
GATHERED = "XLA gathers keys and values in bfloat16, not in float32"
ROUTED = "XLA splits the tokens of a router over other axes than the estimate"
WIDENED = "" if jax.__version_info__ >= (0, 11, 2) else "XLA stores values in bfloat16 as float32: +12%"
ORDER = "layers without a loop: XLA stores other values of the forward pass, and orders the recomputed ones otherwise"
IN_BFLOAT16 = {"dp": ROUNDED, "dp+fsdp": ROUNDED}
OF_EXPERTS = {"fsdp": RING, "ep": GATHERED, "ep+fsdp": ROUTED}
JOINED = "XLA moves the two halves that a prediction concatenates to other devices, and gathers more"
ATTENTION = "the estimate stores more matrices of attention scores at the same time than XLA"

CPU = [
    cpu("scan", "fsdp:8", **SCAN),
    cpu("scan remat", "fsdp:8", batch=64, num_layers=12, **REMAT),
    cpu("scan remat tp", "fsdp:4,tp:2", batch=64, num_layers=12, quick=True, **REMAT),
    cpu("scan dp fsdp tp", "dp:2,fsdp:2,tp:2", **SCAN),
    cpu("bf16 chunked loss", "fsdp:8", outside=WIDENED, batch=64, num_layers=12, loss_chunk=512, **REMAT, **HALF),
    cpu("bf16 scan tp", "fsdp:4,tp:2", **SCAN, **HALF),
    cpu("dots", "fsdp:8", **DOTS),
    cpu("bf16 products", "fsdp:8", batch=64, num_layers=12, **PRODUCTS, **HALF),
    cpu("sp", "fsdp:2,sp:4", batch=16, seq=1024, **REMAT),
    cpu("accumulation", "fsdp:8", batch=128, microbatches=4, **SCAN),
    cpu("tp8", "tp:8", batch=8, num_layers=12, num_kv_heads=8, **REMAT),
    cpu("vit", "fsdp:8", vit, outside=ORDER, **SMALL_VIT),
    cpu("unet", "dp:8", unet, **SMALL_UNET),
    cpu("one device", "fsdp:1", batch=8, num_layers=8, **REMAT),
    cpu("large vocabulary", "fsdp:8", vocab_size=32768, num_layers=4, **REMAT),
    cpu("layers one by one", "fsdp:8"),
    cpu("layers one by one remat", "fsdp:4,tp:2", outside=ORDER, batch=64, num_layers=8, remat="full"),
    cpu("delta nets", "fsdp:8", **DELTA, **SCAN),
    cpu("delta nets remat", "fsdp:8", **DELTA, **REMAT),
    cpu("delta nets one by one", "fsdp:8", **DELTA),
    cpu("delta nets one by one tp", "fsdp:4,tp:2", **DELTA),
    cpu("predictions", "fsdp:8", **LATER, **REMAT),
    cpu("predictions tp", "fsdp:4,tp:2", differs={"tp": JOINED}, **LATER, **REMAT),
    cpu("fsdp moe", "fsdp:8", **SMALL_MOE, **REMAT),
    cpu("moe", "fsdp:4,ep:2", differs={"fsdp": ROUTED}, **SMALL_MOE, **REMAT),
    cpu("latent", "fsdp:8", num_kv_heads=8, head_dim=96, rotary_dims=32, value_head_dim=64, **LATENT, **REMAT),
]
PIPELINES = [
    cpu("pipeline 1f1b", "pp:2,fsdp:4", batch=64, seq=256, num_layers=12, schedule="1f1b", **SCAN),
    cpu("pipeline tp remat", "pp:2,fsdp:2,tp:2", outside=ATTENTION, **SHORT_PIPELINE),
    cpu("pipeline zero bubble", "pp:2,fsdp:4", batch=64, seq=256, num_layers=12, schedule="zb-h1", **SCAN),
]
TPU = [
    tpu("scan", "v6e:2x4", "fsdp:8", differs={"fsdp": RING}, **SCAN),
    tpu("scan remat", "v5e:2x4", "fsdp:8", differs={"fsdp": RING}, **REMAT),
    tpu("scan remat tp", "v6e:2x4", "fsdp:4,tp:2", differs={"fsdp": RING}, **REMAT),
    tpu("scan dp fsdp tp", "v5p:2x2x2", "dp:2,fsdp:2,tp:2", differs=IN_BFLOAT16, batch=16, **SCAN),
    tpu("chunked loss", "v5p:2x2x2", "fsdp:8", loss_chunk=1024, **REMAT),
    tpu("scan tp", "v6e:2x4", "fsdp:4,tp:2", differs={"fsdp": RING}, **SCAN),
    tpu("dots", "v5e:2x4", "fsdp:8", differs={"fsdp": RING}, **DOTS),
    tpu("products", "v5p:2x2x2", "fsdp:8", differs={"fsdp": RING}, **PRODUCTS),
    tpu("sp", "v6e:2x4", "fsdp:2,sp:4", differs={"fsdp+sp": GATHERED}, batch=16, seq=4096, **REMAT),
    tpu("accumulation", "v5p:2x2x2", "fsdp:8", differs={"fsdp": RING}, batch=64, microbatches=4, **SCAN),
    tpu("moe", "v5p:2x2x2", "fsdp:4,ep:2", differs=OF_EXPERTS, **LARGE_MOE, **REMAT),
    tpu("tp8", "v6e:2x4", "tp:8", batch=8, **REMAT),
    tpu("large vocabulary", "v6e:2x4", "fsdp:8", vocab_size=131072, num_layers=4, **REMAT),
    tpu("vit", "v5e:2x4", "fsdp:8", vit, differs={"fsdp": RING}, **LARGE_VIT),
    tpu("unet", "v5p:2x2x2", "dp:8", unet, outside=ORDER, **LARGE_UNET),
    tpu("layers one by one", "v5p:2x2x2", "fsdp:8"),
    tpu("layers one by one remat", "v5p:2x2x2", "fsdp:4,tp:2", outside=ORDER, remat="full"),
]
CASES = [*CPU, *PIPELINES, *TPU]
