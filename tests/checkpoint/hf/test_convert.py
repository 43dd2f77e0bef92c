"""Parameters to safetensors and back: bitwise between any two layouts; every device reads only its slices."""

import dataclasses
import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from flax_mesh import ConfigError, abstract_state, create_mesh, named_leaves
from flax_mesh.checkpoint.hf import convert
from flax_mesh.checkpoint.hf.convert import ParamMapping, load_safetensors, save_safetensors
from flax_mesh.checkpoint.hf.decoders import DECODER_NAMES
from flax_mesh.checkpoint.hf.safetensors import INDEX, open_safetensors, write_safetensors
from flax_mesh.models import make_decoder
from flax_mesh.tree import in_stack
from tests.checkpoint.states import SMALL, check_leaves, pipelined, random_values
from tests.train.bigram import snapshot

LISTED = dataclasses.replace(SMALL, num_layers=4, mlp_size=24, qkv_bias=True, qk_norm=True, tied=False)
SCANNED = dataclasses.replace(LISTED, scan=True)
NAMES = DECODER_NAMES["qwen3"]


def plain(config, *dims):
    mesh = create_mesh(dims, devices=jax.devices()[: np.prod(dims)])
    return abstract_state(lambda: make_decoder(config, nnx.Rngs(0)), mesh)


LAYOUTS = {
    "one device": lambda: plain(LISTED, 1, 1, 1, 1, 1),
    "fsdp8": lambda: plain(LISTED, 1, 8, 1, 1, 1),
    "dp2 fsdp2 tp2": lambda: plain(LISTED, 2, 2, 1, 2, 1),
    "scanned": lambda: plain(SCANNED, 1, 4, 1, 2, 1),
    "pipelined": lambda: pipelined(LISTED).to_nnx()["model"],
    "pipelined, scanned": lambda: pipelined(SCANNED).to_nnx()["model"],
    "pipelined twice, scanned": lambda: pipelined(SCANNED, virtual=2).to_nnx()["model"],
}


@pytest.fixture(scope="module")
def abstracts():
    return {name: make() for name, make in LAYOUTS.items()}


@pytest.fixture(scope="module")
def folders(abstracts, tmp_path_factory):
    """dtype, and the folder that each layout was written to. The folders of test_decoders.py have float32."""
    dtype = jnp.dtype("bfloat16")
    root = tmp_path_factory.mktemp("out")
    for layout, abstract in abstracts.items():
        save_safetensors(root / layout, random_values(abstract, dtype), NAMES, max_file_bytes=4_000)
    return dtype, {layout: root / layout for layout in abstracts}


def test_every_layout_writes_the_same_bytes(folders, abstracts):
    paths = [path for path, _ in named_leaves(abstracts["pipelined, scanned"])]
    assert "layers/attention/q/kernel/from 0" in paths and "layers/attention/q/kernel/from 2" in paths
    dtype, of_layout = folders
    want = snapshot(of_layout["one device"])
    assert len(want) > 3 and INDEX in want
    for layout, folder in of_layout.items():
        assert snapshot(folder) == want, layout
    assert {array.dtype for array in open_safetensors(of_layout["one device"]).values()} == {dtype}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_bitwise(layout, folders, abstracts):
    dtype, of_layout = folders
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), abstracts[layout])
    got = load_safetensors(of_layout["fsdp8"], abstract, NAMES)
    assert jax.tree.structure(got) == jax.tree.structure(abstract)
    check_leaves(got, random_values(abstract, dtype))


