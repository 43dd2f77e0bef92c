"""Types and limits of settings: every number of every config has limits, and no setting takes an invalid text."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from flax_mesh.checkpoint.hf.safetensors import read_json
from flax_mesh.cli.common import with_files
from flax_mesh.errors import ConfigError
from flax_mesh.fields import (
    MAX_FLOAT32,
    MAX_NAME_BYTES,
    path_problem,
    read_file,
    require_types,
    type_problems,
    user_path,
    value_problems,
    value_to_text,
)
from flax_mesh.hardware import load_chip
from flax_mesh.inference.prompts import read_prompts
from flax_mesh.models import DecoderConfig
from flax_mesh.mpmd import Pipeline
from flax_mesh.mpmd.schedules.text import read_schedule
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.overrides import flat_fields, read_overrides
from flax_mesh.train import MeshConfig, OptimizerConfig, PipelineConfig, RunConfig, TrainConfig, make_train_step


@pytest.mark.parametrize(
    ("config", "changes", "problem"),
    [
        (OptimizerConfig, {"b1": 2.0}, "b1 must be below 1, got 2.0"),
        (OptimizerConfig, {"b1": True}, "b1 must be a number, got True"),
        (OptimizerConfig, {"learning_rate": math.inf}, "learning_rate must be finite, got inf"),
        (OptimizerConfig, {"learning_rate": 1e39}, "learning_rate must be finite, got 1e+39"),
        (
            OptimizerConfig,
            {"clip_norm": math.nan},
            "clip_norm must be above 0 and finite, or inf for no clipping, got nan",
        ),
        (OptimizerConfig, {"clip_norm": math.inf}, None),
        (RunConfig, {"steps": True}, "steps must be an integer, got True"),
        (RunConfig, {"seed": -math.inf}, "seed must be an integer, got -inf"),
        (RunConfig, {"spike_factor": 0.5}, "spike_factor must be above 1, or 0 for no limit, got 0.5"),
        (RunConfig, {"spike_factor": 0}, None),
        (RunConfig, {"steps": 2**31}, "steps must be at most 2147483647, got 2147483648"),
        (RunConfig, {"on_nonfinite": "ignore"}, "on_nonfinite must be one of stop, skip, continue, got 'ignore'"),
        (PipelineConfig, {"num_virtual_stages": 0}, "num_virtual_stages must be at least 1, got 0"),
        (MeshConfig, {"shape": 3}, "shape must be text, got 3"),
        (PipelineConfig, {"num_virtual_stages": "2"}, "num_virtual_stages must be an integer or none, got '2'"),
    ],
)
def test_a_value_outside_of_its_limits_is_one_line(config, changes, problem):
    changed = dataclasses.replace(config(), **changes)
    assert [*type_problems(changed), *value_problems(changed)] == ([] if problem is None else [problem])


@dataclasses.dataclass(frozen=True)
class Own:
    """A config of a user, with one limit and annotations that its values do not follow."""

    rate: float = dataclasses.field(default=0.5, metadata={"at_least": 0, "below": 1})
    dtype: str = float  # type: ignore
    cutoff: float = math.inf
    count: int = 2.5  # type: ignore


def config_of(**changes: Any) -> TrainConfig:
    return dataclasses.replace(TrainConfig(make_model=max, loss_fn=max, model=Own()), **changes)


def test_limits_hold_in_a_model_config_of_a_user_and_its_other_fields_are_free():
    assert check_config(config_of()) == []
    assert check_config(config_of(model=Own(rate=1.0))) == ["model.rate must be below 1, got 1.0"]
    assert check_config(config_of(model=Own(rate="much"))) == ["model.rate must be a number, got 'much'"]  # type: ignore


def test_wrong_parts_of_a_config_are_reported_together():
    wrong = config_of(make_model=3, mesh="fsdp:8", run=RunConfig(steps="5", seed=-1, folder=None))  # type: ignore
    assert check_config(wrong) == [
        "make_model must be a function, got 3",
        "mesh must be a MeshConfig, got 'fsdp:8'",
        "run.steps must be an integer, got '5'",
        "run.folder must be text, got None",
        "run.seed must be at least 0, got -1",
    ]


def test_all_mistakes_of_a_decoder_s_config_are_reported_once():
    model = DecoderConfig(rope_theta=-1.0, num_layers=0)
    assert check_config(config_of(model=model)) == [
        "model.num_layers must be at least 1, got 0",
        "model.rope_theta must be above 0, got -1.0",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ""),
        ("~/runs", ""),
        ("x" * 255, ""),
        ("x" * 256, "contains a name of 256 bytes, at most 255 are possible"),
        ("é" * 128, "contains a name of 256 bytes, at most 255 are possible"),
        ("ab/" * 2000, "is too long for a path: 6000 bytes, at most 4095 are possible"),
        ("a\0b", "contains a null byte or a line break"),
        ("a\nb", "contains a null byte or a line break"),
        ("~no_such_user/x", "names a user without a home folder, '~no_such_user'"),
        ("s3://bucket/run", "is an address (s3:), but must be a path of this machine"),
        ("file:/run", "is an address (file:), but must be a path of this machine"),
        ("./s3:/bucket", ""),
        ("run:2/x", ""),
    ],
)
def test_texts_that_cannot_be_paths(text, problem):
    assert path_problem(text) == problem
    found = check_config(config_of(run=RunConfig(folder=text or "x")))
    shown = f"{text!r}" if len(text) < 80 else f"{text!r:.80}..."
    is_wrong = problem and not text.startswith("s3:")  # run.folder may be in a store
    assert found == ([f"run.folder {problem}: {shown}; use another path"] if is_wrong else [])


def test_names_after_a_dot_are_no_addresses_and_no_home_folders_however_often_they_are_read():
    for text in ("./s3:/bucket", "./~/x", "./~no_such_user"):
        assert user_path(user_path(text)) == user_path(text) == Path.cwd() / text
    assert user_path("run:2/x") == Path("run:2/x")


def test_annotations_that_cannot_be_evaluated_are_one_line():
    @dataclasses.dataclass(frozen=True)
    class Local:
        width: "Undefined" = 3  # type: ignore  # noqa: F821

    with pytest.raises(ConfigError, match=r"^the annotations of .*Local cannot be evaluated: name 'Undefined' is not"):
        check_config(config_of(model=Local()))


# --- the text of every setting ---

DECODER = TrainConfig(make_model=max, loss_fn=max, model=DecoderConfig())
SETTINGS = {
    key: (kind,) if get_origin(kind) is tuple else get_args(kind) or (kind,)
    for key, (_, kind, _) in flat_fields(DECODER).items()
}


def limits_of(config: Any, prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Setting -> metadata of every field with limits, also of nested dataclasses."""
    found = {}
    for item in dataclasses.fields(config):
        key, value = f"{prefix}{item.name}", getattr(config, item.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= limits_of(value, f"{key}.")
        elif {"at_least", "above", "at_most", "below", "one_of", "path"} & item.metadata.keys():
            found[key] = item.metadata
    return found


LIMITS = limits_of(DECODER)


def problems_of(*settings: str) -> list[str]:
    """The lines that `flax-mesh train` prints about these settings before it looks for devices."""
    changed, found = read_overrides(DECODER, settings)
    return found or check_config(changed)


def values_at(limits: Mapping[str, Any], *, is_float: bool) -> list[tuple[Any, Any]]:
    """(last value within, first value outside) for each limit of a field."""
    if "one_of" in limits:
        return [(name, f"{name}x") for name in limits["one_of"]]
    if "path" in limits:
        return [("x" * MAX_NAME_BYTES, "x" * (MAX_NAME_BYTES + 1))]
    pairs = [(MAX_FLOAT32, math.nextafter(MAX_FLOAT32, math.inf))] if is_float and "below" not in limits else []
    for name, outwards in (("at_least", -1), ("above", -1), ("at_most", 1), ("below", 1)):
        if name in limits:
            limit, is_within = limits[name], name.startswith("at_")
            direction = outwards if is_within else -outwards
            other = math.nextafter(limit, direction * math.inf) if is_float else limit + direction
            pairs.append((limit, other) if is_within else (other, limit))
    return pairs


def test_all_numbers_and_over_60_settings_have_limits():
    assert {key for key, kinds in SETTINGS.items() if {int, float} & {*kinds}} <= LIMITS.keys() <= SETTINGS.keys()
    assert len(LIMITS) > 60
    assert {key.partition(".")[0] for key in LIMITS} == {key.partition(".")[0] for key in SETTINGS}


@pytest.mark.parametrize("key", LIMITS)
def test_a_setting_is_refused_from_the_first_value_outside_of_each_limit(key):
    pairs = values_at(LIMITS[key], is_float=float in SETTINGS[key])
    assert pairs
    for within, outside in pairs:
        changed, found = read_overrides(DECODER, [f"{key}={value_to_text(within)}"])
        assert found == value_problems(changed) == []
        assert any(line.startswith(f"{key} ") for line in problems_of(f"{key}={value_to_text(outside)}")), outside


INVALID_OF_TYPE = {
    int: ["", "x", "nan", "inf", "-1", "1.5", "1e3", "1,2", "true"],
    float: ["", "x", "nan", "-inf", "-1", "1,2", "0x10", "--"],
    bool: ["", "yes", "1", "none"],
}
INVALID_NAMES, INVALID_AXES = ["", "nope", "0"], ["nope", "dp,nope"]
INVALID_PATHS = ["~nobody-of-this-name/x", "x" * 300, "y/" * 2500]
INVALID = {  # further values of single settings
    "run.seed": ["4294967296", "9" * 30],
    "run.hardware": [*INVALID_PATHS, "/no/such/file", __file__],
    "run.platform": ["", "npu", "cpu:0", "cpu:-1", "cpu:x", "CPU"],
    "run.folder": [*INVALID_PATHS, ""],
    "run.compiler_options": ["x", "=1", "--xla=1", "a=1,a=2"],
    "optimizer.warmup_steps": ["1000000"],
    "optimizer.decay_start": ["10"],
    "optimizer.momentum": ["1", "0.9"],
    "optimizer.no_decay": ["(", "["],
    "optimizer.groups": ["embed", "( frozen", "embed learning_rate*-1", "embed x"],
    "optimizer.matrices": ["kernel", "("],
    "optimizer.shard_over": [*INVALID_AXES, "pp"],
    "checkpoint.start_from": [*INVALID_PATHS, "/no/such/folder", __file__],
    "data.source": [*INVALID_PATHS, ""],
    "data.held_out": ["1", "2"],
    "mesh.shape": ["dp", "dp:x", "dp:0", "dp:-2", "nope:2", "dp:2,dp:4", "dp:-1,tp:-1", "pp:-1"],
    "mesh.rules": ["nope", "pp", "fsdp+nope", "+", "fsdp,dp"],
    "pipeline.num_microbatches": ["3"],
    "pipeline.schedule": ["", "nope"],
    "pipeline.cut": ["", "nope", "1.5"],
    **{key: ["", "x", "1.5,"] for key in ("model.rope_short_factors", "model.rope_long_factors")},
    "model.layer_pattern": ["nope", "0", "local:0", "global:x", ",", "local,global"],
    "model.remat": [*INVALID_NAMES, "full:77", "full:0,none", "full:x", "attention+nope", "full,none", "q+q"],
}  # fmt: skip
OTHERS = {"pipeline.schedule": ["mesh.shape=pp:2", "pipeline.num_microbatches=4"]}  # without which it has no effect


def invalid_texts(key: str) -> list[str]:
    texts = [text for kind in SETTINGS[key] for text in INVALID_OF_TYPE.get(kind, [])]
    texts += INVALID_NAMES if "one_of" in LIMITS.get(key, {}) else []
    texts += INVALID_AXES if key.startswith("model.axes.") else []
    return texts + INVALID.get(key, [])


def test_all_settings_but_those_checked_later_have_invalid_texts():
    assert {key for key in SETTINGS if not invalid_texts(key)} == {
        "checkpoint.best_metric",
        "lora.modules",
        "run.hooks",
    }
    assert {*INVALID, *OTHERS} <= SETTINGS.keys()


@pytest.mark.parametrize("key", [key for key in SETTINGS if invalid_texts(key)])
def test_invalid_texts_of_a_setting_are_refused_before_anything_compiles(key, compilations):
    for text in invalid_texts(key):
        found = problems_of(*OTHERS.get(key, []), f"{key}={text}")
        assert any(key in line for line in found) and len(found) <= 3, (text, found)
    assert not compilations


def test_a_file_of_a_user_must_be_regular_and_not_too_large(tmp_path):
    (tmp_path / "file").write_bytes(b"four")
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "file", 4) == b"four"
    for path, reason in (
        (tmp_path / "pipe", "must be a regular file, but is a pipe or a device; write its content to a file"),
        (Path("/dev/zero"), "must be a regular file"),
        (tmp_path, "must be a file, but is a folder"),
        (tmp_path / "file", "must have at most 3 bytes, but has 4; use a smaller file"),
    ):
        with pytest.raises(OSError, match=reason):
            read_file(path, 3)


