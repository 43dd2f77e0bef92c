"""`flax-mesh checkpoint`: list, inspect, verify, compare and convert checkpoints."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from flax_mesh.checkpoint import find
from flax_mesh.checkpoint import read as describe
from flax_mesh.checkpoint.base import read_base
from flax_mesh.checkpoint.checksums import find_damage
from flax_mesh.checkpoint.diff import SECTIONS, differences, in_both, in_one, value_differences
from flax_mesh.checkpoint.layout import arrays_on_disk
from flax_mesh.cli.common import DONE, FINDINGS, config_of, report_failure, table_width, use_platform
from flax_mesh.cli.text import checkpoint as text
from flax_mesh.errors import ConfigError, StepDeletedError, UnreadableError
from flax_mesh.fields import user_path
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.overrides import added_settings, to_texts
from flax_mesh.recipe.resolve import check, derive
from flax_mesh.recipe.saved import layout_of, layout_record, saved_record
from flax_mesh.recipe.target import abstract_target
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.store import stored_path
from flax_mesh.text import array_text
from flax_mesh.train.export import export, import_huggingface, reshard
from flax_mesh.tree import Constant

RECIPE = re.compile(r".*\.py(:\w+)?")
DIR = "a run folder, its checkpoints/, or one step in it"


@dataclass(frozen=True)
class Output:
    data: dict[str, Any]  # for --json
    text: Callable[[int], str]  # text for the given terminal width
    findings: bool = False  # damage or differences
    unreadable: Sequence[str] = ()  # lines on files that the system refused to read


class Argument(NamedTuple):
    name: str
    options: dict[str, Any]  # of `add_argument`


def _argument(name: str, help: str, **options: Any) -> Argument:
    return Argument(name, {"help": help, **options})


def _step(help: str) -> Argument:
    return _argument("--step", help, metavar="N", type=int)


def _flag(name: str, help: str) -> Argument:
    return _argument(name, help, action="store_true")


FOLDER = _argument("folder", DIR, metavar="DIR")
OUT = _argument("out", "the output folder; it must not exist", metavar="OUT")
OVERRIDES = _argument("overrides", "settings of the recipe", nargs="*", default=[], metavar="section.key=value")
NEWEST_VALID = _step("this step (default: the newest valid one)")
FORMATS = "safetensors with Hugging Face names, a plain Orbax checkpoint, or the adapters alone for PEFT"
IGNORED = "ignore a key of config.json, or the arrays whose names match a regular expression; may be repeated"
# Name -> what it does, and its arguments
KINDS: dict[str, tuple[str, Sequence[Argument]]] = {
    "list": (
        "list the steps with size, date, validity, metrics and mesh",
        [FOLDER, _flag("--quick", "do not verify the files")],
    ),
    "inspect": (
        "show the arrays (shapes, not values), settings, mesh, rules and versions of one step",
        [FOLDER, _step("this step (default: the newest)"), _flag("--all", "list every layer separately")],
    ),
    "verify": ("verify all bytes of every step against their checksums", [FOLDER, _step("only this step")]),
    "diff": (
        "compare two checkpoints, or a checkpoint and a recipe",
        [
            _argument("folder", DIR, metavar="A"),
            _argument("other", "another checkpoint, or RECIPE.py followed by its settings", metavar="B"),
            OVERRIDES,
            _flag("--values", "also compare the values of the arrays"),
        ],
    ),
    "export": (
        "write the parameters as safetensors or as a plain Orbax checkpoint, or the adapters for PEFT",
        [
            *(FOLDER, OUT, _argument("--to", FORMATS, choices=("safetensors", "orbax", "peft"), required=True)),
            NEWEST_VALID,
            _argument(
                "--dtype", "cast floating-point arrays to this dtype", choices=("float32", "bfloat16", "float16")
            ),
            _flag("--no-average", "write the parameters themselves, not their moving average (optimizer.ema)"),
        ],
    ),
    "import": (
        "write a folder of safetensors as a checkpoint of step 0, for checkpoint.start_from",
        [
            _argument(
                "folder",
                "a folder with config.json and *.safetensors, or the id of a model of the hub",
                metavar="HF_FOLDER",
            ),
            *(OUT, _argument("--ignore", IGNORED, metavar="NAME", action="append", default=[])),
        ],
    ),
    "reshard": (
        "save a step in the layout of a recipe, on the available devices",
        [FOLDER, OUT, _argument("recipe", "FILE.py or FILE.py:function", metavar="RECIPE"), OVERRIDES, NEWEST_VALID],
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Inspect, verify, compare and convert checkpoints. Existing checkpoints are never changed."
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input, 3 damage or differences found."
    kinds = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    for kind, (help, arguments) in KINDS.items():
        finding = "differences or damage found" if kind == "diff" else "damage found"
        codes = f"Exit codes: 0 success, 1 unexpected error, 2 invalid input, 3 {finding}."
        added = kinds.add_parser(kind, help=help, description=help, epilog=codes, allow_abbrev=False)
        for name, options in arguments:
            added.add_argument(name, **options)
        added.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    recipe = _recipe_of(arguments)
    for name, path_of in {"folder": stored_path, "other": stored_path, "out": user_path}.items():
        path_of(getattr(arguments, name, ""))  # raises an error before a checkpoint is read
    config = config_of(recipe, arguments.overrides) if recipe else None
    # Everything but reshard runs on the CPU, and must not occupy an accelerator.
    use_platform(config.run.platform if config and arguments.what == "reshard" else "cpu")
    output = _output(arguments, config)
    print(json.dumps(output.data, indent=1) if arguments.json else output.text(table_width()))
    refused = report_failure(UnreadableError(output.unreadable)) if output.unreadable else DONE
    return FINDINGS if output.findings else refused


def _recipe_of(arguments: argparse.Namespace) -> str | None:
    """The recipe in the arguments, if any. Raises ConfigError for settings without a recipe."""
    if arguments.what == "reshard":
        return arguments.recipe
    if arguments.what == "diff" and RECIPE.fullmatch(arguments.other) and not Path(arguments.other).is_dir():
        return arguments.other
    if given := getattr(arguments, "overrides", []):
        raise ConfigError(f"{' '.join(given)}: settings require a recipe, but {arguments.other} is a checkpoint")
    return None


def _output(arguments: argparse.Namespace, config: TrainConfig | None) -> Output:
    step = getattr(arguments, "step", None)
    if arguments.what in READERS:
        folders = [arguments.folder, *([arguments.other] if arguments.what == "diff" and config is None else [])]
        return find.of_newest(lambda: READERS[arguments.what](arguments, config), *folders, step=step)
    if arguments.what == "export":
        average = not arguments.no_average
        data = export(arguments.folder, arguments.out, arguments.to, step, arguments.dtype, average=average)
    elif arguments.what == "import":
        data = import_huggingface(arguments.folder, arguments.out, arguments.ignore, _imported)
    else:
        assert config is not None
        data = reshard(arguments.folder, arguments.out, config, step)
    return Output(data, lambda width: text.written_text(data))


READERS: dict[str, Callable[[argparse.Namespace, TrainConfig | None], Output]] = {
    "list": lambda given, config: _list(given.folder, verify=not given.quick),
    "inspect": lambda given, config: _inspect(find.find_step(given.folder, given.step), given.all),
    "verify": lambda given, config: _verify(given.folder, given.step),
    "diff": lambda given, config: _diff(given.folder, given.other, config, given.overrides, given.values),
}


def _imported(settings: Mapping[str, Any]) -> TrainConfig:
    return TrainConfig(make_model=make_decoder, loss_fn=next_token_loss, model=DecoderConfig(**settings))


def _list(path: str, *, verify: bool) -> Output:
    steps = find.find_steps(path)
    steps_data = _each(
        steps, lambda step: describe.step_data(step, verify=verify and bool(find.STEP.fullmatch(step.name)))
    )
    data = {
        "folder": str(steps[0].parent),
        "checkpoints": steps_data,
        "leftovers": [leftover.name for leftover in find.find_unfinished(steps[0].parent)],
        "verified": verify,
    }
    return _output_of_steps(data, partial(text.list_text, data))


def _each(steps: Sequence[Path], read: Callable[[Path], dict[str, Any]]) -> list[dict[str, Any]]:
    """`read(step)` of all steps but those that a run deletes. StepDeletedError if none is left."""
    results = []
    for step in steps:
        with suppress(StepDeletedError):
            results.append(read(step))
    return results or [read(steps[-1])]


def _output_of_steps(data: dict[str, Any], as_text: Callable[[int], str]) -> Output:
    steps = data["checkpoints"]
    unreadable = [line for step in steps for line in step["unreadable"]]
    return Output(data, as_text, any(step["problems"] for step in steps), unreadable)


def _inspect(step: Path, every: bool) -> Output:
    record = saved_record(step)
    arrays = list(describe.read_tree(step, record).values())
    data = {"folder": str(step.parent)} | describe.step_data(step, verify=False)
    details = {name: record.get(name) for name in ("recipe", "sharding", "versions", "config", "axes", "rules")}
    details["data"] = {key: value for key, value in record["data"].items() if key != "rows"}  # hashes, of all rows
    data |= details | {
        "subtotals": {part: _total(arrays, part) for part in ("model", "optimizer", "")},
        "arrays": [array._asdict() | {"shape": list(array.shape), "bytes": array.nbytes} for array in arrays],
    }
    return Output(data, lambda width: text.inspect_text(data, arrays, width, every=every), bool(data["problems"]))


def _total(arrays: Sequence[describe.Array], part: str) -> dict[str, int]:
    """Numbers of arrays, values and bytes below `part`; "" for all."""
    chosen = [array for array in arrays if array.path.startswith(f"{part}/") or not part]
    return {
        "arrays": len(chosen),
        "values": sum(array.size for array in chosen),
        "bytes": sum(array.nbytes for array in chosen),
    }


def _verify(path: str, number: int | None) -> Output:
    steps = find.find_steps(path)
    chosen = [find.find_step(path, number)] if number is not None else steps
    if len(chosen) > 1:  # quarantined steps are known to be damaged; they are verified only if their path is given
        chosen = [step for step in steps if find.STEP.fullmatch(step.name)] or steps
    results = _each(chosen, _verified)
    quarantined = [step.name for step in steps if step not in chosen and not find.STEP.fullmatch(step.name)]
    data = {"folder": str(steps[0].parent), "checkpoints": results, "set_aside": quarantined}
    return _output_of_steps(data, lambda width: text.verify_text(data))


def _verified(step: Path) -> dict[str, Any]:
    files, size = describe.folder_size(step)
    problems, unreadable = [], []
    try:
        problems = find_damage(step)
        base = None if problems else read_base(step)
        problems += [] if base is None else [f"base {base.folder}, {line}" for line in base.problems()]
    except UnreadableError as error:
        unreadable = error.lines
    return {"name": step.name, "files": files, "bytes": size, "problems": problems, "unreadable": unreadable}


def _diff(a: str, b: str, config: TrainConfig | None, overrides: Sequence[str], values: bool) -> Output:
    old, new = find.find_step(a), find.find_step(b) if config is None else None
    if values and new is not None:
        for step in (old, new):
            find.check_whole(step)
    record = saved_record(old)
    tree = describe.read_tree(old, record)
    if new is not None:
        other = saved_record(new)
        other_tree, name = describe.read_tree(new, other), str(new)
    else:
        assert config is not None
        if values:
            raise ConfigError(f"--values requires two checkpoints, but {b} is a recipe, which has no values")
        name = " ".join([b, *overrides])
        other, other_tree = _recipe_record(config)
        if record["config"]:
            record = record | {"config": added_settings(config) | record["config"]}
    rows = differences(record, other, tree, other_tree)
    data: dict[str, Any] = {
        "a": str(old),
        "b": name,
        "recipe": new is None,
        "compared": [section for section in SECTIONS if in_both(section, record, other)],
        "not_compared": [section for section in SECTIONS if in_one(section, record, other)],
        "differences": [row._asdict() for row in rows],
        "values": None,
    }
    differs = bool(rows)
    if values and new is not None:
        same = [
            array
            for path, array in tree.items()
            if path in other_tree and array_text(array) == array_text(other_tree[path])
        ]
        largest = value_differences(old, new, same)
        data["values"] = {"compared": len(same), "differing": describe.finite(largest)}
        differs = differs or bool(largest)
    return Output(data, lambda width: text.diff_text(data, rows), differs)


def _recipe_record(config: TrainConfig) -> tuple[dict[str, Any], dict[str, describe.Array]]:
    """The record and the arrays that the recipe would save, as far as they are known without devices."""
    check(config)
    recipe = derive(config, abstract_target(config.mesh, config.run.platform), {})
    # With pp this is the mesh of one group: arrays are split in the same way on all groups.
    state = nnx.filter_state(abstract_state(recipe.make, recipe.mesh, **vars(recipe.layout)), nnx.Not(Constant))
    rules, sizes = recipe.rules, recipe.target.sizes
    layout = layout_of(state, rules.layers)
    record = layout_record(sizes, rules, layout) | {"config": to_texts(config)}
    arrays = arrays_on_disk(state, rules.layers)
    tree = {path: describe.Array(path, x.shape, str(x.dtype), layout[path]) for path, x in arrays.items()}
    return record | {"data": {}, "versions": {}}, tree
