"""A model in Python: the texts and the numbers equal the output of the commands, and its mistakes are one line each."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from flax_mesh.cli.common import DONE
from flax_mesh.errors import ConfigError
from flax_mesh.inference import TrainedModel, open_trained
from flax_mesh.models import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")
MESH = "mesh.shape=fsdp:1"


@pytest.fixture(scope="module")
def trained(run) -> TrainedModel:
    return open_trained(run, MESH)


def test_generate_equals_the_command(run, trained, call):
    options = ("--temperature", 1, "--seed", 4, "--max-tokens", 12, MESH, "--json")
    text = call("generate", run, "--prompt", "é and", "--prompt", "x", *options)[1]
    lines = [json.loads(line) for line in text.splitlines()]
    sampled = {"sampling": Sampling(temperature=1.0), "seed": 4, "max_tokens": 12}
    with jax.transfer_guard("disallow"):  # no array is transferred implicitly
        assert trained.generate(["é and", "x"], **sampled) == [line["text"] for line in lines]
    tokens = lines[0]["tokens"]
    before = bytes(tokens[: tokens.index(tokens[4])]).decode(errors="replace")
    assert trained.generate(["é and", "x"], stop=[tokens[4]], **sampled)[0] == before


def test_evaluate_equals_the_command(run, trained, call, tmp_path):
    (tmp_path / "a.txt").write_text("def squares(numbers): return [x * x for x in numbers]")
    options = ("--batch-size", 2, "--max-tokens", 40, MESH, "--json")
    text = call("evaluate", run, "--data", f"a={tmp_path / 'a.txt'}", *options)[1]
    assert trained.evaluate(tmp_path / "a.txt", batch_size=2, max_tokens=40).to_dict() == json.loads(text)["sets"]["a"]


def test_texts_of_a_model_with_numbers_that_are_not_finite_are_a_warning(run, trained, call, monkeypatch):
    def not_a_number(x: jax.Array) -> jax.Array:
        return jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding)

    graphdef, state = nnx.split(trained.model)
    broken = replace(trained, model=nnx.merge(graphdef, jax.tree.map(not_a_number, state)))
    with pytest.warns(UserWarning, match=r"^the text after prompt 0 and 1 more means nothing: .*model\.dtype=float32"):
        broken.generate(["é and", "x"], max_tokens=12)
    monkeypatch.setattr("flax_mesh.cli.common.load_trained", lambda *_, **__: broken)
    command = ("generate", run, "--prompt", "é and", "--prompt", "x", "--max-tokens", 12, MESH)
    code, _, errors = call(*command)
    assert code == DONE and "warning: the text after --prompt number 1 and 1 more means nothing: numbers" in errors
    monkeypatch.setattr("flax_mesh.cli.common.load_trained", lambda *_, **__: trained)
    assert "warning" not in call(*command)[2]


def refused(function, *arguments, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **options)
    return caught.value.lines


def test_mistakes_are_lines_before_anything_compiles(trained, tmp_path, compilations):
    generate, evaluate = (partial(refused, function) for function in (trained.generate, trained.evaluate))
    lines = generate(["a", ""], max_tokens=0, stop=["ab"])
    assert [line.split(" must ")[0] for line in lines] == ["max_tokens", "stop 'ab'", "prompt 1 is empty; it"]
    assert generate([[1]])[0].startswith("prompt 0 must be text, got list; pass token ids to ")
    assert "needs a cache_length of 10 with max_tokens=8" in generate("ab", max_tokens=8, cache_length=9)[0]
    assert generate("a", max_tokens=2**31 - 1)[0].endswith("lower max_tokens, cache_length or batch_size")
    np.save(tmp_path / "large.npy", np.array([1, 256]))
    assert "large.npy: it has the token 256" in evaluate(tmp_path / "large.npy")[0]
    assert "does not exist" in evaluate("nothing.txt")[0]
    assert trained.generate([]) == [] and len(evaluate("", 0, 0, 0, bin_dtype="int8")) == 5
    tokens = replace(trained, tokenizer=None)
    (line,) = refused(tokens.generate, "a")
    assert line.startswith("the prompt is text, but the model has no tokenizer") and not compilations