@pytest.mark.parametrize("layout", ["fsdp8", "dp2 fsdp2 tp2", "scanned", "pipelined, scanned"])
def test_every_device_reads_only_its_own_slices(layout, folders, abstracts, monkeypatch):
    dtype, of_layout = folders
    abstract = abstracts[layout]  # float32
    copies = []
    copy = convert.copy_slice
    monkeypatch.setattr(convert, "copy_slice", lambda out, values: (copies.append(values.nbytes), copy(out, values)))
    load_safetensors(of_layout["one device"], abstract, NAMES)
    shards = {}
    for path, leaf in named_leaves(abstract):
        for index in leaf.sharding.devices_indices_map(leaf.shape).values():
            sizes = [len(range(*part.indices(size))) for part, size in zip(index, leaf.shape, strict=True)]
            layers = sizes[0] if in_stack(path, ["layers"]) else 1
            shards[path, str(index)] = (int(np.prod(sizes)) * dtype.itemsize, layers)
    # A replicated slice is read once, and so is every byte of the files; a stack is read layer by layer.
    assert sum(copies) == sum(size for size, _ in shards.values())
    assert sum(copies) == sum(array.nbytes for array in open_safetensors(of_layout["one device"]).values())
    assert sorted(copies) == sorted(size // layers for size, layers in shards.values() for _ in range(layers))
    assert max(copies) < max(leaf.size for _, leaf in named_leaves(abstracts["one device"])) * dtype.itemsize


def stack_of(names, *shape):
    """A stack with kernels of these names, split over eight devices, and its table."""
    place = jax.NamedSharding(create_mesh((2, 4), ("fsdp", "tp")), jax.P(None, "fsdp", "tp"))
    draw = np.random.default_rng(0)
    kernels = {name: jax.device_put(draw.random(shape, np.float32), place) for name in names}
    return {"layers": kernels}, [ParamMapping(f"layers/{{i}}/{name}", f"{{i}}.{name}", "b a -> a b") for name in names]


def test_saving_and_loading_cast_floats(tmp_path):
    state, table = stack_of(["w"], 3, 4, 8)
    save_safetensors(tmp_path / "out", state, table, dtype="bfloat16", config={"torch_dtype": "float32", "x": 1})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "bfloat16", "x": 1}
    assert {array.dtype for array in open_safetensors(tmp_path / "out").values()} == {jnp.dtype("bfloat16")}
    got = load_safetensors(tmp_path / "out", state, table)
    check_leaves(got, jax.tree.map(lambda x: jax.device_put(x.astype("bfloat16").astype("float32"), x.sharding), state))
    balance = {"layers": [{"moe": {"balance": jnp.full(4, 1 / 3)}}]}
    table = [ParamMapping("layers/{i}/moe/balance", "{i}.bias", "e -> e")]
    save_safetensors(tmp_path / "balance", balance, table, dtype="bfloat16")
    kept = open_safetensors(tmp_path / "balance")["0.bias"]
    assert kept.dtype == np.float32 and np.array_equal(kept, balance["layers"][0]["moe"]["balance"])
    write_safetensors(tmp_path / "integers", {"w": np.arange(4)}, [("w", np.arange(4))])
    with pytest.raises(ConfigError, match=r"w: folder i64\[4\], model f32\[4\]"):
        load_safetensors(tmp_path / "integers", {"w": jnp.zeros(4)}, [ParamMapping("w", "w", "d -> d")])


def test_loaded_arrays_may_be_donated(tmp_path):
    """Replicas of one slice come from one buffer on the host; no device may write into it."""
    state = {"w": jax.device_put(jnp.arange(4096.0), jax.NamedSharding(create_mesh((8, 1, 1, 1, 1)), jax.P()))}
    table = [ParamMapping("w", "w", "d -> d")]
    save_safetensors(tmp_path / "out", state, table)
    got = load_safetensors(tmp_path / "out", state, table)
    doubled = jax.jit(lambda x: 2 * x, donate_argnums=0)(got["w"])
    assert all(np.array_equal(shard.data, 2 * np.arange(4096.0)) for shard in doubled.addressable_shards)


def test_saving_holds_one_parameter_of_one_layer_on_the_host(tmp_path):
    (state, table), layer = stack_of(["gate", "up", "down"], 8, 64, 4096), 64 * 4096 * 4
    assert sum(leaf.nbytes for _, leaf in named_leaves(state)) > 20 * layer
    jax.block_until_ready(state)
    save_safetensors(tmp_path / "warm", state, table)
    tracemalloc.start()
    try:
        save_safetensors(tmp_path / "out", state, table)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layer <= peak < 4 * layer, peak / layer  # the gathered layer, its stored form, and Python's own memory


