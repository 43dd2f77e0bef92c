"""Opening a trained decoder: from any layout onto any mesh, with its moving average; folders that contain none."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mesh import named_leaves
from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.hf.decoders import open_decoder
from flax_mesh.errors import CheckpointCorruptedError, ConfigError
from flax_mesh.fields import value_to_text
from flax_mesh.inference import open as opening
from flax_mesh.inference import source
from flax_mesh.inference.open import default_mesh, open_trained
from flax_mesh.models import DecoderConfig, Sampling, generate, load_decoder, make_decoder, next_token_loss
from flax_mesh.recipe.optimizers.average import with_average
from flax_mesh.recipe.saved import sequence_length
from flax_mesh.train import TrainConfig, apply_overrides
from flax_mesh.train.export import export, import_huggingface, reshard
from tests.checkpoint.deleting import before, replace
from tests.inference.small_run import recipe, save_run
from tests.train import bigram

pytestmark = pytest.mark.usefixtures("quick_compilation")
HF = Path(__file__).parents[1] / "checkpoint" / "hf" / "data"
PROMPTS = [[1, 2, 3], [250], list(range(100, 120))]


def ids(folder: Path, *settings: str, **options) -> list[list[int]]:
    trained = open_trained(folder, settings)
    found = generate(trained.model, PROMPTS, max_tokens=8, batch_size=4, **options)
    return [one.tokens.tolist() for one in found]


@pytest.mark.slow
def test_ids_are_the_same_on_every_mesh_and_from_a_pipelined_checkpoint(run, tmp_path):
    expected = ids(run, "mesh.shape=fsdp:1")
    assert len({token for row in expected for token in row}) > 5
    for settings in (["dp:2,tp:2"], ["sp:2"], ["fsdp:8"], ["fsdp:2,tp:2", "model.scan=true"]):
        assert ids(run, f"mesh.shape={settings[0]}", *settings[1:]) == expected
    pipelined = apply_overrides(recipe(), ["mesh.shape=pp:2,fsdp:2", "pipeline.num_microbatches=2"])
    written = reshard(str(run), str(tmp_path / "pp"), pipelined, None)
    assert written["mesh"] == "pp:2,fsdp:2"
    assert ids(tmp_path / "pp", "mesh.shape=dp:2,tp:2") == expected
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.9)
    sampled = ids(run, "mesh.shape=fsdp:1", sampling=sampling, seed=5)
    assert sampled != expected and ids(tmp_path / "pp", "mesh.shape=dp:2,tp:2", sampling=sampling, seed=5) == sampled


@pytest.mark.slow
def test_the_default_mesh_is_reported_and_uses_all_devices(run):
    lines = []
    trained = open_trained(run, say=lines.append)
    assert dict(trained.mesh.shape)["tp"] == 2 and trained.mesh.size == 8
    assert any("fsdp:4,tp:2 on 8 x cpu; mesh.shape=... sets another one" in line for line in lines)
    assert trained.tokenizer is not None and trained.tokenizer.is_bytes
    assert ids(run) == ids(run, "mesh.shape=fsdp:1")


@pytest.mark.parametrize("name", ["find_valid", "saved_record", "_check_layers", "abstract_state", "averages"])
def test_a_newer_step_is_opened_if_a_run_deletes_the_one_it_reads(run, tmp_path, monkeypatch, name):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    module = source if hasattr(source, name) else opening
    steps = folder / "checkpoints"
    before(monkeypatch, module, name, lambda *_: replace(steps / "3"))
    assert open_trained(folder, "mesh.shape=fsdp:1").source.step == 4
    before(monkeypatch, module, name, lambda *_: replace(steps / "4"))
    with pytest.raises(ConfigError, match=r"has no step 4; it has 5|/4 was deleted or renamed while it was read"):
        open_trained(folder, "mesh.shape=fsdp:1", step=4)


def test_the_default_mesh_divides_every_dim():
    cases: list[tuple[dict[str, Any], int, dict[str, int]]] = [
        ({}, 8, {"fsdp": 2, "tp": 4}),
        ({}, 1, {"fsdp": 1, "tp": 1}),
        ({"num_kv_heads": 1}, 8, {"fsdp": 8, "tp": 1}),
        ({"vocab_size": 50_257}, 8, {"fsdp": 8, "tp": 1}),
        ({}, 7, {"fsdp": 1, "tp": 4}),
        ({"hidden_size": 255, "mlp_size": 767, "vocab_size": 257}, 4, {"fsdp": 3, "tp": 1}),
    ]
    for sizes, devices, expected in cases:
        config = DecoderConfig(**sizes)
        assert default_mesh(config, devices) == expected
        assert config.hidden_size % expected["fsdp"] == 0
        assert config.num_kv_heads % expected["tp"] == config.mlp_size % expected["tp"] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("scan", [True, False])
def test_a_run_with_ema_has_the_average_that_export_writes(tmp_path, scan):
    state = save_run(tmp_path, "optimizer.ema=0.5", f"model.scan={scan}", "mesh.shape=fsdp:2")
    parameters = {path: np.asarray(x) for path, x in named_leaves(state.to_nnx()["model"])}
    averaged = {path: np.asarray(x) for path, x in named_leaves(with_average(state, 0.5).to_nnx()["model"])}
    for average, expected in ((True, averaged), (False, parameters)):
        trained = open_trained(tmp_path, [f"model.scan={scan}", "mesh.shape=fsdp:2"], average=average)
        found = dict(named_leaves(trained.model))
        assert found.keys() == expected.keys()
        for path, x in found.items():
            np.testing.assert_allclose(np.asarray(x), expected[path], rtol=1e-6)
        assert ("moving average" in trained.description) == average
    assert not np.array_equal(parameters["embed/embedding"], averaged["embed/embedding"])
    export(str(tmp_path), str(tmp_path / "hf"), "safetensors", None, None)
    exported = named_leaves(open_decoder(tmp_path / "hf").load(state.to_nnx()["model"]))
    assert dict(exported).keys() == averaged.keys()
    for path, x in exported:
        np.testing.assert_allclose(np.asarray(x), averaged[path], rtol=1e-6, err_msg=path)


def test_a_hugging_face_folder_and_its_import_are_opened(tmp_path):
    trained = open_trained(HF / "qwen2", ["mesh.shape=fsdp:2,tp:2", "model.scan=true"])
    model, _ = load_decoder(HF / "qwen2", trained.mesh, scan=True)
    for (path, x), (_, y) in zip(named_leaves(trained.model), named_leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=path)
    import_huggingface(
        str(HF / "qwen2"),
        str(tmp_path / "imported"),
        (),
        lambda settings: TrainConfig(make_decoder, next_token_loss, DecoderConfig(**settings)),
    )
    imported = open_trained(tmp_path / "imported", ["mesh.shape=fsdp:2", "model.scan=true"])
    np.testing.assert_array_equal(np.asarray(imported.model.norm.scale), np.asarray(model.norm.scale))
    assert imported.tokenizer is None


def refused(folder, *settings, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        open_trained(folder, settings, **options)
    return str(caught.value)


def test_settings_without_effect_and_settings_that_do_not_fit_are_refused(run):
    text = refused(run, "run.steps=2", "optimizer.lr=1", "mesh.shape=pp:2,dp:2", "model.hiden_size=2", "nonsense")
    assert len(text.splitlines()) == 5
    assert "run.steps has no effect here; the settings are model.*, mesh.* and run.platform" in text
    assert "mesh.shape=pp:2,dp:2: generation and evaluation have no pipeline; leave out pp" in text
    assert "did you mean model.hidden_size" in text and "did you mean optimizer.learning_rate" in text
    assert "model.num_heads=4 is not divisible by 8 (tp=8)" in refused(run, "mesh.shape=tp:8")
    assert "model/embed/embedding: checkpoint f32[256,16], model f32[256,32]" in refused(run, "model.hidden_size=32")
    assert "model.num_layers=1000, but it has only" in refused(run, "model.num_layers=1000")
    assert "model.attention=cudnn needs GPUs" in refused(run, "model.attention=cudnn", "model.dtype=bfloat16")
    assert "has no step 7; it has 3" in refused(run, step=7)


def test_a_folder_without_a_decoder_is_refused_in_one_line(tmp_path):
    state = {"w": jax.numpy.zeros(4)}
    texts = {f"model.{name}": str(value) for name, value in vars(bigram.BigramConfig()).items()}
    for name, tree, record in (("plain", state, {}), ("bigram", {"model": state}, {"config": texts})):
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, tree, record)
    assert "its metadata has no settings of a model" in refused(tmp_path / "plain")
    text = refused(tmp_path / "bigram")
    assert "is not a checkpoint of flax_mesh.models.Decoder: its settings lack model.num_layers" in text
    assert "contain model.dropout, model.note" in text and "\n" not in text
    assert "is not a folder" in refused(tmp_path / "nothing")
    assert "is empty" in refused("")
    assert "null byte" in refused("a\0b")
    assert "which has no steps; leave out --step 2" in refused(HF / "llama", step=2)
    save_run(tmp_path, config={f"model.{k}": value_to_text(v) for k, v in vars(DecoderConfig()).items() if k != "axes"})
    text = refused(tmp_path)
    assert text.startswith(f"{tmp_path}/checkpoints/3 is not a checkpoint of flax_mesh.models.Decoder")
    assert "model/embed/embedding: checkpoint f32[256,16], model f32[256,256]" in text
    assert "different" not in text


@pytest.mark.parametrize("length", ["9" * 5000, "٣٢", "0", "2147483648", ""])
def test_a_length_in_the_metadata_that_is_no_number_is_not_known(length):
    assert sequence_length({"config": {"data.sequence_length": length}}) is None
    assert sequence_length({"config": {"data.sequence_length": "32"}}) == 32


def test_the_recipe_of_a_checkpoint_is_not_executed(tmp_path):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    save_run(tmp_path, recipe=f"{evil}:recipe")
    open_trained(tmp_path, ["mesh.shape=fsdp:1"])
    assert not (tmp_path / "executed").exists()


def test_a_damaged_step_is_skipped_and_reported(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    steps = folder / "checkpoints"
    shutil.copytree(steps / "3", steps / "5")  # its record names another step
    lines = []
    assert open_trained(folder, ["mesh.shape=fsdp:1"], say=lines.append).description.endswith("step 3")
    assert any("5 is damaged and was skipped" in line for line in lines)
    with pytest.raises(CheckpointCorruptedError, match="is damaged"):
        open_trained(folder, step=5)
    shutil.copytree(steps / "3", steps / "3.damaged")
    assert "is quarantined; rename it to 3 first" in refused(steps / "3.damaged")
    with pytest.raises(ConfigError, match="damaged is quarantined"):
        reshard(str(steps / "3.damaged"), str(tmp_path / "out"), recipe(), None)
