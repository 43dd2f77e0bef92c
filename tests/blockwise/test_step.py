"""The option `attention` of the train step, of the evaluation and of stages; the placement on meshes."""

import math
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import flax_mesh as fm
from flax_mesh.blockwise import loops, transform
from flax_mesh.errors import ConfigError
from flax_mesh.hlo.collectives import read_collectives
from flax_mesh.hlo.program import read_hlo
from flax_mesh.mpmd import MpmdMesh, Pipeline, split_stages
from flax_mesh.step import options as option
from flax_mesh.step.state import abstract_train_state, init_train_state
from flax_mesh.step.step import make_eval_step, make_train_step
from tests.blockwise.compare import largest_square
from tests.blockwise.model import RULES, batch_of, loss_fn, make

LENGTH = 1024
SIZES = {"dp": 2, "sp": 2, "tp": 2}
LINE = "attention: 2 attentions, q 1024 k 1024, 3 of 4 blocks"
PLACED = "dim 0 over dp, dim 1 over tp, queries over sp, gathered keys"


def layout_of(sizes=None):
    sizes = sizes or {"dp": 1}
    mesh = fm.create_mesh((*sizes.values(),), (*sizes,), devices=jax.devices()[: math.prod(sizes.values())])
    return abstract_train_state(make, fm.abstract_state(make, mesh, RULES))


def traced(sizes=None, **options):
    """(step, its jaxpr) on abstract values."""
    layout = layout_of(sizes)
    step = make_train_step(loss_fn, layout, **options)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(LENGTH))
    return step, step.trace(layout, shapes).jaxpr


def test_auto_leaves_the_program_of_a_model_below_its_limit_and_says_so():
    (auto, program), (_, plain) = traced(), traced(attention="as_written")
    assert str(program) == str(plain)
    assert auto.attention_lines == (
        "attention: as written, because its scores take 384 MiB per device, and auto allows 1.00 GiB",
    )


def test_a_step_in_blocks_has_no_array_of_scores():
    step, program = traced(attention="blockwise", num_microbatches=2)
    assert step.attention_lines == (LINE,)
    assert largest_square(program, LENGTH) == 0


def test_auto_computes_attention_in_blocks_above_its_limit(monkeypatch):
    monkeypatch.setattr(option, "UNKNOWN_CHIP", 2**28)
    step, program = traced()
    assert step.attention_lines == (LINE,) and largest_square(program, LENGTH) == 0


def test_the_axes_of_an_attention_are_those_of_batch_and_parameters():
    assert traced(SIZES, attention="blockwise")[0].attention_lines == (f"{LINE}, {PLACED}",)


def test_an_evaluation_has_the_same_option():
    layout = layout_of()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(LENGTH))
    step = make_eval_step(loss_fn, layout, attention="blockwise")
    assert largest_square(jax.make_jaxpr(step)(layout, shapes).jaxpr, LENGTH) == 0


def test_another_value_of_the_option_is_an_error():
    with pytest.raises(ConfigError, match="attention='flash' is none of auto, kernel, blockwise, as_written"):
        traced(attention="flash")