def test_one_error_lists_every_array_that_differs(folders):
    folder = folders[1]["one device"]
    other = dataclasses.replace(LISTED, num_layers=5, num_kv_heads=4, tied=True, qk_norm=False)
    with pytest.raises(ConfigError) as error:
        load_safetensors(folder, plain(other, 1, 2, 1, 2, 1), NAMES, ignore=[r"q_norm\.weight$"])
    text = str(error.value)
    assert "model.layers.{0..3}.self_attn.k_proj.weight: folder bf16[8,16], model f32[16,16]" in text
    assert "model.layers.4.mlp.up_proj.weight: only in the model, f32[24,16]" in text
    assert "lm_head.weight: only in the folder, bf16[32,16]" in text
    assert "model.layers.{0..3}.self_attn.k_norm.weight: only in the folder, bf16[4]" in text
    assert "q_norm" not in text and "layers.3.mlp" not in text and "embed" not in text
    # k and v with their biases in 4 layers, the 12 arrays of a layer, the head and 4 norms
    assert "does not match the model (33 differences)" in text and text.count("\n") == 1 + 4 + 12 + 1 + 1
    layers = dataclasses.replace(SCANNED, num_layers=2)
    with pytest.raises(ConfigError, match=r"(?s)layers\.\{2\.\.3\}\.input_layernorm.*only in the folder.*\.mlp"):
        load_safetensors(folder, plain(layers, 1, 1, 1, 1, 1), NAMES)


def test_a_state_without_devices_is_refused(folders):
    mesh = AbstractMesh((1, 2, 1, 2, 1), ("dp", "fsdp", "ep", "tp", "sp"))
    abstract = abstract_state(lambda: make_decoder(LISTED, nnx.Rngs(0)), mesh)
    with pytest.raises(ConfigError, match="norm/scale: needs a sharding over devices, got NamedSharding"):
        load_safetensors(folders[1]["one device"], abstract, NAMES)


PATHS = ("layers/{i}/w", "layers/{j}/w")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], r"layers/0/w f32\[2,3\]: exactly one line must match it, but these do: none"),
        ([ParamMapping(path, "w.{i}", "a b -> a b") for path in PATHS], r"these do: layers/\{i\}/w, layers/\{j\}/w"),
        ([ParamMapping("layers/{i}/w", "w.{i}", "a -> a")], r"its line has the dims 'a'"),
        ([ParamMapping("layers/{i}/w", "w", "a b -> a b")], r"'w' must contain in braces \{i\}"),
        ([ParamMapping("layers/{i}/w", "w.{i}", "a -> e a")], r"'w.\{i\}' must contain in braces \{i, e\}"),
        ([ParamMapping("layers/{i}/w", "w.{i}", "a b")], "'a b' must be 'dims in the file -> dims here'"),
        ([ParamMapping("layers/{i}/w", "w.{i}", "a a -> a")], "'a a -> a' must be 'dims in the file -> dims here'"),
        ([ParamMapping("layers/{i}/w", "w.{i}", "a b -> a")], "'a b -> a' must be 'dims in the file -> dims here'"),
        ([ParamMapping("layers/{i}/w", "w.{i}.{e}", "a -> a e")], "'a -> a e' must be 'dims in the file -> dims here'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(line.name for line in value),
)
def test_a_table_that_does_not_match_is_refused(table, message, tmp_path):
    state = {"layers": {"0": {"w": jnp.zeros((2, 3))}}}
    with pytest.raises(ConfigError, match=f"(?s)table of names does not match.*{message}"):
        save_safetensors(tmp_path / "out", state, table)
    with pytest.raises(ConfigError, match=r"maps several parameters to one name: w\."):
        twice = [ParamMapping("a", "w", "d -> d"), ParamMapping("b", "w", "d -> d")]
        save_safetensors(tmp_path / "out", {"a": jnp.zeros(2), "b": jnp.zeros(2)}, twice)
    assert not list(tmp_path.iterdir())


