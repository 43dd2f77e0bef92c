"""The parts of the estimate, by formulas that can be checked by hand. Nothing is compiled but two small models."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import flax_mesh as fm
from flax_mesh.hardware import CHIPS, chip_of
from flax_mesh.jax_compat import lower_without_devices
from flax_mesh.models import DecoderConfig, flops_per_token, make_decoder
from flax_mesh.models.attention import attend
from flax_mesh.plan import plan_step
from flax_mesh.plan.forecast import Estimate, estimate
from flax_mesh.recipe.target import chip_target
from flax_mesh.step.options import score_limit
from tests.plan.cases import ViT, class_loss, decoder, images
from tests.plan.compiled import figures_of

P = PartitionSpec
TINY = DecoderConfig(
    vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=384
)
BATCH, SEQ = 8, 64
SIZES = {"fsdp": 4, "tp": 2}


def mesh_of(sizes, kind=AxisType.Auto):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def tiny(sizes=SIZES, kind=AxisType.Auto, **settings) -> Estimate:
    step, arguments = decoder(mesh_of(sizes, kind), base=TINY, **({"batch": BATCH, "seq": SEQ} | settings))
    return estimate(step, arguments, sizes, "cpu")


def flops(one: Estimate, phase: str) -> float:
    return math.fsum(cost.flops * cost.times for cost in one.costs if cost.phase == phase)


def products_per_token(config: DecoderConfig) -> int:
    """Parameters that every token multiplies: of the layers and of the head."""
    heads = config.num_heads * config.head_dim
    attention = 2 * config.hidden_size * (heads + config.num_kv_heads * config.head_dim)
    mlp, later = 3 * config.hidden_size * config.mlp_size, config.prediction_layers
    of_layers = (config.num_layers + later) * (attention + mlp)
    return of_layers + later * 2 * config.hidden_size**2 + (1 + later) * config.vocab_size * config.hidden_size


def forward_flops(devices: int, config: DecoderConfig = TINY) -> float:
    """2 N per token, and two products of all queries with all keys."""
    scores = 4 * (config.num_layers + config.prediction_layers) * SEQ * config.num_heads * config.head_dim
    return BATCH * SEQ * (2 * products_per_token(config) + scores) / devices


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"scan": True}, {"prediction_layers": 1}], ids=["layers", "scan", "later"])
def test_the_flops_of_a_decoder_equal_the_formula(change: dict[str, Any]):
    one, config = tiny(**change), dataclasses.replace(TINY, **change)
    forward, scores = forward_flops(8, config), 4 * SEQ * config.num_heads * config.head_dim
    assert flops(one, "forward") == pytest.approx(forward, rel=0.01)
    assert flops(one, "backward") == pytest.approx(2 * forward, rel=0.01)
    count = sum(x.size for x in jax.tree.leaves(nnx.eval_shape(lambda: make_decoder(config, nnx.Rngs(0)))))
    scores *= config.num_layers + config.prediction_layers
    # Of causal attention: half of the products of queries with keys.
    stated = BATCH * SEQ * (flops_per_token(config, count, SEQ) + 1.5 * scores) / 8
    assert stated == pytest.approx(3 * forward, rel=0.01)


def test_full_remat_computes_the_forward_pass_again():
    """The head is not in a remat region, and the gradients do not need the result of a layer's last product."""
    one = tiny(scan=True, remat="full")
    head, last = TINY.vocab_size * TINY.hidden_size, TINY.num_layers * TINY.mlp_size * TINY.hidden_size
    again = forward_flops(8) - BATCH * SEQ * 2 * (head + last) / 8
    found = flops(one, "forward"), flops(one, "backward")
    assert found == pytest.approx((forward_flops(8), 2 * forward_flops(8) + again), rel=0.01)


def test_the_flops_of_a_convolution_and_of_its_gradients():
    split = NamedSharding(mesh_of({"dp": 8}), P("dp"))
    x = jax.ShapeDtypeStruct((16, 32, 32, 4), jnp.float32, sharding=split)
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 8), jnp.float32, sharding=NamedSharding(split.mesh, P()))

    def loss(x, kernel):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y**2).sum()

    one = estimate(jax.jit(jax.grad(loss, (0, 1))), (x, kernel), {"dp": 8}, "cpu")
    once = 2 * 16 * 32 * 32 * 8 * 3 * 3 * 4 / 8
    assert flops(one, "forward") == pytest.approx(once)
    assert flops(one, "backward") == pytest.approx(2 * once)


