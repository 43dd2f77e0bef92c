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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
templates_path = ["_templates"]
exclude_patterns = ["_templates"]
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


def add_navigation(app, docname, source):
    """Add the sidebar to the front page: a toctree for each of its tables, with the pages that the table links to."""
    if docname == "index":
        for section in source[0].split("\n## ")[1:]:
            pages = re.findall(r"^\| \[\w+\]\(([\w/]+)\.md\)", section, re.MULTILINE)
            if pages:
                options = f":hidden:\n:caption: {section.splitlines()[0]}\n\n"
                source[0] += "\n```{toctree}\n" + options + "\n".join(pages) + "\n```\n"


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
