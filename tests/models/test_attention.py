"""Kernels of attention: which one is chosen and why, and splash attention equal to XLA's.

On CPUs splash attention is interpreted. `tests/plan/test_compile.py` compiles it for TPUs.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from flax_mesh import PartitionAxis, abstract_state, create_mesh
from flax_mesh.errors import ConfigError
from flax_mesh.jax_compat import kernels_without_devices
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.models.attention import attend
from flax_mesh.models.ops.kernels import Call, choose, misfits
from flax_mesh.sharding.abstract import abstract_split
from flax_mesh.train import DataConfig, MeshConfig, RunConfig, TrainConfig, train
from flax_mesh.tree import named_leaves
from tests.models.reference import SMALL, make_mesh, numpy_decoder, small, tokens_of, with_random_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOLERANCE = 1e-5  # of float32
B, S, H, K, C = 2, 256, 4, 2, 16
LONG = dataclasses.replace(SMALL, num_layers=1, num_heads=4, num_kv_heads=2)
HALF = {"dtype": "bfloat16", "head_dim": 128}


def mesh_of(platform: str = "", **sizes: int) -> AbstractMesh:
    device = AbstractDevice(platform, None, platform) if platform else None
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), abstract_device=device)


def kv_heads_over(axis: str | None) -> dict[str, Any]:
    return {"axes": PartitionAxis(extra={"kv_heads": axis})}


CHOICES = [  # platform, sizes of the mesh, sequence length, other fields of Call -> kernel, reason
    ("tpu", {"fsdp": 8}, 4096, HALF, "splash", "the devices are TPUs"),
    ("tpu", {"fsdp": 8}, 4096, HALF | {"dtype": "float32", "head_dim": 12}, "splash", "the devices are TPUs"),
    ("tpu", {"fsdp": 8}, 4096, HALF | {"has_segments": True}, "splash", "the devices are TPUs"),
    ("tpu", {"fsdp": 2, "sp": 4}, 4096, HALF, "splash", "the devices are TPUs"),
    ("tpu", {"fsdp": 8}, None, HALF, "splash", "the devices are TPUs"),
    ("tpu", {"fsdp": 8}, 4096, HALF | {"dtype": "float16"}, "xla", "dtype bfloat16 or float32, got float16"),
    ("tpu", {"fsdp": 8}, 4000, HALF, "xla", "needs a sequence length that is a multiple of 128, got 4000"),
    ("tpu", {"sp": 4}, 384, HALF, "xla", r"that is a multiple of 512 \(128 \* sp=4\), got 384"),
    ("tpu", {"fsdp": 8}, 1, HALF | {"keys": 4096}, "xla", "needs as many queries as keys, got 1 and 4096"),
    ("tpu", {"tp": 8}, 4096, HALF | {"axes": PartitionAxis(attention_dim_axis="tp")}, "xla", "not split, got tp=8"),
    ("tpu", {"tp": 8}, 4096, HALF | kv_heads_over(None), "splash", "the devices are TPUs"),
    ("tpu", {"dp": 2, "tp": 4}, 4096, HALF | kv_heads_over("dp"), "xla", "and kv_heads dp"),
    ("gpu", {"fsdp": 8}, 4096, HALF, "cudnn", "the devices are GPUs"),
    ("gpu", {"fsdp": 8}, 100, HALF | {"dtype": "float16"}, "cudnn", "the devices are GPUs"),
    ("gpu", {"fsdp": 8}, 4096, HALF | {"dtype": "float32"}, "xla", "cudnn needs model.dtype bfloat16 or float16, got"),
    ("gpu", {"fsdp": 8}, 4096, HALF | {"head_dim": 20}, "xla", "multiple of 8, at most 256, got 20"),
    ("gpu", {"fsdp": 8}, 4096, HALF | {"head_dim": 256}, "xla", "needs a Hopper GPU for a head dim above 128"),
    ("gpu", {"fsdp": 2, "sp": 4}, 4096, HALF, "xla", "needs complete sequences, got sequences split over sp=4"),
    ("gpu", {"fsdp": 8}, 4096, HALF | {"has_segments": True}, "xla", "needs batches without segment_ids"),
    ("cpu", {"fsdp": 8}, 4096, HALF, "xla", "the devices are CPUs"),
    ("", {"fsdp": 8}, 4096, HALF, "xla", "the devices are not known"),
]


@pytest.mark.parametrize("row", CHOICES, ids=lambda row: f"{row[0] or 'unknown'}-{row[4]}-{row[5][-24:]}")
def test_auto_chooses_the_kernel_of_the_platform_where_it_fits(row):
    platform, sizes, length, fields, kernel, reason = row
    lengths = {"queries": length, "keys": length}
    given: dict[str, Any] = {"axes": PartitionAxis(), **lengths, **fields}
    found, why = choose(Call(mesh=mesh_of(platform, **sizes), platform=platform, **given))
    assert found == kernel and re.search(reason, why)


def test_unknown_properties_fit():
    call = Call("bfloat16", 128, PartitionAxis())
    assert [misfits(kernel, call) for kernel in ("xla", "cudnn", "splash")] == [[], [], []]


DTYPE = "xla{}, because cudnn needs model.dtype bfloat16 or float16, got float32"
NOTES = [  # attention, platform -> the line that train, explain and plan print, after "attention: "
    ("auto", "cpu", "xla, because the devices are CPUs (model.attention=auto)"),
    ("auto", "tpu", "splash, because the devices are TPUs (model.attention=auto)"),
    ("auto", "gpu", f"{DTYPE.format('')} (model.attention=auto)"),
    ("auto", "", f"splash on TPUs; {DTYPE.format(' on GPUs')}; xla on others (model.attention=auto)"),
    ("splash", "cpu", "splash (model.attention=splash), interpreted on CPUs: slow, for tests"),
    ("splash", "tpu", "splash (model.attention=splash)"),
    ("cudnn", "gpu", "cudnn (model.attention=cudnn)"),
]


@pytest.mark.parametrize(("attention", "platform", "line"), NOTES)
def test_the_choice_is_one_line(attention, platform, line):
    config = dataclasses.replace(SMALL, attention=attention)
    assert config.notes_on(mesh_of(platform, fsdp=8), 128) == [f"attention: {line}"]
    half = dataclasses.replace(config, dtype="bfloat16")
    if (attention, platform) == ("auto", "gpu"):
        what = "cudnn, xla for batches with segment_ids, because the devices are GPUs"
        assert half.notes_on(mesh_of(platform, fsdp=8), 128) == [f"attention: {what} (model.attention=auto)"]
    assert dataclasses.replace(SMALL, attention="xla").notes_on(mesh_of(platform, fsdp=8), 128) == []


@pytest.mark.parametrize(
    ("platform", "without_cudnn", "found"),
    [
        ("tpu", False, {"splash_mha_fwd"}),
        ("gpu", False, {"dot_product_attention_fwd"}),
        ("gpu", True, set()),  # a warning: JAX does not find cuDNN, or the GPU is too old
        ("cpu", False, set()),
        ("", False, set()),
    ],
)
def test_a_trace_has_the_kernel_of_the_platform_of_its_mesh(platform, without_cudnn, found):
    model = small(dtype="bfloat16", attention="auto")
    warning = pytest.warns(UserWarning, match=r"model.attention=auto uses xla, since cudnn cannot be traced here: .")
    around = warning if without_cudnn else kernels_without_devices()
    with around, jax.sharding.use_abstract_mesh(mesh_of(platform, fsdp=2)):
        text = str(jax.make_jaxpr(lambda tokens: model(tokens))(tokens_of(2, 128)))
    assert {name for name in ("splash_mha_fwd", "dot_product_attention_fwd") if name in text} == found


def test_a_kernel_that_does_not_fit_is_an_error_with_every_reason():
    config = DecoderConfig(attention="cudnn", head_dim=12)
    assert [line.partition(" needs ")[2] for line in config.problems()] == [
        "model.dtype bfloat16 or float16, got float32",
        "a model.head_dim that is a multiple of 8, at most 256, got 12",
    ]
    half = DecoderConfig(attention="splash", dtype="float16")
    assert half.problems() == ["model.attention=splash needs model.dtype bfloat16 or float32, got float16"]
    config = dataclasses.replace(half, dtype="bfloat16", axes=PartitionAxis(attention_dim_axis="tp"))
    mesh = create_mesh((1, 2, 1, 2, 2))
    assert not config.problems() and config.problems_on(mesh, 128) == [
        "model.attention=splash needs head dims that are not split, got tp=2; use model.attention=xla",
        "model.attention=splash needs a sequence length that is a multiple of 256 (128 * sp=2), got 128; use "
        "model.attention=xla, or such a sequence length",
    ]
    for attention in ("auto", "xla"):
        assert dataclasses.replace(SMALL, attention=attention).problems_on(mesh, 100) == []
    config = dataclasses.replace(SMALL, attention="cudnn", dtype="bfloat16")
    assert not config.problems() and not config.problems_on(AbstractMesh((2, 2), ("fsdp", "tp")))  # unknown platform
    assert config.problems_on(mesh) == [
        "model.attention=cudnn needs GPUs, got cpu; use model.attention=xla",
        "model.attention=cudnn needs complete sequences, got sequences split over sp=2; use model.attention=xla, or "
        "another mesh.shape",
    ]


CUDNN = {"attention": "cudnn", "dtype": "bfloat16"}
NO_IDS, WITH_IDS = {}, {"segment_ids": np.zeros((2, 12), np.int32)}


@pytest.mark.parametrize(
    ("change", "ids", "message"),
    [
        ({"attention": "splash"}, NO_IDS, "splash needs a sequence length that is a multiple of 128, got 12; use "),
        (CUDNN, NO_IDS, "model.attention=cudnn cannot be traced here: .*Use model.attention=xla"),
        (CUDNN, WITH_IDS, "cudnn needs batches without segment_ids, got some; use model.attention=xla"),
    ],
)
def test_a_call_that_does_not_fit_its_kernel_is_an_error(change, ids, message):
    model = small(**change)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda tokens: model(tokens, **ids), tokens_of())
    if change == {"attention": "splash"}:  # in generation it uses XLA's
        drawn = jax.eval_shape(lambda tokens: model(tokens, mode="decode"), tokens_of())
        assert drawn.shape == (2, 12, 64)


@pytest.mark.parametrize(
    ("segment_ids", "found"),
    [
        (np.zeros((2, 11), np.int32), r"i32\[2,11\]"),
        (np.zeros((2, 12), np.float32), r"f32\[2,12\]"),
        ([[0] * 12] * 2, "list"),
    ],
)
def test_wrong_segment_ids_are_an_error_in_one_line(segment_ids, found):
    batch: Any = {"inputs": tokens_of(), "targets": tokens_of(), "segment_ids": segment_ids}
    with pytest.raises(ConfigError, match=rf"^segment_ids must be integers of the shape of the tokens, .*got {found}$"):
        next_token_loss(small(), batch)


# Segments


def test_packed_documents_have_the_logits_of_each_document_alone():
    model, tokens = small(), tokens_of(1, 12)
    ids = np.array([[3] * 5 + [1] * 4 + [3] * 3], np.int32)  # the third document has the id of the first
    packed = np.asarray(jax.jit(lambda tokens, ids: model(tokens, segment_ids=ids))(tokens, ids)[0])
    alone = [numpy_decoder(model, tokens[:, part])[0] for part in (slice(0, 5), slice(5, 9), slice(9, 12))]
    for part, document in ((slice(0, 5), alone[0]), (slice(5, 9), alone[1])):
        np.testing.assert_allclose(packed[part], document, atol=2e-5, rtol=1e-4)
    assert np.abs(packed[9:] - alone[2]).max() > 1e-3  # it attends to the first one


# Splash attention


def arrays(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    q, k, v, weights = (random.normal(size=(B, S, heads, C)) for heads in (H, K, K, H))
    ids = np.sort(random.integers(0, 4, (B, S))).astype(np.int32)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(ids), weights


def value_and_gradients(kernel: str, window: int, segments: bool, dtype: Any = jnp.float32, mesh: Any = None) -> Any:
    q, k, v, ids, weights = arrays(dtype)

    def loss(q: Any, k: Any, v: Any) -> Any:
        y = attend(kernel, q, k, v, ids if segments else None, DecoderConfig(), window).astype(jnp.float32)
        return (y * weights).sum(), y

    call = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        grads, y = call(q, k, v)
    return [np.asarray(x, np.float32) for x in (y, *grads)]


def distance(one: Any, other: Any) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("window", "segments"), [(0, False), (40, False), (0, True), (40, True)])
def test_splash_attention_equals_xla(window, segments):
    """Values and gradients, with grouped queries: two heads of queries per head of keys."""
    found = value_and_gradients("splash", window, segments)
    assert distance(found, value_and_gradients("xla", window, segments)) < TOLERANCE
    wrong = (window + 1, segments) if window else (0, not segments)  # a mistake that must be seen
    assert distance(found, value_and_gradients("xla", *wrong)) > 100 * TOLERANCE


@pytest.mark.parametrize("shape", [(2, 1, 1, 2, 2), pytest.param((1, 1, 4, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_splash_attention_on_a_mesh_equals_one_device(shape):
    """Rows, heads and queries are split; ep splits none of them, and the rows are too few for it."""
    found = value_and_gradients("splash", 130, True, mesh=create_mesh(shape))
    assert distance(found, value_and_gradients("xla", 130, True)) < TOLERANCE


def gradients(config: DecoderConfig, mesh: Any = None) -> Any:
    graphdef, state = nnx.split(small(config))
    ids = np.arange(4 * 256).reshape(4, 256) // 100
    batch: Any = {"inputs": tokens_of(4, 256), "targets": tokens_of(4, 256, seed=1), "segment_ids": ids}
    compute = jax.jit(jax.grad(lambda state, batch: next_token_loss(nnx.merge(graphdef, state), batch)[0]))
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        return named_leaves(compute(state, batch))


def test_copies_of_key_value_heads_that_tp_does_not_divide_leave_the_query_heads_split():
    """With the loss and the gradients of one device, also for a vocabulary that is not split."""
    axes = PartitionAxis(hidden_state_axis=None, vocab_axis=None)
    sizes = {"num_layers": 1, "num_heads": 12, "num_kv_heads": 3, "vocab_size": 65}
    make = lambda: make_decoder(dataclasses.replace(SMALL, axes=axes, **sizes), nnx.Rngs(0))  # noqa: E731
    batch: Any = {"inputs": tokens_of(2, 32), "targets": tokens_of(2, 32, seed=1)}
    graphdef, state = nnx.split(with_random_parameters(make))

    def run(graphdef: Any, state: Any) -> tuple[Any, float]:
        compute = jax.jit(jax.value_and_grad(lambda state: next_token_loss(nnx.merge(graphdef, state), batch)[0]))
        program = compute.lower(state).compile()
        costs: Any = program.cost_analysis()
        return program(state), costs["flops"]

    expected, flops = run(graphdef, state)
    line = "^model.num_kv_heads=3 is not divisible by tp=4, whose devices have copies of the key-value heads; query"
    with pytest.warns(UserWarning, match=line), jax.set_mesh(mesh := make_mesh(tp=4)):
        layouts = abstract_state(make, mesh)
        assert layouts["layers"][0]["attention"]["k"]["kernel"].sharding.is_fully_replicated
        placed = jax.tree.map(lambda x, layout: jax.device_put(x, layout.sharding), state, layouts)
        found, of_device = run(abstract_split(make, mesh)[0], placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), found, expected)
    # The logits are not split, and without copies all query heads would be gathered.
    assert flops / 4 < of_device < flops / 2


DECODERS = [  # model, shape of the mesh, axis types
    ({"scan": True, "sliding_window": 150, "remat": "attention"}, (2, 2, 1, 2, 1), "explicit"),
    ({"remat": "attention+mlp_up", "scan": True}, (2, 1, 1, 2, 2), "auto"),
    ({"remat": "dots_saveable"}, (1, 1, 4, 2, 1), "explicit"),
    ({"remat": "attention@host", "scan": True}, (1, 1, 1, 1, 2), "auto"),
    ({"num_heads": 6, "num_kv_heads": 3, "axes": PartitionAxis(extra={"kv_heads": None})}, (2, 1, 1, 2, 1), "auto"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "shape", "axis_types"), DECODERS)
def test_a_decoder_with_splash_attention_has_the_gradients_of_one_with_xla(change, shape, axis_types):
    """With packed batches, remat, lists and stacks of layers, on all meshes."""
    config = dataclasses.replace(LONG, num_layers=2, **change)
    mesh = create_mesh(shape, axis_types=axis_types, devices=jax.devices()[: math.prod(shape)])
    found = gradients(dataclasses.replace(config, attention="splash"), mesh)
    wanted = gradients(dataclasses.replace(config, remat="none"))
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max(), rtol=1e-4, err_msg=path)


def kernels_in(jaxpr: Any) -> Iterator[str]:
    """Without those whose results are not read: with JAX 0.10, only XLA removes them."""
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            if any(id(v) in read for v in eqn.outvars):
                yield eqn.params["name"].split("_")[2]
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from kernels_in(inner)


@pytest.mark.parametrize("remat", ["none", "attention", "dots_saveable", "full"])
def test_policies_but_full_save_the_output_of_splash_attention_and_do_not_compute_it_again(remat):
    graphdef, state = nnx.split(small(num_layers=1, attention="splash", remat=remat))
    batch: Any = {"inputs": tokens_of(1, 128), "targets": tokens_of(1, 128)}
    found = jax.make_jaxpr(jax.grad(lambda s: next_token_loss(nnx.merge(graphdef, s), batch)[0]))(state)
    again = ["fwd"] if remat == "full" else []
    assert sorted(kernels_in(found.jaxpr)) == ["dkv", "dq", "fwd", *again]


def test_a_length_that_does_not_fit_is_an_error_before_a_run(tmp_path):
    """With batches of the recipe, whose length is not known before, it is one of the trace."""
    config = TrainConfig(
        make_decoder,
        next_token_loss,
        dataclasses.replace(SMALL, vocab_size=256, attention="splash"),
        mesh=MeshConfig(shape="fsdp:4,tp:2"),
        data=DataConfig(batch_size=4, sequence_length=96),
        run=RunConfig(steps=2, folder=str(tmp_path), platform="cpu"),
    )
    batch = {"inputs": tokens_of(4), "targets": tokens_of(4)}
    own = dataclasses.replace(config, make_batches=lambda _: lambda step: batch)
    message = "splash needs a sequence length that is a multiple of 128, got"
    for each, length in ((own, 12), (config, 96)):
        with pytest.raises(ConfigError, match=f"{message} {length}; use"):
            train(each)
