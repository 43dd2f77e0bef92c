"""checkpoint.start_from: a new run has the parameters of another, on any mesh, and reports the restored arrays."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from flax_mesh import ConfigError
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.hf.kept import KEPT
from flax_mesh.checkpoint.hf.safetensors import open_safetensors
from flax_mesh.cli import main
from flax_mesh.data.corpus import load_corpus
from flax_mesh.data.run_data import BATCHES, TEXT, TOKENS
from flax_mesh.errors import StepDeletedError
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.recipe.program import TrainProgram, build_program
from flax_mesh.train import DataConfig, apply_overrides, train
from flax_mesh.train.warm_start import check_start_settings, check_text, find_start, start_from
from tests.checkpoint.deleting import replace
from tests.inference.small_run import write_tokenizer
from tests.models.folders import change_arrays
from tests.train.support.llama import LLAMA, config_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


def started(config, folder):
    program = build_program(config)
    state, text = start_from(find_start(str(folder)), program.init(), program.rules.layers)
    for before, after in zip(program.layout.leaves, state.leaves, strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    return program.model(state), text


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["fsdp:2,tp:2,dp:2", "pp:2,fsdp:2,tp:2"])
def test_the_run_starts_with_the_logits_of_the_folder(shape):
    model, text = started(config_of(shape, "model.scan=true"), LLAMA)
    reference = np.load(LLAMA / "reference.npz")
    logits = jax.jit(lambda model, tokens: model(tokens))(model, reference["tokens"])
    np.testing.assert_allclose(logits, reference["logits"], atol=1e-5 * np.abs(reference["logits"]).max())
    assert text.startswith("restored all ")


SMALL = ("model.num_layers=1", "model.vocab_size=256")


@pytest.fixture(scope="module")
def program() -> TrainProgram:
    return build_program(config_of("fsdp:1", *SMALL))


@pytest.fixture(scope="module")
def parameters(program, tmp_path_factory) -> Path:
    """A folder with step 7: the parameters of a run and its settings."""
    folder = tmp_path_factory.mktemp("parameters")
    with Checkpointer(folder, layers=program.rules.layers) as checkpointer:
        checkpointer.save(7, program.init().to_nnx(), {"config": to_texts(program.recipe.config)})
    return folder


@pytest.fixture
def saved(parameters, tmp_path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(parameters, tmp_path / "saved")


def test_a_newer_step_is_the_start_if_a_run_deletes_the_one_it_found(program, saved):
    start, named, state = find_start(str(saved)), find_start(str(saved / "7")), program.init()
    replace(saved / "7")
    assert "step 8, restored " in start_from(start, state, program.rules.layers)[1]
    with pytest.raises(StepDeletedError, match="/7 was deleted or renamed"):
        start_from(named, state, program.rules.layers)


def test_settings_of_the_model_that_differ_from_the_checkpoint_are_refused_together(saved, tmp_path):
    start = [*SMALL, f"checkpoint.start_from={saved}", f"run.folder={tmp_path / 'run'}"]
    other = ["model.rope_theta=500.0", "model.norm_epsilon=0.1", "model.rope_factor=2.0"]
    free = ["model.dtype=bfloat16", "model.remat=full", "model.router_z_loss=0.5", "optimizer.learning_rate=0.5"]
    config, lines = config_of("fsdp:1", *start, *other, *free), []
    message = r"(?s)step 7 .*theta: 1000\.0 -> 500\.0.*factor: 8\.0 -> 2\.0.*norm_epsilon: .* -> 0\.1.*--allow-c"
    with pytest.raises(ConfigError, match=message) as error:
        check_start_settings(find_start(str(saved)), config, TEXT, allow_changes=False)
    assert len(error.value.lines) == 5
    kept = saved / KEPT
    kept.mkdir()
    (kept / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^data\.source=stdlib is text, .* \S+/saved/huggingface/tokenizer\.json"):
        train(config, allow_changes=True)
    assert not (tmp_path / "run").exists()
    (kept / "tokenizer.json").rename(kept / "generation_config.json")
    train(config, allow_changes=True, say=lines.append)
    changed = [line for line in lines if line.startswith("changed since the checkpoint: model.")]
    assert len(changed) == 6
    assert (tmp_path / "run" / "checkpoints" / KEPT / "generation_config.json").read_text() == "{}"
    # A run that resumes takes parameters from its checkpoints.
    (tmp_path / "run" / "checkpoints" / KEPT / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is text.* \S+/run/checkpoints/huggingface/tokenizer\.json"):
        train(apply_overrides(config, ["run.steps=2"]))


def test_settings_of_an_imported_checkpoint_and_of_one_without_settings(tmp_path):
    assert main(["checkpoint", "import", str(LLAMA), str(tmp_path / "imported")]) == 0
    start = find_start(str(tmp_path / "imported"))
    assert check_start_settings(start, config_of("fsdp:1"), TEXT, allow_changes=False) == []
    for setting in ("rope_theta=500.0", "num_layers=3"):
        with pytest.raises(ConfigError, match=setting.replace("=", ".* -> ")):
            check_start_settings(start, config_of("fsdp:1", f"model.{setting}"), TEXT, allow_changes=False)
    with Checkpointer(tmp_path / "bare") as checkpointer:
        checkpointer.save(7, {"x": np.zeros(2)}, {})
    start = find_start(str(tmp_path / "bare"))
    assert check_start_settings(start, config_of("fsdp:1", "model.rope_theta=500.0"), TEXT, allow_changes=False) == []


def test_a_folder_of_another_model_or_with_unknown_keys_is_rejected_before_files_are_read(tmp_path):
    run = f"run.folder={tmp_path / 'run'}"
    with pytest.raises(ConfigError, match=r"model\.rope_theta=500\.0 differs from 1000\.0 in checkpoint\.start_from"):
        train(config_of("fsdp:4", f"checkpoint.start_from={LLAMA}", "model.rope_theta=500.0", run))
    with pytest.raises(ConfigError, match=r"start_from: .* is not a folder"):
        train(config_of("fsdp:4", f"checkpoint.start_from={tmp_path / 'none'}", run))
    assert not (tmp_path / "run").exists()
    folder = shutil.copytree(LLAMA, tmp_path / "hub")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"new_key": 1,', 1))
    problems = check_config(config_of("fsdp:1", f"checkpoint.start_from={folder}"))
    assert "new_key=1 is an unknown key" in problems[1] and "checkpoint import FOLDER OUT --ignore" in problems[-1]


def test_a_tied_head_in_the_folder_must_equal_the_embedding(tmp_path):
    folder = shutil.copytree(LLAMA, tmp_path / "llama")
    head = np.array(open_safetensors(folder)["model.embed_tokens.weight"])
    config = config_of("fsdp:1", f"checkpoint.start_from={folder}", f"run.folder={tmp_path / 'run'}")
    change_arrays(folder, lambda arrays: arrays | {"lm_head.weight": head})
    assert not check_config(config)
    program = build_program(config)
    _, text = start_from(find_start(str(folder)), program.init(), program.rules.layers)
    assert text.startswith("restored all ")
    change_arrays(folder, lambda arrays: arrays | {"lm_head.weight": head + 1})
    with pytest.raises(ConfigError, match=r"start_from: .*lm_head\.weight differs from model\.embed_tokens\.weight"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_text_is_refused_for_a_model_with_a_tokenizer_and_the_error_shows_how_to_encode_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(LLAMA, "hub"))
    write_tokenizer(folder)
    Path("own.txt").write_text("hello world " * 200)
    with pytest.raises(ConfigError, match=r"set data\.source=own\.npy") as error:
        check_text(TEXT, "own.txt", folder)
    exec("\n".join(line.strip() for line in error.value.lines[1:3]))
    tokens = load_corpus(DataConfig(source="own.npy", sequence_length=8)).train
    assert tokens[:1] == 1 and 200 < len(tokens) < 2000  # the token before every text, and fewer tokens than bytes
    check_text(TOKENS, "own.npy", folder)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"AutoTokenizer\.from_pretrained\('hub'\)"):
        check_text(TEXT, "*.txt", folder)
    assert main(["checkpoint", "import", "hub", "imported"]) == 0
    with pytest.raises(ConfigError, match=r"remove \S+imported/huggingface/tokenizer\.model"):
        check_text(TEXT, "*.txt", find_start("imported").files)


def test_text_for_a_folder_without_a_tokenizer_is_a_note(parameters, tmp_path):
    assert main(["checkpoint", "export", str(parameters), str(tmp_path / "hub"), "--to", "safetensors"]) == 0

    def say(line):
        if line.startswith("note: "):
            raise InterruptedError(line)  # before anything compiles

    start = [f"checkpoint.start_from={tmp_path / 'hub'}", f"run.folder={tmp_path / 'run'}"]
    with pytest.raises(InterruptedError, match=r"/hub has no tokenizer, so data\.source is read as bytes"):
        train(config_of("fsdp:1", *SMALL, *start), say=say)


def test_text_after_tokens_and_tokens_after_text_are_changes_of_a_start(tmp_path):
    config = config_of("fsdp:1", "model.num_layers=1")
    message = r"(?s)tokens of data\.source: (bytes of text|ids in token files) -> .*--allow-changes"
    for before, other in ((TOKENS, TEXT), (TEXT, TOKENS)):
        with Checkpointer(tmp_path / before) as checkpointer:
            metadata = {"config": to_texts(config), "data": {"kind": before}}
            checkpointer.save(7, {"model": {"x": np.zeros(2)}}, metadata)
        start = find_start(str(tmp_path / before))
        for kind in (before, BATCHES):
            assert check_start_settings(start, config, kind, allow_changes=False) == []
        with pytest.raises(ConfigError, match=message):
            check_start_settings(start, config, other, allow_changes=False)
        (change,) = check_start_settings(start, config, other, allow_changes=True)
        assert change.changes_result
