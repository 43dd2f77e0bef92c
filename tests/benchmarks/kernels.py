"""Which form the attention of each program has on GPUs and on TPUs, and why: traced only, without devices.

Programs of the tests, random chains, models of the tests in the styles of other projects, and models of Flax's
examples, Tunix and bonsai where they can be imported (their folders in PYTHONPATH; a row has the reason if they
cannot). Arrays of float32 are bfloat16 here, so that cuDNN can compute them; the equations are unchanged.

    python -m tests.benchmarks kernels [--sources programs,chains] [--chains 300] [--length 1024]
"""

import contextlib
import functools
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
from flax import nnx
from hypothesis import HealthCheck, Phase

from flax_mesh import jax_compat
from flax_mesh.blockwise import transform
from flax_mesh.blockwise.traced import find
from flax_mesh.kernels import OF_PLATFORM
from flax_mesh.program.program import program_of
from tests.benchmarks.common.report import options, report, use_cpu
from tests.blockwise.chains import chains
from tests.blockwise.chains import program_of as program_of_chain
from tests.blockwise.programs import PROGRAMS
from tests.mpmd.zoo.models import BY_NAME
from tests.sharding.foreign.styles import BY_NAME as STYLES
from tests.sharding.foreign.styles import context_of, mesh_of

Traced = tuple[Callable[..., Any], Sequence[Any]]
ROWS = 2


def narrow(x: Any) -> Any:
    """The shape and dtype of an array, in bfloat16 if it has float32."""
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct(aval.shape, jnp.bfloat16 if aval.dtype == jnp.float32 else aval.dtype)


def forms(fn: Callable[..., Any], args: Sequence[Any], platform: str, block: int) -> list[str]:
    """One text for each kind of attention, as the lines of a run have it, and for each array that stays."""
    try:
        closed = jax.make_jaxpr(fn)(*jax.tree.map(narrow, tuple(args)))
    except TypeError:  # a model that states its dtypes
        closed = jax.make_jaxpr(fn)(*args)
    program, layouts = program_of(closed), [None] * len(closed.jaxpr.invars)
    with jax_compat.kernels_without_devices():
        found = transform.rewrite(
            program, layouts, lambda _: None, block, kernel=OF_PLATFORM[platform], platform=platform
        )
    return [*found.lines, *(line for line in found.stays if "stays" in line)]


def short(line: str) -> str:
    """The kernel and its mask, or the reason why there is none."""
    if "; no kernel: " in line:
        return f"blocks: {line.rpartition('; no kernel: ')[2]}"
    if "stays: " in line:
        return f"as written: {line.rpartition('stays: ')[2]}"
    return re.sub(r"^.* k \d+, |, probabilities.*$", "", line)


# The programs of the tests


def of_programs(given: Any) -> Iterator[tuple[str, Callable[[], Traced], int]]:
    yield from ((name, make, 22) for name, make in PROGRAMS.items())


def of_chains(given: Any) -> Iterator[tuple[str, Callable[[], Traced], int]]:
    drawn: list[Any] = []
    quickly = {"phases": [Phase.generate], "suppress_health_check": [*HealthCheck], "database": None}

    @hypothesis.settings(max_examples=given.chains, derandomize=True, deadline=None, **quickly)
    @hypothesis.given(chains())
    def draw(chain: Any) -> None:
        drawn.append(chain)

    draw()
    for chain in drawn:
        yield str(tuple(chain)), functools.partial(program_of_chain, chain), chain.block


def of_model(make: Callable[[], Any], loss: Callable[..., Any], *batch: Any, wrt: Any = nnx.Param) -> Traced:
    """The loss of an abstract model as a function of its parameters and of the batch."""
    graphdef, params, others = nnx.split(nnx.eval_shape(make), wrt, ...)

    def fn(params: Any, others: Any, batch: Any) -> Any:
        result = loss(nnx.merge(graphdef, params, others), *batch)
        return result[0] if isinstance(result, tuple) else result

    return fn, (params, others, batch)


