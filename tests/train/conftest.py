"""The text that runs of these tests train on."""

from pathlib import Path

import pytest

from tests.train.bigram import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))
