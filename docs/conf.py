"""The documentation as a site: sphinx-build -W --keep-going docs build/docs."""

import re
import shutil
from importlib import metadata
from pathlib import Path

project = "flax_mesh"
release = metadata.version("flax-mesh")
html_title = f"{project} {release}"
html_theme = "furo"
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_design"]
templates_path = ["_templates"]
exclude_patterns = ["_templates"]
myst_enable_extensions = ["colon_fence"]  # cards
myst_heading_anchors = 4  # links such as page.md#a-heading resolve here as they do in a repository

# `name` in a docstring links to the page of that name, and is code where there is none.
default_role = "py:obj"
suppress_warnings = ["ref.python"]
# One parameter a line where a signature is long, defaults as they are written in the code.
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # prose: the type is in the signature, and a colon in the text ends none

# A constant has no docstring of its own; that of its type says nothing about it.
CONSTANTS = {
    "flax_mesh.checkpoint.DECODER_NAMES": "Tables of parameter names: a tuple of `ParamMapping` for each "
    "`model_type` of Hugging Face (llama, mistral, qwen2, qwen3, qwen3_moe, mixtral).",
}

# Every name of api.md gets a generated page. A page of a name that is gone would be a warning.
shutil.rmtree(Path(__file__).parent / "generated", ignore_errors=True)


CARD = """:::{{grid-item-card}} {0}
:link: {1}
:link-type: doc

{2}
:::"""


def add_navigation(app, docname, source):
    """On the front page, show every table of pages as cards, and add a toctree with these pages for the sidebar.

    It begins as README does: the installation, the picture and the first example.
    """
    if docname != "index":
        return
    head, *sections = source[0].split("\n## ")
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    picture = re.search(r"^!\[.*", readme, re.MULTILINE)[0].replace("docs/", "")
    example = re.search(r"^```python\n.*?^```\n", readme, re.DOTALL | re.MULTILINE)[0]
    parts = [f"{head}\n```sh\npip install -e .  # in a clone of the repository\n```\n\n{picture}\n\n{example}"]
    for section in sections:
        rows = re.findall(r"^\| \[([\w ]+)\]\(([\w/]+)\.md\) \| (.*) \|$", section, re.MULTILINE)
        if rows:
            cards = "\n\n".join(CARD.format(*row) for row in rows)
            grid = f"::::{{grid}} 1 2 3 3\n:gutter: 2\n\n{cards}\n::::\n"
            pages = "\n".join(page for _, page, _ in rows)
            toctree = f"```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n\n{pages}\n```\n"
            section = re.sub(r"(^\|.*\n)+", lambda _, grid=grid: grid, section, count=1, flags=re.MULTILINE) + toctree
        parts.append(section)
    source[0] = "\n## ".join(parts)


def skip_fields_of_named_tuples(app, what, name, obj, skip, options):
    """Their generated descriptions, "Alias for field number 0", repeat the signature."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def describe_constants(app, what, name, obj, options, lines):
    if what == "data":
        lines[:] = [CONSTANTS[name]]


def setup(app):
    app.connect("autodoc-process-docstring", describe_constants, priority=900)  # after napoleon
    app.connect("source-read", add_navigation)
    app.connect("autodoc-skip-member", skip_fields_of_named_tuples)
