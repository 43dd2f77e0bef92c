"""Random bad calls of the public functions and bad commands, in one process, and those that no error answers.

Each function has valid arguments. A call replaces one or two of them by values that may be wrong in type, shape or
range. It ends at the checks, or with a result if the values are accepted. A command has wrong words, settings and
files; nothing is trained or compiled.

python -m tests.cli.bad_calls SEED COUNT     COUNT calls and COUNT commands of this seed, and their problems
"""

import contextlib
import io
import linecache
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import flax_mesh as fm
from flax_mesh.checkpoint import Checkpointer, RetentionPolicy, load_safetensors, save_safetensors
from flax_mesh.cli import main
from flax_mesh.cli.common import BAD_INPUT, DONE, FINDINGS
from flax_mesh.errors import PeerError
from flax_mesh.inference import open_trained
from flax_mesh.lora import add_lora, merge_lora, with_lora
from flax_mesh.models import DecoderConfig, Sampling, generate, load_decoder, make_decoder
from flax_mesh.mpmd import CutError, MpmdMesh, Pipeline, chain_stages, split_stages
from flax_mesh.mpmd.schedules import (
    StageCost,
    check_schedule,
    draw_schedule_svg,
    make_schedule,
    schedule_table,
    search_schedule,
    simulate,
)
from flax_mesh.plan import load_chip, parse_topology, plan
from flax_mesh.plan.compile import compile_recipe
from flax_mesh.plan.search import search_layouts
from flax_mesh.recipe import resolve
from flax_mesh.recipe.overrides import to_texts
from flax_mesh.sharding import audit_rules
from flax_mesh.train import (
    StateLayout,
    StepOptions,
    abstract_train_state,
    array_batches,
    build_program,
    init_train_state,
    load_recipe,
    make_eval_step,
    make_train_step,
    place_batch,
)
from tests.step.net import Net

PACKAGE = str(Path(fm.__file__).parent)
OWN = (fm.ConfigError, fm.ShardingError, fm.SaveError, fm.NoMeshError, CutError, PeerError)
RAISED = (ValueError, TypeError, KeyError, OSError, RuntimeError)  # if flax_mesh raises them itself
MOST = 2000  # characters of a message
MOST_SECONDS = 100  # of one call, also on a slow machine
RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny.py")


Table = Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]


class Call(NamedTuple):
    """A function with its valid arguments, and the names of those that are changed."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        shown = {name: shown_value(self.arguments[name]) for name in self.changed}
        return f"{self.name}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def shown_value(value: Any) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) < 80 else f"{text[:60]}... ({len(text)} characters)"


class Answers(NamedTuple):
    """The calls that were not answered by an error of flax_mesh, and the numbers of those that were, and of results."""

    findings: list[str]
    refused: int
    accepted: int


def finding(call: Call) -> str | None:
    """The problem of the answer of a call; "" for an error that answers the mistake, None for a result."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call.function(**call.arguments)
    except Exception as error:
        return problem_of(error, [call.name, *call.arguments])
    return too_slow(start)


def too_slow(start: float) -> str | None:
    taken = time.monotonic() - start
    return f"took {taken:.0f} s" if taken > MOST_SECONDS else None


def problem_of(error: BaseException, names: list[str]) -> str:
    """ "" for an error of flax_mesh with a short message, in which a TypeError names the function or an argument."""
    text, kind = str(error), type(error).__name__
    if len(text) > MOST:
        return f"{kind} of {len(text)} characters"
    if not text.strip():
        return f"{kind} without a message"
    if isinstance(error, OWN) or is_of_caller(error):
        return ""
    if not isinstance(error, RAISED) or not is_raised_by_flax_mesh(error):
        return f"{kind} at {place_of(error)}: {text[:200]}"
    if isinstance(error, TypeError) and not any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for name in names):
        return f"TypeError names no argument: {text[:200]}"
    return ""


def place_of(error: BaseException) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in trace_of(error)]
    own = [(file, line) for file, line in frames if file.startswith(PACKAGE)]
    file, line = (own or frames)[-1]
    return f"{Path(file).name}:{line}"


def is_of_caller(error: BaseException) -> bool:
    """Whether a function of this file has raised it, which flax_mesh called: its message is the caller's."""
    files = [frame.f_code.co_filename for frame, _ in trace_of(error)]
    first = next((number for number, file in enumerate(files) if file.startswith(PACKAGE)), len(files))
    return __file__ in files[first:]


