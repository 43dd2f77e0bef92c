"""docs/pipelines.md: what its code prints, the errors above all, is what the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


@pytest.mark.slow
def test_blocks_print_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the page saves a checkpoint
    namespace: dict[str, Any] = {"__name__": "pipelines_page"}
    shown, printed = [], []
    jax.config.update("jax_disable_most_optimizations", True)  # less time to compile
    try:
        for code, text in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "docs/pipelines.md", "exec"), namespace)
            if text:
                shown.append(text.strip())
                printed.append(out.getvalue().strip())
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert len(shown) == len(re.findall("```text", PAGE)) > 5
    assert printed == shown
