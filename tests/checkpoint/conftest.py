"""What the tests of `flax-mesh checkpoint` start from: a run folder with two checkpoints, and the command itself."""

from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh import named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.cli import main
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.train.data.data import Corpus
from flax_mesh.train.metadata import layout_of, record
from tests.checkpoint.small_decoder import RECIPE, changed, program_of


@pytest.fixture(scope="module")
def on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("the recipe asks for CPU devices")


@pytest.fixture(scope="module")
def state():
    """The state of the recipe with numbers of its own in every array; nothing is compiled for it."""
    abstract = program_of()[3].layout.to_nnx()
    random = np.random.default_rng(0)
    leaves = [
        jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding) for _, x in named_leaves(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory) -> Path:
    """A run folder with the steps 5 and 10, as a run of the recipe writes them."""
    config, mesh, rules, _ = program_of()
    corpus = Corpus(np.zeros(9), np.zeros(9), "nine zeros", "c0ffee", 32, 1.0)
    folder = tmp_path_factory.mktemp("runs") / "small"
    with Checkpointer(folder / "checkpoints", layers=rules.layers) as checkpointer:
        for step, loss, what in ((5, 2.5, state), (10, float("nan"), changed(state))):
            row = {"step": step, "loss": loss, "eval_loss": 2.25}
            metadata = record(
                step,
                recipe=RECIPE,
                config=config,
                mesh=mesh,
                rules=rules,
                layout=layout_of(state, rules.layers),
                fingerprint=sharding_fingerprint(state),
                corpus=corpus,
                row=row,
            )
            checkpointer.save(step, what, metadata)
    return folder


@pytest.fixture
def command(capsys):
    """Run `flax-mesh checkpoint ...`: (exit code, what it printed, what it complained of)."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run