def of_tests(given: Any) -> Iterator[tuple[str, Callable[[], Traced], int]]:
    cases = {**BY_NAME, **{name: style.case for name, style in STYLES.items()}}
    for name, case in cases.items():
        yield name, lambda case=case: of_model(case.make, case.loss_fn, case.batch(4), wrt=case.wrt), 4


# Models of other projects, as their code is; small sizes


def tokens(given: Any) -> Any:
    return jax.ShapeDtypeStruct((ROWS, given.length), jnp.int32)


def decode(model: Any, tokens: Any) -> Any:
    """A causal decoder that takes its positions and its mask, (batch, queries, keys), as Gemma of Flax and Tunix do."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, at, None, jnp.broadcast_to(at[:, :, None] >= at[:, None], (*tokens.shape, tokens.shape[1])))[0]


SIZES = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
LLAMA = {**SIZES, "vocab_size": 64, "rope_theta": 10_000, "norm_eps": 1e-6}


def of_gemma(module: Any, given: Any, **more: Any) -> Traced:
    """Gemma 2: a soft cap, every other layer with a window."""
    kinds = module.AttentionType
    kinds = (kinds.LOCAL_SLIDING, kinds.GLOBAL)
    sizes = {"num_embed": 64, "final_logit_softcap": 30.0, "use_post_attn_norm": True, "use_post_ffw_norm": True}
    sizes |= {"attention_types": kinds, "attn_logits_soft_cap": 50.0, "sliding_window_size": 128}
    config = (getattr(module, "ModelConfig", None) or module.TransformerConfig)(**SIZES, **sizes, **more)
    make = getattr(module, "Gemma", None) or module.Transformer
    return of_model(lambda: make(config, rngs=nnx.Rngs(0)), decode, tokens(given))


def of_llama(module: Any, given: Any) -> Traced:
    name = next(x for x in ("Llama3", "Qwen2", "Qwen3") if hasattr(module, x))
    config = module.ModelConfig(**LLAMA)
    return of_model(lambda: getattr(module, name)(config, rngs=nnx.Rngs(0)), decode, tokens(given))


def of_linen(module: Any, given: Any, name: str, **sizes: Any) -> Traced:
    """A model of Flax's examples in Linen."""
    sizes = {"vocab_size": 64, "output_vocab_size": 64, "num_layers": 1, "deterministic": True, "max_len": 4096} | sizes
    known = module.TransformerConfig.__dataclass_fields__
    model = getattr(module, name)(module.TransformerConfig(**{k: x for k, x in sizes.items() if k in known}))
    inputs = [tokens(given)] * (2 if hasattr(module, "Encoder") and hasattr(module, "EncoderDecoder1DBlock") else 1)
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    if "train" in inspect.signature(type(model).__call__).parameters:
        rest = {"train": True, "rngs": keys}
        params = jax.eval_shape(lambda x: model.init(keys, inputs=x, train=True), *inputs)
        return lambda params, x: model.apply(params, inputs=x, **rest), (params, *inputs)
    return lambda params, *x: model.apply(params, *x, rngs=keys), (jax.eval_shape(model.init, keys, *inputs), *inputs)


def of_images(module: Any, given: Any, name: str, *shape: int, **sizes: Any) -> Traced:
    config = module.ModelConfig(**sizes)
    given = jax.ShapeDtypeStruct((ROWS, *shape), jnp.float32)
    rngs = {"rngs": nnx.Rngs(0)} if name.startswith("ViT") else {}
    loss = lambda model, x: jax.tree.leaves(model(x, **rngs))[0]  # noqa: E731
    return of_model(lambda: getattr(module, name)(config, rngs=nnx.Rngs(0)), loss, given)


