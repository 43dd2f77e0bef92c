"""Every test sees 8 CPU devices, unless `--platform` asks for the devices of another backend."""

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="JAX backend of the tests: cpu (8 virtual devices), gpu, tpu")


def pytest_configure(config: pytest.Config) -> None:
    platform = config.getoption("--platform")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
