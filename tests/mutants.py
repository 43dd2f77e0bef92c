"""A test of the tests: changes flax_mesh in one place at a time, and runs the tests that guard this place.

    python -m tests.mutants --seed 1 --count 120
    python -m tests.mutants --folder mpmd/split --count 20

Every mutant runs against the default tests of its folder, ended by the first failure; only survivors run its slow
tests. Prints a line per mutant and the share that is caught. Survivors are code to test, or changes without effect. The
changes of `tests/suite/planted.py` are tried first.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.suite import tiers
from tests.suite.planted import PLANTED

ROOT = tiers.TESTS.parent
COPIED = ("flax_mesh", "tests", "recipes", "docs", "pyproject.toml", "README.md", "CITATION.cff")
LIMIT = 900  # seconds of one run of pytest; a mutant that never ends is caught
# Folders of tests -> others whose default tests find mistakes of the same code.
ALSO = {"checkpoint": "checkpoint/hf", "models": "checkpoint/hf train", "step": "recipe/optimizers"}
ALSO |= {"data": "train", "sharding": "train"}
SWAPS: dict[type[ast.AST], str] = {  # operator -> its replacement
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.And: "or",
    ast.Or: "and",
}


class Mutant(NamedTuple):
    file: str  # relative to the repository
    kind: str
    line: int
    code: str  # the mutated file
    text: str  # the change, in one line


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file: operators, limits, dropped lines and swapped arguments."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def mutant(kind: str, line: int, start: int, end: int, new: str) -> Mutant:
        old = data[start:end].decode()
        code = (data[:start] + new.encode() + data[end:]).decode()
        return Mutant(file, kind, line, code, f"{' '.join(old.split())} -> {new}")

    def between(left: ast.expr, right: ast.expr, kind: str, operator: ast.AST) -> Iterator[Mutant]:
        new, start, end = SWAPS.get(type(operator)), span(left)[1], span(right)[0]
        if new is not None:
            brackets = data[start:end].decode()
            old = brackets.replace("(", " ").replace(")", " ").replace("\\", " ").strip()
            if "#" not in old and brackets.count(old) == 1:
                at = start + len(brackets[: brackets.index(old)].encode())
                yield mutant(kind, left.lineno, at, at + len(old.encode()), new)

    for node in _code(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[operator, *_], comparators=[right, *_]):
                yield from between(left, right, "operator", operator)
            case ast.BinOp(left=left, op=operator, right=right) if not _is_text(left) and not _is_text(right):
                yield from between(left, right, "operator", operator)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, "operator", operator)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield mutant("operator", node.lineno, *span(node), f"({ast.unparse(operand)})")
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                yield mutant("limit", node.lineno, *span(node), str(value + 1))
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue():
                yield mutant("dropped line", node.lineno, *span(node), "pass")
            case ast.Call(args=[ast.Name() as first, ast.Name() as second, *_]) if first.id != second.id:
                start, end = span(first)[0], span(second)[1]
                yield mutant("swapped arguments", node.lineno, start, end, f"{second.id}, {first.id}")


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: without annotations, and without raised or formatted expressions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.AnnAssign | ast.arg):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield from _code(node.value)
            continue
        yield node
        if isinstance(node, ast.FunctionDef):
            for child in [*node.args.defaults, *node.body]:
                yield child
                yield from _code(child)
        elif not isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            yield from _code(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def planted() -> list[Mutant]:
    """The mutants of tests/suite/planted.py."""
    mutants = []
    for file, old, new in PLANTED:
        source = (ROOT / file).read_text()
        line = source[: source.index(old)].count("\n") + 1
        mutants.append(
            Mutant(file, "planted", line, source.replace(old, new), f"{old.split(chr(10))[0].strip()} -> ...")
        )
    return mutants


def choose(count: int, seed: int, folder: str | None) -> list[Mutant]:
    """`count` random mutants, over all folders in proportion to their code; mutants of a file are of several kinds."""
    rng, found = random.Random(seed), []
    for path in sorted((ROOT / "flax_mesh").rglob("*.py")):
        place = path.parent.relative_to(ROOT / "flax_mesh").as_posix()
        if folder in (None, place):
            found += mutants_of(path.relative_to(ROOT).as_posix(), path.read_text())
    kinds = sorted({mutant.kind for mutant in found})
    by_kind = {kind: [m for m in found if m.kind == kind] for kind in kinds}
    share = -(-count // len(kinds))
    chosen = [m for kind in kinds for m in rng.sample(by_kind[kind], min(share, len(by_kind[kind])))]
    rng.shuffle(chosen)
    return chosen[:count]


def test_files(file: str) -> list[str]:
    """The test files that guard a file, beginning with files of the same name."""
    own = sorted(tiers.touched_folders([file]))
    folders = dict.fromkeys([*own, *(other for folder in own for other in ALSO.get(folder, "").split())])
    paths = [path for folder in folders for path in sorted((tiers.TESTS / folder).glob("test_*.py"))]
    stem = Path(file).stem
    paths.sort(key=lambda path: stem not in path.stem)
    return [path.relative_to(ROOT).as_posix() for path in paths]


def run_tests(copy: Path, names: list[str], marks: str, cache: Path) -> str:
    """ "" if all tests pass, else the id of the first that fails, or another reason."""
    env = os.environ | {"PYTHONPATH": str(copy), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:budget", "-m", marks, *names]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "it does not end"
    if done.returncode in (0, 5):  # 5: no test is selected
        return ""
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit code {done.returncode}"


def try_mutant(mutant: Mutant, marks: dict[str, str], copy: Path, cache: Path) -> tuple[str, str]:
    """(The tier that catches it or "", the test). A test that also fails without the change is an error."""
    path, files = copy / mutant.file, test_files(mutant.file)
    original = path.read_text()
    for tier, expression in marks.items():
        path.write_text(mutant.code)
        failed = run_tests(copy, files, expression, cache)
        path.write_text(original)
        if failed:
            function = failed.partition("[")[0]
            if "::" in function and run_tests(copy, [function], expression, cache):
                raise RuntimeError(f"{function} fails without a mutant too: repair it first")
            return tier, failed
    return "", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="random mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="only this folder of flax_mesh, for example mpmd/split; without planted ones")
    parser.add_argument("--default-only", action="store_true", help="no slow tests for those that survive")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (%(default)s)")
    arguments = parser.parse_args()
    mutants = choose(arguments.count, arguments.seed, arguments.folder)
    mutants = mutants if arguments.folder else planted() + mutants
    marks = {"default": "not slow"} | ({} if arguments.default_only else {"slow": "slow"})
    caught: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="flax_mesh-mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies = [Path(folder) / str(i) for i in range(arguments.jobs)]
        for copy in copies:
            for name in COPIED:
                source = ROOT / name
                (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)  # type: ignore[operator]

        def try_next(mutant: Mutant) -> tuple[Mutant, str, str, float]:
            copy, start = copies.pop(), time.monotonic()
            try:
                return mutant, *try_mutant(mutant, marks, copy, Path(folder) / "cache"), time.monotonic() - start
            finally:
                copies.append(copy)

        for mutant, tier, test, seconds in pool.map(try_next, mutants):
            caught[mutant.kind, tier] += 1
            place = f"{mutant.file}:{mutant.line} [{mutant.kind}] {mutant.text[:80]}"
            print(f"{tier or 'SURVIVED':8} {place} {test} {seconds:.0f} s", flush=True)
    for kind in sorted({kind for kind, _ in caught}):
        print(kind, {tier or "survived": caught[kind, tier] for tier in ("default", "slow", "")})
    default, slow = (sum(n for (_, tier), n in caught.items() if tier == name) for name in ("default", "slow"))
    share = f", {default / (default + slow):.0%} by the default tests" if default + slow else ""
    print(f"{default + slow} of {len(mutants)} mutants are caught{share}")


if __name__ == "__main__":
    main()
