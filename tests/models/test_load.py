"""`load_decoder`: a folder in Hugging Face's format becomes a decoder whose arrays are sharded over any mesh."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_mesh import CheckpointCorruptedError, ConfigError, ShardingError, abstract_state, create_mesh, named_leaves
from flax_mesh.checkpoint import DECODER_NAMES, huggingface_config, save_safetensors
from flax_mesh.models import Decoder, DecoderConfig, load_decoder, make_decoder, pretrained_config
from tests.models.folders import change_arrays, change_config
from tests.models.reference import small

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = DecoderConfig(
    **{"vocab_size": 32, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
    **{"mlp_size": 24, "qk_norm": True, "tied": False},
)
MESHES = {
    "one device": lambda: create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1]),
    "dp8": lambda: create_mesh((8, 1, 1, 1, 1)),
    "fsdp8": create_mesh,
    "dp2 fsdp2 tp2": lambda: create_mesh((2, 2, 1, 2, 1)),
    "fsdp4 tp2 without other axes": lambda: create_mesh((4, 2), ("fsdp", "tp")),
}


def load_on_one(folder, **options):
    return load_decoder(folder, MESHES["one device"](), **options)


@pytest.fixture(scope="module")
def source():
    return small(CONFIG)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "qwen3"
    config = huggingface_config(vars(CONFIG), max_position_embeddings=64, eos_token_id=3)
    save_safetensors(path, nnx.state(source), DECODER_NAMES["qwen3"], config=config, max_file_bytes=4_000)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_the_config_of_a_folder_has_its_sizes_and_keeps_how_it_is_computed(folder, copy, monkeypatch):
    own = DecoderConfig(dtype="bfloat16", remat="full", scan=True)
    assert pretrained_config(own, str(folder)) == replace(CONFIG, dtype="bfloat16", remat="full", scan=True)
    kept = copy.parent / "run" / "checkpoints" / "huggingface"
    shutil.copytree(copy, kept)
    for place in ("run", "run/checkpoints", "run/checkpoints/20"):
        assert pretrained_config(own, str(copy.parent / place)) == pretrained_config(own, str(folder))
    monkeypatch.chdir(copy)
    assert pretrained_config(own, "") == own
    change_config(copy, model_type="gpt2")
    assert {pretrained_config(own, str(name)) for name in (copy, copy / "absent", "a\0b")} == {own}


@pytest.mark.sampled
@pytest.mark.parametrize("name", MESHES)
def test_the_loaded_decoder_equals_the_saved_one_on_every_mesh(name, source, folder):
    mesh = MESHES[name]()
    model, config = load_decoder(folder, mesh)
    assert isinstance(model, Decoder) and config == model.config == CONFIG
    abstract = abstract_state(lambda: make_decoder(CONFIG, nnx.Rngs(0)), mesh)
    for (path, got), (_, want), (_, layout) in zip(
        *(named_leaves(tree) for tree in (nnx.state(model), nnx.state(source), abstract)), strict=True
    ):
        assert got.sharding == layout.sharding and got.dtype == want.dtype, path
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), path


def test_dtype_is_that_of_parameters_and_computation(source, folder):
    mesh = MESHES["fsdp8"]()
    model, config = load_decoder(folder, mesh, dtype=jnp.bfloat16)
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    for (path, got), (_, want) in zip(named_leaves(nnx.state(model)), named_leaves(nnx.state(source)), strict=True):
        assert np.array_equal(got, np.asarray(want).astype(jnp.bfloat16)), path
    mixed, config = load_decoder(folder, mesh, dtype="bfloat16", param_dtype="float32")
    assert config.dtype == "bfloat16" and nnx.state(mixed)["norm"]["scale"].dtype == jnp.float32


def test_overrides_replace_fields_of_the_config(source, folder):
    mesh = MESHES["dp2 fsdp2 tp2"]()
    model, config = load_decoder(folder, mesh, scan=True, remat="full", loss_chunk=8)
    assert (config.scan, config.remat, config.loss_chunk) == (True, "full", 8)
    stack = model.layers.attention.q.kernel[...]
    assert stack.sharding.spec == jax.P(None, "fsdp", "tp", None)
    np.testing.assert_array_equal(stack, np.stack([layer.attention.q.kernel[...] for layer in source.layers]))


@pytest.fixture
def tied(tmp_path):
    """A folder with tied embeddings in its config.json, and its model."""
    model = small(CONFIG, tied=True)
    more = huggingface_config(vars(model.config))
    save_safetensors(tmp_path / "tied", nnx.state(model), DECODER_NAMES["qwen3"], config=more)
    return tmp_path / "tied", model


def test_a_tied_head_and_rotary_frequencies_in_the_folder_are_ignored(tied):
    folder, model = tied
    again = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    again["lm_head.weight"] = np.asarray(model.embed.embedding)
    change_arrays(folder, lambda arrays: arrays | again)
    loaded, config = load_on_one(folder)
    assert config.tied
    np.testing.assert_array_equal(loaded.embed.embedding, model.embed.embedding)


@pytest.mark.sampled
@pytest.mark.parametrize("where", [0, -1], ids=["first", "last"])
def test_a_stored_head_that_differs_from_the_tied_embedding_in_value_shape_or_dtype_is_refused(tied, where):
    folder, model = tied
    embedding = np.asarray(model.embed.embedding)
    head = embedding.copy()
    head[where, where] += 1
    change_config(folder, num_hidden_layers=10**9)
    for stored in (head, embedding[:-1], embedding.astype(np.float16)):
        change_arrays(folder, lambda arrays, stored=stored: arrays | {"lm_head.weight": stored})
        message = r"(?s)has 1000000000 layers.*lm_head\.weight differs from model\.embed_tokens"
        with pytest.raises(ConfigError, match=message):
            load_on_one(folder)
    change_arrays(folder, lambda arrays: arrays | {"lm_head.weight": head})
    change_config(folder, num_hidden_layers=CONFIG.num_layers)
    loaded, config = load_on_one(folder, ignore=["lm_head.weight"])
    assert config.tied
    for untied in ({"tied": False}, {}):  # as an override, and in config.json
        change_config(folder, tie_word_embeddings=bool(untied))
        loaded, config = load_on_one(folder, ignore=(), **untied)
        assert not config.tied
        np.testing.assert_array_equal(loaded.head.kernel, head.T)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_scale": 0.5}, r"logit_scale=0.5 is an unknown key.*ignore=\('logit_scale',\)"),
        ({"num_hidden_layers": 10**9}, "has 1000000000 layers"),
        ({"num_hidden_layers": 2}, r"model.layers.2.mlp.up_proj.weight: only in the folder"),
        ({"num_hidden_layers": 4}, r"model.layers.3.mlp.up_proj.weight: only in the model"),
        ({"head_dim": 3}, "model.head_dim must be even"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_another_decoder_is_refused(change, message, copy):
    change_config(copy, **change)
    with pytest.raises(ConfigError, match=message):
        load_on_one(copy)


def test_ignore_takes_keys_and_arrays_without_effect(copy):
    change_config(copy, new_key=1)
    change_arrays(copy, lambda arrays: arrays | {"extra.weight": np.zeros(3, np.float32)})
    load_on_one(copy, ignore=["new_key", r"^extra\."])
    with pytest.raises(ConfigError, match=r"ignore='\(' is not a valid regular expression"):
        load_on_one(copy, ignore=["new_key", "("])


def test_the_path_must_be_a_folder_with_a_config_and_undamaged_files(folder, copy, tmp_path):
    mesh = MESHES["one device"]()
    path = sorted(copy.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointCorruptedError, match=path.name):
        load_decoder(copy, mesh)
    with pytest.raises(ConfigError, match=f"{folder}/config.json is not a local folder. Download the model first"):
        load_decoder(folder / "config.json", mesh)
    with pytest.raises(
        ConfigError, match=r"Qwen/Qwen3-0.6B is not a path .* the model with: hf download Qwen/Qwen3-0.6B"
    ):
        load_decoder("Qwen/Qwen3-0.6B", mesh)
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        load_decoder(tmp_path, mesh)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="no safetensors files"):
        load_decoder(tmp_path, mesh)


def test_options_that_the_model_or_the_mesh_does_not_allow_are_refused(folder):
    mesh = MESHES["one device"]()
    with pytest.raises(TypeError, match="no_such_field"):
        load_decoder(folder, mesh, no_such_field=1)
    with pytest.raises(ConfigError, match=r"model.dtype must be one of float32, bfloat16, float16, got 'int8'"):
        load_decoder(folder, mesh, dtype="int8")
    if jax.default_backend() == "cpu":
        with pytest.raises(ConfigError, match=r"model.attention=cudnn needs GPUs"):
            load_decoder(folder, mesh, dtype="bfloat16", attention="cudnn", head_dim=8)
    copied = pytest.warns(
        UserWarning, match=r"^model.num_kv_heads=2 is not divisible by tp=8, whose devices have copies"
    )
    with copied, pytest.raises(ShardingError, match=r"attention/q/kernel: dim 1 has size 4, not divisible by 8"):
        load_decoder(folder, create_mesh((1, 1, 1, 8, 1)))
