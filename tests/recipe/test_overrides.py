"""Settings as text: parsing, printing, comparison with saved settings, and the names of the first version."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh.errors import ConfigError
from flax_mesh.recipe.overrides import Change, changes, current_settings, flat_fields, to_lines, to_texts
from flax_mesh.train import RunConfig, TrainConfig, apply_overrides


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = ()
    name: str = field(default="", metadata={"changes_result": False})


@dataclass(frozen=True)
class Model:
    """A field of every type that has a text form, and two that have none."""

    count: int = 1
    rate: float = 0.5
    flag: bool = False
    text: str = "a b"
    maybe: int | None = None
    maybe_rate: float | None = None
    mixed: int | float = 1
    names: tuple[str, ...] = ()
    axis: str | tuple[str, ...] | None = None
    inner: Inner = Inner()
    shape: tuple[int, str] = (1, "a")
    other: Any = None


@dataclass(frozen=True)
class Pair:
    """Two fields that depend on each other."""

    width: int = 8
    heads: int = 4

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


def config_of(model: Any, **sections: Any) -> TrainConfig:
    return TrainConfig(
        make_model=lambda config, rngs: pytest.fail("must not be called"), loss_fn=max, model=model, **sections
    )


def problems_of(config: TrainConfig, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(config, overrides)
    return caught.value.lines


# --- the model of a folder ---


def test_overrides_replace_settings_of_the_model_in_start_from():
    config = config_of(Model(), model_from=lambda model, folder: dataclasses.replace(model, text=folder, count=5))
    assert apply_overrides(config, ["run.steps=2"]).model == Model()
    found = apply_overrides(config, ["model.count=7", "checkpoint.start_from=a"])
    assert found.model == Model(text="a", count=7)
    assert apply_overrides(found, ["run.steps=2"]).model == found.model, "it is not replaced again"
    config = config_of(Model(), model_from=lambda model, folder: model.size)
    (line,) = problems_of(config, "checkpoint.start_from=a")
    assert line.startswith("model_from: ") and "has no attribute 'size'" in line
    (line,) = problems_of(config_of(Model(), model_from=lambda model: model), "checkpoint.start_from=a")
    assert "must be callable with the arguments (model, folder)" in line


# --- one value ---


VALUES: dict[str, dict[str, Any]] = {
    "count": {"-3": -3, "1_000": 1000},
    "rate": {"3e-4": 3e-4, "2": 2.0, "inf": math.inf},
    "flag": {"true": True, "False": False},
    "text": {"": "", "a=b, c": "a=b, c", "none": "none"},
    "maybe": {"none": None, "7": 7},
    "maybe_rate": {"None": None},
    "mixed": {"2": 2, "2.5": 2.5},
    "names": {"a,b": ("a", "b"), "a,": ("a",), ",": ()},
    "axis": {"dp": "dp", "fsdp,dp": ("fsdp", "dp"), "none": None},
    "inner.sizes": {"3,5": (3, 5)},
    "inner.name": {"x": "x"},
}


@pytest.mark.parametrize("key", VALUES)
def test_an_override_becomes_a_value_of_the_field_s_type(key):
    for text, value in VALUES[key].items():
        config = apply_overrides(config_of(Model()), [f"model.{key}={text}"])
        found, _, _ = flat_fields(config)[f"model.{key}"]
        assert found == value and type(found) is type(value), text


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.count=many", "model.count must be an integer, got 'many'"),
        ("model.rate=fast", "model.rate must be a number, got 'fast'"),
        ("model.flag=1", "model.flag must be true or false, got '1'"),
        ("model.maybe=x", "model.maybe must be an integer or none, got 'x'"),
        ("model.mixed=x", "model.mixed must be an integer or a number, got 'x'"),
        ("model.names=a", "model.names must be values joined by commas, got 'a'"),
        ("model.inner.sizes=1,b", "model.inner.sizes must be values joined by commas, got '1,b'"),
        ("run.lr=3e-4", "run.lr is not a setting; did you mean optimizer.learning_rate?"),
        ("wd=0", "wd is not a setting; did you mean optimizer.weight_decay?"),
        ("batch_size=3", "batch_size is not a setting; did you mean data.batch_size?"),
        ("run.stepz=3", "run.stepz is not a setting; did you mean run.steps?"),
        ("steps=3", "steps is not a setting; did you mean run.steps?"),
        ("model.iner.name=x", "model.iner.name is not a setting; did you mean model.inner.name?"),
        ("qq=1", "qq is not a setting; sections are model, lora, mesh, pipeline, data, optimizer, checkpoint, run"),
        ("run.steps", "'run.steps' is not an override; write section.key=value, such as run.steps=20"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_the_setting(setting, problem):
    assert problems_of(config_of(Model()), setting) == [problem]


def test_a_field_without_text_form_can_be_set_by_the_recipe_only():
    assert not {"model.shape", "model.other"} & flat_fields(config_of(Model())).keys()
    assert apply_overrides(config_of(Model(shape=(2, "b"))), ["model.count=3"]).model == Model(count=3, shape=(2, "b"))
    assert problems_of(config_of(Model()), "model.shape=1,a")[0].startswith("model.shape is not a setting")


def test_overrides_leave_the_given_config_and_all_other_settings_alone():
    before = config_of(Model())
    after = apply_overrides(before, ["run.steps=20", "model.inner.name=x"])
    assert before.run == RunConfig() and before.model == Model()
    model = dataclasses.replace(before.model, inner=Inner(name="x"))
    assert after == dataclasses.replace(before, run=dataclasses.replace(before.run, steps=20), model=model)


def test_settings_that_depend_on_each_other_are_changed_together():
    assert apply_overrides(config_of(Pair()), ["model.width=9", "model.heads=3"]).model == Pair(9, 3)
    problem = "model.width: width 9 must be a multiple of heads 4"  # which names no setting of another section
    assert problems_of(config_of(Pair()), "model.width=9", "run.steps=3") == [problem]


@pytest.mark.parametrize("model", [None, {"width": 3}, 7])
def test_a_model_config_that_is_not_a_dataclass_has_no_settings(model):
    config = apply_overrides(config_of(model), ["run.steps=3"])
    assert config.model is model and config.run.steps == 3
    assert not [key for key in flat_fields(config) if key.startswith("model")]


# --- printing and reading back ---

texts = st.text(st.characters(codec="utf-8"), max_size=12)
names = st.text("abcdefgh _-./", min_size=1, max_size=6)
floats = st.floats(allow_nan=False)
models = st.builds(
    Model,
    count=st.integers(),
    rate=floats,
    flag=st.booleans(),
    text=texts,
    maybe=st.none() | st.integers(),
    maybe_rate=st.none() | floats,
    mixed=st.integers() | floats,
    names=st.lists(names, max_size=3).map(tuple),
    axis=st.none() | names | st.lists(names, max_size=3).map(tuple),
    inner=st.builds(Inner, sizes=st.lists(st.integers(), max_size=3).map(tuple), name=texts),
)


@given(models, models)
def test_a_printed_config_is_read_back_over_any_other_config(model, other):
    config = config_of(model)
    assert apply_overrides(config_of(other), to_lines(config)).model == model
    assert apply_overrides(config, to_lines(config)) == config


# --- changes ---


def test_changes_lists_differences_and_whether_they_change_the_result():
    before = config_of(Model(inner=Inner(sizes=(1,), name="old")))
    saved = dict(line.split("=", 1) for line in to_lines(before))
    assert changes(saved, before) == []
    neutral = ["run.steps=20", "run.folder=b", "mesh.shape=tp:2", "checkpoint.every=7", "model.inner.name=new"]
    others = ["run.seed=1", "optimizer.b1=0.8", "model.count=2", "model.inner.sizes=1,2", "data.batch_size=32"]
    found = changes(saved, apply_overrides(before, neutral + others))
    assert {(change.key, change.changes_result) for change in found} == {
        *((text.split("=")[0], False) for text in neutral),
        *((text.split("=")[0], True) for text in others),
    }
    lines = [str(change) for change in found]
    assert {"run.seed: 0 -> 1 (changes the result)", "run.steps: 1000 -> 20"} <= {*lines}
    saved = dict(line.split("=", 1) for line in to_lines(config_of(Pair())))
    saved["model.gone"] = "3"
    del saved["model.heads"], saved["run.attention"]
    assert changes(saved, config_of(Pair())) == [
        Change("model.heads", "(absent)", "4", True),
        Change("run.attention", "as_written", "auto", False),  # runs before this setting had no blocks
        Change("model.gone", "3", "(absent)", True),
    ]


# --- names and values of the first version ---


@pytest.mark.parametrize(
    ("words", "current"),
    [
        ("residuals=store", "remat=none"),
        ("residuals=lean", "remat=cheap"),
        ("residuals=recompute", "remat=full"),
        ("microbatches=4", "num_microbatches=4"),
        ("virtual=2", "num_virtual_stages=2"),
        ("transport=native", "transport=ordered"),
    ],
)
def test_old_names_and_values_are_read_as_the_renamed_ones(words, current):
    old, new = f"pipeline.{words}", f"pipeline.{current}"
    config = apply_overrides(config_of(Model()), [old])
    assert config.pipeline == apply_overrides(config_of(Model()), [new]).pipeline
    lines = to_lines(config)
    assert new in lines and old not in lines
    (old_key, old_value), (new_key, new_value) = old.split("="), new.split("=")
    saved = to_texts(config)
    others = {key: value for key, value in saved.items() if key != new_key}
    assert saved[new_key] == new_value
    assert changes({**saved, old_key: old_value}, config) == changes({**others, old_key: old_value}, config) == []
    assert current_settings({old_key: old_value}) == {new_key: new_value}
    assert current_settings({old_key: "odd"}) == {new_key: "odd"}, "a change that a resumed run names"


def test_mistakes_under_an_old_name_report_the_name_that_was_typed():
    both = ["pipeline.microbatches=2", "pipeline.num_microbatches=2", "pipeline.remat=full", "pipeline.residuals=lean"]
    wrong = ["pipeline.transport=native", "pipeline.transport=ordered", "pipeline.virtual=many"]
    assert problems_of(config_of(Model()), *both, *wrong) == [
        "pipeline.num_microbatches is set twice",
        "pipeline.remat is set twice, once under its old name pipeline.residuals",
        "pipeline.transport is set twice",
        "pipeline.virtual must be an integer or none, got 'many'",
    ]
    for value in ("keep", "cheap", ""):
        assert problems_of(config_of(Model()), f"pipeline.residuals={value}") == [
            f"pipeline.residuals must be one of store, lean, recompute, got {value!r}; "
            "its current name is pipeline.remat, one of none, cheap, full"
        ]
