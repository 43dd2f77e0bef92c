"""Resuming: a run that is killed twice after random steps, and started again, is bit for bit an undisturbed one.

One table of the parts of runs: their data, their optimizer, hooks, and the mesh. `MATRIX` also names settings that
only the second of the three processes has. On another mesh, the losses are equal but for rounding. The kill is an
exception in a hook; test_kills.py has kills of a process at any moment.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mesh.blockwise import transform
from flax_mesh.blockwise.traced import find
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.data.iterators import IteratorBatches, decode, encode
from flax_mesh.errors import ConfigError
from flax_mesh.models import next_token_loss
from flax_mesh.recipe.saved import run_metadata
from flax_mesh.step import options
from flax_mesh.train import TrainConfig, apply_overrides, build_program, load_recipe
from tests.data import user_recipe
from tests.data.user_recipe import MAKERS, Windows
from tests.train import bigram
from tests.train.support.runs import checkpoints, rows_of, run, state_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS, EVERY = 8, 2
RECIPES = Path(__file__).parents[2] / "recipes"
BAD_TOKENS, FIXED_TOKENS = (np.full((8, 16), token, np.int32) for token in (255, 7))
TIMES = {"seconds", "data_wait_seconds", "device_bytes", "mfu", "resumed_from"}


def loss_fn(model: Any, batch: Any) -> Any:
    """NaN for batches of BAD_TOKENS."""
    total, weight = next_token_loss(model, batch)[:2]
    return total * jnp.where(jnp.all(batch["inputs"] == 255), jnp.nan, 1.0), weight


def with_a_bad_batch(config: TrainConfig) -> Callable[[int], Any]:
    """The built-in batches, but for the batch of the third step."""
    batches = user_recipe.token_batches(config)
    return lambda step: {"inputs": BAD_TOKENS, "targets": BAD_TOKENS} if step == 2 else batches(step)


def own(make: Any) -> TrainConfig:
    evaluated = {"held_out": lambda config, evaluate: evaluate({"inputs": FIXED_TOKENS, "targets": FIXED_TOKENS})}
    return replace(user_recipe.recipe(), make_batches=make, eval_fns=evaluated)


DATA: dict[str, Callable[[], TrainConfig]] = {
    "bigram": lambda: replace(bigram.recipe(), make_batches=Windows, sample=None),
    "tokens": user_recipe.recipe,
    **{name: lambda name=name: own(MAKERS[name]) for name in MAKERS},
    "bad batch": lambda: replace(own(with_a_bad_batch), loss_fn=loss_fn),
    "images": lambda: load_recipe(str(RECIPES / "vit.py")),
    "pairs": lambda: load_recipe(str(RECIPES / "encoder_decoder.py")),
}
EMA, HOST = "optimizer.ema=0.7", "optimizer.memory=pinned_host"
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "zero": (EMA, "optimizer.moment_dtype=bfloat16", "optimizer.shard_over=dp"),
    "muon": (EMA, "optimizer.name=muon", "optimizer.groups=^embed learning_rate*0.1", "optimizer.schedule=wsd"),
    "adafactor": (EMA, "optimizer.name=adafactor", "optimizer.momentum=0.9", "optimizer.groups=norm/ frozen"),
    "sgd": (EMA, "optimizer.name=sgd", "optimizer.schedule=linear"),
    "host": (HOST,),
    "skip": ("run.on_nonfinite=skip", "run.spike_factor=9"),
    "every": (
        *(EMA, HOST, "optimizer.name=muon", "optimizer.schedule=wsd", "optimizer.moment_dtype=bfloat16"),
        *("optimizer.groups=^embed learning_rate*0.5; layers/0/ frozen", "optimizer.shard_over=dp"),
        *("model.num_layers=4", "model.remat=attention+mlp_up:2,none"),
    ),
}
HOOKS: dict[str, tuple[str, ...]] = {"": (), "hooks": ("run.hooks=tensorboard", "run.profile=2")}
EXPERTS = ("model.num_experts=4", "model.scan=true")
MESHES: dict[str, tuple[str, ...]] = {
    "dp": ("mesh.shape=dp:2", "pipeline.num_microbatches=1"),
    "mesh": ("mesh.shape=dp:2,fsdp:2,tp:2",),
    "explicit": ("mesh.shape=fsdp:2,tp:2", "mesh.axis_types=explicit"),
    "scan": ("mesh.shape=dp:2,fsdp:2,tp:2", "model.scan=true"),
    "deep": ("mesh.shape=fsdp:2,tp:2", "model.num_layers=4"),
    "experts": ("mesh.shape=fsdp:2,tp:2", *EXPERTS),
    "pp": ("mesh.shape=pp:2,dp:2",),
    "pp scan": ("mesh.shape=pp:2,dp:2,fsdp:2", "model.scan=true"),
    "zb-h1": ("mesh.shape=pp:2,fsdp:2", "pipeline.schedule=zb-h1"),
    "interleaved": ("mesh.shape=pp:2,fsdp:2,tp:2", "pipeline.schedule=interleaved-1f1b", "model.num_layers=4"),
    "cut": ("mesh.shape=pp:2,fsdp:2,sp:2", "pipeline.cut=1", "pipeline.remat=full"),
    "pp experts": ("mesh.shape=pp:2,ep:2,fsdp:2", *EXPERTS),
}
Case = tuple[str, str, str, str, str]  # data, optimizer, hooks, mesh, and the mesh or setting of the second process
MATRIX: list[Case] = [
    ("bigram", "adamw", "", "dp", ""),
    *((data, "adamw", "", mesh, "") for data in ("function", "iterator", "bytes", "grain") for mesh in ("dp", "pp")),
    *(("tokens", name, "", mesh, "") for name in ("zero", "muon", "adafactor") for mesh in ("mesh", "pp")),
    *(("tokens", "sgd", "", mesh, "") for mesh in ("scan", "pp scan")),
    *(("bad batch", "skip", "hooks", mesh, "") for mesh in ("dp", "pp")),
    *(("iterator", "every", "hooks", mesh, "") for mesh in ("mesh", "pp")),
    ("images", "adamw", "", "dp", ""),
    ("pairs", "adamw", "", "pp", ""),
    ("tokens", "host", "", "mesh", "optimizer.memory=device"),
    ("tokens", "adamw", "", "mesh", HOST),
    ("tokens", "adamw", "", "explicit", "mesh.axis_types=auto"),
    ("iterator", "adamw", "", "mesh", "pp"),
    *(("tokens", "adamw", "", "mesh", then) for then in ("zb-h1", "cut")),
    ("tokens", "adamw", "", "scan", "pp scan"),
    ("tokens", "adamw", "", "deep", "interleaved"),
    ("tokens", "adamw", "", "experts", "pp experts"),
]


def config_of(case: Case, folder: Path, text: Path, *, second: bool = False) -> TrainConfig:
    data, optimizer, hooks, mesh, then = case
    common = [f"run.folder={folder}", f"run.steps={STEPS}", "run.eval_every=3", "run.platform=auto"]
    common += [f"checkpoint.every={EVERY}", f"checkpoint.keep={STEPS}", "run.sample_tokens=0"]
    chosen = ("pipeline.num_microbatches=2", *OPTIMIZERS[optimizer], *HOOKS[hooks], *MESHES[mesh])
    settings = {setting.split("=")[0]: setting for setting in chosen}
    if second and then:
        settings |= {setting.split("=")[0]: setting for setting in MESHES.get(then, (then,))}
    config = replace(DATA[data](), hooks=(make_hook,) if hooks else ())
    source = f"data.source={text}"
    return apply_overrides(config, [*common, *settings.values(), *[source] * (data not in ("images", "pairs"))])


def make_hook(folder: Path, config: TrainConfig, start: int) -> Callable[[dict[str, Any]], None]:
    def hook(row: dict[str, Any]) -> None:
        with (folder / "hook.txt").open("a") as file:
            file.write(f"{row['step']}\n")

    return hook


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without times."""
    return [{name: x for name, x in row.items() if name not in TIMES and "_per_s" not in name} for row in rows]


