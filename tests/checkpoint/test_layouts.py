"""Every layout restores into every other: the values are bitwise equal, and training continues with equal losses.

A layout's programs are built and compiled once for the module; a pair costs a restore and ten steps.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.train import DataConfig, OptimizerConfig, RunConfig, TrainConfig, TrainState, apply_overrides
from flax_mesh.train.build import TrainProgram, batch_sharding, make_mesh, run_rules, train_program
from flax_mesh.train.data.batches import make_batch_fn
from flax_mesh.train.data.data import load_corpus
from tests.checkpoint.states import by_layer, check_same

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYOUTS = {
    "one": ("mesh.shape=dp:1",),
    "dp8": ("mesh.shape=dp:8",),
    "fsdp8": ("mesh.shape=fsdp:8",),
    "tp4": ("mesh.shape=tp:4",),
    "sp2": ("mesh.shape=sp:2",),
    "dp2fsdp2tp2": ("mesh.shape=dp:2,fsdp:2,tp:2",),
    "pp2fsdp2tp2": ("mesh.shape=pp:2,fsdp:2,tp:2",),
    "pp4": ("mesh.shape=pp:4",),
    "scanned": ("mesh.shape=fsdp:2,tp:2", "model.scan=true"),
    "scanned dp2": ("mesh.shape=dp:2", "model.scan=true"),
    "scanned pp2": ("mesh.shape=pp:2,dp:2", "model.scan=true"),
}
PAIRS = [("scanned", "scanned dp2"), *itertools.product(LAYOUTS, LAYOUTS)]  # the first one in the default tests
BEFORE, AFTER = 3, 10  # steps


class Setup(NamedTuple):
    program: TrainProgram
    batch: Any


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """`setup(layout)`: the program and the batches of a run in this layout; each is built once."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}, and its neighbour {i + 1}.\n" for i in range(400)))
    config = TrainConfig(
        make_model=make_decoder,
        loss_fn=next_token_loss,
        model=DecoderConfig(
            vocab_size=256, hidden_size=16, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=4, mlp_size=32
        ),
        data=DataConfig(source=str(text), sequence_length=16, batch_size=32, held_out=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=20),
        run=RunConfig(platform="auto"),
    )
    corpus = load_corpus(config.data)

    @functools.cache
    def of(layout: str) -> Setup:
        own = apply_overrides(config, ["pipeline.num_microbatches=4", *LAYOUTS[layout]])
        mesh = make_mesh(own, print)
        rules = run_rules(own)
        batch = make_batch_fn(
            corpus.train, seed=0, config=own.data, sharding=batch_sharding(mesh, rules.axes), vocab_size=256
        )
        return Setup(train_program(own, mesh, rules), batch)

    return of


@pytest.fixture(scope="module")
def saved(setup, tmp_path_factory):
    """`saved(layout)`: a folder with the state after three steps, this state, and the ten losses that follow."""

    @functools.cache
    def of(layout: str):
        program, batch = setup(layout)
        state = program.init()
        for i in range(BEFORE):
            state, _ = program.step(state, batch(i))
        folder = tmp_path_factory.mktemp("saved")
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(BEFORE, state, {})
        copy = jax.tree.map(np.array, state)  # the steps donate the arrays
        return folder, copy, losses(program, batch, state)

    return of


def losses(program: TrainProgram, batch: Any, state: TrainState) -> np.ndarray:
    found = []
    for i in range(BEFORE, BEFORE + AFTER):
        state, metrics = program.step(state, batch(i))
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "after"), dict.fromkeys(PAIRS))
def test_a_run_continues_in_every_other_layout(before, after, setup, saved):
    folder, saved_state, want = saved(before)
    program, batch = setup(after)
    with Checkpointer(folder) as checkpointer:
        restored = checkpointer.restore(program.layout, BEFORE)
    for leaf, abstract in zip(jax.tree.leaves(restored), program.layout.leaves, strict=True):
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
    check_same(saved_state, restored)
    assert any("/layers/3/" in path for path in by_layer(saved_state))
    have = losses(program, batch, restored)
    assert len(set(want)) == AFTER and want[-1] < want[0]  # the loss decreases
    if before == after:
        assert np.array_equal(have, want)
    np.testing.assert_allclose(have, want, rtol=0, atol=5e-6)