def of_umt5(module: Any, given: Any) -> Traced:
    config = module.ModelConfig(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    loss = lambda model, x, y, mask: jax.tree.leaves(model(x, mask, y, mask))[0]  # noqa: E731
    made = lambda: module.UMT5Model(config, rngs=nnx.Rngs(0))  # noqa: E731
    return of_model(made, loss, *[tokens(given)] * 3)


GEMMA = "transformer", "transformer_cfg"  # of Flax's examples, whose folder is in PYTHONPATH
DINO = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
VIT = {"image_size": (512, 512), "patch_size": (16, 16), "num_channels": 3, "hidden_dim": 64, "mlp_dim": 64}
VIT |= {"attn_dropout_prob": 0.0, "dropout_prob": 0.0, "num_heads": 4, "eps": 1e-6, "num_layers": 1, "num_labels": 9}
JEPA = {"crop_size": 128, "frames_per_clip": 32, "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
JEPA |= {"num_pooler_layers": 1, "num_labels": 9}
# name -> (the modules, the function of them)
OTHERS: dict[str, tuple[tuple[str, ...], Callable[..., Traced]]] = {
    "Flax's examples: gemma": (GEMMA, of_gemma),
    "Flax's examples: lm1b": (("lm1b.models",), functools.partial(of_linen, name="TransformerLM")),
    "Flax's examples: lm1b, dropout": (
        ("lm1b.models",),
        functools.partial(of_linen, name="TransformerLM", deterministic=False),
    ),
    "Flax's examples: wmt": (("wmt.models",), functools.partial(of_linen, name="Transformer")),
    "Flax's examples: nlp_seq": (("nlp_seq.models",), functools.partial(of_linen, name="Transformer")),
    **{f"Tunix: {name}": ((f"tunix.models.{name}.model",), of_llama) for name in ("llama3", "qwen2", "qwen3")},
    "Tunix: gemma": (("tunix.models.gemma.model",), of_gemma),
    "bonsai: umt5": (("bonsai.models.umt5.modeling",), of_umt5),
    "bonsai: vit": (
        ("bonsai.models.vit.modeling",),
        lambda module, given: of_images(module, given, "ViTClassificationModel", 512, 512, 3, **VIT),
    ),
    "bonsai: dinov3": (
        ("bonsai.models.dinov3.modeling",),
        lambda module, given: of_images(module, given, "Dinov3ViTModel", 3, 512, 512, image_size=512, **DINO),
    ),
    "bonsai: vjepa2": (
        ("bonsai.models.vjepa2.modeling",),
        lambda module, given: of_images(module, given, "VJEPA2ForVideoClassification", 32, 128, 128, 3, **JEPA),
    ),
}


def of_others(given: Any) -> Iterator[tuple[str, Callable[[], Traced], int]]:
    for name, (modules, make) in OTHERS.items():

        def traced(modules: tuple[str, ...] = modules, make: Callable[..., Traced] = make) -> Traced:
            parts = [vars(importlib.import_module(module)) for module in modules]
            return make(SimpleNamespace(**{key: x for part in parts for key, x in part.items()}), given)

        yield name, traced, 128


SOURCES = {"programs": of_programs, "chains": of_chains, "tests": of_tests, "others": of_others}


def rows_of(source: str, given: Any) -> Iterator[dict[str, str]]:
    for name, make, block in SOURCES[source](given):
        row = {"source": source, "program": name}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(find, "FEWEST", 2 if source == "tests" else find.FEWEST))
            if name in STYLES:
                stack.enter_context(context_of(STYLES[name]))
                stack.enter_context(jax.set_mesh(mesh_of(STYLES[name])))
            try:
                fn, args = make()
            except ImportError as error:
                yield row | {"gpu": f"not installed: {error}", "tpu": ""}
                continue
            found = {platform: forms(fn, args, platform, block) for platform in ("gpu", "tpu")}
        texts = {platform: dict.fromkeys(map(short, lines)) for platform, lines in found.items()}
        yield row | {platform: "; ".join(each) or "no attention" for platform, each in texts.items()}


def counted(rows: Iterable[dict[str, str]], source: str) -> list[dict[str, Any]]:
    """The number of programs for each pair of texts."""
    counts = Counter((row["gpu"], row["tpu"]) for row in rows if row["source"] == source)
    return [{"source": source, "program": count, "gpu": gpu, "tpu": tpu} for (gpu, tpu), count in counts.most_common()]


def main(arguments: Sequence[str] | None = None) -> int:
    given = options("kernels", arguments, sources=(*SOURCES,), chains=300, length=1024)
    use_cpu()
    rows = [row for source in given.sources for row in rows_of(source, given)]
    shown = [row for row in rows if row["source"] != "chains"] + counted(rows, "chains")
    return report("kernels", arguments, shown)
