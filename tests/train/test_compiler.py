"""Options of the compiler: from text to the step, and refused before anything large compiles."""

from functools import partial

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides, train
from flax_mesh.train.checks import check_compiler_options, check_config
from flax_mesh.train.config import options_text, parse_compiler_options
from tests.train.bigram import recipe, write_text

NAMES = st.from_regex(r"xla_[a-z_]{1,12}", fullmatch=True)
VALUES = st.booleans() | st.integers(-9, 99) | st.from_regex(r"[A-Z]{0,5}(,[A-Z]{1,5}){0,2}", fullmatch=True)


@settings(max_examples=30)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_options_survive_as_text(options):
    assert parse_compiler_options(options_text(options)) == options


def test_all_mistakes_in_the_text_are_told_at_once(tmp_path):
    text = "fast,xla_a=1,--xla_b=2,xla_a=3"
    config = apply_overrides(recipe(), [f"run.compiler_options={text}", "run.steps=0"])
    assert check_config(config) == [
        "run.steps must be at least 1, got 0",
        "run.compiler_options: 'fast' is no option; write NAME=VALUE, such as "
        "xla_gpu_enable_latency_hiding_scheduler=true",
        "run.compiler_options: '--xla_b=2' is no option; write NAME=VALUE, such as "
        "xla_gpu_enable_latency_hiding_scheduler=true",
        "run.compiler_options: xla_a is set twice",
    ]


def test_the_compiler_is_asked_which_options_it_has():
    check = partial(check_compiler_options, device=jax.devices()[0])
    assert check({"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_autotune_level": 4}) == []
    unknown, wrong = check({"xla_no_such_option": 1, "xla_gpu_autotune_level": "high"})
    assert unknown.startswith("run.compiler_options: xla_no_such_option=1 is refused: ") and "No such" in unknown
    assert wrong.startswith("run.compiler_options: xla_gpu_autotune_level=high is refused: ")


def test_a_run_says_and_uses_its_options_and_refuses_unknown_ones(tmp_path):
    text, said = write_text(tmp_path), []
    base = [f"data.source={text}", f"run.folder={tmp_path / 'run'}", "run.steps=1", "run.eval_every=0",
            "run.sample_tokens=0"]  # fmt: skip
    with pytest.raises(ConfigError, match=r"run.compiler_options: xla_fast=true is refused"):
        train(apply_overrides(recipe(), [*base, "run.compiler_options=xla_fast=true"]))
    assert not (tmp_path / "run").exists()
    dump = f"xla_dump_to={tmp_path / 'dump'}"
    train(apply_overrides(recipe(), [*base, f"run.compiler_options={dump}"]), say=said.append)
    assert f"compiler: {dump}" in said
    assert list((tmp_path / "dump").glob("*jit_step*"))
