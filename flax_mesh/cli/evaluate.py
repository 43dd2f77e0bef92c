"""`flax-mesh evaluate`: loss, bits per byte and perplexity of a trained decoder on texts and token files."""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from flax_mesh.checkpoint.read import finite, plain
from flax_mesh.cli.common import DONE, TrainedRequest, add_trained, check_counts, say, table_width
from flax_mesh.data.config import STDLIB
from flax_mesh.data.corpus import load_documents
from flax_mesh.errors import ConfigError, Mistakes, labelled
from flax_mesh.fields import path_problem
from flax_mesh.inference.evaluate import Evaluation, TextSet, evaluate, read_set
from flax_mesh.inference.source import EVALUATION_LENGTH, Source
from flax_mesh.inference.tokenizer import Tokenizer, open_tokenizer
from flax_mesh.inference.trained import TrainedModel
from flax_mesh.text import mesh_text, table_text

NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
HEADS = ("set", "tokens", "bytes", "loss", "bits/byte", "perplexity")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the loss in nats per token, the bits per byte and the perplexity of texts or tokens. Every token but "
        "the first is predicted once."
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


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
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
