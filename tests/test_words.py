"""Docs, docstrings and comments name their nouns: rates of vague phrases per 10,000 words, and names of variables."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
TUTORIALS = [ROOT / "docs" / name for name in ("quickstart.md", "tutorial.md", "tasks.md")]
MODULES = sorted([*(ROOT / "flax_mesh").rglob("*.py"), *ROOT.glob("recipes/*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# Phrase -> the most per 10,000 words. The documentation of JAX, Flax, Optax, PyTorch and others is below these rates.
MOST = {r"\b(that|those) of\b": 3, r"\bwhat\b": 10, r"\b(one's|its own|their own)\b": 6, r"\b(is|are) no\b": 2}
YOU, LEAST_YOU = r"\byou(r|rs|rself)?\b", 40  # in tutorials
VAGUE = {"found", "own", "one", "made", "more"}  # names of variables that lack their noun


# A regular expression takes a tenth of the time of Python's tokenizer and parser, for 500 files.
TOKEN = re.compile(
    r'''(?P<indent>^[ ]*)?\w?(?:"""(?P<doc>(?:\\.|[^\\])*?)"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')'''
    r"|#(?P<comment>.*?)$",
    re.MULTILINE | re.DOTALL,
)


def prose(path: Path) -> str:
    """The text of a page without code, or the docstrings and comments of a module."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = [*TOKEN.finditer(text)]
        docs = [token["doc"] for token in tokens if token["indent"] is not None and token["doc"]]
        # One text for the comments, since a phrase may continue on the next line.
        text = "\n\n".join([*docs, " ".join(token["comment"] for token in tokens if token["comment"])])
    return " ".join(re.sub(r"```.*?```|`[^`\n]*`", " ", text, flags=re.DOTALL).split())


def rate(phrase: str, text: str) -> float:
    return 1e4 * len(re.findall(phrase, text, re.IGNORECASE)) / len(re.findall(r"[A-Za-z][\w'-]*", text))


def vague_names(code: str) -> list[str]:
    if not VAGUE & set(re.findall(r"\w+", TOKEN.sub("", code))):  # no need to parse it
        return []
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name | ast.arg)]
    stored = [node for node in names if not isinstance(getattr(node, "ctx", None), ast.Load)]
    return [name for node in stored if (name := node.arg if isinstance(node, ast.arg) else node.id) in VAGUE]


@pytest.mark.parametrize("paths", [PAGES, MODULES, TESTS], ids=["pages", "docstrings and comments", "tests"])
def test_vague_phrases_are_rare(paths):
    text = " ".join(map(prose, paths))
    rates = {phrase: rate(phrase, text) for phrase in MOST}
    assert not {phrase: value for phrase, value in rates.items() if value > MOST[phrase]}


def test_tutorials_address_the_reader():
    assert rate(YOU, " ".join(map(prose, TUTORIALS))) >= LEAST_YOU


def test_variables_are_named_by_a_noun():
    places = {str(path.relative_to(ROOT)): names for path in MODULES if (names := vague_names(path.read_text()))}
    assert not places


def test_phrases_in_code_are_not_counted(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("It is that of\nthe text `what`.\n\n```python\nwhat\n```\n")
    module.write_text('"""That\nof a docstring."""\n\n# It is that\n# of a comment.\nmore = "what"\n')
    assert prose(page) == "It is that of the text ." and rate(r"\bthat of\b", prose(module)) == 2000
    assert vague_names(module.read_text()) == ["more"]
