"""What the commands share: exit codes and errors, the settings of a recipe, output, the JAX platform."""

import argparse
import shutil
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from flax_mesh.checkpoint.read import plain
from flax_mesh.errors import CheckpointCorruptedError, ConfigError, SaveError, ShardingError
from flax_mesh.train import TrainConfig, apply_overrides, load_recipe
from flax_mesh.train.overrides import setting_of

DONE, FAILED, BAD_INPUT, FINDINGS, STOPPED = 0, 1, 2, 3, 4
EXIT_CODES = {CheckpointCorruptedError: FINDINGS, ConfigError: BAD_INPUT, ShardingError: BAD_INPUT, SaveError: FAILED}
PIPED_WIDTH = 200  # columns of tables that go into a file or another program


def tell_failure(error: BaseException) -> int:
    """Print an expected error as lines, any other with its traceback. Returns the exit code."""
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)
    if code is None:
        traceback.print_exception(error)
        return FAILED
    for line in str(error).splitlines():
        print(f"flax-mesh: {plain(line)}", file=sys.stderr)
    return code


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="FILE.py or FILE.py:function")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings such as run.steps=20; @FILE reads them from a file",
    )


def config_of(recipe: str, overrides: Sequence[str]) -> TrainConfig:
    return apply_overrides(load_recipe(recipe), _with_files(overrides))


def _with_files(overrides: Iterable[str]) -> list[str]:
    """The settings with every @FILE replaced by its lines; a setting on the command line overrides the file's."""
    given = [text for text in overrides if not text.startswith("@")]
    keys = {setting_of(text) for text in given}
    lines = [line for text in overrides if text.startswith("@") for line in _settings_file(text[1:])]
    return [*(line for line in lines if setting_of(line) not in keys), *given]


def _settings_file(name: str) -> list[str]:
    """Lines of a file that are neither empty nor a remark (#)."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"@{name} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    return [line for line in text.split("\n") if line.strip() and not line.startswith("#")]


def write_file(option: str, name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {name} cannot be written: {error.strerror}") from error


def table_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def use_platform(platform: str) -> None:
    """Choose the JAX backend before any device is touched: "auto", "cpu", "cpu:8", "gpu", "tpu"."""
    name, _, count = platform.partition(":")
    try:
        if name != "auto":
            # The first is the default; checkpoints are cut into layers on the CPU.
            jax.config.update("jax_platforms", {"gpu": "cuda,cpu", "cpu": "cpu"}.get(name, f"{name},cpu"))
        if count:
            jax.config.update("jax_num_cpu_devices", int(count))
        found, reason = jax.devices()[0].platform, ""
    except (RuntimeError, AssertionError) as error:  # JAX asserts that cuda has devices
        found, reason = None, f" ({' '.join(str(error).split())})" if str(error) else ""
    if name not in ("auto", found):  # without its plugin for cuda JAX goes on to the CPU, and says nothing
        reason = reason or f" (JAX found {found})"
        raise ConfigError(f"run.platform={platform} has no devices here{reason}; use auto for those that are here")
