"""Ids of the Hugging Face hub in the place of folders, with a cache that is filled by hand and without a network."""

import shutil
import sys
from importlib import util
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from flax_mesh import store
from flax_mesh.checkpoint.base import make_base
from flax_mesh.checkpoint.hf.decoders import read_config
from flax_mesh.checkpoint.hf.kept import is_huggingface
from flax_mesh.checkpoint.hf.peft import adapter_config
from flax_mesh.cli import main
from flax_mesh.data.tokenizers.chat import open_tokenizer
from flax_mesh.errors import ConfigError
from flax_mesh.inference.source import find_source
from flax_mesh.models import DecoderConfig, pretrained_config
from flax_mesh.plan import plan
from flax_mesh.recipe.checks import check_start
from flax_mesh.recipe.overrides import changes, read_overrides, to_texts
from flax_mesh.store import commit_of, model_folder, with_commit
from flax_mesh.train import ChatConfig, load_recipe, read_preferences, train
from flax_mesh.train.warm_start import find_start
from tests.train.support.llama import LLAMA, config_of

COMMITS = ["a" * 40, "b" * 40]


def fill(cache: Path, name: str, commit: str, branch: str = "main") -> Path:
    """The folder of a commit, whose files are links to blobs, and a branch that names the commit."""
    repository = cache / f"models--{name.replace('/', '--')}"
    blobs, folder, refs = (repository / x for x in ("blobs", f"snapshots/{commit}", "refs"))
    for path in (blobs, folder, refs):
        path.mkdir(parents=True, exist_ok=True)
    for file in [x for x in LLAMA.iterdir() if x.suffix in (".json", ".safetensors")]:
        shutil.copy(file, blobs / file.name)
        (folder / file.name).symlink_to(f"../../blobs/{file.name}")
    (refs / branch).write_text(commit)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch, request) -> tuple[Path, str]:
    """The cache, and the id of a model in it, which no other test uses."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    name = f"org/{request.node.originalname[5:35]}"
    fill(tmp_path / "cache", name, COMMITS[0])
    return tmp_path / "cache", name


def test_an_id_is_a_folder_wherever_a_folder_is_accepted(cache):
    folder, name = model_folder(cache[1]), cache[1]
    assert folder == cache[0] / f"models--{name.replace('/', '--')}" / "snapshots" / COMMITS[0]
    other = fill(cache[0], name, COMMITS[1], "branch")
    assert [model_folder(f"{name}@{x}") for x in ("main", "branch", COMMITS[1])] == [folder, other, other]
    assert is_huggingface(name) and find_start(name).files == folder and find_source(name).path == folder
    config = pretrained_config(DecoderConfig(), name)
    assert config == pretrained_config(DecoderConfig(), str(folder)) and check_start(name, config) == []
    base = make_base(name, {})
    assert base.folder == f"{name}@{COMMITS[0]}" and base.files and base.problems() == []
    assert adapter_config({}, [], 1, 1.0, *commit_of(base.folder) or ())["revision"] == COMMITS[0]


def test_a_text_that_names_a_file_or_a_path_object_is_no_id_and_a_failure_is_not_asked_for_again(monkeypatch):
    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        raise ValueError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert [str(model_folder(x)) for x in ("data/train.jsonl", Path("runs/tiny"))] == ["data/train.jsonl", "runs/tiny"]
    for _ in range(2):
        with pytest.raises(ConfigError, match="org/never is not a path of this machine"):
            model_folder("org/never")
    assert asked == ["org/never"]


def test_commits_settings_tokenizers_and_rows_are_read_without_parameters(cache, monkeypatch):
    asked, download = list[list[str]](), huggingface_hub.snapshot_download

    def spy(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return download(name, **options)

    monkeypatch.setattr("huggingface_hub.snapshot_download", spy)
    start = [f"checkpoint.start_from={cache[1]}"]
    config = read_overrides(config_of("fsdp:1", "run.folder=run"), start)[0]
    assert check_start(config.checkpoint.start_from, pretrained_config(DecoderConfig(), cache[1])) == []
    assert read_config(cache[1])["model_type"] == "llama"
    with pytest.raises(ConfigError, match="must be a folder with a tokenizer"):
        open_tokenizer(cache[1], 300)
    monkeypatch.setattr("flax_mesh.data.preferences.read_rows", lambda *_: ([], ""))
    read_preferences(ChatConfig(source="pairs.jsonl"), cache[1], 300, log_probs=lambda: np.asarray, keep_in="run")
    assert asked and not any("safetensors" in pattern for patterns in asked for pattern in patterns)


def test_a_config_alone_is_enough_for_a_plan_but_not_for_a_run(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(LLAMA / "config.json", folder)
    config = config_of("fsdp:4", f"checkpoint.start_from={folder}", f"run.folder={tmp_path / 'run'}")
    assert check_start(str(folder), config.model) == [] and plan(config, "v5p:2x2x1").fits
    for refused in (lambda: train(config), lambda: find_start(str(folder))):
        with pytest.raises(ConfigError, match=r"config\.json, but neither safetensors nor a checkpoint; add the param"):
            refused()
    assert not (tmp_path / "run").exists()
    (folder / "config.json").write_text((LLAMA / "config.json").read_text().replace("{", '{"new_key": 1,', 1))
    assert "new_key=1 is an unknown key" in check_start(str(folder), config.model)[1]


def test_a_path_that_exists_comes_before_an_id(cache):
    shutil.copytree(LLAMA, cache[1])
    assert model_folder(cache[1]) == Path(cache[1]) and with_commit(cache[1]) == cache[1]
    assert find_source(cache[1]).path == Path(cache[1])
    assert make_base(cache[1], {}).folder == str(Path(cache[1]).absolute())


@pytest.mark.parametrize("key", ["checkpoint.start_from", "loss_fn.teacher"])
def test_a_run_records_the_commit_and_its_folder_keeps_it_when_the_branch_moves(key, cache):
    name, recipe = cache[1], load_recipe(str(Path(__file__).parents[3] / "recipes" / "distill.py"))

    def recorded(text: str) -> str:
        config, problems = read_overrides(recipe, ["run.folder=run", f"{key}={text}"])
        assert not problems
        return to_texts(config)[key]

    assert recorded(name) == f"{name}@{COMMITS[0]}"
    Path("run").mkdir()
    Path("run/config.txt").write_text(f"run.seed=0\n{key}={name}@{COMMITS[1]}\n")  # an earlier main
    for text in (name, f"{name}@main"):
        assert recorded(text) == f"{name}@{COMMITS[1]}"
    (cache[0] / f"models--{name.replace('/', '--')}" / "refs" / "v2").write_text(COMMITS[0])
    assert recorded(f"{name}@v2") == f"{name}@{COMMITS[0]}", "another revision is a change, of which both are named:"
    config = read_overrides(recipe, [f"{key}={name}@v2"])[0]
    saved = to_texts(config) | {key: f"{name}@{COMMITS[1]}"}
    (change,) = changes(saved, config)
    assert str(change).startswith(f"{key}: {name}@{COMMITS[1]} -> {name}@{COMMITS[0]}") and change.changes_result
    for text in (f"{name}@{COMMITS[0]}", "org/other", "runs/a/b", ""):
        assert recorded(text) == text


RAISED = {
    "GatedRepoError": "requires access: ask for it at https://huggingface.co/org/model, and log in with: hf auth login",
    "RepositoryNotFoundError": "does not exist, or is private",
    "RevisionNotFoundError": "has no revision old",
    "HTTPError": "cannot be downloaded: raised here",
    "OfflineModeIsEnabled": "cannot be downloaded: raised here",
}

PLAIN = ("HTTPError", "OfflineModeIsEnabled")


@pytest.mark.parametrize("kind", RAISED)
def test_an_id_that_cannot_be_loaded_is_an_error_with_both_readings_and_the_download(kind, monkeypatch):
    from huggingface_hub import errors

    def download(name, **options):
        client = sys.modules[errors.HfHubHTTPError.__bases__[0].__module__.split(".")[0]]
        response = client.Response(403, request=client.Request("GET", "https://huggingface.co"))
        options = {} if kind in PLAIN else {"response": response}
        raise getattr(errors, kind)("raised here", **options)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    store._snapshot.cache_clear()
    with pytest.raises(ConfigError) as error:
        model_folder("org/model@old")
    (line,) = error.value.lines
    assert line.startswith("org/model@old is not a path of this machine, and as a model of the Hugging Face hub it ")
    assert RAISED[kind] in line and line.endswith("hf download org/model --revision old")


def test_without_a_network_an_id_that_is_not_whole_in_the_cache_is_an_error_with_the_download(cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repair, both = "hf download org/part", "in the cache of this machine. Correct the path or the id, or download the"
    folder = fill(cache[0], "org/part", COMMITS[0])
    (file,) = folder.glob("*.safetensors")
    others = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]

    def problem(name: str, kind: str = store.MODEL) -> str:
        store._snapshot.cache_clear()
        try:
            return str(model_folder(name, kind)).replace(str(folder), "")
        except ConfigError as error:
            return str(error)

    assert problem("org/part") == ""
    shutil.copy(file, others[0])
    file.unlink()
    assert problem("org/part").endswith(f"not all of them, {both} model with: {repair}")
    assert problem("org/part", store.SETTINGS) == ""
    shutil.copy(others[0], others[1])
    assert problem("org/part") == ""
    for path in others:
        path.unlink()
    assert repair in problem("org/part") and "hf download org/absent" in problem("org/absent")
    data = cache[0] / "datasets--org--part"
    (data / "snapshots" / COMMITS[0]).mkdir(parents=True)
    (data / "snapshots" / COMMITS[0] / "README.md").write_text("")
    (data / "refs").mkdir()
    (data / "refs" / "main").write_text(COMMITS[0])
    assert problem("org/part", store.DATASET).endswith(
        f"has no files of data {both} dataset with: {repair} --repo-type dataset"
    )


def test_commands_name_an_id_that_is_not_in_the_cache_and_a_missing_package(cache, capfd, monkeypatch):
    assert main(["generate", "org/absent", "--prompt", "a"]) == 2
    assert "it is not in the cache of this machine, or only a part" in capfd.readouterr().err
    assert check_start("org/absent", DecoderConfig())[0].startswith("checkpoint.start_from: org/absent is not a path")
    assert main(["checkpoint", "import", "org/absent", "out"]) == 2
    assert "hf download org/absent" in capfd.readouterr().err
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"org/other is not a path .* pip install \"flax-mesh\[hub\]\""):
        model_folder("org/other")
