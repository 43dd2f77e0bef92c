"""Random arguments and mutated recipes through every command that only checks: an exit code of a mistake, no traceback.

Nothing is computed: the commands are `explain`, `train --print-config`, and others with a wrong argument. The draws are
seeded.
"""

import random
import re
from pathlib import Path

import pytest

from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.recipe.checks import check_config
from flax_mesh.recipe.overrides import flat_fields, read_overrides, to_texts
from flax_mesh.train import load_recipe
from tests.inference.small_run import recipe, save_run

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny.py")
NUM_DRAWS = 300
# Values of all kinds. Counts stay small: a decoder of a million layers is valid, and takes hours to trace.
WORDS = """
0 1 2 3 8 -1 1.5 1e-3 inf -inf nan 1e39 none None true no 0x10 1_0 ٣ dp nope fsdp,dp dp,dp tp, , a=b = ~no_such_user/x
/dev/null/x { ../.. * ** float32 bfloat16 xla cudnn full checkpoint_dots save_only_these_names dp:2,tp:2 pp:2 pp:2,dp:2
dp:0 dp:-1,tp:-1 pp:-1 dp:2,dp:2 : cpu cpu:4 cpu:0 tpu:2 2,3 9,9 flops count 1f1b zb-v interleaved gpipe server
always stop skip eval_loss uint32 --x=1 a=1,a=2 %s {}
"""
VALUES = WORDS.split()
VALUES += ["", " ", "\n", "9" * 30, "9" * 5000, "x" * 5000, "a\0b", "[" * 5000, "\u00e9\udcff"]
KEYS = ["", "run", "run.", ".steps", "run.steps.x", "optimizer.lr", "model.axes", "mesh"]
KEYS += ["x" * 5000, "run.\0", "é", "[", "@"]


def check(capsys: pytest.CaptureFixture[str], argv: list[str]) -> int:
    """The exit code: it stands for a mistake if lines of errors are printed."""
    code, lines = main(argv), capsys.readouterr().err.splitlines()
    assert code in (DONE, FINDINGS, BAD_INPUT) and bool(lines) == (code == BAD_INPUT), (argv, code, lines)
    assert all(line.startswith("flax-mesh: ") and len(line) < 6000 for line in lines) and len(lines) < 40, (argv, lines)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_random_settings_end_in_a_documented_exit_code(part, capsys):
    draw, codes = random.Random(part), []
    names = [name for name in to_texts(load_recipe(TINY)) if name != "model.num_layers"]
    for _ in range(NUM_DRAWS // 3):
        chosen = [draw.choice(names if draw.random() < 0.85 else KEYS) for _ in range(draw.choice((1, 1, 2, 4)))]
        settings = [f"{name}{'=' * (draw.random() < 0.97)}{draw.choice(VALUES)}" for name in chosen]
        settings = [text for text in settings if not text.startswith(("@", "-"))]
        codes.append(check(capsys, ["explain", TINY, *settings]))
        printed = check(capsys, ["train", TINY, "--print-config", *settings])
        assert printed == DONE or printed == codes[-1] == BAD_INPUT, settings
    assert {DONE, BAD_INPUT} <= set(codes)


@pytest.mark.slow
def test_random_arguments_of_a_trained_model_end_in_a_documented_exit_code(capsys, tmp_path):
    """Nothing is computed: one argument is always wrong."""
    save_run(tmp_path / "run")
    settings = [*to_texts(recipe()), *KEYS]
    usable = [value for value in VALUES if not value.startswith("/dev")]
    for name, own in (
        ("generate", "prompt prompts top-k top-p seed stop cache-length temperature out"),
        ("evaluate", "data sequence-length bin-dtype"),
    ):
        draw, options = random.Random(0), [*own.split(), "max-tokens", "step"]
        for _ in range(150):
            argv = [f"--{draw.choice(options)}={draw.choice(usable)}" for _ in range(draw.randrange(4))]
            argv = [word if not word.startswith("--out=") else f"--out={tmp_path}/{len(word)}\0" for word in argv]
            argv += [f"{draw.choice(settings)}={draw.choice(VALUES)}" for _ in range(draw.randrange(3))]
            argv = [word for word in argv if not word.startswith("@")]
            assert check(capsys, [name, str(tmp_path / "run"), "--batch-size", "0", *argv]) == BAD_INPUT, argv


@pytest.mark.slow
def test_every_setting_takes_or_refuses_values_of_all_kinds():
    """Each setting alone, as far as a config is checked without tracing."""
    tiny, draw, refused, tried = load_recipe(TINY), random.Random(0), 0, 0
    for name in flat_fields(tiny):
        for value in draw.sample(VALUES, 20):
            changed, found = read_overrides(tiny, [f"{name}={value}"])
            found = found or check_config(changed)
            assert len(found) <= 3 and all("\n" not in line for line in found), (name, value, found)
            refused, tried = refused + bool(found), tried + 1
    assert tried > 1000 and tried // 3 < refused < tried


CODE = """
( ) = , : " None -1 0 1.5 float('nan') '3' [] {} lambda:3 print x return raise yield dataclasses 1/0 exit() é #
"""
TOKENS = CODE.split()
TOKENS += ["", " ", "\n", "\t", "\0", "lambda *a: None"]


def mutated(draw: random.Random) -> str:
    """recipes/tiny.py with one to three of its words replaced, removed, doubled or exchanged."""
    words = re.findall(r"\w+|\s+|.", Path(TINY).read_text())
    for _ in range(draw.randint(1, 3)):
        at, other = draw.randrange(len(words)), draw.randrange(len(words))
        change = draw.randrange(4)
        if change == 3:
            words[at], words[other] = words[other], words[at]
        else:
            words[at] = (draw.choice(TOKENS), "", 2 * words[at])[change]
    return "".join(words)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_mutated_recipes_are_explained_or_refused_with_their_line(part, tmp_path, capsys):
    draw, codes = random.Random(part), []
    for index in range(100):
        path = tmp_path / f"own{index}.py"
        path.write_text(mutated(draw), encoding="utf-8")
        codes.append(check(capsys, ["explain", str(path)]))
    assert {DONE, BAD_INPUT} <= set(codes)


NUMBERS = """
0 1 2 3 -1 4.5 1e308 -inf nan x 1,1,1 1,1,1/2,2,2 1,1 1,nan,1 1e-300,1,1 4,3,2,1 , / ٣
1,1,1,0.5/1,1,1,0.5/1,1,1,0.5/1,1,1
"""
SIZES = [*NUMBERS.split(), "", "\x1b[31m", "9" * 9, "9" * 5000, "x" * 5000]


def test_random_options_of_a_schedule_end_in_a_documented_exit_code(capsys):
    draw, codes = random.Random(0), []
    for _ in range(200):
        name = draw.choice(["1f1b", "gpipe", "zb-v", "interleaved-1f1b", "other"])
        options = {"stages": "4", "microbatches": "8"}
        for option in draw.sample([*options, "costs", "virtual"], draw.randint(1, 3)):
            options[option] = draw.choice(SIZES)
        codes.append(check(capsys, ["schedule", name, *(f"--{key}={value}" for key, value in options.items())]))
    assert {DONE, BAD_INPUT} == {*codes}