def trace_of(error: BaseException) -> list[tuple[Any, int]]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def is_raised_by_flax_mesh(error: BaseException) -> bool:
    """Whether a `raise` of flax_mesh is the end of the traceback."""
    frame, line = trace_of(error)[-1]
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) and re.match(r"\s*raise\b", linecache.getline(file, line)) is not None


def loss_fn(model: Any, batch: Any) -> Any:
    losses = (model(batch["x"]) - batch["x"]) ** 2
    return losses.sum(), losses.size


def make() -> Any:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def make_net() -> Any:
    return Net(nnx.Rngs(0))


def opened(**arguments: Any) -> None:
    Checkpointer(**arguments).close()


def mesh_of_one() -> Mesh:
    return fm.create_mesh((1,), ("x",), devices=jax.devices()[:1])


class Given:
    """The arguments of valid calls, created once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mesh = fm.create_mesh((2, 2, 2), ("dp", "fsdp", "tp"))
        rules = [("kernel", P("fsdp", "tp")), (".*", P())]
        self.pp = fm.create_mesh((2, 4), ("pp", "fsdp"))
        self.specs = {"kernel": P("fsdp", "tp"), "bias": P("tp")}
        self.tree = {"kernel": np.ones((8, 16), np.float32), "bias": np.ones(16, np.float32)}
        self.placed = fm.shard(self.tree, self.specs, self.mesh)
        self.batch = {"x": np.ones((16, 8), np.float32)}
        self.abstract = fm.abstract_state(make, self.mesh, rules)
        self.abstract_net = fm.abstract_state(make_net, self.mesh, rules)
        self.state = init_train_state(make, self.abstract)
        self.schedule = make_schedule("1f1b", num_groups=2, num_microbatches=4)
        self.staged = split_stages(loss_fn, make, self.batch, mesh=MpmdMesh(self.pp, "pp"), schedule=self.schedule)
        self.config = DecoderConfig(
            vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16
        )
        self.decoder = make_decoder(self.config, nnx.Rngs(0))
        self.recipe = load_recipe(RECIPE)
        self.settings = [name for name in to_texts(self.recipe) if name not in ("model.num_layers", "run.platform")]
        self.settings += ["", "run", "run.", ".x", "x" * 5000, "run.\0", "\x1b[31m", "model.axes", "@"]
        broken = {
            "text": b"some text", "binary": b"\xff\xfe\x00", "x.npy": b"\x93NUMPY\x01\x00v\x00{", "x.toml": b"[a\nb=",
            "hf/config.json": b"{", "hf/model.safetensors": b"\xff" * 8 + b"{}", "hf/tokenizer.json": b"[]",
            "list/config.json": b"[1]", "chip.toml": b"name = 3\nmemory = 'x'\n", "bad.py": b"def recipe(:\n",
            "none.py": b"def recipe():\n    return 3\n", "raises.py": b"1/0\n",
        }  # fmt: skip
        for name, content in broken.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        (folder / "empty").mkdir()
        (folder / "link").symlink_to(folder / "nothing")
        (folder / "loop").symlink_to(folder / "loop")
        self.others = [jnp.ones(4), jax.random.key(0), mesh_of_one(), self.pp, self.mesh, self.abstract_net, self.state]
        self.others += [self.staged, self.schedule, self.decoder, self.config, self.recipe, self.tree, self.placed]
        self.paths = [str(path) for path in sorted(folder.rglob("*"))] + [f"{folder}/nothing", "/dev/null", "/"]


TEXTS = ["", " ", "x", "nope", "x" * 5000, "a\0b", "\x1b[31m\n", "é\udcff", "{}", "%s", "dp", "dp:2,tp:4", "pp:0", "("]
WORDS = """
0 1 -1 3 nan inf 1e39 none true 1_0 ٣ tp, dp,dp pp:2,dp:4 fsdp:-1 dp:0 cpu:0 1f1b float32 --x=1 ~no_such_user/x v5e:3
tpu:1x
"""
TEXTS += [*WORDS.split(), "[" * 5000, *(head + "9" * 5000 for head in ("", "dp:", "v5e:", "full:", "xla_x=", "v-"))]
NUMBERS = [0, 1, -1, 3, 7, 10**30, -(10**30), 1.5, float("nan"), float("inf"), True, np.int64(2), np.float32(0.5), 1j]
OTHERS = [
    None, [], (), {}, set(), object(), int, b"x", iter([1]), lambda: None, lambda *a, **k: 1, [None], ["x"], [1, "x"],
    (1, 2, 3), (-1, -1), ("dp", "dp"), ("dp", None), {"x": 1}, {1: 2}, {"": None}, [[]], [[1, 2], [3]], P(), P("nope"),
    P("dp", "dp"), P("dp", None, "tp"), P(("fsdp", "tp")), np.zeros(0), np.ones((3, 5)), np.ones(3, bool),
    np.array("x"), np.array([None]), np.array(["a", "b"]),
    jax.ShapeDtypeStruct((4,), jnp.float32), nnx.State({}), AbstractMesh((2,), ("dp",)), fm.PartitionAxis(),
    fm.PartitionRules([]), StageCost(1.0, 1.0), StepOptions(), StateLayout(), RetentionPolicy(), Sampling(),
    [("(", P())],
    [("a", "b", "c")], [(".*", 3)], [("x",)], [(".*", ("fsdp", "tp", "dp", "sp"))], {"kernel": P("dp")}, Path("x"),
    ValueError("x"), ..., slice(3), range(4), 1e400, "float32", "int3", np.float32, optax.adam(1.0), Ellipsis,
]  # fmt: skip


def calls(given: Given) -> Table:
    """Name -> function and valid arguments."""
    rules = [("kernel", P("fsdp", "tp")), (".*", P())]
    costs, mesh, folder = [[1.0, 1.0, 1.0]] * 2, given.mesh, given.folder
    rows: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (fm.create_mesh, {"axis_dims": (2, 4), "axis_names": ("dp", "tp"), "dcn_mesh_dims": None, "backend": None,
                          "axis_types": None, "devices": None, "num_slices": None, "use_jax": False}),
        (fm.create_cpu_mesh, {"axis_dims": (2, 4), "axis_names": ("dp", "tp")}),
        (fm.parse_mesh_from_string, {"axis_dims": "dp:2,tp:4", "names": ("dp", "tp")}),
        (fm.calculate_host_mesh_shape, {"global_mesh_shape": (2, 4), "total_devices": 8, "num_processes": 1}),
        (fm.create_device_mesh, {"mesh_shape": (2, 4), "devices": None}),
        (fm.create_hybrid_device_mesh, {"mesh_shape": (2, 4), "dcn_mesh_shape": (1, 1), "devices": None}),
        (fm.get_axes_size_in_mesh, {"axis_names": "dp", "mesh": mesh}),
        (fm.get_mesh_axis_names, {"mesh": mesh}),
        (fm.PartitionAxis, {"batch_axis": "dp", "extra": {}, "head_axis": "tp"}),
        (fm.PartitionRules, {"table": rules, "axes": fm.PartitionAxis(), "layers": ()}),
        (fm.partitioned, {"rules": rules, "layers": (), "axes": fm.PartitionAxis()}),
        (fm.partition_rules, {"model": given.decoder}),
        (fm.match_partition_rules, {"rules": rules, "tree": given.tree, "mesh": mesh, "min_size": 0,
                                    "on_mismatch": "error", "dropped": None}),
        (fm.abstract_state, {"make": make_net, "mesh": mesh, "rules": "fsdp", "axes": None, "on_mismatch": "error",
                             "min_size": 0, "shard_optimizer_over": (), "optimizer_memory": "device"}),
        (fm.init_model, {"make": make_net, "abstract": given.abstract_net}),
        (fm.init_state, {"make": make_net, "abstract": given.abstract_net}),
        (fm.shard, {"tree": given.tree, "specs": given.specs, "mesh": mesh, "dtype": None, "memory_kind": None,
                    "on_mismatch": "error", "may_alias": None}),
        (fm.reshard, {"tree": given.placed, "specs": given.specs, "mesh": mesh, "dtype": None, "memory_kind": None,
                      "on_mismatch": "error"}),
        (fm.gather, {"tree": given.placed, "dtype": None, "bytes_in_flight": None, "remote": "error"}),
        (fm.make_shard_and_gather_fns, {"specs": given.specs, "mesh": mesh, "dtype": None, "on_mismatch": "error"}),
        (fm.constrain, {"x": np.ones((8, 16)), "logical_axes": ("batch", "mlp"), "axes": fm.PartitionAxis(),
                        "mode": "train"}),
        (fm.with_sharding_constraint, {"x": np.ones((8, 16)), "spec": P("dp"), "on_mismatch": "error"}),
        (fm.explain_sharding, {"make": make_net, "mesh": mesh, "rules": "fsdp", "axes": None}),
        (fm.analyze_sharding_strategy, {"tree": given.tree, "specs": given.specs, "mesh": mesh, "compiled": None}),
        (fm.create_pattern_based_partition_spec, {"pattern": "x", "mesh": mesh, "default_spec": P()}),
        (fm.extract_shardings, {"tree": given.placed, "mesh": mesh}),
        (fm.extract_sharding_structure, {"tree": given.placed}),
        (fm.get_shardings_with_structure, {"tree": given.placed}),
        (fm.get_partition_spec, {"tree": given.placed}),
        (fm.get_names_from_partition_spec, {"specs": given.specs}),
        (fm.named_leaves, {"tree": given.tree}),
        (audit_rules, {"rules": rules, "tree": given.tree, "mesh": mesh}),
        (make_schedule, {"name": "1f1b", "num_groups": 2, "num_microbatches": 4, "num_virtual_stages": None}),
        (search_schedule, {"costs": costs, "memory_limit": 4.0, "num_microbatches": 4, "num_groups": None,
                           "stage_to_group": None, "activation_sizes": None, "objective": "makespan", "seconds": 0.01,
                           "seed": 0}),
        (simulate, {"schedule": given.schedule, "costs": StageCost(1.0, 2.0)}),
        (schedule_table, {"schedule": given.schedule, "costs": StageCost(1.0, 2.0), "width": 80}),
        (check_schedule, {"schedule": given.schedule, "memory_limit": 8.0, "activation_sizes": None}),
        (draw_schedule_svg, {"schedule": given.schedule, "costs": StageCost(1.0, 2.0)}),
        (StageCost, {"forward": 1.0, "backward": 2.0, "weights": 1.0, "transfer": 0.0}),
        (MpmdMesh, {"jax_mesh": given.pp, "mpmd_axis_name": "pp"}),
        (split_stages, {"loss_fn": loss_fn, "model": make, "batch": given.batch, "mesh": MpmdMesh(given.pp, "pp"),
                        "schedule": "1f1b", "num_microbatches": 4, "num_stages": None, "layers": None, "cuts": None,
                        "balance": "flops", "wrt": nnx.Param}),
        (chain_stages, {"loss_fn": loss_fn, "stages": lambda: [make_net(), make_net()], "batch": given.batch,
                        "mesh": MpmdMesh(given.pp, "pp"), "schedule": "1f1b", "num_microbatches": 4}),
        (Pipeline, {"staged": given.staged, "optimizer": None, "mesh": None, "schedule": None,
                    "layout": StateLayout("fsdp"), "options": StepOptions(), "remat": "none", "transport": "auto"}),
        (init_train_state, {"make": make, "abstract": given.abstract}),
        (abstract_train_state, {"make": make, "abstract": given.abstract}),
        (make_train_step, {"loss_fn": loss_fn, "state": given.state, "num_microbatches": 1, "layers": None,
                           "axes": None, "options": StepOptions()}),
        (make_eval_step, {"loss_fn": loss_fn, "state": given.state}),
        (place_batch, {"batch": given.batch, "mesh": mesh, "axes": fm.PartitionAxis()}),
        (StepOptions, {"seed": 0, "learning_rate": None, "compiler_options": None, "skip_nonfinite": False}),
        (StateLayout, {"rules": "fsdp", "axes": None, "shard_optimizer_over": (), "optimizer_memory": "device"}),
        (array_batches, {"arrays": given.batch, "batch_size": 4, "seed": 0}),
        (opened, {"folder": folder / "saved", "keep": 3, "layers": None, "best_metric": "eval_loss",
                 "host_bytes": None, "compress": False}),
        (RetentionPolicy, {"newest": 3, "best": 0, "every": None}),
        (load_safetensors, {"folder": folder / "hf", "abstract": given.abstract_net, "names": (), "ignore": ()}),
        (save_safetensors, {"folder": folder / "empty", "state": given.tree, "names": ()}),
        (load_decoder, {"folder": folder / "hf", "mesh": mesh, "dtype": None, "ignore": ()}),
        (generate, {"model": given.decoder, "prompts": [[1, 2]], "max_tokens": 1, "sampling": Sampling(),
                    "stop_tokens": (), "seed": 0, "batch_size": 1, "cache_length": None}),
        (Sampling, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        (open_trained, {"folder": folder / "empty", "overrides": (), "step": None, "average": True}),
        (add_lora, {"make": make_net, "loss_fn": loss_fn, "batch": given.batch, "rank": 2, "modules": "kernel",
                    "alpha": None, "seed": 0}),
        (merge_lora, {"model": given.decoder}),
        (with_lora, {"function": loss_fn}),
        (load_recipe, {"name": RECIPE}),
        (resolve, {"config": given.recipe, "target": None}),
        (build_program, {"config": given.recipe}),
        (plan, {"config": given.recipe, "topology": "v5e:2x2x1x1"}),
        (load_chip, {"path": folder / "chip.toml"}),
        (parse_topology, {"text": "v5e:2x4", "chip": None}),
        (compile_recipe, {"recipe": f"{folder}/none.py", "overrides": (), "topology": "cpu:8", "limit": 5.0}),
        (search_layouts, {"config": given.recipe, "chips": "v5e:x", "fixed": (), "plans": 1}),
    ]  # fmt: skip
    return {function.__name__: (function, arguments) for function, arguments in rows}


def random_call(
    draw: random.Random, given: Given, table: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]
) -> Call:
    name = draw.choice(list(table))
    function, arguments = table[name]
    changed = tuple(draw.sample(list(arguments), min(len(arguments), draw.choice((1, 1, 2)))))
    kinds = (TEXTS, NUMBERS, OTHERS, OTHERS, given.others, given.paths)
    return Call(name, function, {**arguments, **{each: draw.choice(draw.choice(kinds)) for each in changed}}, changed)


def random_command(draw: random.Random, given: Given) -> list[str]:
    """Words of a command that computes nothing: its data, mesh or model is wrong, or it only prints settings."""
    path = lambda: draw.choice([*given.paths, *TEXTS])  # noqa: E731
    value = lambda: draw.choice([*TEXTS, *given.paths])  # noqa: E731
    settings = [f"{draw.choice(given.settings)}={value()}" for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    recipe = draw.choice([RECIPE, RECIPE, path()])
    what = draw.choice(["list", "inspect", "verify", "diff", "export", "import", "reshard", value()])
    option = lambda *names: [f"--{draw.choice(names)}={value()}" for _ in range(draw.randrange(3))]  # noqa: E731
    words = {
        "train": [recipe, "--print-config", *settings],
        "explain": [recipe, *settings],
        "launch": ["-n", draw.choice(["0", "-1", "x", "1e9", ""]), "--", "train", recipe, *settings],
        "generate": [path(), "--batch-size=0", *option("prompt", "prompts", "top-k", "temperature", "step", "seed")],
        "evaluate": [path(), "--batch-size=0", *option("data", "step", "sequence-length", "max-tokens")],
        "plan": [path(), *option("topology", "search", "limit", "plans"), *settings],
        "mesh": [value(), "--platform=cpu:8"],
        "schedule": [draw.choice(["1f1b", "zb-v", value()]), *option("stages", "microbatches", "costs", "memory")],
        "checkpoint": [what, path(), *([path()] * (what in ("diff", "export", "import", "reshard")))],
        value(): [value()],
    }
    name = draw.choice(list(words))
    return [name, *words[name], *([value()] * (draw.random() < 0.1))]


def command_finding(argv: list[str]) -> str | None:
    """As `finding`, for a command: an exception, a traceback, a long or an unmarked line is wrong."""
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("ignore")
            code = main(argv)
    except Exception as error:
        return f"{type(error).__name__} at {place_of(error)}: {str(error)[:200]}"
    return problem_of_output(code, err.getvalue()) or too_slow(start) or (None if code == DONE else "")


def problem_of_output(code: int, err: str) -> str:
    lines = err.splitlines()
    if "Traceback" in err or code not in (DONE, BAD_INPUT, FINDINGS):
        return f"exit code {code}: {err[-300:]}"
    if bool(lines) != (code == BAD_INPUT) and code != FINDINGS:
        return f"exit code {code} with {len(lines)} lines of errors"
    wrong = [line for line in lines if not line.startswith("flax-mesh: ") or len(line) > MOST + len("flax-mesh: ")]
    return f"{len(wrong[0])} characters: {wrong[0][:100]}" if wrong else ""


def run(seed: int, count: int, folder: Path) -> Answers:
    """The answers to `count` calls and `count` commands; a finding begins with the name of the call."""
    draw, given = random.Random(seed), Given(folder)
    table, answers = calls(given), {}
    for number in range(count):
        call, argv = random_call(draw, given, table), random_command(draw, given)
        answers[f"{number} {call}"] = finding(call)
        answers[f"{number} flax-mesh {' '.join(map(shown_value, argv))}"] = command_finding(argv)
    found = [f"{call}: {problem}" for call, problem in answers.items() if problem]
    problems = list(answers.values())
    return Answers(found, problems.count(""), problems.count(None))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as name:
        answers = run(int(sys.argv[1]), int(sys.argv[2]), Path(name))
    print(*answers.findings, sep="\n")
    print(f"{len(answers.findings)} findings, {answers.refused} refused, {answers.accepted} accepted")
