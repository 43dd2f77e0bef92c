"""Every test sees 8 CPU devices, unless `--platform` asks for the devices of another backend."""

from collections.abc import Iterator

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="JAX backend of the tests: cpu (8 virtual devices), gpu, tpu")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew from what the recipes give")


def pytest_configure(config: pytest.Config) -> None:
    platform = config.getoption("--platform")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by an event for everything XLA compiles during the test."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
