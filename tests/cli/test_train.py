"""The command line: the errors for mistakes of the user, and settings that are printed and read back."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax
import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FAILED, STOPPED
from flax_mesh.cli.text.generated import printable
from flax_mesh.cli.text.start import Programs, Work, lost_programs, reason
from flax_mesh.cli.train import _display, _print_result, step_line
from flax_mesh.processes.launch import SIGNALS
from flax_mesh.recipe.overrides import to_lines
from flax_mesh.train import TrainResult, apply_overrides, load_recipe
from flax_mesh.train.metrics import Row
from tests.train import bigram
from tests.train.bigram import count_compilations, snapshot, write_text
from tests.train.support.runs import rows_of

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny.py")


pytestmark = pytest.mark.usefixtures("on_eight_cpu_devices")


@pytest.fixture
def error_lines(capsys):
    """Run a command that must fail, and return the lines of its error without their prefix."""

    def run(*argv: str) -> list[str]:
        with count_compilations() as compiled:
            assert main(argv) == BAD_INPUT
        assert not compiled
        lines = capsys.readouterr().err.splitlines()
        assert lines and all(line.startswith("flax-mesh: ") for line in lines)
        return [line.removeprefix("flax-mesh: ") for line in lines]

    return run


# --- mistakes; single ones are in test_bad_input.py ---


def test_all_mistakes_are_reported_at_once(error_lines):
    lines = error_lines("train", TINY, "mesh.shape=dp:2,tp:4", "model.num_heads=6", "model.vocab_size=258")
    whole = "model.axes.vocab_axis=none, which leaves it whole, or for a new model a multiple"
    assert lines == [
        f"model.vocab_size=258 is not divisible by 4 (tp=4); use another mesh.shape, {whole}",
        "model.num_heads=6 is not divisible by 4 (tp=4); use a multiple, or another mesh.shape",
    ]
    for command in (["train"], ["explain"], ["checkpoint", "reshard", "x", "y"]):
        lines = error_lines(*command, TINY, "run.stps=3", "run.seed=x", "nonsense", "run.steps=0", "model.head_dim=3")
        names = ["run.stps", "run.seed", "'nonsense'", "run.steps", "model.head_dim"]
        assert [line.split()[0] for line in lines] == names
    lines = error_lines("train", TINY, "run.steps=0", "run.platform=npu", "mesh.shape=pp:-1", "model.head_dim=3")
    names = {line.split()[0].split("=")[0] for line in lines}
    assert len(lines) == 4 and names == {"mesh.shape", "model.head_dim", "run.platform", "run.steps"}


@pytest.mark.slow
def test_a_platform_without_devices_is_reported_in_one_line():
    argv = ["-m", "flax_mesh.cli", "train", TINY, "run.platform=tpu"]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == BAD_INPUT
    line = r"flax-mesh: run\.platform=\S+ has no devices here \(.+\); use run\.platform=auto for .*\n"
    assert re.fullmatch(line, done.stderr)


def test_version_prints_the_versions_of_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"flax-mesh .+ \(jax \d\S*, flax \d\S*\)\n", capsys.readouterr().out)


# --- settings as text ---


def test_the_printed_config_is_read_back_to_the_same_config(capsys, tmp_path):
    changed = ["run.steps=7", "run.folder=my runs/a b", "data.seed=none", "model.axes.batch_axis=dp", "mesh.shape=tp:2"]
    assert main(["train", TINY, "--print-config", *changed]) == DONE
    printed = capsys.readouterr().out
    file = tmp_path / "settings.txt"
    file.write_text(printed)
    assert main(["train", TINY, f"@{file}", "--print-config"]) == DONE
    assert capsys.readouterr().out == printed
    comment, *lines = printed.splitlines()
    assert comment == f"# flax-mesh train {TINY} @THIS_FILE"
    assert lines == to_lines(apply_overrides(load_recipe(TINY), changed))
    assert {"run.folder=my runs/a b", "model.axes.batch_axis=dp"} <= set(lines)
    assert main(["train", TINY, f"@{file}", f"@{file}"]) == BAD_INPUT
    assert "flax-mesh: model.vocab_size is set twice\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("in_file", "arguments", "expected"),
    [
        ("run.steps=5 run.seed=9", "run.steps=7", "run.steps=7 run.seed=9"),
        # old names and values
        ("pipeline.residuals=lean", "pipeline.remat=full", "pipeline.remat=full"),
        ("pipeline.remat=cheap", "pipeline.residuals=recompute", "pipeline.remat=full"),
        ("pipeline.residuals=store", "pipeline.residuals=recompute", "pipeline.remat=full"),
        ("run.steps=7", "pipeline.transport=native", "run.steps=7 pipeline.transport=ordered"),
    ],
)
def test_a_setting_on_the_command_line_overrides_a_file(capsys, tmp_path, in_file, arguments, expected):
    file = tmp_path / "settings.txt"
    file.write_text("\n".join(["# a comment", "", *in_file.split()]))
    for argv in ([f"@{file}", *arguments.split()], [*arguments.split(), f"@{file}"]):
        assert main(["train", TINY, *argv, "--print-config"]) == DONE
        lines = capsys.readouterr().out.splitlines()
        assert set(expected.split()) <= set(lines)
        assert not any("residuals" in line or "pipeline.microbatches" in line for line in lines)


def test_options_may_appear_anywhere(capsys):
    for place in range(4):
        argv = [TINY, "run.steps=7", "run.seed=9"]
        argv.insert(place, "--print-config")
        assert main(["train", *argv]) == DONE
        assert {"run.steps=7", "run.seed=9"} <= set(capsys.readouterr().out.splitlines())


# --- a run ---


@pytest.mark.slow
def test_a_run_prints_its_steps_and_the_command_that_extends_it(small, capsys, tmp_path):
    assert main([*small, "run.steps=2", "run.sample_tokens=4"]) == DONE
    out = capsys.readouterr().out
    assert len(re.findall(r"^step +[12]  loss \d\.\d{4}  grad \d\.\d{3}  lr \S+  [\d,]+ tok/s", out, re.M)) == 2
    assert re.search(r"^step +2 .*  held-out \d\.\d{4} = \d\.\d{3} bits/byte$", out, re.M)
    assert re.search(r"^held-out: \d\.\d{3} bits per byte at step 2$", out, re.M)
    assert "sample, after the first bytes of the held-out text:" in out
    assert f"finished at step 2; metrics and checkpoints: {tmp_path / 'run'}" in out
    argv = printed_command(out, "train on")
    assert argv[-1] == "run.steps=4"
    assert main(argv) == DONE
    assert "resuming, 2 steps to go" in capsys.readouterr().out
    assert main(argv) == DONE
    assert "Nothing to do." in capsys.readouterr().out
    before = snapshot(tmp_path / "run")
    assert main([*argv, "--restart"]) == DONE
    assert snapshot(tmp_path / "run") == before
    argv = printed_command(capsys.readouterr().out, "train on")
    assert f"run.folder={tmp_path / 'run-2'}" in argv and "--restart" not in argv


def test_a_run_that_cannot_be_resumed_prints_the_command_that_starts_from_its_parameters(capsys):
    config = apply_overrides(load_recipe(TINY), ["data.resumable=false", "run.steps=9"])
    argv = ["train", TINY, "data.resumable=false", "run.steps=9", "checkpoint.start_from=other"]
    for status in ("stopped", "finished"):
        _print_result(TrainResult(status, 4, Path("runs/a")), argv, config, [])
        out = capsys.readouterr().out
        assert "resume: " not in out and "train on: " not in out
        found = printed_command(out, "start from its parameters")
        more = ["run.folder=runs/a", "--restart", "run.steps=9", "checkpoint.start_from=runs/a"]
        assert found == ["train", TINY, "data.resumable=false", *more]


def printed_command(out: str, label: str) -> list[str]:
    line = [line for line in out.splitlines() if line.startswith(f"{label}: ")][-1]
    name, *argv = shlex.split(line.removeprefix(f"{label}: "))
    assert name == "flax-mesh"
    return argv


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("To be,\nor \x1b[2J\x07not\r\n\x00", "To be,\nor \\x1b[2J\\x07not\\r\n\\x00"),
        ("\x7f \x85 \x9b31m", "\\x7f \\x85 \\x9b31m"),  # the last one is the control sequence introducer of 8 bits
        ("a\u202eb\u2069 \u200f", "a\\u202eb\\u2069 \\u200f"),
        *(
            (text, text)
            for text in ("if x:\n\treturn", "10\u00a0km", "日本\u3000語", "👩\u200d👩\u200d👧", "a\u200cb", "")
        ),
    ],
)
def test_control_characters_of_a_text_are_escaped_and_no_others(text, expected):
    assert printable(text) == expected


def test_a_row_is_printed_as_a_line_without_unknown_values():
    row = {"step": 3, "loss": 2.5, "grad_norm": 0.25, "tokens_per_s": 12345.6, "mfu": None, "device_bytes": None}
    assert step_line(row) == "step      3  loss 2.5000  grad 0.250  12,346 tok/s"
    row |= {"learning_rate": 3e-4, "mfu": 0.415, "device_bytes": 3 * 2**30, "eval_loss": 2.0, "bits_per_byte": None}
    assert step_line(row) == (
        "step      3  loss 2.5000  grad 0.250  lr 3.00e-04  12,346 tok/s  mfu 41.5%  3.0 GiB  held-out 2.0000"
    )
    assert step_line(row | {"bits_per_byte": 2.885}).endswith("  held-out 2.0000 = 2.885 bits/byte")


LONG = ("run.steps=50", "run.eval_every=0", "checkpoint.every=100")


@pytest.fixture
def signal_at_step_2(monkeypatch):
    """A function that makes the run send itself a signal when it prints its second step."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup pytest` ignores

    def send(number: int) -> None:
        def line_of(row: Row, *more: Any) -> str:
            if row["step"] == 2:
                signal.raise_signal(number)
            return step_line(row, *more)

        monkeypatch.setattr("flax_mesh.cli.train.step_line", line_of)

    yield send
    signal.signal(signal.SIGHUP, before)