def test_a_custom_table_works_for_any_model(tmp_path):
    """Nested lists, a convolution, one kernel stored in three parts, and a counter."""
    experts = [{str(e): {"w": jnp.full((2, 3), 10.0 * i + e)} for e in range(3)} for i in range(2)]
    state = {
        "blocks": {str(i): {"experts": experts[i]} for i in range(2)},
        "conv": {"kernel": jnp.arange(2 * 3 * 4 * 5, dtype=jnp.float32).reshape(2, 3, 4, 5)},
        "qkv": jnp.arange(12.0).reshape(3, 2, 2),
        "count": jnp.int32(7),
    }
    table = [
        ParamMapping("blocks/{i}/experts/{e}/w", "h.{i}.mlp.{e}.w", "out in -> in out"),
        ParamMapping("conv/kernel", "conv.weight", "out in y x -> y x in out"),
        ParamMapping("qkv", "qkv.{part}", "d c -> part c d"),
        ParamMapping("count", "count", "->"),
    ]
    save_safetensors(tmp_path / "out", state, table)
    stored = open_safetensors(tmp_path / "out")
    assert stored["conv.weight"].shape == (5, 4, 2, 3) and stored["count"].shape == () and stored["count"] == 7
    assert np.array_equal(stored["qkv.2"], np.asarray(state["qkv"][2].T))
    assert (stored["h.1.mlp.2.w"] == 12).all() and stored["h.1.mlp.2.w"].shape == (3, 2)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    check_leaves(load_safetensors(tmp_path / "out", abstract, table), state)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"h/0": {"w": 1.0}, "h": {"0": {"w": 2.0}}}, "  h/0/w: 2 parameters have this path"),
        ({"h": {"01": {"w": 1.0}, "1": {"w": 2.0}}}, "  h/01/w f32[2]: exactly one line must match it"),
    ],
)
def test_parameters_with_the_same_name_in_the_files_are_not_loaded(tree, message, tmp_path):
    """Both would be read from one array."""
    table = [ParamMapping("h/{i}/w", "h.{i}", "d -> d")]
    names = {"h": {str(i): {"w": jnp.full(2, float(i))} for i in range(2)}}
    save_safetensors(tmp_path / "out", names, table)
    abstract = jax.tree.map(lambda x: jnp.full(2, x), tree)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_safetensors(tmp_path / "out", abstract, table, ignore=["h.*"])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slices_of_any_dims_equal_the_stored_elements(data):
    here = data.draw(st.permutations("abcd"))
    flat = list(data.draw(st.permutations("abcd")))[: data.draw(st.integers(1, 4))]
    numbered = [letter for letter in here if letter not in flat]
    here = numbered + [letter for letter in here if letter in flat]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(flat) - 1)))) if len(flat) > 1 else []
    groups = [flat[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(flat)], strict=True)]
    sizes = {letter: data.draw(st.integers(1, 4)) for letter in "abcd"}
    text = " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] for group in groups)
    line = ParamMapping("w", ".".join(["w", *(f"{{{letter}}}" for letter in numbered)]), f"{text} -> {' '.join(here)}")
    shape = tuple(sizes[letter] for letter in here)
    (leaf,) = convert.map_params({"w": np.zeros(shape, np.float32)}, [line])
    stored = {part.name: np.random.default_rng(i).random(part.shape) for i, part in enumerate(leaf.arrays)}
    bounds = [tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    got = convert.read_slice(leaf.arrays, stored, bounds, np.float64)
    assert got.shape == tuple(stop - start for start, stop in bounds)
    for at in np.ndindex(got.shape):
        where = {letter: start + i for letter, (start, _), i in zip(here, bounds, at, strict=True)}
        name = ".".join(["w", *(str(where[letter]) for letter in numbered)])
        place = [np.ravel_multi_index([where[x] for x in group], [sizes[x] for x in group]) for group in groups]
        assert got[at] == stored[name][tuple(place)]
