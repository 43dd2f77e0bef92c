"""Tests run on 8 CPU devices, unless `--platform` selects another backend."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests.suite import tiers
from tests.suite.budget import BudgetPlugin
from tests.suite.cost import CostPlugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="JAX backend of the tests: cpu (8 virtual devices), gpu, tpu")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from the recipes")
    parser.addoption(
        "--update-budget", action="store_true", help="rewrite tests/budget.txt from the counts of this run"
    )
    parser.addoption("--cost", action="store_true", help="print the test files that need most CPU time")
    parser.addoption("--slice", metavar="K/N", type=tiers.parse_slice, help="only slice K of N of the slow tests")
    parser.addoption(
        "--touched",
        metavar="FOLDERS",
        default="",
        help="with --slice: also the slow tests of these folders below tests/",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub and datasets: no test needs a network
    gc.set_threshold(50_000, 20, 50)  # with Python's numbers, collections take 3% of the CPU time
    _share_compilation_cache(config)
    config.pluginmanager.register(BudgetPlugin(config), "budget")
    if config.getoption("--cost"):
        config.pluginmanager.register(CostPlugin(), "cost")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it to processes that they start
    platform = config.getoption("--platform")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        if config.getoption("markexpr") == "not slow":  # also in the processes that the tests start
            jax.config.update("jax_disable_most_optimizations", True)
            os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    if platform == "gpu":  # whose products of float32 arrays have by default the precision of 19 bits
        jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks all cases of sampled functions but the first as slow, and applies `--slice` and `--touched`."""
    for item in items:
        if "sampled" in item.keywords and isinstance(item, pytest.Function) and any(item.callspec.indices.values()):
            item.add_marker("slow")
    chosen = config.getoption("--slice")
    if chosen is not None:
        touched = set(str(config.getoption("--touched")).split(","))
        selected = [i for i in items if "slow" not in i.keywords or tiers.is_selected(i.nodeid, chosen, touched)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
        items[:] = selected


def pytest_collection_finish() -> None:
    gc.freeze()  # imported objects remain until the end, and no collection needs to visit it


def _share_compilation_cache(config: pytest.Config) -> None:
    """Shares XLA's compilation cache among all tests and the processes that they start, to reduce their time."""
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which has inherited the settings
        return
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # several runs may share it, as in tests/mutants.py
    if folder is None:
        folder = tempfile.mkdtemp(prefix="flax_mesh-compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that runs of bigram models train on."""
    from tests.train.bigram import write_text

    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """Disables most XLA optimizations, as the default tier does: compiling takes a third to a half less time."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def quick_unless_slow(request: pytest.FixtureRequest) -> None:
    """As `quick_compilation`, but slow tests run the programs that users run."""
    if "slow" not in request.keywords:
        request.getfixturevalue("quick_compilation")


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """A list that contains one event for every XLA compilation during the test."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
