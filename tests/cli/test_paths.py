"""Every argument, option and setting that is a path: an address is refused at the start, and ~ is the home folder."""

import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import flax_mesh as fm
from flax_mesh.checkpoint import Checkpointer, ParamMapping, load_safetensors, read_config, save_safetensors
from flax_mesh.checkpoint.find import find_steps
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE
from flax_mesh.data.chats import ChatConfig, read_chats
from flax_mesh.data.corpus import load_documents
from flax_mesh.data.tokenizers.chat import open_tokenizer
from flax_mesh.errors import ConfigError
from flax_mesh.inference import open_trained
from flax_mesh.models import load_decoder
from flax_mesh.mpmd.runtime.profile import Timeline
from flax_mesh.mpmd.schedules import make_schedule
from flax_mesh.mpmd.schedules.text import read_schedule
from flax_mesh.plan import load_chip
from flax_mesh.recipe.checks import check_config
from flax_mesh.train import apply_overrides, load_recipe, train

RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny.py")
ONE = make_schedule("1f1b", num_groups=1, num_microbatches=1)
TIMELINE = Timeline(ONE, tuple((0, action, at, at + 1.0) for at, action in enumerate(ONE.rows[0])))
IN_STORES = {"Checkpointer", "Checkpointer of a Path", "find_steps", "open_trained", "open_tokenizer"}
FUNCTIONS: dict[str, Callable[[str], object]] = {
    "Checkpointer": Checkpointer,
    "Checkpointer of a Path": lambda path: Checkpointer(Path(path)),
    "find_steps": find_steps,
    "load_safetensors": lambda path: load_safetensors(path, {}, []),
    "save_safetensors": lambda path: save_safetensors(path, {}, []),
    "read_config": read_config,
    "load_decoder": lambda path: load_decoder(path, fm.create_mesh((8,), ("fsdp",))),
    "open_trained": open_trained,
    "open_tokenizer": lambda path: open_tokenizer(path, 9),
    "read_chats": lambda path: read_chats(ChatConfig(source=path), "here", 9),
    "load_documents": lambda path: load_documents(path, bin_dtype="uint16"),
    "load_chip": load_chip,
    "load_recipe": load_recipe,
    "read_schedule": read_schedule,
    "Timeline.write": TIMELINE.write,
    "train": lambda path: train(load_recipe(RECIPE), trace=path),
}
COMMANDS = {
    "mesh": ["mesh", "fsdp:8", "--svg"],
    "explain": ["explain", RECIPE, "--html"],
    "calibrate": ["plan", "--calibrate"],
    "schedule": ["schedule", "1f1b", "--stages=2", "--microbatches=2", "--svg"],
    "schedule to": ["schedule", "1f1b", "--stages=2", "--microbatches=2", "--out"],
    "trace": ["train", RECIPE, "mesh.shape=pp:2", "--trace"],
    "generate": ["generate"],
    "prompts": ["generate", "here", "--prompts"],
    "generate to": ["generate", "here", "--prompt=x", "--out"],
    "evaluate": ["evaluate", "here", "--data"],
    "checkpoint": ["checkpoint", "verify"],
    "export": ["checkpoint", "export", "here", "--to=safetensors"],
    "diff": ["checkpoint", "diff", "here"],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_refuses_an_address_before_it_writes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = "hdfs" if name in IN_STORES else "gs"
    with pytest.raises(ConfigError, match=rf"is an address \({kind}:\), but must be a path of this machine"):
        FUNCTIONS[name](f"{kind}://bucket/run.json")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_refuses_an_address_before_it_writes(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "hdfs://host/x"]) == BAD_INPUT
    assert "is an address (hdfs:), but must be a path of this machine" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_settings_that_are_paths_refuse_an_address():
    keys = ("run.hardware", "data.source", "pipeline.schedule", "run.folder", "checkpoint.start_from")
    settings = [*(f"{key}=s3://a/x.txt" for key in keys[:3]), *(f"{key}=hdfs://a/x.txt" for key in keys[3:])]
    config = apply_overrides(load_recipe(RECIPE), ["mesh.shape=pp:2", *settings])
    address = re.compile(r"is an address \((s3|hdfs):\), but must be a path of this machine")
    problems = [line for line in check_config(config) if address.search(line)]
    assert len(problems) == len(keys) and all(any(key in line for key in keys) for line in problems), problems


def test_paths_begin_at_the_home_folder_after_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Checkpointer("~/run").folder == tmp_path / "run"
    save_safetensors("~/model", {"w": jnp.zeros(2)}, [ParamMapping("w", "w", "i -> i")])
    TIMELINE.write("~/trace.json")
    assert main(["mesh", "fsdp:8", "--svg=~/mesh.svg"]) == DONE
    schedule = ["schedule", "1f1b", "--stages=2", "--microbatches=2"]
    assert main([*schedule, "--out=~/schedule.txt"]) == DONE
    assert read_schedule("~/schedule.txt") == make_schedule("1f1b", num_groups=2, num_microbatches=2)
    Path("recipe.py").write_text("from recipes.tiny import recipe")
    assert load_recipe("~/recipe.py") is not None
    names = {"model", "trace.json", "trace.svg", "mesh.svg", "schedule.txt", "recipe.py"}
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == names
