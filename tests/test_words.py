"""The docs, docstrings, comments and texts of flax_mesh use the terms of JAX's and PyTorch's documentation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Word(NamedTuple):
    pattern: str  # a space matches any white space, so that a phrase is found across line breaks; case is ignored
    use: str  # the standard term
    example: str  # matched by the pattern


# Lookaheads exclude the standard uses of a word, such as "stands for", "gives up" and "held out".
WORDS = [
    # Computation
    Word(r"\b(made|makes?|making) ((it|them|all|more|what) )?(again|anew)\b", "recomputed", "is made again"),
    Word(r"\bas good as free\b", "about one instruction per element", "what is as good as free"),
    Word(r"\bwhat is kept\b", "residuals", "bytes of what is kept"),
    Word(r"\blets? go of\b", "frees", "B lets go of what W does not take"),
    Word(r"\b(hold|holds|holding|held) up\b", "delays", "without holding up a result"),
    Word(
        r"\bcross(es|ed|ings?)?\b(?!-|[ -](entropy|product|attention|validation))"
        r"(?! (the )?(slow )?((process|slice|host|granule)(es|s)?|DCN|network)\b)",
        "stage boundary activation; is transferred",
        "what crosses between stages",
    ),
    # Arrays and devices
    Word(r"\bborn\b", "initialized directly sharded", "parameters are born sharded"),
    Word(r"\A\s*whole\s*\Z", "replicated", "whole"),
    Word(
        r"\b(is|are|be|stays?|left|kept|held|lies|copied|found|filled|gathered) whole\b(?! numbers?\b)",
        "replicated (arrays); valid (checkpoints); complete",
        "the stream is whole on tp",
    ),
    Word(
        r"\bwhole (on|over|or|arrays?|leaf|leaves|checkpoints?|ones?)\b",
        "replicated (arrays); valid (checkpoints); complete",
        "the newest whole checkpoint",
    ),
    Word(r"\b(lie|lies|lay|lying) (on|in|at|there|where|with|along|elsewhere|alone)\b", "is placed", "lies on a group"),
    Word(r"\b(where|what) (\w+ ){0,3}lies?\b", "the placement of", "what lies where"),
    Word(r"\b(stand|stands|stood|standing)\b(?!-)(?! (alone|for|in for)\b)", "is stored, appears", "it stands in docs"),
    Word(r"\bhomes?\b(?! (directory|folder|page)\b)", "owner", "the home of a leaf"),
    Word(r"`held`|\bheld (here|there|elsewhere|against)\b|\bwhat(ever)? held\b", "stored; local copies", "held there"),
    Word(r"`mine`|\b(is|are) mine\b|\bmine (is|are|alone)\b", "local", "groups that are mine"),
    Word(r"\bcut(s|ting)? (\w+ ){0,3}into\b", "split", "models that are cut into stages"),
    Word(r"\bspeakers?\b", "representative ranks", "the speakers of the mesh"),
    # Transfers
    Word(r"\b(go|goes|went|going) by\b(?! (itself|themselves)\b)", "is transferred with", "arrays go by the server"),
    Word(r"\bcarries\b(?! out\b)", "transfers, contains", "the outermost axis carries it"),
    Word(r"\bnative (way|walk|order|transport)\b", "ordered transport", "sent the native way"),
    Word(r"""\btransport ?= ?["']?native\b""", "ordered", 'Pipeline(transport="native")'),
    # Reports
    Word(r"\b(tell|tells|told|telling)\b", "reports; distinguishes", "what `explain` tells"),
    Word(r"\b(says|said|saying)\b", "reports, states", "an error that says so"),
    Word(r"\bgives\b(?! up\b)", "returns", "the function gives a mesh"),
    Word(r"\bknows of\b", "detects; contains", "the barrier knows of no failure"),
    Word(r"\bwants\b", "requires, needs", "what a stage wants"),
    # Persons
    Word(r"\b(no|some|any|every)body\b", "no process, another process, the caller", "nobody waits"),
    Word(r"\bwhom\b", "which", "for whom it is made"),
    # Checkpoints
    Word(r"\bset(s|ting)? ((it|them|one|those) )?aside\b", "quarantined", "damaged steps are set aside"),
    Word(r"\bcheckpointer\.fill\b|(?<!\w)\.fill\b", "restore_partial", "Checkpointer.fill"),
    # Constructions
    Word(r"\bthe same of\b", "name the noun", "the same of its gradient"),
    Word(r"(\A|[.:;] )of what\b", "subject first", "Kept. Of what F sends, all"),
    Word(r"\b(last metres|lower door)\b", "shutdown; low-level API", "dies on the last metres"),
]
PATTERNS = [(re.compile(word.pattern.replace(" ", r"\s+"), re.IGNORECASE), word.use) for word in WORDS]

