"""XLA options of the training step: their text, and a check on a device."""

# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import re
from collections.abc import Mapping

import jax

from flax_mesh.errors import ConfigError
from flax_mesh.mesh.torus.torus import DeviceLike
from flax_mesh.text import first_line

CompilerOptions = dict[str, bool | int | str]


def parse_compiler_options(text: str) -> CompilerOptions:
    """Parse "NAME=VALUE,NAME=VALUE". The values true and false become bools, integers become ints.

    A value may contain commas: it extends to the next `NAME=`. Raises ConfigError with one line for every malformed
    part and for every name that is set twice.
    """
    options: CompilerOptions = {}
    problems: list[str] = []
    for part in re.split(r",(?=[^,=]*=)", text) if text else []:
        name, equals, value = part.strip().partition("=")
        if not (name and equals) or name.startswith("-"):
            problems.append(
                f"run.compiler_options: {part!r} is not an option; write NAME=VALUE, such as "
                "xla_gpu_enable_latency_hiding_scheduler=true"
            )
        elif name in options:
            problems.append(f"run.compiler_options: {name} is set twice")
        else:
            options[name] = _parse_option(value)
    if problems:
        raise ConfigError(problems)
    return options


def options_text(options: Mapping[str, bool | int | str]) -> str:
    """The inverse of `parse_compiler_options`."""
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())


def _parse_option(value: str) -> bool | int | str:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if re.fullmatch("-?[0-9]{1,18}", value) else value


def check_compiler_options(options: CompilerOptions, device: DeviceLike) -> list[str]:
    """One line for every option that the compiler of `device` rejects, found by compiling `x + 1` with it."""
    problems: list[str] = []
    sharding = jax.sharding.SingleDeviceSharding(device)
    for name, value in options.items():
        add_one = jax.jit(lambda x: x + 1, compiler_options={name: value})
        try:
            add_one.lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding)).compile()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            problems.append(f"run.compiler_options: {options_text({name: value})} is refused: {first_line(error)}")
    return problems
