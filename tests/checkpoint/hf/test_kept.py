"""Settings and files of a Hugging Face folder, through import, a run and export: only the parameters change."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from flax_mesh.checkpoint.hf.decoders import decoder_config_from_hf, read_config
from flax_mesh.checkpoint.hf.kept import KEPT, keep_files, other_files, updated_config
from flax_mesh.checkpoint.hf.safetensors import open_safetensors
from flax_mesh.cli.common import BAD_INPUT, DONE
from flax_mesh.errors import ConfigError
from flax_mesh.train.warm_start import find_start, keep_other_files
from tests.train.bigram import snapshot

pytestmark = pytest.mark.usefixtures("on_cpu")

DATA = Path(__file__).parent / "data"
FAMILIES = sorted(path.name for path in DATA.iterdir())
OTHER = {
    "generation_config.json": b'{"eos_token_id": [1, 2],\r\n "temperature": 0.6}',
    "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
    "tokenizer.model": b"\n\x00\xffbinary",
    "tokenizer_config.json": b'{"chat_template": "{{ x }}"}',
    "merges.txt": b"a b\n",
    "LICENSE": b"as it is",
}


def folder_with_other_files(name: str, place: Path) -> Path:
    """A folder of a hub: tokens, lengths and files that this library does not use, and files that it must not copy."""
    folder = Path(shutil.copytree(DATA / name, place))
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 131_072, "eos_token_id": [7, 9], "bos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=4))  # not as this library writes it
    for file, data in OTHER.items():
        (folder / file).write_bytes(data)
    for file in (".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json"):
        (folder / file).write_bytes(b"not copied")
    (folder / "original").mkdir()
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_import_and_export_change_no_file_and_a_cast_only_the_dtype_in_the_config(command, tmp_path, name):
    folder = folder_with_other_files(name, tmp_path / "hub")
    assert command("import", folder, tmp_path / "imported")[0] == DONE
    assert command("verify", tmp_path / "imported")[0] == DONE
    assert command("export", tmp_path / "imported", tmp_path / "back", "--to", "safetensors")[0] == DONE
    back = snapshot(tmp_path / "back")
    assert back.keys() == {*OTHER, "config.json", "model.safetensors"}
    for file in (*OTHER, "config.json"):
        assert back[file] == (folder / file).read_bytes(), file
    there, here = open_safetensors(folder), open_safetensors(tmp_path / "back")
    assert there.keys() == here.keys() and len(there) > 20
    assert all(there[one].dtype == here[one].dtype and np.array_equal(there[one], here[one]) for one in there)
    cast = ["export", tmp_path / "imported", tmp_path / "cast", "--to", "safetensors", "--dtype", "bfloat16"]
    assert command(*cast)[0] == DONE
    assert read_config(tmp_path / "cast") == read_config(folder) | {"dtype": "bfloat16"}
    assert (tmp_path / "cast" / "tokenizer.model").read_bytes() == OTHER["tokenizer.model"]
    assert {array.dtype.name for array in open_safetensors(tmp_path / "cast").values()} == {"bfloat16"}


def test_a_damaged_config_that_was_kept_is_one_line(command, tmp_path):
    assert command("import", DATA / "qwen2", tmp_path / "imported")[0] == DONE
    (tmp_path / "imported" / KEPT / "config.json").write_text("[1]")
    code, _, err = command("export", tmp_path / "imported", tmp_path / "back", "--to", "safetensors")
    assert (code, err.count("\n")) == (BAD_INPUT, 1) and "config.json must be a JSON object; repair it" in err
    assert not (tmp_path / "back").exists()


def test_a_run_keeps_the_files_of_its_start(tmp_path):
    hub = folder_with_other_files("qwen2", tmp_path / "hub")
    keep_other_files(find_start(str(hub)), tmp_path / "first" / "checkpoints")
    kept = tmp_path / "first" / "checkpoints" / KEPT
    assert snapshot(kept) == OTHER | {"config.json": (hub / "config.json").read_bytes()}
    keep_files(kept, tmp_path / "second")  # as from a checkpoint of the first run
    keep_files(tmp_path / "none", tmp_path / "second")  # nothing came with it: those that are there stay
    assert [path.name for path in other_files(tmp_path / "second" / KEPT)] == sorted([*OTHER, "config.json"])


def test_links_lead_out_of_an_imported_folder_only_into_a_hub_cache(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    hub = folder_with_other_files("qwen2", tmp_path / "models--a--b" / "snapshots" / "1")
    (blobs := hub.parent.parent / "blobs").mkdir()
    (blobs / "f00").write_text("{}")
    (hub / "merges.txt").unlink(missing_ok=True)
    (hub / "merges.txt").symlink_to("../../blobs/f00")
    keep_other_files(find_start(str(hub)), tmp_path / "first")
    assert (tmp_path / "first" / KEPT / "merges.txt").read_text() == "{}"
    (hub / "notes.txt").symlink_to(secret)
    with pytest.raises(ConfigError, match=rf"notes\.txt is a link to {secret}, outside of .*; links must stay inside"):
        find_start(str(hub))
    with pytest.raises(ConfigError, match="outside of"):
        keep_files(hub, tmp_path / "second")


ROPE = {"rope_low_frequency_factor": 1.0, "rope_high_frequency_factor": 4.0, "rope_original_length": 64}
CHANGES = [
    {},
    {"param_dtype": "bfloat16"},
    {"rope_theta": 123.0},
    {"norm_epsilon": 0.5, "vocab_size": 7, "tied": True},
    {"num_experts": 2, "experts_per_token": 1},
    {"rope_factor": 8.0, **ROPE},
]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("changes", CHANGES)
def test_only_changed_settings_change_the_config(name, changes):
    more = {"eos_token_id": [7, 9], "max_position_embeddings": 99, "new_key": {"a": 1}}
    kept = read_config(DATA / name) | more
    settings = decoder_config_from_hf(kept, ignore=["new_key"])
    if "num_experts" in changes and not settings["num_experts"]:
        changes = {}
    if "rope_factor" in changes and settings["rope_kind"] not in ("llama3", "yarn"):
        changes = {"rope_factor": 8.0}  # the only one of these settings that the kind has
    changed = settings | changes
    found = updated_config(kept, changed)
    assert decoder_config_from_hf(found, ignore=["new_key"]) == changed | {"dtype": changed["param_dtype"]}
    assert found.items() >= more.items()
    assert changes or found == kept


def test_the_config_of_another_family_is_not_kept():
    settings = decoder_config_from_hf(read_config(DATA / "qwen3"))
    assert updated_config(read_config(DATA / "qwen2"), settings)["model_type"] == "qwen3"
