"""Helpers shared by the commands: exit codes, messages, settings, output files, the JAX platform, trained decoders."""

import argparse
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
from jax.experimental.compilation_cache import compilation_cache

from flax_mesh.checkpoint.read import plain
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, Mistakes, Problem, SaveError, ShardingError
from flax_mesh.fields import integer_problems, path_problem, read_file
from flax_mesh.inference.open import load_trained
from flax_mesh.inference.source import Settings, Source, find_source, read_settings
from flax_mesh.inference.tokenizer import Tokenizer
from flax_mesh.inference.trained import TrainedModel
from flax_mesh.processes.output import output_failure, reader_has_ended
from flax_mesh.processes.start import check_single_process
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.config import TrainConfig
from flax_mesh.recipe.load import load_recipe
from flax_mesh.recipe.overrides import read_overrides, setting_of, to_texts
from flax_mesh.text import lines_of, one_line, shortened

DONE, FAILED, BAD_INPUT, FINDINGS, STOPPED, DIVERGED = 0, 1, 2, 3, 4, 6  # 5: LOST of processes/watchdog.py
INTERRUPTED = 128 + signal.SIGINT  # as a shell reports it
EXIT_CODES = {CheckpointCorruptedError: FINDINGS, ConfigError: BAD_INPUT, ShardingError: BAD_INPUT, SaveError: FAILED}
MOST_PRINTED = 2000  # characters of a line of an error, which may contain an argument of any length
MOST_BYTES = 2**24  # of a file of settings
PIPED_WIDTH = 200  # columns of a table if the output is not a terminal
NO_FILES: Mapping[str, str] = MappingProxyType({})


def report_failure(error: BaseException) -> int:
    """Print the lines of an expected error, or the traceback of any other error. Returns the exit code."""
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)
    if code is None:
        traceback.print_exception(error)
        return FAILED
    for line in error.shown if isinstance(error, ConfigError) else lines_of(error):
        print(f"flax-mesh: {shortened(plain(line), MOST_PRINTED)}", file=sys.stderr)
    return code


def with_lost_output(code: int) -> int:
    """`code`, or 1 instead of 0 if standard output could not be written, except if its reader has ended (`| head`)."""
    sys.stdout.flush()
    failure = output_failure(sys.stdout)
    if failure is None or reader_has_ended(sys.stdout):
        return code
    print(f"flax-mesh: standard output could not be written: {failure.strerror}", file=sys.stderr)
    return code or FAILED


def config_of(recipe: str, overrides: Sequence[str]) -> TrainConfig:
    """The config of a recipe with these settings.

    Raises one ConfigError for all mistakes in them: the wrong values too if a setting is unknown.
    """
    config, problems = read_overrides(load_recipe(recipe), with_files(overrides))
    if problems:
        raise ConfigError([*problems, *check_config(config)])
    return config


def with_files(overrides: Iterable[str]) -> list[str]:
    """Replace every @FILE by its lines. A setting on the command line overrides the same setting in a file."""
    given = [text for text in overrides if not text.startswith("@")]
    keys = {setting_of(text) for text in given}
    lines = [line for text in overrides if text.startswith("@") for line in _settings_file(text[1:])]
    return [*(line for line in lines if setting_of(line) not in keys), *given]