@pytest.mark.sampled
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_stops_the_run(small, signal_at_step_2, capfd, tmp_path, number):
    signal_at_step_2(number)
    assert main([*small, *LONG]) == STOPPED
    captured = capfd.readouterr()
    assert "stopped at step 3" in captured.out and f"{number.name}: saving after this step" in captured.err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]


def test_an_ignored_signal_stays_ignored(small, signal_at_step_2):
    """`nohup flax-mesh train`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signal_at_step_2(signal.SIGHUP)
        assert main([*small, "run.steps=3", "run.eval_every=0"]) == DONE
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_before_the_first_step_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("flax_mesh.cli.explain.explain", lambda config: signal.raise_signal(signal.SIGINT))
    assert main(["explain", TINY]) == 130
    assert capsys.readouterr().err == "flax-mesh: interrupted\n"


# --- a standard output that cannot be written ---


@contextmanager
def standard_output(stream: TextIO | None) -> Iterator[None]:
    """Not a fixture, because pytest sets sys.stdout again after the setup of a test."""
    before, sys.stdout = sys.stdout, stream
    try:
        yield
    finally:
        sys.stdout = before
        if stream is not None:
            stream.close()  # raises an error if something is left that cannot be written


def without_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return open(write, "w")


def test_a_run_whose_reader_has_ended_saves_and_stops(small, capfd, tmp_path):
    with standard_output(without_reader()):
        assert main([*small, *LONG]) == STOPPED
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    err = capfd.readouterr().err
    assert "standard output is closed: saving after this step" in err
    assert f"stopped at step {saved.name}; metrics" in err and "\nresume: flax-mesh train" in err
    with standard_output(without_reader()):
        assert main(["checkpoint", "list", str(tmp_path / "run")]) == DONE
    assert not capfd.readouterr().err


PRINTING = [
    ("train", TINY, "--print-config"),
    ("explain", TINY),
    ("explain", TINY, "--json"),
    ("schedule", "1f1b", "--stages", "4", "--microbatches", "8"),
    ("mesh", "dp:8", "--platform", "cpu"),
]


@pytest.mark.parametrize("argv", PRINTING, ids=" ".join)
def test_a_command_that_only_prints_succeeds_without_a_reader(argv, capfd):
    with standard_output(without_reader()):
        assert main(argv) == DONE
    assert not capfd.readouterr().err


def test_a_full_disk_under_standard_output_is_reported(capfd):
    with standard_output(open("/dev/full", "w")):
        assert main(["train", TINY, "--print-config"]) == FAILED
    assert capfd.readouterr().err == "flax-mesh: standard output could not be written: No space left on device\n"


def test_a_run_needs_no_standard_output_and_restores_the_signal_handlers(small):
    """`flax-mesh train >&-`."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with standard_output(None):
        assert main(["explain", TINY]) == DONE
        assert main([*small, "run.steps=2", "run.eval_every=0"]) == DONE
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_character_that_the_terminal_does_not_have_is_escaped(tmp_path):
    with standard_output(open(tmp_path / "out", "w", encoding="ascii")):
        assert main(["train", TINY, "--print-config", "run.folder=läufe"]) == DONE
    assert "run.folder=l\\xe4ufe" in (tmp_path / "out").read_text().splitlines()


