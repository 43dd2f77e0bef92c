"""Settings as text, read and printed; recipes by name; meshes that fit the devices."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_mesh.axes import PartitionAxis
from flax_mesh.errors import ConfigError
from flax_mesh.train import RunConfig, TrainConfig, apply_overrides, load_recipe, to_lines
from flax_mesh.train.build import fit_mesh, make_mesh
from flax_mesh.train.checks import check_config
from flax_mesh.train.config import AXIS_NAMES
from flax_mesh.train.overrides import Change, changes, flat_fields, parse_value, value_to_text

TINY = Path(__file__).parents[2] / "recipes" / "tiny.py"


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = ()
    name: str = field(default="", metadata={"changes_result": False})


@dataclass(frozen=True)
class Model:
    """A field of every type that text can say, and two that it cannot."""

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
    """Two fields that hold only together."""

    width: int = 8
    heads: int = 4

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


def config_of(model: Any, **sections: Any) -> TrainConfig:
    return TrainConfig(make_model=lambda config, rngs: pytest.fail("never made"), loss_fn=max, model=model, **sections)


def problems_of(config: TrainConfig, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(config, overrides)
    return caught.value.problems


# --- one value ---


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "-3", -3),
        ("count", "1_000", 1000),
        ("rate", "3e-4", 3e-4),
        ("rate", "2", 2.0),
        ("rate", "inf", math.inf),
        ("flag", "true", True),
        ("flag", "False", False),
        ("text", "", ""),
        ("text", "a=b, c", "a=b, c"),
        ("text", "none", "none"),
        ("maybe", "none", None),
        ("maybe", "7", 7),
        ("maybe_rate", "None", None),
        ("mixed", "2", 2),
        ("mixed", "2.5", 2.5),
        ("names", "a,b", ("a", "b")),
        ("names", "a,", ("a",)),
        ("names", ",", ()),
        ("axis", "dp", "dp"),
        ("axis", "fsdp,dp", ("fsdp", "dp")),
        ("axis", "none", None),
        ("inner.sizes", "3,5", (3, 5)),
        ("inner.name", "x", "x"),
    ],
)
def test_an_override_becomes_a_value_of_the_field_s_type(key, text, value):
    config = apply_overrides(config_of(Model()), [f"model.{key}={text}"])
    found, _, _ = flat_fields(config)[f"model.{key}"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.count=many", "model.count must be a whole number, got 'many'"),
        ("model.count=1.5", "model.count must be a whole number, got '1.5'"),
        ("model.rate=fast", "model.rate must be a number, got 'fast'"),
        ("model.flag=1", "model.flag must be true or false, got '1'"),
        ("model.maybe=x", "model.maybe must be a whole number or none, got 'x'"),
        ("model.mixed=x", "model.mixed must be a whole number or a number, got 'x'"),
        ("model.names=a", "model.names must be values joined by commas, got 'a'"),
        ("model.inner.sizes=1,b", "model.inner.sizes must be values joined by commas, got '1,b'"),
        ("run.steps=", "run.steps must be a whole number, got ''"),
        ("run.stepz=3", "run.stepz is no setting; did you mean run.steps?"),
        ("steps=3", "steps is no setting; did you mean run.steps?"),
        ("model.iner.name=x", "model.iner.name is no setting; did you mean model.inner.name?"),
        ("qq=1", "qq is no setting; sections are model, mesh, pipeline, data, optimizer, checkpoint, run"),
        ("run.steps", "'run.steps' is no override; write section.key=value, such as run.steps=20"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_the_setting(setting, problem):
    assert problems_of(config_of(Model()), setting) == [problem]


def test_all_mistakes_stand_in_one_error_a_line_each_in_their_order():
    wrong = ["run.stps=3", "model.count=x", "nonsense", "run.seed=1", "run.seed=2", "model.rate=y"]
    problems = problems_of(config_of(Model()), *wrong)
    assert [line.split()[0] for line in problems] == [
        "run.stps",
        "model.count",
        "'nonsense'",
        "run.seed",
        "model.rate",
    ]
    assert problems[3] == "run.seed is set twice"
    with pytest.raises(ConfigError, match=r"^run\.stps") as caught:
        apply_overrides(config_of(Model()), wrong)
    assert str(caught.value).splitlines() == problems


def test_a_field_that_text_cannot_say_stays_with_the_recipe():
    assert not {"model.shape", "model.other"} & flat_fields(config_of(Model())).keys()
    assert apply_overrides(config_of(Model(shape=(2, "b"))), ["model.count=3"]).model == Model(count=3, shape=(2, "b"))
    assert problems_of(config_of(Model()), "model.shape=1,a")[0].startswith("model.shape is no setting")


def test_overrides_leave_the_given_config_and_all_other_settings_alone():
    before = config_of(Model())
    after = apply_overrides(before, ["run.steps=20", "model.inner.name=x"])
    assert before.run == RunConfig() and before.model == Model()
    assert after == dataclasses.replace(
        before,
        run=dataclasses.replace(before.run, steps=20),
        model=dataclasses.replace(before.model, inner=Inner(name="x")),
    )


def test_settings_that_hold_only_together_are_changed_together():
    assert apply_overrides(config_of(Pair()), ["model.width=9", "model.heads=3"]).model == Pair(9, 3)
    assert problems_of(config_of(Pair()), "model.width=9") == ["model.width: width 9 must be a multiple of heads 4"]


@pytest.mark.parametrize("model", [None, {"width": 3}, 7])
def test_a_model_config_that_is_no_dataclass_has_no_settings(model):
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


@given(models)
def test_a_printed_config_reads_back_to_the_same_config(model):
    config = config_of(model)
    assert apply_overrides(config_of(Model()), to_lines(config)).model == model
    assert apply_overrides(config, to_lines(config)) == config


@given(st.floats(allow_nan=False), st.integers())
def test_numbers_keep_every_bit(number, count):
    assert parse_value(value_to_text(number), float) == number
    assert parse_value(value_to_text(count), int) == count


def test_the_whole_tiny_recipe_reads_back_onto_another_one():
    tiny = load_recipe(str(TINY))
    lines = to_lines(tiny)
    assert {"mesh.shape=dp:2,fsdp:2,tp:2", "model.axes.batch_axis=fsdp,dp", "data.seed=none"} <= set(lines)
    changed = apply_overrides(
        tiny, ["run.steps=3", "model.axes.batch_axis=dp", "data.seed=5", "mesh.shape=tp:2", "model.tied=false"]
    )
    assert changed != tiny
    assert apply_overrides(changed, lines) == tiny
    assert isinstance(apply_overrides(changed, lines).model.axes, PartitionAxis)


# --- what changed ---


def test_changes_tell_what_differs_and_whether_the_result_does():
    before = config_of(Model(inner=Inner(sizes=(1,), name="old")))
    saved = dict(line.split("=", 1) for line in to_lines(before))
    assert changes(saved, before) == []
    neutral = ["run.steps=20", "run.folder=b", "mesh.shape=tp:2", "checkpoint.every=7", "model.inner.name=new"]
    others = ["run.seed=1", "optimizer.b1=0.8", "model.count=2", "model.inner.sizes=1,2", "data.batch_size=32"]
    after = apply_overrides(before, neutral + others)
    found = {change.key: change for change in changes(saved, after)}
    assert {key for key, change in found.items() if change.changes_result} == {text.split("=")[0] for text in others}
    assert {key for key, change in found.items() if not change.changes_result} == {
        text.split("=")[0] for text in neutral
    }
    assert str(found["run.seed"]) == "run.seed: 0 -> 1 (changes the result)"
    assert str(found["run.steps"]) == "run.steps: 1000 -> 20"


def test_settings_that_came_or_went_count_as_changed():
    config = config_of(Pair())
    saved = dict(line.split("=", 1) for line in to_lines(config))
    saved["model.gone"] = "3"
    del saved["model.heads"]
    assert changes(saved, config) == [
        Change("model.heads", "(absent)", "4", True),
        Change("model.gone", "3", "(absent)", True),
    ]


# --- recipes by name ---

RECIPE = """
from __future__ import annotations
from dataclasses import dataclass
from flax_mesh.train import RunConfig, TrainConfig

