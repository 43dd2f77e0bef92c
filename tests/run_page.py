"""run_page.py PAGE: runs the Python blocks of a page or a notebook from top to bottom, in one process with one device.

A text block directly after a Python block must be the output of that block. Exits with 1 and the difference otherwise.
"""

import contextlib
import difflib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any


def text_of(page: Path) -> str:
    """The Markdown of a page. Cells of a notebook become text, Python blocks, and the text blocks that these print."""
    if page.suffix != ".ipynb":
        return page.read_text()
    parts = []
    for cell in json.loads(page.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def main(page: Path) -> str:
    """The difference between the text blocks of the page and the output of its code, "" if there is none."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    shown, printed = [], []
    text = text_of(page)
    pairs = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE)
    for number, (code, output) in enumerate(pairs, start=1):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
        if output:
            shown.append(output.strip())
            printed.append(out.getvalue().strip())
    if len(shown) != len(re.findall(r"^```text\n", text, re.MULTILINE)):
        return f"{page.name} has a text block that does not follow a Python block"
    lines = [block.splitlines() for block in ("\n\n".join(shown), "\n\n".join(printed))]
    return "\n".join(difflib.unified_diff(lines[0], lines[1], "page", "printed", lineterm=""))


if __name__ == "__main__":
    if difference := main(Path(sys.argv[1])):
        sys.exit(difference)