@pytest.mark.parametrize("count", [1, 2])
def test_a_progress_bar_is_drawn_in_a_terminal_by_a_run_of_one_process(count, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal
    with _display(3, ()) as display:
        assert display._progress.disable == (count > 1)


def test_the_remaining_time_of_a_resumed_run_follows_from_its_own_steps():
    for seconds in (2.0, 40.0):
        now = [0.0]
        with _display(110, ()) as display:
            progress = display._progress
            progress.get_time = lambda now=now: now[0]
            for step, passed in ((101, 100.0), (102, seconds), (103, seconds), (104, seconds)):
                now[0] += passed  # the first one includes compilation
                display.row({"step": step, "loss": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0})
            assert progress.tasks[0].completed == 104
            assert progress.tasks[0].time_remaining == seconds * 6


# --- the cache of compiled programs in the run folder ---

# As a user's process: without the cache that the tests share. Small programs are cached too.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
ENVIRONMENT |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
ENVIRONMENT |= {"JAX_LOG_COMPILES": "1"}


def run_process(folder: Path, *settings: str) -> tuple[int, list[float]]:
    """(how often the compiled step was read, losses) of a run of four steps."""
    common = [f"data.source={folder.parent / 'squares.txt'}", f"run.folder={folder}", "run.platform=cpu:2"]
    common += ["run.steps=4", "checkpoint.every=2"]
    command = [sys.executable, "-m", "flax_mesh.cli", "train", bigram.__file__, *common, *settings]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == DONE, done.stderr
    hits = (done.stdout + done.stderr).count("Persistent compilation cache hit for 'jit_step'")
    assert ("compiled again, although" in done.stdout) == (folder.name == "damaged")
    return hits, [row["loss"] for row in rows_of(folder)]


@pytest.mark.slow
def test_runs_that_read_the_programs_compile_damaged_ones_or_have_no_cache_have_the_same_losses(tmp_path):
    write_text(tmp_path)
    hits, losses = run_process(tmp_path / "run")
    assert not hits and len(losses) == 4
    assert any("jit_step" in file.name for file in (tmp_path / "run" / "compiled").iterdir())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    for name in ("copy", "damaged"):
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / name))
        for file in (copy / "compiled").iterdir():
            if name == "damaged":
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert run_process(copy, "--allow-changes") == (name == "copy", losses)
    assert run_process(tmp_path / "none", "run.compilation_cache=false") == (0, losses)
    assert not (tmp_path / "none" / "compiled").exists()


