"""`flax-mesh evaluate`: the loss of a trained decoder on texts and token files, or its results in tasks of lm-eval."""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from flax_mesh.checkpoint.read import finite, plain
from flax_mesh.cli.common import DONE, TrainedRequest, add_trained, as_option, check_counts, say, table_width
from flax_mesh.data.config import STDLIB
from flax_mesh.data.corpus import load_documents
from flax_mesh.errors import ConfigError, Mistakes, labelled
from flax_mesh.fields import integer_problems, path_problem
from flax_mesh.inference.evaluate import Evaluation, TextSet, evaluate, read_set
from flax_mesh.inference.source import EVALUATION_LENGTH, Source
from flax_mesh.inference.tasks import Tasks, open_tasks, run_tasks
from flax_mesh.inference.tokenizer import Tokenizer, open_tokenizer, stop_tokens
from flax_mesh.inference.trained import TrainedModel
from flax_mesh.text import mesh_text, table_text

NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
OF_DATA = {"data": [], "bin_dtype": "uint16", "max_tokens": None}  # options and their defaults
OF_TASKS = dict.fromkeys(("include_path", "output_path", "num_fewshot", "limit")) | {"apply_chat_template": False}
SHOWN = ("results", "groups", "versions", "n-shot", "n-samples")  # of the results of lm-eval
HEADS = ("set", "tokens", "bytes", "loss", "bits/byte", "perplexity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the loss in nats per token, the bits per byte and the perplexity of texts or tokens. Every token but "
        "the first is predicted once. With --tasks, print its results in tasks of lm-eval (pip install "
        '"flax-mesh[eval]").'
    )
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input, 3 the checkpoint is damaged."
    add_trained(parser)
    parser.add_argument(
        "--data",
        metavar="[NAME=]SOURCE",
        action="append",
        default=[],
        help='a text file, a token file (.npy, .bin), a folder, a glob or "stdlib", as data.source; may be repeated',
    )
    parser.add_argument(
        "--sequence-length",
        metavar="N",
        type=int,
        help=f"tokens per window (default: as in the run, or at most {EVALUATION_LENGTH})",
    )
    parser.add_argument("--batch-size", metavar="N", type=int, default=8, help="windows per batch (default: 8)")
    parser.add_argument(
        "--bin-dtype", choices=("uint16", "uint32"), default="uint16", help="of .bin files (default: uint16)"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, help="evaluate only the first N tokens of each set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    tasks = parser.add_argument_group("tasks of lm-eval")
    tasks.add_argument("--tasks", metavar="NAME[,NAME]", help="names of tasks and groups, instead of --data")
    tasks.add_argument("--include-path", metavar="DIR", help="a folder with tasks of your own, YAML files of lm-eval")
    tasks.add_argument("--output-path", metavar="DIR", help="write the results there, as lm_eval --output_path does")
    tasks.add_argument("--num-fewshot", metavar="N", type=int, help="examples before each question")
    tasks.add_argument("--limit", metavar="N", type=int, help="only the first N examples of each task")
    tasks.add_argument("--apply-chat-template", action="store_true", help="ask by the chat template of the tokenizer")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.tasks is not None:
        return _run_tasks(arguments)
    trained, sets, length = _opened(arguments)
    options = {"sequence_length": length, "batch_size": arguments.batch_size}
    say(f"windows: {length} tokens")
    results: dict[str, Evaluation] = {}
    for name, result in evaluate(trained.model, trained.mesh, sets, **options):
        results[name] = result
        if not math.isfinite(result.loss):
            say(
                f"warning: the loss of {plain(name)} is {result.loss}: numbers of the model are not finite; "
                "try model.dtype=float32, or another --step"
            )
    if arguments.json:
        shown = {name: result.to_dict() for name, result in results.items()}
        model = {"model": trained.description, "mesh": mesh_text(trained.mesh.shape)}
        print(json.dumps(finite(model | options | {"sets": shown}), indent=1))
    else:
        print(table_text(HEADS, rows_of(results), table_width(), right=HEADS[1:], wrap=HEADS[:1]))
    return DONE


def _run_tasks(arguments: argparse.Namespace) -> int:
    mistakes, opened = Mistakes(), Tasks([], {})
    tokenizer, stops = None, tuple[int, ...]()
    options = {name: getattr(arguments, name) for name in ("num_fewshot", "limit", "apply_chat_template")}
    with mistakes:
        check_counts(arguments, "sequence_length", "batch_size", "limit")
    mistakes.problems += map(as_option, integer_problems({"num_fewshot": arguments.num_fewshot or 0}, 0))
    wrong = _given(arguments, OF_DATA)
    mistakes.problems += [f"{name} is an option for texts and tokens; leave it out, or --tasks" for name in wrong]
    request = TrainedRequest(arguments, mistakes)
    if (source := request.source) is not None:
        with mistakes:
            stops = stop_tokens(source)
        with mistakes:
            tokenizer = open_tokenizer(source)
    with mistakes:
        opened = open_tasks([name for name in arguments.tasks.split(",") if name], arguments.include_path)
    trained = request.load(tokenizer, stops)
    sizes = {"batch_size": arguments.batch_size, "max_length": arguments.sequence_length}
    from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

    results = run_tasks(trained, opened, arguments.output_path, **sizes, say=say, **options)
    if arguments.json:
        model = {"model": trained.description, "mesh": mesh_text(trained.mesh.shape)}
        print(json.dumps(finite(model | {name: results[name] for name in SHOWN if name in results}), indent=1))
    else:
        for column in (name for name in ("results", "groups") if name in results):
            print(make_table(results, column))
    return DONE


def _given(arguments: argparse.Namespace, defaults: Mapping[str, object]) -> list[str]:
    """The options that are not as by default."""
    given = [name for name, default in defaults.items() if getattr(arguments, name) != default]
    return [f"--{name.replace('_', '-')}" for name in given]


def rows_of(results: Mapping[str, Evaluation]) -> list[list[str]]:
    """The rows of the table, with "-" for unknown values."""

    def cells(name: str, result: Evaluation) -> list[str]:
        bits = "-" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
        size = "-" if result.num_bytes is None else f"{result.num_bytes:,}"
        return [plain(name), f"{result.num_tokens:,}", size, f"{result.loss:.4f}", bits, f"{result.perplexity:.4g}"]

    return [cells(name, result) for name, result in results.items()]


def _opened(arguments: argparse.Namespace) -> tuple[TrainedModel, dict[str, TextSet], int]:
    """The model, the sets, the tokens per window. Checks without a device come first: a line for every mistake."""
    mistakes, sources = Mistakes(), {}
    sets: dict[str, TextSet] = {}
    with mistakes:
        check_counts(arguments, "sequence_length", "batch_size", "max_tokens")
    mistakes.problems += [
        f"{name} is an option of --tasks; pass --tasks NAME too" for name in _given(arguments, OF_TASKS)
    ]
    with mistakes:
        sources = read_sources(arguments.data)
    request = TrainedRequest(arguments, mistakes)
    source = request.source
    tokenizer = cache(lambda: None if source is None else open_tokenizer(source))  # once, and only for text
    for name, text in sources.items():
        with mistakes:
            sets[name] = _read_set(name, text, arguments, source, tokenizer)
    length = arguments.sequence_length or (EVALUATION_LENGTH if source is None else source.evaluation_length)
    return request.load(sequence_length=length), sets, length


def read_sources(texts: Sequence[str]) -> dict[str, str]:
    """Name -> source of every --data; a source without a name is called by its text."""
    sources, problems = {}, []
    if not texts:
        problems.append(
            '--data is missing; pass --data SOURCE: a text file, a token file, a folder, a glob or "stdlib"'
        )
    for text in texts:
        match = None if os.path.lexists(text[:4000].replace("\0", "")) else NAMED.fullmatch(text)
        name, source = (match[1], match[2]) if match else (text, text)
        if problem := path_problem(source) or ("" if source else "is empty"):
            problems.append(f"--data {text[:80]!r}: this text {problem}")
        elif name in sources:
            problems.append(f"--data: two sets have the name {name}; write NAME=SOURCE with another name")
        else:
            sources[name] = source
    if problems:
        raise ConfigError(problems)
    return sources


def _read_set(
    name: str,
    text: str,
    arguments: argparse.Namespace,
    source: Source | None,
    tokenizer: Callable[[], Tokenizer | None],
) -> TextSet:
    label = f"--data {name}" if name == text or text == STDLIB else f"--data {name}={text}"
    files = {"bin_dtype": arguments.bin_dtype, "option": "--bin-dtype"}
    if source is None:  # which is an error already
        with labelled(label):
            return TextSet(load_documents(text, **files).join(), None)
    most = arguments.max_tokens if (arguments.max_tokens or 0) > 0 else None  # others are reported as mistakes
    return read_set(text, tokenizer, source.model.vocab_size, label=label, most=most, **files)