def kills_of(case: Case) -> tuple[int, int]:
    """The steps after which the first and the second process are killed, drawn from the names of a case."""
    draw = np.random.default_rng(zlib.crc32("-".join(case).encode()))
    return int(draw.integers(3, 5)), int(draw.integers(6, 8))


def resumed(case: Case, folder: Path, text: Path) -> list[int]:
    """Run a case three times, of which the last one finishes. Returns the steps of which hooks see the rows."""
    start, seen = 0, []
    for number, kill_at in enumerate((*kills_of(case), None)):
        ran = run(config_of(case, folder, text, second=number == 1), kill_at=kill_at)
        assert [row["step"] for row in ran.rows] == list(range(start + 1, (kill_at or STEPS) + 1))
        resumes = f"at step {start}; resuming, {STEPS - start} steps to go"
        assert any(resumes in line for line in ran.lines) == (start > 0)
        seen += range(start + 1, kill_at or STEPS + 1)  # the hook that kills is the first one
        start = checkpoints(folder)[-1]
        assert start == ((kill_at or STEPS + 1) - 1) // EVERY * EVERY
    with Checkpointer(folder / "checkpoints") as checkpointer:
        assert all(checkpointer.verify(step) == [] for step in checkpointer.steps())
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("case", MATRIX, ids="-".join)
def test_a_run_that_is_killed_and_resumed_is_bit_for_bit_an_undisturbed_one(case: Case, tmp_path: Path, text: Path):
    if case[0] == "grain":
        pytest.importorskip("grain", reason="the extra data is not installed")
    run(config_of(case, tmp_path / "whole", text))
    seen = resumed(case, tmp_path / "killed", text)
    expected, found = (numbers(rows_of(tmp_path / name)) for name in ("whole", "killed"))
    assert len({row["loss"] for row in expected}) == len(expected) == STEPS, "the test requires distinct losses"
    assert any("loss" in name for name in expected[2].keys() - {"loss"}) or case[0] == "bigram", "nothing was evaluated"
    if case[1] == "skip":
        assert [row["skipped"] for row in found] == [0, 0, *[1] * 6]
    if case[2]:
        assert [int(line) for line in (tmp_path / "killed" / "hook.txt").read_text().splitlines()] == seen
        assert {"tensorboard", "profile"} <= {path.name for path in (tmp_path / "killed").iterdir()}
    if case[4] in MESHES or case[4].startswith("mesh."):  # other meshes round differently
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=5e-5)
    else:
        assert found == expected
        assert state_of(tmp_path / "killed", STEPS) == state_of(tmp_path / "whole", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp", "pp"])
def test_a_resumed_run_keeps_the_attention_that_it_began_with(mesh: str, tmp_path: Path, text: Path, monkeypatch):
    monkeypatch.setattr(find, "FEWEST", 2)
    monkeypatch.setattr(transform, "BLOCK", 4)
    monkeypatch.setattr(options, "UNKNOWN_CHIP", 0)
    configs = [config_of(("tokens", "adamw", "", mesh, ""), tmp_path / name, text) for name in ("whole", "killed")]
    run(configs[0])
    run(configs[1], kill_at=5)
    monkeypatch.setattr(options, "UNKNOWN_CHIP", 2**30)
    ran, line = run(configs[1]), "attention: as the run began, 2 attentions in blocks; auto would choose 2 attentions"
    assert any(f"{line} as written here" in text for text in ran.lines), ran.lines
    found, expected = (state_of(Path(config.run.folder), STEPS) for config in (configs[1], configs[0]))
    assert (
        found == expected and run_metadata(tmp_path / f"killed/checkpoints/{STEPS}")["attention"] == ["blockwise"] * 2
    )
    new = run(replace(configs[1], run=replace(configs[1].run, steps=1)), restart=True)
    set_anew = build_program(apply_overrides(configs[1], ["run.attention=as_written"]))
    assert not any(line in text for text in new.lines) and set_anew.recipe.step_options.attention == "as_written"


@pytest.mark.slow
def test_a_state_that_is_saved_one_batch_too_late_is_found(tmp_path, text, monkeypatch):
    """The comparison itself: the thread that prefetches batches has drawn the next one already."""
    case, state_after = ("iterator", "adamw", "", "dp", ""), IteratorBatches.state

    def one_batch_later(self: IteratorBatches, step: int) -> dict[str, Any]:
        copy = Windows(config_of(case, tmp_path, text))
        copy.set_state(decode(state_after(self, step)))
        next(copy)
        return encode(copy.get_state())

    monkeypatch.setattr(IteratorBatches, "state", one_batch_later)
    with pytest.raises(ConfigError, match="differs from the one that the run used"):
        resumed(case, tmp_path / "killed", text)