@dataclass(frozen=True)
class Size:
    width: int = 3

def recipe():
    return TrainConfig(make_model=max, loss_fn=max, model=Size())

def long():
    return TrainConfig(make_model=max, loss_fn=max, model=Size(9), run=RunConfig(steps=9000))

def number():
    return 3
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(RECIPE)
    return path


def test_a_recipe_is_a_function_of_a_file(recipe_file):
    assert load_recipe(str(recipe_file)).run.steps == 1000
    assert load_recipe(f"{recipe_file}:long").run.steps == 9000


def test_a_recipe_s_own_config_class_has_settings(recipe_file):
    config = apply_overrides(load_recipe(str(recipe_file)), ["model.width=5"])
    assert to_lines(config)[0] == "model.width=5"


def test_a_missing_recipe_is_named_with_those_beside_it(recipe_file):
    with pytest.raises(ConfigError, match=r"recipe .*/owm\.py: no such file; there are .*/own\.py$"):
        load_recipe(str(recipe_file.with_name("owm.py")))
    with pytest.raises(ConfigError, match=r"^recipe nowhere/own\.py: no such file$"):
        load_recipe("nowhere/own.py")


def test_a_missing_function_is_named_with_those_there_are(recipe_file):
    with pytest.raises(ConfigError, match=r"own\.py has no function 'short'; it has recipe, long, number$"):
        load_recipe(f"{recipe_file}:short")