def test_a_kept_program_that_compiles_again_is_named_with_the_reason():
    """Not one that was read under the same name, or that compiles too quickly to be kept."""
    programs = Programs()
    for name, stage, seconds in [("step", "compiled", 9), ("split", "compiled", 0.1), ("call", "compiled", 9)]:
        programs.works[name, stage] = Work(1, seconds, seconds)
    programs.works["call", "read"] = Work(1, 0.1, 0.1)
    assert lost_programs(programs, {"step", "split", "call"}, 1.0) == ["step"]
    assert lost_programs(programs, {"split"}, 1.0) == []
    before, now = {"jax": "0.10.2", "mesh": "dp:2", "flax": "1"}, {"jax": "0.12.0", "mesh": "dp:2", "model.size": "4"}
    assert reason(before, now) == "jax 0.10.2 -> 0.12.0; flax 1 -> (absent); model.size (absent) -> 4"
    assert reason(now, now) == reason({}, now) and "the code of the recipe" in reason(now, now)


FAILS_LATER = """
from dataclasses import replace
import jax
from tests.train import bigram

seen = []

def count(loss):
    seen.append(loss)
    if len(seen) == WHEN:
        raise KeyError("no such metric")

def loss_fn(model, batch):
    sums = bigram.loss_fn(model, batch)
    jax.debug.callback(count, sums[0])
    return sums

def recipe():
    return replace(bigram.recipe(), loss_fn=loss_fn)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "steps"), [(3, [1, 2]), (5, [1, 2, 3, 4])])  # in step 3; in the evaluation of step 4
def test_a_callback_that_raises_ends_the_run_with_its_line_and_without_saving_its_step(when, steps, tmp_path, capsys):
    (tmp_path / "recipe.py").write_text(FAILS_LATER.replace("WHEN", str(when)))
    settings = ["mesh.shape=dp:8", f"data.source={write_text(tmp_path)}", f"run.folder={tmp_path / 'run'}"]
    argv = ["train", str(tmp_path / "recipe.py"), *settings, "checkpoint.every=2", "run.steps=6"]
    assert main(argv) == BAD_INPUT
    error = f"flax-mesh: a callback of the step: {tmp_path / 'recipe.py'}, line 11: KeyError: 'no such metric'"
    assert error in capsys.readouterr().err.splitlines()
    assert [row["step"] for row in rows_of(tmp_path / "run")] == steps
    assert {x.name for x in (tmp_path / "run" / "checkpoints").iterdir() if x.name.isdigit()} == {"2", str(steps[-1])}