STANDARD = """P stands for PartitionSpec. A stand-alone script. The run gives up after 3 tries. A whole number.
The model as a whole. Held-out loss; tokens are held out; the lock is held. The cross-entropy of a cross-host transfer.
An axis that crosses slices, or the slow network. It carries out the actions. Laid out along the axis. The carry of a
scan. A lookup goes by itself. Made against the odds. np.full fills arrays. Hosts agree. A native function. The home
directory. It holds three arrays. Given a mesh, the result is transferred across hosts and set to zero. The algorithm
underlies it. A standard notation. A minimum cut. The schedule `mine = Schedule(...)` gave the loss."""


def texts_of_python(code: str) -> Iterator[tuple[int, str]]:
    """(line of its start, text) of every string constant, docstrings included, and of every block of comments."""
    tree = ast.parse(code)
    inside = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value
    # Consecutive lines of comments are one text, since a phrase may continue on the next line.
    for comments in re.finditer(r"#[^\n]*(?:\n *#[^\n]*)*", code):
        yield code[: comments.start()].count("\n") + 1, comments[0].replace("#", "")


def texts_of_file(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text()
    if path.suffix == ".py":
        yield from texts_of_python(text)
    elif path.name == "changelog.md":
        # It lists old names, as code.
        yield 1, re.sub(r"`[^`]*`", lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    else:
        yield 1, text


def find_words(path: Path) -> list[str]:
    """`file:line: phrase -> use X` for every hit in a file, in the order of its lines."""
    found = []
    for start, text in texts_of_file(path):
        for pattern, use in PATTERNS:
            for match in pattern.finditer(text):
                line = start + text[: match.start()].count("\n")
                found.append((line, " ".join(match[0].split()), use))
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return [f"{name}:{line}: {phrase} -> use {use}" for line, phrase, use in sorted(found)]


@pytest.mark.slow
def test_docs_and_docstrings_use_standard_terms():
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "flax_mesh").rglob("*.py")]
    assert len(files) > 100, "the search does not find the files of the repository"
    found = [line for path in sorted(files) for line in find_words(path)]
    lines = (ROOT / "flax_mesh" / "recipe" / "saved.py").read_text().splitlines()
    # The value that checkpoints store since the first version; printed as "replicated".
    (stored,) = (n for n, line in enumerate(lines, start=1) if line.startswith("STORED_REPLICATED = "))
    found.remove(f"flax_mesh/recipe/saved.py:{stored}: whole -> use replicated")
    assert not found, f"{len(found)} phrases:\n" + "\n".join(found)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.example)
def test_every_pattern_matches_its_example(word):
    assert re.search(word.pattern, word.example, re.IGNORECASE)


def test_standard_uses_identifiers_and_code_in_the_changelog_are_not_reported(tmp_path):
    (tmp_path / "page.md").write_text(STANDARD)
    (tmp_path / "code.py").write_text("held = whom(tells)\n")
    (tmp_path / "changelog.md").write_text("- `mine` -> `local`\n")
    assert [found for path in tmp_path.iterdir() for found in find_words(path)] == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "# Title\n\nA stage is made\nagain in B.\n", 3),
        ("docstring.py", 'def f():\n    """A stage.\n\n    It is made\n    again in B.\n    """\n', 4),
        ("comment.py", "x = 1\n\n# A stage is made\n# again in B.\n", 3),
        ("string.py", 'def f(x):\n    print(f"stage {x} is made " "again")\n', 2),
    ],
    ids=["page", "docstring", "comment", "string"],
)
def test_a_planted_phrase_is_found(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    assert find_words(tmp_path / name) == [f"{name}:{line}: made again -> use recomputed"]