def test_stages_have_the_same_option_and_their_text_the_lines():
    mesh = MpmdMesh(fm.create_mesh((2, 2, 2), ("pp", "dp", "sp")), "pp")
    batch = batch_of(LENGTH)
    options = {"mesh": mesh, "schedule": "1f1b", "num_microbatches": 2}
    staged = split_stages(loss_fn, make, batch, attention="blockwise", **options)
    assert f"{LINE}, dim 0 over dp, queries over sp, gathered keys" in str(staged)
    assert "attention" not in str(split_stages(loss_fn, make, batch, attention="as_written", **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "documents"),
    [("dp,sp,tp", 0), ("fsdp,sp", 0), ("pp,dp,sp", 0), ("dp,sp", 8), ("sp", 8), ("pp,sp", 8), ("pp,dp,sp", 8)],
)
def test_losses_on_a_mesh_are_those_of_the_program_as_written(kind, documents, monkeypatch):
    names, batch = kind.split(","), batch_of(LENGTH, documents=documents)
    sizes = (2, 2, 2)[: len(names)]
    visited, forward = [], loops.Loops.forward

    def observed(self, values, visits):
        out, saved = forward(self, values, visits)
        jax.debug.callback(lambda x: visited.append(np.asarray(x)), saved.visited)
        return out, saved

    if documents:  # blocks of 64, of documents of 128
        monkeypatch.setattr(loops.Loops, "forward", observed)
        others = (transform.rewrite.__defaults__ or ())[1:]
        monkeypatch.setattr(transform.rewrite, "__defaults__", (64, *others))

    def losses(attention):
        if "pp" in names:
            mesh = MpmdMesh(fm.create_mesh(sizes, names, devices=jax.devices()[: 2 ** len(names)]), "pp")
            options = {"mesh": mesh, "schedule": "1f1b", "num_microbatches": 2, "attention": attention}
            pipeline = Pipeline(split_stages(loss_fn, make, batch, **options), rules=RULES)
            state, step = pipeline.init_state(), pipeline.step
        else:
            mesh = fm.create_mesh(sizes, names, devices=jax.devices()[: 2 ** len(names)])
            state = init_train_state(make, fm.abstract_state(make, mesh, RULES))
            step = make_train_step(loss_fn, state, attention=attention)
        found = []
        for _ in range(3):
            state, metrics = step(state, batch)
            found += [float(metrics["loss"]), float(metrics["grad_norm"])]
        return found

    np.testing.assert_allclose(losses("blockwise"), losses("as_written"), rtol=1e-5)
    jax.effects_barrier()
    # The queries of a block have two documents, or three where rows differ; without a skip up to 16 blocks.
    assert bool(visited) == bool(documents) and all(x.shape == (8,) and x.max() <= 6 for x in visited)


@pytest.mark.slow
def test_each_layer_gathers_keys_and_values_once_and_reduces_their_gradients_once():
    mesh = fm.create_mesh((*SIZES.values(),), (*SIZES,))
    state = init_train_state(make, fm.abstract_state(make, mesh, RULES))
    step = make_train_step(loss_fn, state, attention="blockwise")
    compiled = step.lower(state, jax.tree.map(jax.numpy.asarray, batch_of(LENGTH))).compile()
    found = read_collectives(read_hlo(compiled), mesh)
    counts = Counter((x.kind, x.axes) for x in found if "blockwise_attention" in x.source)
    assert counts == {("all-gather", ("sp",)): 4, ("reduce-scatter", ("sp",)): 4}
    assert all(x.times == 1 and x.times_known for x in found if "blockwise_attention" in x.source)


@pytest.mark.slow
def test_queries_on_explicit_axes_are_computed_where_their_types_say():
    from jax.sharding import NamedSharding, PartitionSpec

    from tests.blockwise.programs import by_hand, causal, qkv

    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(AxisType.Explicit,) * 3)
    specs = PartitionSpec("dp", "sp", "tp"), *[PartitionSpec("dp", None, "tp")] * 2
    lines, args = [], qkv()
    attention = lambda q, k, v: by_hand(q, k, v, causal)  # noqa: E731
    blockwise = fm.blockwise_attention(attention, block=24, say=lines.append)
    loss = lambda fn: jax.jit(jax.grad(lambda *x: jax.numpy.sum(jax.numpy.sin(fn(*x))), (0, 1, 2)))  # noqa: E731
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    with jax.set_mesh(mesh):
        found = loss(blockwise)(*placed)
    assert lines == ["1 attention, q 96 k 96, 10 of 16 blocks, dim 0 over dp, dim 1 over tp, queries over sp"]
    for x, y in zip(found, loss(attention)(*args), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5)
