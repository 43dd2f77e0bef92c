"""Every layout restores into every other: the values are bitwise equal, and training continues with equal losses."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from flax_mesh import PartitionRules
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.data.batches import BatchFn, make_batch_fn
from flax_mesh.recipe.program import TrainProgram, batch_sharding, train_program
from flax_mesh.recipe.resolve import resolve
from flax_mesh.recipe.target import local_target
from flax_mesh.train import DataConfig, OptimizerConfig, RunConfig, TrainConfig, TrainState, apply_overrides
from tests.checkpoint.states import by_layer, check_same
from tests.mpmd.runtime.pipelines import Net, Stack, net_loss

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
BEFORE, AFTER = 3, 5  # steps


@dataclasses.dataclass(frozen=True)
class NetConfig:
    scan: bool = False
    vocab_size: int = 256


def loss_fn(model, batch):
    """Of the tokens modulo the 16 that the model has."""
    return net_loss(model, {"x": batch["inputs"] % 16, "y": batch["targets"] % 16})


# The layers compile in a fifth of the time of a decoder's.
CONFIG = TrainConfig(
    make_model=lambda config, rngs: (Stack if config.scan else Net)(rngs),
    loss_fn=loss_fn,
    model=NetConfig(),
    rules=PartitionRules(
        [("embedding", ("vocab", "embed")), ("kernel", ("embed", "mlp")), (".*", ())], layers="layers"
    ),
    data=DataConfig(sequence_length=16, batch_size=32),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=20),
    run=RunConfig(platform="auto"),
)
TEXT = "".join(f"{i} squared is {i * i}, and its neighbour {i + 1}.\n" for i in range(400))


@functools.cache
def setup(layout: str) -> tuple[TrainProgram, BatchFn]:
    """The program and the batches of a run in this layout, which are built once."""
    own = apply_overrides(CONFIG, ["pipeline.num_microbatches=4", *LAYOUTS[layout]])
    program = train_program(resolve(own, local_target(own.mesh, own.run.platform)))
    tokens, sharding = np.frombuffer(TEXT.encode(), np.uint8), batch_sharding(program.mesh, program.rules.axes)
    return program, make_batch_fn(tokens, seed=0, config=own.data, sharding=sharding)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(layout)`: a folder with the state after three steps, this state, and the losses that follow."""

    @functools.cache
    def of(layout: str):
        program, batch = setup(layout)
        state = program.init()
        for i in range(BEFORE):
            state, _ = program.step(state, batch(i))
        folder = tmp_path_factory.mktemp("saved")
        with Checkpointer(folder, layers="layers") as checkpointer:
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
def test_a_run_continues_in_every_other_layout(before, after, saved):
    folder, saved_state, want = saved(before)
    program, batch = setup(after)
    with Checkpointer(folder, layers="layers") as checkpointer:
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
