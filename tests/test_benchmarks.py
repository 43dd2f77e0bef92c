"""Every benchmark runs at its smallest size and prints a last line of JSON with its results and their origin."""

import importlib
import json
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

import tests.benchmarks

QUICK = {
    "mesh": ["--rounds", "1"],
    "plan": ["--only", "6-8B"],
    "placement": ["--rounds", "1", "--alone"],
    "rules": ["--rounds", "1", "--layers", "2"],
    "schedules": ["--cases", "5", "--seconds", "0.1"],
}
SLOW = {
    "checkpoints": ["--mib", "16", "--rounds", "1"],
    "compile": ["--layers", "1,2", "--rounds", "1", "--kinds", "scanned;unrolled, plain"],
    "imports": ["--runs", "1"],
    "overlap": ["--ms", "2", "--steps", "1", "--schedules", "1f1b"],
    "pipeline": ["--microbatches", "4", "--steps", "4", "--ms", "2"],
    "processes": ["--processes", "2", "--ms", "2", "--steps", "1", "--schedules", "1f1b"],
    "remat": ["--layers", "4", "--width", "32", "--sequence", "16", "--steps", "2", "--dtypes", "bfloat16"],
    "safetensors": ["--layers", "1", "--rounds", "1"],
    "train": ["--rounds", "2", "--steps", "4", "--layers", "1", "--width", "32", "--length", "32"],
    "step": ["--rounds", "2", "--leaves", "4", "--devices", "1,2"],
}


def check(name: str, line: str) -> dict[str, Any]:
    found = json.loads(line)
    assert found["benchmark"] == name
    assert found["command"].startswith(f"python -m tests.benchmarks {name}")
    assert found["versions"].keys() >= {"python", "jax", "flax"} and found["hardware"]["cpus"] >= 1 and found["date"]
    rest = found.keys() - {"benchmark", "command", "versions", "hardware", "date"}
    assert any(found[key] for key in rest), f"no figures: {line}"
    return found


def run(name: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert importlib.import_module(f"tests.benchmarks.{name}").main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2, "a table comes before the JSON"
    return check(name, lines[-1])


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "plan" else ()) for n in QUICK])
def test_a_benchmark_runs(name: str, capsys: pytest.CaptureFixture[str]):
    found = run(name, QUICK[name], capsys)
    assert found["command"].endswith(" ".join(QUICK[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_benchmark_runs(name: str):
    command = [sys.executable, "-m", "tests.benchmarks", name, *SLOW[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    check(name, done.stdout.splitlines()[-1])


def test_every_benchmark_is_run_here():
    names = {m.name for m in pkgutil.iter_modules(tests.benchmarks.__path__) if not m.ispkg and m.name != "__main__"}
    assert names - {"gpu"} == QUICK.keys() | SLOW.keys()  # tested in tests/test_gpu_benchmark.py