def _settings_file(name: str) -> list[str]:
    """The lines of a file, without empty lines and comments (#)."""
    if problem := path_problem(name):
        raise ConfigError(f"@{name[:80]}: this text {problem}")
    try:
        text = read_file(name, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"@{name} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from error
    return [line for line in text.split("\n") if line.strip() and not line.startswith("#")]


def write_file(option: str, name: str, text: str, *, mode: str = "w") -> None:
    """Write a file, after `check_writable` has checked its name."""
    try:
        with open(name, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option} {name} cannot be written: {error.strerror}") from error


def files_read(recipe: str, overrides: Sequence[str], config: TrainConfig) -> dict[str, str]:
    """Name -> path of the files that a command reads: the recipe, files of settings, and settings that name files."""
    named = {f"the recipe {recipe}": recipe.partition(":")[0]} | settings_files(overrides)
    named |= {f"{key}={text}": text for key, text in to_texts(config).items()}
    return {name: path for name, text in named.items() if os.path.isfile(path := os.path.expanduser(text))}


def settings_files(overrides: Sequence[str]) -> dict[str, str]:
    return {text: text[1:] for text in overrides if text.startswith("@")}


def output_problems(option: str, name: str, others: Mapping[str, str]) -> list[str]:
    """One line if an option cannot name the file that a command writes.

    `others` are files and folders that the command reads, or writes too: their name in errors -> path.
    """
    if not name:
        return [f"{option} must name a file, got an empty text; name one, or leave out {option}"]
    if problem := path_problem(name):
        return [f"{option} {name[:80]}: this text {problem}"]
    if os.path.isdir(name):
        return [f"{option} {name} cannot be written: it is a folder; name a file"]
    for what, path in others.items():
        is_folder = os.path.isdir(path)
        is_inside = Path(os.path.realpath(name)).is_relative_to(os.path.realpath(path))
        if is_inside if is_folder else _is_same(name, path):
            return [
                f"{option} must name a file that the command uses for nothing else, got {name}, which is "
                f"{'in ' * is_folder}{what}; use another file"
            ]
    return []


def _is_same(name: str, path: str) -> bool:
    """Whether two paths lead to one file, also through links."""
    if os.path.exists(name) and os.path.exists(path):
        return os.path.samefile(name, path)
    return os.path.realpath(name) == os.path.realpath(path)


def check_writable(option: str, name: str, others: Mapping[str, str] = NO_FILES) -> None:
    """Raises the ConfigErrors of `output_problems` and `write_file`, for a file that is written much later.

    An existing file is not changed.
    """
    if problems := output_problems(option, name, others):
        raise ConfigError(problems)
    is_new = not os.path.exists(name)
    write_file(option, name, "", mode="a")
    if is_new:
        os.remove(name)


def say(line: str) -> None:
    """Print a line that is not the result of a command: to standard error, at once."""
    print(line, file=sys.stderr, flush=True)


def table_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def use_platform(platform: str) -> None:
    """Select the JAX backend: "auto", "cpu", "cpu:8", "gpu" or "tpu". Must be called before JAX is initialized."""
    name, _, count = platform.partition(":")
    try:
        if name != "auto":
            # The first platform is the default. The CPU is required to divide stacked layers of checkpoints.
            jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "cpu": "cpu"}.get(name, f"{name},cpu"))
        if count:
            jax.config.update("jax_num_cpu_devices", int(count))
        platform_here, reason = jax.devices()[0].platform, ""
    except (RuntimeError, AssertionError) as error:  # JAX raises AssertionError if cuda has no devices
        platform_here, reason = None, f" ({text})" if (text := one_line(error)) else ""
    if name not in ("auto", platform_here):  # without the cuda plugin, JAX silently uses the CPU
        reason = reason or f" (JAX found {platform_here})"
        raise ConfigError(
            f"run.platform={platform} has no devices here{reason}; use run.platform=auto for the available devices"
        )


def use_compilation_cache(folder: Path) -> Path | None:
    """Keep compiled programs in a folder, unless JAX has a cache already. This is a setting of the whole process.

    Returns the folder if it is used.

    The key of a program contains its text, the compiler's version and options and the kind of the devices, for CPUs
    their instruction sets too.
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 (not in the types of JAX)
        jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
        # XLA's own caches: the keys would contain the path, so that a folder that was moved would be compiled again.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        compilation_cache.reset_cache()  # JAX may have found that there is none
    return folder if getattr(jax.config, "jax_compilation_cache_dir") == str(folder.absolute()) else None  # noqa: B009


def add_trained(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that open a trained decoder."""
    parser.add_argument(
        "source",
        metavar="DIR",
        help="a run folder, its checkpoints/, one step in it, or a Hugging Face folder or id (org/name)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings of the mesh and the model, and run.platform, such as mesh.shape=dp:2,tp:2 model.dtype=bfloat16",
    )
    parser.add_argument("--step", metavar="N", type=int, help="this step (default: the newest valid one)")
    parser.add_argument(
        "--no-average",
        action="store_true",
        help="use the parameters themselves, not their moving average (optimizer.ema)",
    )


class TrainedRequest:
    """The trained decoder that a command line names. Wrong parts are None, and `mistakes` contain the reasons.

    >>> request = TrainedRequest(arguments, mistakes)
    >>> ...  # more checks, which may use request.source
    >>> trained = request.load(tokenizer)  # raises all mistakes first
    """

    def __init__(self, arguments: argparse.Namespace, mistakes: Mistakes):
        self.source: Source | None = None
        self.settings: Settings | None = None
        self._mistakes, self._average = mistakes, not arguments.no_average
        with mistakes:
            check_single_process(f"flax-mesh {arguments.command}")
        with mistakes:
            self.source = find_source(arguments.source, arguments.step)
            self.settings = read_settings(self.source, with_files(arguments.overrides))

    def load(
        self, tokenizer: Tokenizer | None = None, stops: Sequence[int] = (), sequence_length: int | None = None
    ) -> TrainedModel:
        """Load the decoder on the platform of its settings, unless there is a mistake."""
        self._mistakes.raise_if_any()
        assert self.source is not None and self.settings is not None
        use_platform(self.settings.config.run.platform)
        options = {"average": self._average, "sequence_length": sequence_length}
        return load_trained(self.source, self.settings, tokenizer, stops, **options, say=say)


def as_option(problem: Problem) -> Problem:
    """`--max-tokens must be ...` for `max_tokens must be ...`."""
    return problem.renamed(f"--{problem.setting.replace('_', '-')}")


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Raise one ConfigError for the options that are set and not at least 1."""
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if problems := integer_problems(values):
        raise ConfigError([as_option(problem) for problem in problems])
