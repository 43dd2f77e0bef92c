"""Options of XLA for the training step: read from text, tried before anything large compiles."""

import re
from typing import Any

import jax

from flax_mesh.errors import ConfigError

Options = dict[str, bool | int | str]


def parse_compiler_options(text: str) -> Options:
    """name -> value of "NAME=VALUE,NAME=VALUE"; true, false and whole numbers are read as such.

    A value may have commas: what follows one, up to the next NAME=, belongs to it. Raises ConfigError, a line for
    every part that is not of this form or that sets a name twice.
    """
    found: Options = {}
    problems = []
    for part in re.split(r",(?=[^,=]*=)", text) if text else []:
        name, equals, value = part.strip().partition("=")
        if not (name and equals) or name.startswith("-"):
            problems.append(
                f"run.compiler_options: {part!r} is no option; write NAME=VALUE, such as "
                "xla_gpu_enable_latency_hiding_scheduler=true"
            )
        elif name in found:
            problems.append(f"run.compiler_options: {name} is set twice")
        else:
            found[name] = _parse(value)
    if problems:
        raise ConfigError(problems)
    return found


def check_compiler_options(options: Options, device: Any) -> list[str]:
    """One line for every option that the compiler of `device` refuses."""
    found = []
    for name, value in options.items():
        one = jax.jit(lambda x: x + 1, compiler_options={name: value})
        try:
            one.lower(jax.ShapeDtypeStruct((), "float32", sharding=_on(device))).compile()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            found.append(f"run.compiler_options: {name}={_text(value)} is refused: {str(error).splitlines()[0]}")
    return found


def options_text(options: Options) -> str:
    """The options as `parse_compiler_options` reads them."""
    return ",".join(f"{name}={_text(value)}" for name, value in options.items())


def _parse(value: str) -> bool | int | str:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.lstrip("-").isdecimal() else value


def _text(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _on(device: Any) -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(device)
