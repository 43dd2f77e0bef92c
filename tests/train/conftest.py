"""The text that runs of these tests train on, and processes that train on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.bigram import write_text
from tests.train.support.processes import PATIENCE, Run, start_run


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def start(text) -> Iterator[Callable[..., Run]]:
    """`start(folder, *settings)` starts a process. Those that still run at the end are killed."""
    runs: list[Run] = []

    def start(folder: Path, *settings: str, **kinds: Any) -> Run:
        runs.append(start_run(folder, text, *settings, **kinds))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait(PATIENCE)