def test_trip_counts_of_nested_loops_multiply():
    split = NamedSharding(mesh_of({"dp": 8}), P(None, "dp"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)

    def body(carry, _):
        inner, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ y), None), carry, None, length=5)
        return inner, None

    one = estimate(jax.jit(lambda x: jax.lax.scan(body, x, None, length=3)[0]), (x,), {"dp": 8}, "cpu")
    assert [cost.times for cost in one.costs if cost.flops] == [15]
    assert {exchange.times for exchange in one.exchanges} == {15}


def test_a_loop_of_one_trip_stores_what_its_body_stores():
    """XLA removes such loops: neither stacks of residuals nor their slices are left."""

    def loss(kernels, x, scan):
        layer = lambda x, w: (jnp.tanh(jnp.exp(x @ w) @ w), None)  # noqa: E731
        return (jax.lax.scan(layer, x, kernels)[0] if scan else layer(x, kernels[0])[0]).sum()

    arrays = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 64, 64), (512, 64)))
    loop, plain = (jax.jit(jax.value_and_grad(partial(loss, scan=scan))) for scan in (True, False))
    peaks = [estimate(step, arrays, {"dp": 1}, "cpu").profile.peak for step in (loop, plain)]
    assert peaks[0] == peaks[1] > 512 * 64 * 4


def test_collectives_of_a_shard_map_are_counted_as_they_are_written():
    mesh = mesh_of({"a": 2, "b": 4})
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("a", "b")))  # 64 bytes on a device

    def each(x):
        gathered = jax.lax.all_gather(x, "b", axis=1, tiled=True)  # 256 bytes
        summed = jax.lax.psum(gathered, "a")
        return jax.lax.psum_scatter(summed, ("a", "b"), scatter_dimension=1, tiled=True)

    mapped = jax.shard_map(each, mesh=mesh, in_specs=P("a", "b"), out_specs=P(None, ("a", "b")), check_vma=False)
    one = estimate(jax.jit(mapped), (x,), {"a": 2, "b": 4}, "cpu")
    found = [(e.kind, e.axes, e.operand_bytes) for e in one.exchanges]
    assert found == [("all-gather", ("b",), 64), ("all-reduce", ("a",), 256), ("reduce-scatter", ("a", "b"), 256)]


@pytest.mark.slow
def test_explicit_axes_have_the_collectives_of_auto_axes():
    auto, explicit = (figures_of(tiny(scan=True, kind=kind)).operands for kind in (AxisType.Auto, AxisType.Explicit))
    assert auto.keys() == explicit.keys()
    large = [axes for axes, size in auto.items() if size > 0.05 * sum(auto.values())]
    assert large and {axes: explicit[axes] for axes in large} == pytest.approx({axes: auto[axes] for axes in large})


def test_collectives_do_not_name_axes_of_one_device():
    sizes, axes = {"dp": 2, "fsdp": 4, "ep": 1}, ("fsdp", "ep")
    split = NamedSharding(mesh_of(sizes), P(axes))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)
    summed = jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=split.mesh, in_specs=P(axes), out_specs=P())
    one = estimate(jax.jit(summed), (x,), sizes, "tpu")
    assert [(exchange.kind, exchange.axes) for exchange in one.exchanges] == [("all-reduce", ("fsdp",))]


def test_a_chain_of_many_cheap_operations_is_one_kernel():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh_of({"fsdp": 4}), P()))

    def chain(x):
        for i in range(1200):
            x = x * i
        return x

    (kernel,) = estimate(jax.jit(chain), (x,), {"fsdp": 4}, "tpu").kernels
    assert kernel.read_bytes == kernel.written_bytes == 8 * 8 * 4


def test_a_chain_of_many_partial_sums_is_reduced_once():
    """A deep model without a scan sums the gradients of all layers in one chain of additions."""
    sizes = {"fsdp": 4}
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh_of(sizes), P(None, "fsdp")))

    def chain(x):
        total = x @ x.T
        for i in range(1, 400):
            total += (x * i) @ x.T
        return total

    assert [exchange.kind for exchange in estimate(jax.jit(chain), (x,), sizes, "tpu").exchanges] == ["all-reduce"]


