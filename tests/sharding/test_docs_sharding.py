"""docs/sharding.md: what its code prints, the errors above all, is what the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()


def test_blocks_print_what_the_page_shows():
    namespace: dict[str, Any] = {"__name__": "sharding_page"}
    shown, printed = [], []
    for code, text in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "docs/sharding.md", "exec"), namespace)
        if text:
            shown.append(text.strip())
            printed.append(out.getvalue().strip())
    assert len(shown) == len(re.findall("```text", PAGE)) > 5
    assert printed == shown
