"""A list of thousands of mistakes ends after a screen with the number of the others, at every door that reads files."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import flax_mesh as fm
from flax_mesh.checkpoint import Checkpointer, huggingface_config, load_safetensors
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, FINDINGS
from flax_mesh.errors import MOST
from flax_mesh.models import DecoderConfig
from flax_mesh.train import array_batches, place_batch
from flax_mesh.tree import nest

RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny.py")
COUNT = range(3000)
CONFIG = huggingface_config(vars(DecoderConfig()))
INDEX = {"weight_map": {f"w{i}": f"model-{i}.safetensors" for i in COUNT}}
FILES = {
    "unknown/config.json": json.dumps(CONFIG | {f"strange_key_{i}": i for i in COUNT}),
    "unknown/model.safetensors": "",
    "twice/config.json": "{" + ",".join(f'"k{i}":1,"k{i}":1' for i in COUNT) + "}",
    "twice/model.safetensors": "",
    "missing/config.json": json.dumps(CONFIG),
    "missing/model.safetensors.index.json": json.dumps(INDEX),
    "links/config.json": json.dumps(CONFIG),
    "links/model.safetensors.index.json": json.dumps({"weight_map": {f"w{i}": f"../{i}" for i in COUNT}}),
    "settings.txt": "\n".join(f"foo.bar{i}=3" for i in COUNT[:300]),
    "chip.toml": "\n".join(f"key{i} = 3" for i in COUNT),
    "prompts.jsonl": "3\n" * len(COUNT),
}
COMMANDS = {
    "unknown keys": ["checkpoint", "import", "unknown", "out"],
    "unknown keys of a start": ["train", RECIPE, "checkpoint.start_from=unknown"],
    "unknown keys of a decoder": ["generate", "unknown", "--prompt=x"],
    "keys that are there twice": ["checkpoint", "import", "twice", "out"],
    "missing files": ["checkpoint", "import", "missing", "out"],
    "links": ["checkpoint", "import", "links", "out"],
    "settings": ["train", RECIPE, "@settings.txt"],
    "a chip": ["plan", RECIPE, "--topology=v5p:4", "run.hardware=chip.toml"],
    "prompts": ["generate", "missing", "--prompts=prompts.jsonl"],
    "options": ["mesh", "fsdp:8", *(f"--x{i}" for i in COUNT)],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_prints_a_screen_of_mistakes_and_the_number_of_the_others(command, tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(command) in (BAD_INPUT, FINDINGS)
    lines = capsys.readouterr().err.splitlines()
    assert len("\n".join(line.removeprefix("flax-mesh: ") for line in lines)) <= MOST
    assert any(re.search(r"and [\d,]+ more|\([\d,]+ characters\)", line) for line in lines), lines


MANY = {f"x{i}": np.ones(i + 1) for i in COUNT}
MESH = fm.create_mesh((jax.device_count(),), ("fsdp",))
CALLS = {
    "rules": lambda: fm.PartitionRules([(f"({i}", ("embed",)) for i in COUNT]),
    "parameters": lambda: fm.abstract_state(lambda: nest(MANY.items()), MESH, [("none", ())]),
    "leaves": lambda: Checkpointer("checkpoints").save(1, dict.fromkeys(MANY, "text")),
    "names": lambda: Checkpointer("checkpoints").save(1, {"a": MANY, **{f"a.{name}": x for name, x in MANY.items()}}),
    "a batch": lambda: place_batch({name: np.ma.masked_array(np.ones(8)) for name in MANY}, MESH),
    "rows": lambda: place_batch(MANY, MESH),
    "rows of batches": lambda: array_batches(MANY, batch_size=2, seed=0),
    "safetensors": lambda: load_safetensors("missing", {}, []),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_lists_a_screen_of_mistakes_and_the_number_of_the_others(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("missing").mkdir()
    Path("missing/model.safetensors.index.json").write_text(json.dumps(INDEX))
    with pytest.raises((fm.ConfigError, fm.ShardingError)) as error:
        call()
    assert len(str(error.value)) <= MOST and re.search(r"and [\d,]+ more|\([\d,]+ characters\)", str(error.value))