def attention(implementation: Any, causal: bool = True) -> Estimate:
    mesh = mesh_of({"fsdp": 1})
    x = jax.ShapeDtypeStruct((2, 2048, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def attend(q, k, v):
        found = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
        return found.astype(jnp.float32).sum()

    return estimate(jax.jit(jax.grad(attend, (0, 1, 2))), (x, x, x), {"fsdp": 1}, "gpu")


def splash(window: int = 0, length: int = 2048) -> Estimate:
    """On a mesh of two devices, of which each has one of two rows."""
    device = AbstractDevice("tpu", None, "tpu")
    mesh = AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), abstract_device=device)
    x = jax.ShapeDtypeStruct((2, length, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))

    def attend_all(q, k, v):
        return attend("splash", q, k, v, None, DecoderConfig(), window).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        return estimate(jax.jit(jax.grad(attend_all, (0, 1, 2))), (x, x, x), {"fsdp": 2}, "tpu")


def test_splash_attention_stores_no_scores_and_computes_whole_blocks_of_them():
    """Two products forward; three for queries and four for keys and values backward, which have a kernel each."""
    of_row = 4 * 8 * 2048 * 2048 * 64
    found = splash()
    assert found.profile.peak < 8 * 2048 * 2048 * 2
    assert flops(found, "forward") == of_row / 2
    assert {cost.dtype for cost in found.costs if cost.flops >= of_row / 2} == {"bfloat16"}
    assert flops(found, "backward") == pytest.approx(3.5 * of_row / 2, rel=1e-3)  # and sums of two gradients
    assert flops(splash(window=300), "forward") == of_row * 1024 / 2048  # two blocks of 512 keys per block of queries
    assert flops(splash(window=300, length=4096), "forward") == 2 * of_row * 1024 / 2048


