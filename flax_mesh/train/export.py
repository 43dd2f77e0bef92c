"""Conversion of checkpoints: export to safetensors, a plain Orbax checkpoint or PEFT, import, and resharding.

The output folder must not exist. It is written under a temporary name and renamed, so that it is complete or absent.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_mesh.checkpoint import Checkpointer
from flax_mesh.checkpoint.checksums import noticing_deletion
from flax_mesh.checkpoint.diff import batches, read_batch
from flax_mesh.checkpoint.find import STEP, check_committed, check_path, find_valid, of_newest, step_number
from flax_mesh.checkpoint.hf.convert import assembled, cast_dtype, file_arrays, stored_value
from flax_mesh.checkpoint.hf.decoders import DECODER_NAMES, has_images, huggingface_config, open_decoder, read_config
from flax_mesh.checkpoint.hf.kept import (
    CONFIG,
    KEPT,
    is_huggingface,
    keep_files,
    other_files,
    read_kept_config,
    updated_config,
)
from flax_mesh.checkpoint.hf.mapping import map_params
from flax_mesh.checkpoint.hf.peft import ADAPTER, ADAPTER_CONFIG, adapted_arrays, adapter_config, peft_factors
from flax_mesh.checkpoint.hf.safetensors import write_safetensors
from flax_mesh.checkpoint.read import Array, mesh_of, read_record, read_tree
from flax_mesh.errors import ConfigError, SaveError
from flax_mesh.fields import parse_value, user_path
from flax_mesh.lora.adapters import A, B
from flax_mesh.mesh.create import create_mesh
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.optimizers.schedule_free import NOT_EVALUATED, schedule_free_sources
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.recipe.program import train_program
from flax_mesh.recipe.resolve import check, resolve_checked, rules_of
from flax_mesh.recipe.saved import (
    FORMAT,
    averages,
    layout_of,
    layout_record,
    saved_lora,
    saved_record,
    sequence_length,
    versions,
)
from flax_mesh.recipe.target import local_target
from flax_mesh.sharding import sharding_fingerprint
from flax_mesh.sharding.abstract import abstract_state
from flax_mesh.step.state import TrainState
from flax_mesh.store import commit_of, is_present, on_this_machine, stored_path, with_commit
from flax_mesh.text import mesh_text, one_line
from flax_mesh.tree import MODEL, PyTree, named_leaves, nest

ImportModel = Callable[[Mapping[str, Any]], TrainConfig]  # decoder settings from config.json -> config
FILE_BYTES = 5_000_000_000  # maximum size of one safetensors file
HOST_BYTES = 2**30  # maximum size of the arrays copied to the host at a time


def export(
    folder: str, out: str, to: str, step: int | None, dtype: str | None, *, average: bool = True
) -> dict[str, object]:
    """Write the newest valid step, or `step`: parameters as "safetensors", as "orbax", or the adapters as "peft".

    If the run has a moving average of its parameters (`optimizer.ema`), the average is written, unless `average` is
    False.
    """
    return of_newest(lambda: _export(folder, out, to, step, dtype, average), folder, step=step)


def _export(folder: str, out: str, to: str, step: int | None, dtype: str | None, average: bool) -> dict[str, object]:
    checkpoint, passed_over = find_valid(folder, step)
    record = saved_record(checkpoint)
    arrays = read_tree(checkpoint, record)
    tree = _parameters(arrays)
    cast = {path: array._replace(dtype=cast_dtype(path, array.dtype, dtype).name) for path, array in tree.items()}
    averaged = averages(checkpoint, arrays, record) if average else {}
    with new_folder(out, checkpoint, by_orbax=to == "orbax") as work:
        details: dict[str, Any] = {
            "notes": [f"note: these are {NOT_EVALUATED}"] if schedule_free_sources(arrays) else []
        }
        if to == "safetensors":
            values = _merged(checkpoint, cast, averaged, record)
            cast = {path: array for path, array in cast.items() if not path.endswith((A, B))}
            details["model_type"] = _export_safetensors(checkpoint, work, cast, values, record, dtype)
        elif to == "peft":
            details["notes"] += _export_peft(checkpoint, work, cast, averaged, record)
            cast = {path: array for path, array in cast.items() if path.endswith((A, B))}
        else:
            _export_orbax(work, _values(checkpoint, cast, averaged))
    sizes = {"arrays": len(cast), "bytes": sum(array.nbytes for array in cast.values()), "averaged": len(averaged)}
    return _written(checkpoint, out, passed_over) | {"to": to} | sizes | details


def _merged(
    step: Path, tree: Mapping[str, Array], averaged: Mapping[str, tuple[Array, float]], record: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """`_values` of a decoder, whose weights have the contracted dims first, with its adapters merged."""
    factors = dict(_values(step, {path: x for path, x in tree.items() if path.endswith((A, B))}, averaged))
    scale = saved_lora(record).scale
    for path, value in _values(step, {path: x for path, x in tree.items() if path not in factors}, averaged):
        if path + A in factors:
            a, b = (factors[path + suffix].astype(np.float32) for suffix in (A, B))
            change = np.tensordot(a, b, 1)
            if change.shape != value.shape:
                raise ConfigError(f"{path} has the shape {value.shape}, but its adapter is for {change.shape}")
            value = (value.astype(np.float32) + scale * change).astype(value.dtype)
        yield path, value


def _values(
    step: Path, tree: Mapping[str, Array], averaged: Mapping[str, tuple[Array, float]]
) -> Iterator[tuple[str, np.ndarray]]:
    """As `read_values`, a few at a time, with the moving averages in the place of the parameters that have one."""
    yield from read_values(step, {path: array for path, array in tree.items() if path not in averaged})
    stored = {path: array for path, (array, _) in averaged.items() if path in tree}
    for path, value in read_values(step, stored):
        yield path, (value * averaged[path][1]).astype(tree[path].dtype)


def import_huggingface(folder: str, out: str, ignore: Sequence[str], model: ImportModel) -> dict[str, Any]:
    """Write the parameters of a folder of safetensors as a checkpoint of step 0; they must fit in host memory."""
    with _errors_name_option():
        source = open_decoder(folder, ignore=ignore)
        config = model(source.settings)
        if problems := [*config.model.problems(), *source.problems()]:
            raise ConfigError(problems)
    mesh = create_mesh((1, 1, 1, 1, 1), devices=jax.devices()[:1])
    rules = rules_of(config, mesh)
    abstract = abstract_state(lambda: config.make_model(config.model, nnx.Rngs(0)), mesh, rules)
    with _errors_name_option():
        state = {"model": source.load(abstract)}
    record = {
        "format": FORMAT,
        "step": 0,
        "recipe": f"imported from {with_commit(folder)}",
        "config": {key: text for key, text in to_texts(config).items() if key.startswith("model.")},
        "data": {"description": "none yet", "content_hash": "", "position": 0},
        "metrics": {},
        "versions": versions(),
        **layout_record(mesh.shape, rules, layout_of(state, ())),
    }
    with new_folder(out) as work:
        sizes = _save(work, 0, state, (), record)
        keep_files(source.path, work)
    return {"from": folder, "out": out, "to": "checkpoint", "model_type": source.model_type, **sizes}


def reshard(folder: str, out: str, config: TrainConfig, step: int | None) -> dict[str, object]:
    """Save the newest valid step, or `step`, in the layout of a recipe on the available devices."""
    check(config)
    target = local_target(config.mesh, config.run.platform)
    program = train_program(resolve_checked(config, target, tries_options=False))
    abstract, layers = program.layout, program.rules.layers

    def read() -> tuple[Path, dict[Path, list[str]], dict[str, Any], TrainState]:
        source, passed_over = find_valid(folder, step)
        check_committed(source)
        with noticing_deletion(source), Checkpointer(source.parent, layers=layers or None) as checkpointer:
            # find_valid has verified it.
            state = checkpointer.restore(abstract, step_number(source), verify=False)
            return source, passed_over, saved_record(source), state

    source, passed_over, record, state = of_newest(read, folder, step=step)
    before, after = mesh_text(mesh_of(record)), mesh_text(program.mesh.shape)
    record |= layout_record(program.mesh.shape, program.rules, layout_of(abstract, layers))
    record |= {"sharding": sharding_fingerprint(abstract.to_nnx()), "resharded_from": before}
    if record["config"]:
        record["config"] |= {"mesh.shape": config.mesh.shape}
    with new_folder(out, source) as work:
        sizes = _save(work, step_number(source), state, layers, record)
        keep_files(on_this_machine(source.parent / KEPT), work)
    details = {"to": "checkpoint", "mesh": after, "before": before, "notes": list(program.recipe.notes)}
    return _written(source, out, passed_over) | details | sizes


@contextmanager
def _errors_name_option() -> Iterator[None]:
    """Add the name of the command-line option to errors about `ignore=`."""
    try:
        yield
    except ConfigError as error:
        if not error.can_ignore:
            raise
        raise type(error)([*error.lines, "  On the command line, ignore= is --ignore NAME."]) from error


@contextmanager
def new_folder(out: str | Path, step: Path | None = None, *, by_orbax: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `out` that is renamed to `out` at the end of the block, or removed after an error.

    Raises ConfigError if `out` exists, is in the folder of the `step` that is read or would be taken for another step
    beside it, or if its parent cannot be written; SaveError if writing fails.
    """
    path = user_path(out).absolute()
    if not str(out):
        raise ConfigError("the output folder must have a name, got an empty text; name a folder that does not exist")
    if by_orbax:
        check_path(path)
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; nothing was overwritten. Use another folder, or remove this one.")
    if step is not None and _is_part_of(path, step):
        raise ConfigError(
            f"{path} must not be a step beside {step}, or in it: the next run would take it for a checkpoint of its "
            "own; use another folder"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{path} cannot be written: {reason}; use another folder") from error
    with temporary as folder:
        work = Path(folder) / path.name
        try:
            yield work
            os.rename(work, path)
        except OSError as error:
            raise SaveError(
                f"{path} could not be written: {error.strerror or error}; the partial output was removed"
            ) from error


def _is_part_of(path: Path, step: Path) -> bool:
    """Whether a path is in the folder of a step, or the folder of another step beside it."""
    path, step = path.resolve(), step.resolve()
    return path.is_relative_to(step) or (path.parent == step.parent and STEP.fullmatch(path.name) is not None)


def _parameters(tree: Mapping[str, Array]) -> dict[str, Array]:
    """Path without "model/" -> array of the model. A tree without "model/" and "optimizer/" is a model itself."""
    parts = any(path.startswith((MODEL, "optimizer/")) for path in tree)
    parameters = {
        path.removeprefix(MODEL): array for path, array in tree.items() if path.startswith(MODEL) or not parts
    }
    if not parameters:
        raise ConfigError(f"the checkpoint must have arrays below {MODEL}, found none")
    return parameters


def _export_safetensors(
    step: Path,
    work: Path,
    tree: Mapping[str, Array],
    values: Iterable[tuple[str, np.ndarray]],
    record: Mapping[str, Any],
    dtype: str | None,
) -> str:
    """Write the arrays and config.json, with its "model_type" as the result."""
    kept = read_kept_config(step.parent)
    # Of an imported model it is unknown how long its sequences were; `saved_record` has the default.
    length = sequence_length(read_record(step))
    config = _huggingface_config(record["config"], dtype, kept, length)
    others = other_files(on_this_machine(step.parent / KEPT))
    copies = [file for file in others if file.name != CONFIG or config == kept]
    json_files = {} if config == kept else {CONFIG: config}
    abstract = nest((path, jax.ShapeDtypeStruct(array.shape, array.dtype)) for path, array in tree.items())
    params = map_params(abstract, DECODER_NAMES[config["model_type"]])
    arrays = {param.path: param.arrays for param in params}
    pieces = ((part, stored_value(part, value[part.at])) for path, value in values for part in arrays[path])
    write_safetensors(
        work, file_arrays(params), assembled(pieces), json_files=json_files, copies=copies, max_file_bytes=FILE_BYTES
    )
    return config["model_type"]


def _export_peft(
    step: Path,
    work: Path,
    tree: Mapping[str, Array],
    averaged: Mapping[str, tuple[Array, float]],
    record: Mapping[str, Any],
) -> list[str]:
    """Write the adapters and their adapter_config.json, with notes as the result."""
    weights = {path: array for path, array in tree.items() if not path.endswith((A, B))}
    if not (adapted := [path for path in weights if path + A in tree]):
        raise ConfigError(f"{step} has no adapters, since lora.rank is 0; --to safetensors writes all parameters")
    kept = read_kept_config(step.parent)
    names = DECODER_NAMES[_huggingface_config(record["config"], None, kept, None)["model_type"]]
    params = map_params(nest((path, jax.ShapeDtypeStruct(x.shape, x.dtype)) for path, x in weights.items()), names)
    arrays = adapted_arrays(params, adapted)
    factors = dict(_values(step, {path: x for path, x in tree.items() if path not in weights}, averaged))
    written = peft_factors((array, factors[path + A], factors[path + B]) for path, array in arrays.items())
    lora, start = saved_lora(record), str(record["config"].get("checkpoint.start_from", ""))
    base, revision = commit_of(start) or (None, None)
    if base is None and start and is_present(stored_path(start)) and is_huggingface(start):
        base = str(user_path(start).absolute())
    # transformers may name the layers of a model that reads images otherwise than those of its text decoder.
    if is_part := base is not None and has_images(read_config(start)):
        base = revision = None
    all_names = [part.name for param in params for part in param.arrays]
    counts = Counter(array.name for array in arrays.values())
    ranks = {name: lora.rank * count for name, count in counts.items()}
    config = adapter_config(ranks, all_names, lora.rank, lora.scale, base, revision)
    write_safetensors(
        work, written, written.items(), json_files={ADAPTER_CONFIG: config}, file=ADAPTER, max_file_bytes=sys.maxsize
    )
    if base:
        return []
    what = "reads images too" if is_part else "is not a Hugging Face folder"
    return [
        f"note: base_model_name_or_path is null: the run started from {start or 'no checkpoint'}, which {what}; "
        "load the adapters on --to safetensors of the checkpoint that it started from"
    ]


def read_values(step: Path, tree: Mapping[str, Array]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name in `tree`, value) of every array, read and cast in batches of bounded size."""
    names = {array.path: name for name, array in tree.items()}
    for batch in batches(list(tree.values())):
        yield from ((names[path], value) for path, value in read_batch(step, batch).items())


def _export_orbax(work: Path, values: Iterable[tuple[str, np.ndarray]]) -> None:
    """Save numpy arrays, so that a machine with other devices can read them. All of them must fit in host memory."""
    import orbax.checkpoint as ocp

    nested = nest(values)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as orbax:
            orbax.save(work, args=ocp.args.StandardSave(nested))
    # Tensorstore raises ValueError for most file errors, Orbax RuntimeError.
    except (OSError, RuntimeError, ValueError) as error:
        raise SaveError(f"{work.name} could not be written: {one_line(error, 300)}") from error


def _huggingface_config(
    lines: Mapping[str, Any], dtype: str | None, kept: Mapping[str, Any], length: int | None
) -> dict[str, Any]:
    """The config.json of a checkpoint with these settings: `kept`, the imported one, as far as it is still true."""
    kinds = int | float | bool | str | None
    settings = {key: parse_value(str(value), kinds) for key, value in lines.items()}
    model = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    model = {"rope_factor": 1.0} | model | ({"param_dtype": dtype} if dtype else {})
    try:
        return updated_config(kept, model) if kept else huggingface_config(model, max_position_embeddings=length)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the model of the checkpoint has no known Hugging Face equivalent (its settings: {error}); "
            "--to orbax exports any model"
        ) from error


def _save(folder: Path, step: int, state: PyTree, layers: Sequence[str], record: Mapping[str, Any]) -> dict[str, int]:
    """Save and verify `state`. Returns the number of its arrays and bytes."""
    with Checkpointer(folder, keep=None, layers=layers or None, host_bytes=HOST_BYTES) as checkpointer:
        checkpointer.save(step, state, record)
        checkpointer.wait()
        if problems := checkpointer.verify(step):
            raise SaveError(f"{folder}: the files differ from the arrays that were written: {problems[0]}")
    named = named_leaves(state)
    return {"arrays": len(named), "bytes": sum(leaf.nbytes for _, leaf in named)}


def _written(step: Path, out: str, passed_over: Mapping[Path, Sequence[str]]) -> dict[str, object]:
    return {
        "from": str(step),
        "out": out,
        "passed_over": {step_path.name: list(lines) for step_path, lines in passed_over.items()},
    }
