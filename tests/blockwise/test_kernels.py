"""Which attentions a kernel computes, by their equations; its results on CPUs; the calls for GPUs and TPUs."""

import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh import jax_compat
from flax_mesh.blockwise import transform
from flax_mesh.blockwise.masks import mask
from flax_mesh.errors import ConfigError
from flax_mesh.kernels import EVERY, KERNELS, Need, gpu_problem, misfit
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.step.state import abstract_train_state, init_train_state
from flax_mesh.step.step import make_train_step
from tests.blockwise.attentions import (
    CASES,
    IDS,
    LENGTH,
    assert_near,
    cast,
    distance,
    masked,
    mesh_of,
    operands,
    with_scores,
)
from tests.blockwise.compare import largest_square, rewritten, with_kernel
from tests.blockwise.model import RULES, batch_of, loss_fn, make
from tests.blockwise.programs import PROGRAMS, by_hand

SPLASH = {"both sides", "soft cap", "documents", "padding", "sinks"}  # that only splash attention computes
FAST = {("cudnn", "lengths"), ("splash", "sinks")}
OF_BOTH = [("splash", name) for name in CASES] + [("cudnn", name) for name in CASES if name not in SPLASH]
OF_PROGRAMS = """full causal window additive_mask grouped_queries grouped_queries_merged exp_by_hand cross of_jax
    of_jax_window vmapped of_nnx""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    ("kernel", "name"), [x if x in FAST else pytest.param(*x, marks=pytest.mark.slow) for x in OF_BOTH]
)
def test_a_kernel_is_as_near_to_float64_as_the_program_as_written(kernel, name):
    fn, args, seen = CASES[name]
    args = cast(args, jnp.bfloat16)
    (line,) = rewritten(fn, args, kernel).lines
    assert f", {KERNELS[kernel].title}, {seen}, probabilities in" in line
    assert_near(fn, with_kernel(fn, kernel), args)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PROGRAMS)
def test_the_programs_in_a_kernel_are_as_near_to_float64_as_they_are_written(name):
    fn, args = PROGRAMS[name]()
    assert_near(fn, with_kernel(fn, "cudnn", 22), cast(args, jnp.bfloat16))


def one_more(see: Callable[..., Any]) -> Callable[[Any], Any]:
    """A mask with one element more than the keys that a query sees."""
    return lambda s: jnp.where(
        see(distance(s)) | ((jnp.arange(s.shape[-2])[:, None] == 70) & (jnp.arange(s.shape[-1]) == 101)), s, -1e30
    )


NO_KERNEL = {
    "one element more": (one_more(lambda d: d >= 0), "its mask is neither causal nor a window"),
    "one element less": (
        lambda s: jnp.where((distance(s) == 3) & (jnp.arange(s.shape[-1]) == 90), -1e30, masked(lambda d: d >= 0)(s)),
        "its mask is neither causal nor a window",
    ),
    "a window that grows": (
        lambda s: jnp.where((distance(s) >= 0) & (distance(s) <= 20 + (jnp.arange(s.shape[-1]) > 64)), s, -1e30),
        "its mask is neither causal nor a window",
    ),
    "a key before the first": (masked(lambda d: d > 0), "a query sees no key"),
    "a mask that sets scores to 0": (masked(lambda d: d >= 0, 0.0), "numbers are added to its scores"),
    "a mask that is not low": (masked(lambda d: d >= 0, -100.0), "numbers are added to its scores"),
    "a capped mask": (lambda s: 50 * jnp.tanh(masked(lambda d: d >= 0)(s) / 50), "its scores are changed by tanh"),
    "a scale that grows": (lambda s: s * (1 + jnp.arange(s.shape[-1])), "its scores are multiplied by an array"),
    "a scale per head": (
        lambda s: s * jnp.asarray([0.3, 0.31], s.dtype)[:, None, None],
        "its scores are multiplied by an array",
    ),
    "a negative scale": (lambda s: s * -0.3, "its scores are multiplied by an array"),
    "numbers by distance": (lambda s: s - 0.1 * abs(distance(s)), "numbers are added to its scores"),
    "another function": (jnp.sin, "its scores are changed by sin"),
    "a gradient that stops": (jax.lax.stop_gradient, "its scores are changed by stop_gradient"),
    "two caps": (lambda s: 5 * jnp.tanh(jnp.tanh(s / 5)), "its scores are changed by tanh"),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NO_KERNEL)
def test_other_equations_are_no_kernel_and_the_line_has_the_reason(name, kernel):
    change, reason = NO_KERNEL[name]
    (line,) = rewritten(with_scores(change), cast(operands(), jnp.bfloat16), kernel).lines
    assert line.endswith(f" blocks; no kernel: {reason}")


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        (
            lambda s, bias: s + bias,
            np.ones((2, 2, LENGTH, LENGTH), np.float32),
            "an array is added, which may need a gradient",
        ),
        (lambda s, scale: s * scale, np.float32(2), "its scores are multiplied by an array"),
        (
            lambda s, x: jnp.where(x[:, None, :, None] == x[:, None, None, :] + 1, s, -1e9),
            IDS,
            "its mask compares different arrays",
        ),
        (
            lambda s, x: jnp.where((x[:, None, :, None] == x[:, None, None, :]) | (distance(s) == 0), s, -1e9),
            IDS,
            "its mask depends on data other than ids of documents or padding",
        ),
    ],
    ids="bias scale next_document documents_and_more".split(),  # noqa: SIM905
)
def test_arrays_of_the_program_are_no_kernel(change, given, reason):
    fn = lambda q, k, v, x: by_hand(q, k, v, lambda s: change(s, x))  # noqa: E731
    (line,) = rewritten(fn, (*operands(), given), "splash").lines
    assert line.endswith(f"; no kernel: {reason}")


def test_a_line_has_the_property_that_the_kernel_lacks():
    fn, args, _ = CASES["causal"]
    found = {
        rewritten(fn, cast(operands(length=length), dtype), kernel, 40).lines[0].rpartition(": ")[2]
        for kernel, dtype, length in (
            ("cudnn", jnp.float32, 128),
            ("splash", jnp.float16, 128),
            ("splash", jnp.float32, 96),
        )
    }
    for name in ("documents", "padding", "sinks"):
        fn, args, _ = CASES[name]
        found.add(rewritten(fn, cast(args, jnp.bfloat16), "cudnn").lines[0].rpartition(": ")[2])
    assert found == {
        "cuDNN needs bfloat16 or float16, got float32",
        "splash attention needs bfloat16 or float32, got float16",
        "splash attention needs a length that is a multiple of 128, got 96",
        "cuDNN needs attention within documents to be in blocks",
        "cuDNN needs padding without a window",
        "cuDNN needs scores without a sink",
    }


@pytest.mark.parametrize(("capability", "problem"), [("7.5", "8.0 (Ampere), got 7.5"), ("8.0", ""), ("10.3", "")])
def test_gpus_before_ampere_have_no_kernel(capability, problem, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert gpu_problem().endswith(problem) and bool(gpu_problem()) == bool(problem)


def test_splash_attention_to_every_key_needs_queries_on_one_device():
    need = Need(("float32",) * 3, 1024, 1024, (64, 64), EVERY, 0.0, False, parts=2)
    assert misfit("splash", need) == "splash attention needs queries on one device to attend to every key, got 2 parts"
    assert not misfit("splash", need._replace(band=(None, 0))) and not misfit("splash", need._replace(parts=1))


def test_a_mistake_in_the_band_is_found_by_the_check_of_the_mask(monkeypatch):
    """The band is read from the first and the last query; all others are checked."""
    fn = with_scores(one_more(lambda d: d >= 0))
    monkeypatch.setattr(mask._Mask, "check", lambda *_: None)
    assert "causal" in rewritten(fn, cast(operands(), jnp.bfloat16), "cudnn").lines[0]


# Without devices


def test_splash_attention_is_mapped_over_devices_that_split_none_of_its_dims():
    """The compiler for TPUs refuses a kernel of Pallas that is not."""
    fn, args, _ = CASES["causal"]
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", tp=2)), jax_compat.kernels_without_devices():
        jaxpr = jax.make_jaxpr(with_kernel(fn, "splash", platform="tpu"))(*cast(args, jnp.bfloat16))
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert "shard_map" in names and not names & {"pallas_call", "custom_vjp_call"}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("causal", "MaskType.CAUSAL 0"),
        ("window", "MaskType.CAUSAL 20"),
        ("every key", "MaskType.NO_MASK 0"),
        ("lengths", "MaskType.PADDING_CAUSAL 0"),
    ],
)
def test_the_program_for_gpus_has_calls_of_cudnn_with_the_mask(name, call):
    fn, args, _ = CASES[name]
    args, mesh = cast(args, jnp.bfloat16), mesh_of("gpu", dp=1)
    with jax.sharding.use_abstract_mesh(mesh), jax_compat.kernels_without_devices():
        fused = with_kernel(fn, "cudnn", platform="gpu")
        loss = lambda *x: fused(*x).astype(jnp.float32).sum()  # noqa: E731
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*args)
    text = jax_compat.lower_without_devices(traced, "cuda").as_text()
    found = re.findall(rf'@{jax_compat.ATTENTION}.*backend_config = "([^"]*)"', text)
    assert found == [f"forward {call}", f"backward {call}"]
    assert largest_square(traced.jaxpr, LENGTH) == 0


@cache
def layout_on(mesh):
    return abstract_train_state(make, fm.abstract_state(make, mesh, RULES))


def traced_step(platform, sizes, **options):
    layout = layout_on(mesh_of(platform, **sizes))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(1024))
    step = make_train_step(loss_fn, layout, **options)
    with jax_compat.kernels_without_devices():
        return step, step.trace(layout, shapes)


def test_a_step_for_tpus_has_splash_attention_on_all_axes():
    step, traced = traced_step("tpu", {"dp": 2, "sp": 2, "tp": 2})
    placed = "dim 0 over dp, dim 1 over tp, queries over sp"
    kernel = "splash attention, causal, probabilities in float32"
    assert step.attention_lines == (f"attention: 2 attentions, q 1024 k 1024, {kernel}, {placed}",)
    assert largest_square(traced.jaxpr, 1024) == 0
    assert jax_compat.lower_without_devices(traced, "tpu").as_text().count(jax_compat.KERNEL) == 3  # of both layers


def test_splash_attention_of_rows_on_unknown_devices_is_computed_on_every_device():
    fn, args, _ = CASES["causal"]
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", dp=2)):  # XLA cannot split the kernel
        (line,) = rewritten(fn, args, "splash", platform="tpu").lines
    assert line.endswith("splash attention, causal, probabilities in float32, all of it on every device")


def test_auto_says_why_there_is_no_kernel():
    step, _ = traced_step("gpu", {"dp": 1})
    assert re.fullmatch(
        r"attention: as written, because its scores take .* per device, and auto allows .*; no kernel: cuDNN needs "
        "bfloat16 or float16, got float32",
        *step.attention_lines,
    )


def test_where_the_platform_is_not_known_the_lines_have_the_choice_on_each():
    step, _ = traced_step("", {"dp": 2})
    first, *lines = [line.removeprefix("attention: ") for line in step.attention_lines]
    assert first.startswith("as written, because its scores take") and [x[:7] for x in lines] == ["on TPUs", "on GPUs"]
    assert "splash attention, causal" in lines[0] and lines[1].endswith("cuDNN needs bfloat16 or float16, got float32")


def test_forms_of_an_earlier_step_are_kept_where_auto_would_choose_others(monkeypatch):
    plain, splash, blocks = ("as_written",) * 2, ("splash",) * 2, ("as_written", "blockwise")
    written = str(traced_step("tpu", {"dp": 1}, attention="as_written")[1].jaxpr)
    for forms in (plain, blocks):
        step, traced = traced_step("tpu", {"dp": 1}, attention=forms)
        assert step.attention_forms == forms and (str(traced.jaxpr) == written) == (forms == plain)
        assert step.attention_lines[0].endswith("; auto would choose 2 attentions by splash attention here")
    assert traced_step("tpu", {"dp": 1})[0].attention_forms == splash
    monkeypatch.setattr(transform, "OF_PLATFORM", {})  # a version without kernels
    assert traced_step("tpu", {"dp": 1})[0].attention_forms == plain
    assert traced_step("tpu", {"dp": 1}, attention=splash)[0].attention_forms == splash


@pytest.mark.parametrize(
    ("platform", "forms", "problem"),
    [
        ("gpu", ("splash",) * 2, "2 attentions by splash attention, which cannot be kept, because splash attention ne"),
        ("gpu", ("cudnn",) * 2, "2 attentions by cuDNN, which cannot be kept, because cuDNN needs bfloat16 or float16"),
        ("gpu", ("blockwise",), "1 attention in blocks, which cannot be kept, because the program has others"),
    ],
)
def test_where_forms_cannot_be_kept_a_line_names_both(platform, forms, problem):
    step, _ = traced_step(platform, {"dp": 1}, attention=forms)
    assert step.attention_forms == ("as_written",) * 2
    assert step.attention_lines[0].startswith(f"attention: the run began with {problem}")
    assert step.attention_lines[0].endswith("; auto chooses 2 attentions as written here")


def test_a_form_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigError, match=r"none of auto, .*, and no tuple of splash, cudnn, blockwise, as_written"):
        traced_step("gpu", {"dp": 1}, attention=("flash",))


def test_kernel_is_an_error_for_an_attention_that_has_none():
    with pytest.raises(ConfigError, match=r"attention=kernel needs a kernel for every attention[\s\S]*got float32"):
        traced_step("gpu", {"dp": 1}, attention="kernel")


def decoder_step(platform, sequence=1024, step: Any = "auto", **settings: Any):
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "sliding_window": 300}
    config = DecoderConfig(**sizes, dtype="bfloat16", **settings)

    def make():
        model = make_decoder(config, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    layout = abstract_train_state(make, fm.abstract_state(make, mesh_of(platform, fsdp=1)))
    tokens = jax.ShapeDtypeStruct((2, sequence), jnp.int32)
    with jax_compat.kernels_without_devices():
        step = make_train_step(next_token_loss, layout, attention=step)
        return step, step.trace(layout, {"inputs": tokens, "targets": tokens})


def test_the_attention_of_a_decoder_by_xla_becomes_the_calls_of_its_own_kernel():
    calls = []
    for attention, option in (("cudnn", "as_written"), ("xla", "auto")):
        traced = decoder_step("gpu", step=option, attention=attention)[1]
        lines = jax_compat.lower_without_devices(traced, "cuda").as_text().splitlines()
        calls.append([re.sub(r"%\w+", "", line) for line in lines if f"@{jax_compat.ATTENTION}" in line])
    assert len(calls[0]) == 2 and "MaskType.CAUSAL 300" in calls[0][0] and calls[0] == calls[1]


def test_a_decoder_with_a_soft_cap_has_splash_attention():
    step, _ = decoder_step("tpu", attention_softcap=50.0)
    (line,) = step.attention_lines
    assert line.endswith("splash attention, causal in a window of 300, capped at 50, probabilities in float32")


@pytest.mark.slow
def test_losses_in_a_kernel_on_a_mesh_are_those_of_the_program_as_written():
    mesh, batch = fm.create_mesh((2, 2, 2), ("dp", "sp", "tp")), batch_of(512, rows=2, documents=3)

    def losses(attention):
        state = init_train_state(make, fm.abstract_state(make, mesh, RULES))
        step = make_train_step(loss_fn, state, attention=attention)
        found = []
        for _ in range(2):
            state, metrics = step(state, batch)
            found += [float(metrics["loss"]), float(metrics["grad_norm"])]
        return found, step.attention_lines

    found, (line,) = losses("kernel")
    assert line.endswith(
        "splash attention, causal, within documents, probabilities in float32, interpreted: slow, for tests, dim 0 "
        "over dp, dim 1 over tp, queries over sp"
    )
    np.testing.assert_allclose(found, losses("as_written")[0], rtol=1e-5)