def test_files_of_users_are_read_by_read_file(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe.toml")
    readers = (lambda: read_prompts([], str(pipe)), lambda: read_schedule(str(pipe)), lambda: load_chip(pipe))
    for read in (*readers, lambda: with_files([f"@{pipe}"]), lambda: read_json(pipe)):
        with pytest.raises(ConfigError, match="cannot be read: it must be a regular file, but is a pipe"):
            read()


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("MeshConfig()", MeshConfig()),
        ("PipelineConfig(num_microbatches=4, remat='full')", PipelineConfig(num_microbatches=4, remat="full")),
        ("OptimizerConfig(clip_norm=1)", OptimizerConfig(clip_norm=1)),  # the default is 1.0, and types are checked
    ],
)
def test_repr_of_a_config_shows_changed_fields_and_can_be_evaluated(text, config):
    assert repr(config) == text
    assert eval(text) == config


@pytest.mark.parametrize("function", [make_train_step, Pipeline])
def test_an_unknown_option_is_refused_with_the_name_of_the_function_and_near_names(function: Callable[..., Any]):
    text = rf"^{function.__name__}: unknown keywords 'donate', 'learning_rat' \(near: learning_rate\). The keywords are"
    with pytest.raises(TypeError, match=text):
        function(print, None, donate=False, learning_rat=None)


def test_the_error_for_a_literal_has_its_values():
    def call(mode: Literal["a", "b"] | None = None) -> None: ...

    with pytest.raises(TypeError, match=r"mode must be one of 'a', 'b' or none, got 3\."):
        require_types(call, mode=3)
