"""Tasks of lm-eval (the Language Model Evaluation Harness) on a trained decoder; the extra `eval`."""

import importlib.util
import random
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flax_mesh.errors import ConfigError, Mistakes, labelled
from flax_mesh.fields import integer_problems
from flax_mesh.inference.trained import TrainedModel

NO_NETWORK = (
    "run the command where there is a network, once, which keeps the data in ~/.cache/huggingface; copy that folder "
    "here, and set HF_HUB_OFFLINE=1"
)


class Tasks(NamedTuple):
    """Tasks and groups of lm-eval, and the `generation_kwargs` of the tasks that generate texts."""

    items: list[object]
    generation: dict[str, Mapping[str, object]]


def evaluate_tasks(
    trained: TrainedModel,
    tasks: str | Sequence[str],
    *,
    include_path: str | Path | None = None,
    output_path: str | Path | None = None,
    batch_size: int = 8,
    sequence_length: int | None = None,
    say: Callable[[str], object] = warnings.warn,
    **options: object,
) -> dict[str, object]:
    """Evaluate a decoder on tasks of lm-eval, as `flax-mesh evaluate --tasks` does.

    To evaluate the model of your own training loop, pass `dataclasses.replace(trained, model=model)`.

    Args:
        trained: As `open_trained` returns it. It must have a tokenizer.
        tasks: Names of tasks or groups of lm-eval, or of `include_path`.
        include_path: A folder with tasks of your own, YAML files in lm-eval's format.
        output_path: A folder or a .json file in which lm-eval writes its results, under a name with the time.
        batch_size: Number of texts that are computed together.
        sequence_length: The most tokens of a text; of a longer one the first tokens are left out. Default: the length
            of the training run, or the length that config.json allows.
        say: Called with notes, each once, such as about texts that are too long.
        **options: Other arguments of `lm_eval.simple_evaluate`, such as `num_fewshot`, `limit` and
            `apply_chat_template`.

    Returns:
        The results of lm-eval: "results" has the metrics of every task.

    Raises:
        ConfigError: A task is not known or its data cannot be read, lm-eval is not installed, the model has no
            tokenizer, or an option of a task is not supported. Nothing has been compiled.
    """
    sizes = {"batch_size": batch_size} | ({} if sequence_length is None else {"sequence_length": sequence_length})
    if problems := integer_problems(sizes):
        raise ConfigError(problems)
    with _random_state_kept():
        opened = open_tasks([tasks] if isinstance(tasks, str) else tasks, include_path)
        return run_tasks(
            trained, opened, output_path, batch_size=batch_size, max_length=sequence_length, say=say, **options
        )


def open_tasks(names: Sequence[str], include_path: str | Path | None = None) -> Tasks:
    """Read tasks with their data. One ConfigError has a line for every name that cannot be opened."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('tasks require the package lm_eval, which is not installed: pip install "flax-mesh[eval]"')
    from datasets.exceptions import DatasetsError  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError(f"tasks of your own must be YAML files in a folder, got {include_path}")
    if not names:
        raise ConfigError("no task is named; pass the name of a task, or several")
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path is not None else None
    if manager is None or not {*names} <= {*manager.all_subtasks}:
        manager = TaskManager(include_path=include_path)  # with the tasks of lm-eval, which takes 10 s
    problems, opened = list[str](), Tasks([], {})
    of_names: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if name not in manager.all_tasks:
            similar = get_close_matches(name, manager.all_tasks) or ["another name"]
            problems.append(f"there is no task {name!r}; use {', '.join(similar)}")
            continue
        try:
            loaded = manager.load([name])
        except ConnectionError as error:
            problems.append(f"the data of task {name} cannot be downloaded: {error}; {NO_NETWORK}")
        except (OSError, DatasetsError, KeyError, TypeError, ValueError) as error:
            problems.append(f"task {name} cannot be read: {error}; repair its files")
        else:
            opened.items.extend([loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values())
            for key, task in loaded["tasks"].items():
                if (other := of_names.setdefault(key, name)) != name:
                    problems.append(f"task {key} is in {other} and in {name}; leave out one of them")
                if task.OUTPUT_TYPE == "generate_until":
                    opened.generation[key] = task.get_config("generation_kwargs")
                if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                    problems.append(f"task {key} runs code that the model writes, or needs images; use another task")
    if problems:
        raise ConfigError(problems)
    return opened


def run_tasks(
    trained: TrainedModel,
    opened: Tasks,
    output_path: str | Path | None = None,
    *,
    batch_size: int,
    max_length: int | None,
    say: Callable[[str], object],
    **options: object,
) -> dict[str, object]:
    """Evaluate tasks of `open_tasks`; the arguments are as of `evaluate_tasks`."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.loggers import EvaluationTracker  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from flax_mesh.inference.lm import TrainedLM

    model, mistakes = TrainedLM(trained, batch_size, max_length, say), Mistakes()
    for name, given in opened.generation.items():
        with mistakes, labelled(f"task {name}"):
            model.options(given)
    mistakes.raise_if_any()
    folder, tracker = Path(output_path or "."), None
    if output_path is not None:
        folder = folder.parent if folder.suffix == ".json" else folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_path={output_path} cannot be made: {error.strerror}; use another one") from error
        tracker = EvaluationTracker(output_path=str(output_path))
    defaults = {"log_samples": False, "torch_random_seed": None, "batch_size": batch_size}
    named = {"model_args": {"pretrained": str(trained.source.path)}, "evaluation_tracker": tracker}
    manager = TaskManager(include_defaults=False)
    results = simple_evaluate(model, tasks=opened.items, task_manager=manager, **named, **(defaults | options))
    if tracker is not None:
        samples = results.get("samples") or {}
        tracker.save_results_aggregated({name: value for name, value in results.items() if name != "samples"}, samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task, rows)
        if not [*folder.rglob(f"*{tracker.date_id}.json")]:  # lm-eval only logs it
            raise ConfigError(f"the results could not be written to {output_path}; use another folder")
    return results


@contextmanager
def _random_state_kept() -> Generator[None]:
    """lm-eval and the packages that it imports seed the generators of the process."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