def test_a_recipe_must_return_a_train_config(recipe_file):
    with pytest.raises(ConfigError, match=r"own\.py:number: number\(\) must return a TrainConfig, got int$"):
        load_recipe(f"{recipe_file}:number")


def test_a_recipe_must_be_python(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"recipe .*notes\.txt: not a Python file$"):
        load_recipe(str(path))


# --- values that are wrong by themselves ---


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("run.steps=0", "run.steps must be at least 1, got 0"),
        ("checkpoint.keep=0", "checkpoint.keep must be at least 1, got 0"),
        ("run.seed=-1", "run.seed must not be negative, got -1"),
        ("run.seed=4294967296", r"run.seed must be below 2\*\*32, got 4294967296"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate must not be negative, got nan"),
        ("optimizer.clip_norm=0", r"optimizer.clip_norm must be above 0 \(inf for no clipping\), got 0.0"),
        ("optimizer.warmup_steps=200", "optimizer.warmup_steps=200 must be below optimizer.decay_steps=150"),
        ("pipeline.num_microbatches=3", "data.batch_size=16 is not divisible by pipeline.num_microbatches=3"),
        ("data.batch_size=0", "data.batch_size must be an integer of at least 1, is 0"),
        ("optimizer.shard_over=dp,data", "optimizer.shard_over: 'data' is no mesh axis; use some of dp, fsdp, ep"),
        ("mesh.shape=pp:-1", "mesh.shape=pp:-1 leaves pp to the number of devices; give it a size"),
        ("pipeline.cut=2;3", "pipeline.cut must be flops, count, or the first layer of every stage but the first"),
        ("pipeline.remat=keep", "pipeline.remat must be one of none, cheap, full, got 'keep'"),
        ("pipeline.transport=nccl", "pipeline.transport must be one of auto, server, native, got 'nccl'"),
        ("mesh.shape=dp:two", r"mesh.shape: .*'dp:two' is malformed"),
        ("mesh.shape=dp:-1,tp:-1", r"mesh.shape: .*only one size can be -1"),
        ("run.platform=npu", r"run.platform must be auto, cpu, cpu:N \(N devices\), gpu or tpu, got 'npu'"),
        ("run.platform=cpu:0", "run.platform must be .*got 'cpu:0'"),
        ("run.platform=gpu:2", "run.platform must be .*got 'gpu:2'"),
        ("run.folder=", "run.folder is empty; name a folder, such as runs/default"),
        ("model.head_dim=3", "model.head_dim must be even for rotary positions, got 3"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(setting, problem):
    tiny = load_recipe(str(TINY))
    assert check_config(tiny) == []
    found = check_config(apply_overrides(tiny, [setting]))
    assert len(found) == 1 and re.match(problem, found[0]), found


# --- meshes that fit ---

sizes = st.integers(1, 12)


@given(st.dictionaries(st.sampled_from(AXIS_NAMES[1:]), sizes, min_size=1), st.integers(1, 70), st.data())
def test_a_fitted_mesh_fits_and_every_axis_divides_the_one_asked_for(shape, num_devices, data):
    free = data.draw(st.none() | st.sampled_from(sorted(shape)))
    asked = shape if free is None else shape | {free: -1}
    fitted = fit_mesh(asked, num_devices)
    used = math.prod(fitted.values())
    assert list(fitted) == list(asked)
    assert 1 <= used <= num_devices
    assert all(size >= 1 for size in fitted.values())
    assert all(asked[name] % size == 0 for name, size in fitted.items() if name != free)
    if free is not None:
        assert used + used // fitted[free] > num_devices, "-1 takes what is left"
    if math.prod(size for size in asked.values() if size != -1) <= num_devices:
        assert all(fitted[name] == size for name, size in asked.items() if size != -1), "what fits is not shrunk"


def test_a_mesh_shrinks_copies_of_the_model_before_splits_of_its_layers():
    asked = {"dp": 2, "fsdp": 2, "tp": 2}
    assert [fit_mesh(asked, n) for n in (8, 7, 2, 1)] == [
        asked,
        {"dp": 1, "fsdp": 2, "tp": 2},
        {"dp": 1, "fsdp": 1, "tp": 2},
        {"dp": 1, "fsdp": 1, "tp": 1},
    ]
    assert fit_mesh({"dp": 12, "tp": 2}, 8) == {"dp": 3, "tp": 2}
    assert fit_mesh({"tp": 3, "fsdp": -1}, 8) == {"tp": 3, "fsdp": 2}


@pytest.mark.parametrize(
    ("shape", "sizes", "said"),
    [
        ("dp:2,fsdp:2,tp:2", (2, 2, 2), []),
        ("dp:2,fsdp:-1", (2, 4), []),
        (
            "dp:4,fsdp:2,tp:2",
            (2, 2, 2),
            ["mesh: dp:4,fsdp:2,tp:2 needs more than the 8 devices here; shrunk to dp:2,fsdp:2,tp:2"],
        ),
        ("dp:3", (3,), ["mesh: uses 3 of the 8 devices here"]),
    ],
)
def test_auto_takes_the_devices_that_are_there_and_says_what_it_changed(shape, sizes, said):
    assert jax.device_count() == 8
    heard = []
    config = apply_overrides(config_of(Model()), [f"mesh.shape={shape}", "run.platform=auto"])
    mesh = make_mesh(config, heard.append)
    assert tuple(size for size in mesh.shape.values() if size > 1) == sizes
    assert heard == said


def test_a_platform_that_was_named_is_never_shrunk():
    config = apply_overrides(config_of(Model()), ["mesh.shape=dp:3", "run.platform=cpu"])
    with pytest.raises(ConfigError, match=r"^mesh.shape=dp:3: .*multiply to 3.* 8.*dp:8"):
        make_mesh(config, lambda text: pytest.fail(text))
