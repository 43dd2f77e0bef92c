"""The cache in the compiled programs that users run: each device reads its own part, and XLA copies none of it."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import flax_mesh as fm
from flax_mesh.hlo.collectives import read_collectives
from flax_mesh.hlo.program import Array, HloProgram, read_hlo
from flax_mesh.mesh.context import in_mesh
from flax_mesh.models import Decoder, Sampling, attention, generate, make_decoder
from flax_mesh.models.cache import read_slots
from flax_mesh.models.generation import programs
from flax_mesh.models.generation.programs import Programs
from flax_mesh.sharding.constrain import constrain
from tests.benchmarks.generate import SIZES, bytes_of
from tests.models.reference import SMALL, make_mesh, small

pytestmark = pytest.mark.slow
AXES = fm.PartitionAxis(hidden_state_axis=None, generation_batch_axis="dp")
SLOTS = 512
IN_PLACE = {"scatter", "dynamic-update-slice"}


def compiled(model: Decoder, rows: int) -> tuple[HloProgram, Programs, jax.Array]:
    """The program of a group of tokens, and the keys of the first layer or stack."""
    programs._compiled.cache_clear()  # a test replaces a function that it calls
    made, ids = Programs(model, 0, Sampling()), np.arange(rows, dtype=np.int32)
    first = made.prefill(np.zeros((rows, 16), np.int32), np.full(rows, 3, np.int32), ids, SLOTS)
    with in_mesh(made.mesh):
        arrays = made.leaves, made._options, first.state, np.int32(4), np.bool_(False)
        return read_hlo(made._decode.lower(*arrays).compile()), made, jax.tree.leaves(first.cache.keys)[0]


@pytest.mark.parametrize("scan", [False, True])
def test_no_device_receives_the_keys_and_values_of_other_rows_and_heads(scan, monkeypatch):
    config, mesh = dataclasses.replace(SMALL, num_layers=1, axes=AXES, scan=scan), make_mesh(dp=2, tp=2)
    make = lambda: make_decoder(config, nnx.Rngs(0))  # noqa: E731
    model = fm.init_model(make, fm.abstract_state(make, mesh))

    def largest() -> int:
        program, made, keys = compiled(model, 4)
        assert made.mesh is not None and keys.nbytes == 4 * part
        return max(x.payload_bytes for x in read_collectives(program, made.mesh))

    part = 4 * SLOTS * SMALL.num_kv_heads * SMALL.head_dim * 4 // 4  # bytes of a quarter of the rows and heads
    assert largest() < part // 4
    mistaken = lambda cache, layer: read_slots(constrain(cache, (), axes=AXES, mode="decode"), layer)  # noqa: E731
    monkeypatch.setattr(attention, "read_slots", mistaken)
    assert largest() >= part
    programs._compiled.cache_clear()


@pytest.mark.parametrize("rows", [1, 8])
def test_no_instruction_copies_the_cache(rows, monkeypatch):
    def copies() -> list[str]:
        program, _, keys = compiled(small(SMALL, num_layers=1), rows)
        found: list[str] = []
        for x in program.instructions():
            inside = {x.opcode, *(y.opcode for y in program.computations.get(x.called.get("calls", ""), ()))}
            is_as_large = isinstance(x.shape, Array) and x.shape.content == keys.nbytes
            if is_as_large and inside & {"copy", "transpose"} and not inside & IN_PLACE:
                found.append(str(x))
        return found

    assert copies() == []
    in_slots = lambda cache, layer: jax.lax.optimization_barrier(read_slots(cache, layer)) + 0  # noqa: E731
    monkeypatch.setattr(attention, "read_slots", in_slots)
    assert copies()
    programs._compiled.cache_clear()


@pytest.mark.parametrize("change", [{"attention_softcap": 20.0}, {"attention_sinks": True, "scan": True}])
def test_scores_of_the_decoder_itself_have_a_product_in_bfloat16(change):
    """XLA has none on CPU for keys with their slots last, in batches of several rows and heads."""
    model = small(SMALL, num_layers=1, dtype="bfloat16", param_dtype="bfloat16", **change)
    found = generate(model, [[1, 2], [3], [4, 5, 6]], max_tokens=4)
    assert all(np.isfinite(one.log_probs).all() and len(one.tokens) == 4 for one in found)


@pytest.mark.parametrize("rows", [1, 32])
def test_a_token_of_a_large_model_moves_little_more_than_its_parameters_and_cache(rows):
    """1.1B parameters, of which no array is made: 1.004 and 1.12 times."""
    config = dataclasses.replace(SIZES["llama-1b"], dtype="float32", param_dtype="float32")
    used, floor = bytes_of(config, rows, 128, 128)
    assert floor <= used <= 1.15 * floor
