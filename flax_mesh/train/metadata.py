"""The metadata saved with every checkpoint, and its comparison with the settings of a run that resumes."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from flax_mesh.checkpoint import read_config
from flax_mesh.checkpoint.base import make_base
from flax_mesh.checkpoint.read import mesh_of
from flax_mesh.data.run_data import RunData
from flax_mesh.data.user_batches import row_changes
from flax_mesh.errors import ConfigError
from flax_mesh.processes import broadcast_from_process_0
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.overrides import Change, changes, to_texts
from flax_mesh.recipe.program import TrainProgram
from flax_mesh.recipe.saved import FORMAT, layout_of, layout_record, versions
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.text import mesh_text
from flax_mesh.train.metrics import Row
from flax_mesh.tree import Constant

MICROBATCHES = "pipeline.num_microbatches"
AVERAGE_DECAY = "optimizer.ema"  # the average is divided by 1 - decay^updates, so all updates must have one decay


def run_record(recipe: str, program: TrainProgram, data: RunData) -> dict[str, Any]:
    """The metadata of a run's checkpoints as JSON, with the fields that depend on the step filled in for step 0."""
    state = nnx.filter_state(program.layout.to_nnx(), nnx.Not(Constant))
    constants = program.recipe.constants
    sums = broadcast_from_process_0("constants", lambda: constants_record(constants)) if constants else "{}"
    return {
        "format": FORMAT,
        "step": 0,
        "recipe": recipe,
        "config": to_texts(program.recipe.config),
        **layout_record(program.mesh.shape, program.rules, layout_of(state, program.rules.layers)),
        "sharding": sharding_fingerprint(state),
        "data": data.record(0),
        "constants": json.loads(sums),
        "attention": [*program.attention_forms],
        "metrics": {},
        "versions": versions(),
    }


def constants_record(folders: Mapping[str, str]) -> str:
    """JSON of name -> a checksum of config.json and the safetensors in a folder; reads all of their bytes."""
    contents = {name: [read_config(folder), make_base(folder, {}).files] for name, folder in folders.items()}
    texts = {name: json.dumps(content, sort_keys=True) for name, content in contents.items()}
    return json.dumps({name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})


def step_record(run: Mapping[str, Any], step: int, row: Row, check: Mapping[str, Any], data: RunData) -> dict[str, Any]:
    """The metadata of one checkpoint, with the fields `check` of a StepCheck."""
    metrics = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {**run, "step": step, "data": data.record(step), "metrics": metrics, **check}


def config_lines(run: Mapping[str, Any]) -> list[str]:
    """The lines of config.txt: the settings of a `run_record`, and a description of its data as a comment."""
    return [*(f"{key}={text}" for key, text in run["config"].items()), _data_line(run)]


def _data_line(run: Mapping[str, Any]) -> str:
    return f"# {run['data']['name']}: {run['data']['content_hash']}"


def repeats_rows(run: Mapping[str, Any], config: TrainConfig, lines: Sequence[str], last: int) -> bool:
    """Whether a new run repeats all rows of an earlier run, with config.txt `lines` and last step `last`.

    That is, settings and data are equal, and the earlier run was killed before its first save.
    """
    before = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    saves = [before.get(key, "") for key in ("checkpoint.every", "run.steps")]
    had_saved = not all(
        re.fullmatch("[0-9]{1,18}", text) and last < int(text) for text in saves
    )  # its checkpoints were removed
    # Rows with an evaluation are not repeated if other steps have one.
    changed = any(change.changes_result or change.key == "run.eval_every" for change in changes(before, config))
    return not had_saved and not changed and last <= config.run.steps and _data_line(run) in lines


def check_resume(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    config: TrainConfig,
    *,
    allow_changes: bool,
    is_sum: Callable[[], bool] = lambda: False,
) -> list[Change]:
    """List the settings that changed since the checkpoint was saved.

    Raises ConfigError if one of them changes the result, unless `allow_changes`, and always if AVERAGE_DECAY changed.
    `is_sum` returns whether the loss is a sum over rows: another number of microbatches is then accepted.
    """
    changed = changes(saved["config"], config)
    if any(change.key == MICROBATCHES for change in changed) and is_sum():
        note = "rounding only, unless a term of the loss depends on the entire batch, as a router's does"
        changed = [x._replace(changes_result=False, note=note) if x.key == MICROBATCHES else x for x in changed]
    changed += _data_changes(saved["data"], now["data"])
    before = saved.get("constants", {})
    for name, text in now.get("constants", {}).items():
        if before.get(name, text) != text:
            changed.append(Change(f"files of constants[{name!r}]", before[name][:12], text[:12], True))
    if ("state" in saved["data"]) != ("state" in now["data"]):
        before, after = ("present" if "state" in record["data"] else "(absent)" for record in (saved, now))
        changed.append(Change("state of the iterator of make_batches", before, after, True))
    refused = [
        change for change in changed if change.changes_result and (not allow_changes or change.key == AVERAGE_DECAY)
    ]
    if refused:
        if any(change.key == AVERAGE_DECAY for change in refused):
            repair = (
                "Restore these settings, or start a new run (--restart, or another run.folder); --allow-changes does "
                f"not accept another {AVERAGE_DECAY}, because the stored average needs one decay for all updates."
            )
        else:
            repair = (
                "Restore these settings, start a new run (--restart, or another run.folder), or resume with them by "
                "--allow-changes."
            )
        raise ConfigError(
            list(map(str, refused)),
            head=f"the checkpoint of step {saved['step']} was saved with different settings:",
            repair=repair,
        )
    return changed


def _data_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """One if the content changed; of rows, one for those that changed, were added and were removed."""
    before, after = saved["content_hash"], now["content_hash"]
    texts = [after[:12]] if before != after else []
    before = before[:12]
    if texts and "rows" in saved and "rows" in now:
        before, texts = row_changes(saved["rows"], now["rows"])
    return [Change(now["name"], before, text, True) for text in texts]


def layout_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line if the mesh changed, and one for every array that is split over other axes than in the checkpoint."""
    before, after = mesh_of(saved), mesh_of(now)
    lines = [f"mesh {mesh_text(before)} -> {mesh_text(after)}"] if before != after else []
    old = saved.get("layout", {})
    return lines + [
        f"{path}: {old[path]} -> {spec}" for path, spec in now["layout"].items() if old.get(path, spec) != spec
    ]