@pytest.mark.parametrize(("sizes", "blocks"), [({"fsdp": 2}, 10), ({"sp": 2}, 2 * 5)], ids=str)
def test_attention_in_blocks_counts_the_blocks_that_the_device_with_most_of_them_visits(sizes, blocks):
    """Of 4 blocks of queries and 4 of keys, causal: 10 in a row; in head-tail order 5 on each of two devices."""
    mesh, spec = mesh_of(sizes), P("fsdp" if "fsdp" in sizes else None, "sp" if "sp" in sizes else None)
    x = jax.ShapeDtypeStruct((2, 2048, 8, 256), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def attend_all(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        gradients = jax.jit(jax.grad(fm.blockwise_attention(attend_all, in_specs=[spec] * 3), (0, 1, 2)))
        found = estimate(gradients, (x, x, x), sizes, "tpu")
    products = blocks * 2 * 512 * 512 * 8 * 256
    assert flops(found, "forward") == pytest.approx(2 * products, rel=0.05)
    assert flops(found, "backward") == pytest.approx(5 * products, rel=0.05)  # of which one computes the scores again
    assert all(operation.times_known for operation in found.program.block.walk())


@pytest.mark.parametrize(("kind", "blocks"), [("NVIDIA H100", "3 of 4"), ("TPU v5p", "10 of 16")])
def test_blocks_of_attention_are_longer_on_gpus(kind, blocks):
    lines, x = [], jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
    chip = chip_of(kind)
    assert chip is not None
    with jax.sharding.use_abstract_mesh(chip_target({"fsdp": 1}, chip).abstract_mesh("auto")):
        attention = partial(jax.nn.dot_product_attention, is_causal=True)
        jax.eval_shape(fm.blockwise_attention(attention, say=lines.append), x, x, x)
    assert lines == [f"1 attention, q 2048 k 2048, {blocks} blocks"]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_plan_has_attention_in_blocks_where_the_run_has_it(chip):
    limit = score_limit(chip_target({"fsdp": 2}, chip).abstract_mesh("auto"))
    assert limit == (2**30 if chip.platform == "cpu" else int(chip.memory / 8))


def test_other_kernels_of_pallas_are_lowered_as_they_are():
    def add_one(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    call = pl.pallas_call(add_one, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))
    text = lower_without_devices(jax.jit(call).trace(jnp.zeros((8, 128))), "tpu").as_text()
    assert "tpu_custom_call" in text


def test_an_attention_kernel_stores_no_scores_and_computes_half_of_them_if_causal():
    scores, full, causal = 2 * 8 * 2048 * 2048 * 2, 4 * 2 * 8 * 2048 * 2048 * 64, attention("cudnn")
    assert causal.profile.peak < scores < attention("xla").profile.peak
    assert flops(attention("cudnn", causal=False), "forward") == full
    assert flops(causal, "forward") == full / 2
    assert flops(causal, "backward") == 2.5 * full / 2


@pytest.mark.parametrize(("kind", "times"), [("NVIDIA H200", 2), ("TPU v5p", 2), ("TPU v6e", 4), ("TPU7x", 4)])
def test_attention_with_heads_of_64_dims_fills_a_part_of_the_matrix_units(kind, times):
    (kernel,) = [cost for cost in attention("cudnn").costs if cost.phase == "forward" and cost.flops]
    chip = chip_of(kind)
    assert chip is not None
    assert kernel.seconds(chip)[0] == times * kernel.flops / (chip.peak_flops["bfloat16"] * chip.matmul_fraction)


# Rows, sizes and groups; of the kernels that libtpu compiles for them: tiles of rows and of columns (a gradient of
# weights has as many tiles of columns as the side of a unit allows).
GROUPED = {
    (32768, 2048, 1536, 64): {"TPU v5e": (319, 3, 12), "TPU v6e": (191, 1, 6)},
    (262144, 7168, 2048, 256): {"TPU v5p": (2303, 16, 16), "TPU7x": (1279, 4, 8)},
    (524288, 4096, 1536, 128): {"TPU v5p": (4223, 6, 12), "TPU7x": (2175, 2, 6)},
}


@pytest.mark.parametrize(("sizes", "kind"), [(sizes, kind) for sizes, found in GROUPED.items() for kind in found])
def test_grouped_products_take_the_tiles_of_the_compiled_kernel(sizes, kind):
    (rows, inner, columns, groups), chip = sizes, chip_of(kind)
    visits, *tiles = GROUPED[sizes][kind]
    shapes = [((rows, inner), jnp.bfloat16), ((groups, inner, columns), jnp.bfloat16), ((groups,), jnp.int32)]
    sharding = NamedSharding(mesh_of({"fsdp": 1}), P())
    x, w, group_sizes = (jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes)
    step = jax.jit(jax.grad(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes).astype(jnp.float32).sum() ** 2, (0, 1)))
    found = [cost for cost in estimate(step, (x, w, group_sizes), {"fsdp": 1}, "tpu").costs if cost.grouped]
    assert [cost.flops for cost in found] == [2.0 * rows * inner * columns] * 3
    others = 2 * (rows * columns + groups * inner * columns)
    for cost, count in ((found[0], tiles[0]), *((c, tiles[1]) for c in found if c.grouped and c.grouped.weights)):
        assert chip is not None and cost.grouped is not None
        compute, memory = cost.seconds(chip)
        padded = visits * chip.matrix_unit / rows
        assert compute == pytest.approx(padded * cost.flops / chip.peak("bfloat16") / chip.matmul_fraction)
        assert memory == pytest.approx((2 * rows * inner * count + others) / chip.memory_bandwidth)


def residual_stream(layers: int, platform: str, wrap: Callable[..., Any] = lambda layer: layer) -> Estimate:
    """The gradients of layers that add to a value, from a norm, a product and tanh."""

    def layer(x, w):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True))
        return x + jnp.tanh(normed @ w)

    def loss(x, *weights):
        for w in weights:
            x = wrap(layer)(x, w)
        return (x**2).sum()

    shapes = [(512, 64), *[(64, 64)] * layers]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return estimate(jax.jit(jax.grad(loss, tuple(range(len(shapes))))), arguments, {}, platform)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_bytes_of_a_layer_do_not_depend_on_the_number_of_layers(platform):
    """Sums of gradients along the residual stream are stored, not computed again in every layer."""
    estimates = [residual_stream(layers, platform) for layers in (2, 3, 4)]
    two, three, four = [math.fsum(x.bytes for x in one.costs if x.phase == "backward") for one in estimates]
    assert four - three == three - two


@pytest.mark.parametrize(("platform", "reads"), [("tpu", [4]), ("gpu", [2, 2, 2])])
def test_tpus_fuse_operations_around_a_product_and_gpus_use_other_kernels(platform, reads):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    one = estimate(jax.jit(lambda a, b, c, d: (a * b) @ c + d), (x,) * 4, {}, platform)
    assert [len(kernel.reads) for kernel in one.kernels] == reads


