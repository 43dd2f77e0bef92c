"""Types and limits of settings: every number of every config has limits, and they are checked in one place."""

import dataclasses
import math
from typing import Any

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.models import DecoderConfig
from flax_mesh.settings import field_types, path_problem, type_problems, value_problems
from flax_mesh.train import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from flax_mesh.train.checks import check_config

CONFIGS = (DecoderConfig, CheckpointConfig, DataConfig, MeshConfig, OptimizerConfig, PipelineConfig, RunConfig)
NUMBERS = [
    (config, item.name)
    for config in CONFIGS
    for item in dataclasses.fields(config)
    if field_types(config())[item.name] in (int, float, int | None, float | None)
]


def test_the_numbers_of_all_configs_are_found():
    assert len(NUMBERS) > 40


@pytest.mark.parametrize(("config", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_every_number_has_limits_and_is_finite(config, name):
    default, (item,) = config(), [item for item in dataclasses.fields(config) if item.name == name]
    assert value_problems(default) == type_problems(default) == []
    assert {"at_least", "above"} & item.metadata.keys()
    is_float = field_types(default)[name] is float
    for wrong in (-1, -math.inf, math.nan, *[math.inf] * ("also" not in item.metadata), *[1e39] * is_float):
        changed = dataclasses.replace(default, **{name: wrong})
        (problem,) = [*type_problems(changed, "x."), *value_problems(changed, "x.")]
        assert problem.startswith(f"x.{name} must be ") and problem.endswith(f"got {wrong}"), problem
    for wrong in (True, "1", [1]):
        (problem,) = type_problems(dataclasses.replace(default, **{name: wrong}), "x.")
        assert problem.startswith(f"x.{name} must be a") and problem.endswith(f"got {wrong!r}"), problem


@pytest.mark.parametrize(
    ("config", "changes", "problem"),
    [
        (OptimizerConfig, {"b1": 2.0}, "b1 must be below 1, got 2.0"),
        (OptimizerConfig, {"b2": 1.0}, "b2 must be below 1, got 1.0"),
        (OptimizerConfig, {"epsilon": 0.0}, "epsilon must be above 0, got 0.0"),
        (OptimizerConfig, {"learning_rate": math.inf}, "learning_rate must be finite, got inf"),
        (
            OptimizerConfig,
            {"clip_norm": math.nan},
            "clip_norm must be above 0 and finite, or inf for no clipping, got nan",
        ),
        (OptimizerConfig, {"clip_norm": math.inf}, None),
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
        ("runs/default", ""),
        ("~/runs", ""),
        ("x" * 255, ""),
        ("x" * 256, "contains a name of 256 bytes, at most 255 are possible"),
        ("é" * 128, "contains a name of 256 bytes, at most 255 are possible"),
        ("ab/" * 2000, "is too long for a path: 6000 bytes, at most 4095 are possible"),
        ("a\0b", "contains a null byte or a line break"),
        ("a\nb", "contains a null byte or a line break"),
        ("~no_such_user/x", "names a user without a home folder, '~no_such_user'"),
    ],
)
def test_texts_that_cannot_be_paths(text, problem):
    assert path_problem(text) == problem
    assert check_config(config_of(run=RunConfig(folder=text or "x"))) == (
        [f"run.folder {problem}: {text!r}; use another path"]
        if problem and len(text) < 80
        else [f"run.folder {problem}: {text!r:.80}...; use another path"]
        if problem
        else []
    )


def test_annotations_that_cannot_be_evaluated_are_one_line():
    @dataclasses.dataclass(frozen=True)
    class Local:
        width: "Undefined" = 3  # type: ignore  # noqa: F821

    with pytest.raises(ConfigError, match=r"^the annotations of .*Local cannot be evaluated: name 'Undefined' is not"):
        check_config(config_of(model=Local()))