@pytest.mark.parametrize(
    "read", [jax.lax.dynamic_slice_in_dim, lambda x, at, size, axis: x[:size]], ids=["dynamic", ""]
)
def test_a_slice_reads_its_part_of_an_array(read):
    x, at = jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    (kernel,) = estimate(jax.jit(lambda x, at: read(x, at, 8, axis=0)), (x, at), {}, "gpu").kernels
    assert kernel.written_bytes == 8 * 64 * 4 <= kernel.read_bytes <= 8 * 64 * 4 + 4


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_without_excess_precision_the_values_that_a_program_rounds_are_stored_with_16_bits(platform):
    """As on one H100: 55.6 GiB of the 1.1B model of `recipes/llama_1b.py`, 61.2 GiB with excess precision."""

    def layer(x, w):  # as a residual stream whose sums and norms are in float32
        wide = x.astype(jnp.float32)
        normed = (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True))).astype(jnp.bfloat16)
        return (wide + jnp.matmul(normed, w, preferred_element_type=jnp.float32)).astype(jnp.bfloat16)

    step = jax.jit(jax.grad(lambda x, w: layer(layer(layer(x, w), w), w).astype(jnp.float32).sum(), 1))
    args = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    wide, rounded = (estimate(step, args, {}, platform, excess_precision=x).profile.peak for x in (True, False))
    assert wide - rounded >= 2 * 4096 * 64 * 2  # two sums
    hardware, sharding = {"tpu": "v5e:1x1", "gpu": "h100:1x1"}[platform], NamedSharding(mesh_of({"dp": 1}), P())
    placed = [x.update(sharding=sharding) for x in args]
    planned = plan_step(step, placed, hardware, compiler_options={"xla_allow_excess_precision": False})
    assert plan_step(step, placed, hardware).memory.peak - planned.memory.peak >= 2 * 4096 * 64 * 2


def _small_vit(mesh):
    return images(mesh, model=ViT, loss=class_loss, size=224, batch=8, width=64, depth=1, heads=2)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "make", [partial(decoder, base=TINY, batch=BATCH, seq=SEQ, scan=True), _small_vit], ids=["decoder", "vit"]
)
def test_the_results_have_the_shardings_of_the_compiled_step(make):
    sizes = {"fsdp": 8}
    mesh = fm.create_mesh((8,), ("fsdp",))
    step, arguments = make(mesh)
    lowered = step.lower(*arguments)
    planned, abstract = make(mesh_of(sizes))
    one = estimate(planned, abstract, sizes, "cpu")
    shapes, shardings = jax.tree.leaves(lowered.out_info), jax.tree.leaves(lowered.compile().output_shardings)
    true = [sharding.shard_shape(x.shape) for x, sharding in zip(shapes, shardings, strict=True)]
    assert [x.local for x in one.program.block.results] == true


def test_cpus_store_the_factors_of_sums_of_products_and_products_of_two_arrays():
    """The sums in the gradients of a norm read two factors of its size; nothing else needs the broadcast ones."""
    alive = [x.array for x in tiny({"fsdp": 4}).profile.alive if x.phase == "forward"]
    rows = [x for x in alive if x.local[:2] == (BATCH // 4, SEQ)]
    kinds = Counter((x.producer.kind, x.local[2:]) for x in rows if x.producer is not None)
    norms = 2 * TINY.num_layers + 1
    assert kinds["broadcast_in_dim", (TINY.hidden_size,)] == 2 * norms
    assert kinds["multiply", (TINY.hidden_size,)] == norms
    assert kinds["multiply", (TINY.mlp_size,)] == TINY.num_layers  # of the activation function, beside its factors


def test_cpus_write_the_zeros_of_each_loop_that_starts_from_them():
    """Each loop changes an array of its length in place; XLA writes all of them at the start."""

    def step(x):
        zeros = jnp.zeros((8, 64))
        total = lambda factor: jax.lax.scan(lambda c, row: (c + factor * row, None), zeros, x)[0]  # noqa: E731
        return total(1.0) * total(2.0) * total(3.0), zeros

    x = jax.ShapeDtypeStruct((4, 8, 64), "float32")
    both = estimate(jax.jit(step), (x,), {}, "cpu")
    freed = {id(x) for step in both.profile.steps for x in step.freed}
    last = [x.array.producer for step in both.profile.steps for x in step.written if id(x) not in freed]
    assert "broadcast_in_dim" in [producer.kind for producer in last if producer]  # the zeros that are a result
    estimated = estimate(jax.jit(lambda x: step(x)[0]), (x,), {}, "cpu")
    filled = [step.kernel for step in estimated.profile.steps if not (step.kernel.reads or step.kernel.computes)]
    assert [x.array.local for kernel in filled for x in kernel.writes] == 3 * [(8, 64)]
    assert estimated.profile.peak >= 3 * 8 * 64 * 4


def test_values_behind_a_barrier_are_computed_after_all_of_its_operands_on_cpus():
    """The values that are computed again are stored for one layer at a time, not from the start."""
    alive = residual_stream(4, "cpu", wrap=jax.checkpoint).profile.alive
    kinds = [x.array.producer.kind for x in alive if x.phase == "backward" and x.array.producer]
    assert kinds and kinds.count("tanh") <= 1
