"""`flax-mesh generate`: continue prompts with a trained decoder."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from flax_mesh.cli.common import (
    DONE,
    TrainedRequest,
    add_trained,
    as_option,
    check_writable,
    say,
    settings_files,
    write_file,
)
from flax_mesh.cli.text.chat import Conversation
from flax_mesh.cli.text.generated import Printer, json_of
from flax_mesh.errors import ConfigError, Mistakes
from flax_mesh.inference.prompts import Prompt, encode_prompts, read_prompts, stop_ids
from flax_mesh.inference.source import Source
from flax_mesh.inference.tokenizer import open_tokenizer, stop_tokens
from flax_mesh.inference.trained import TrainedModel, finite_problem
from flax_mesh.models import Generated, Sampling, SpeedReport, generate
from flax_mesh.models.generation.generate import length_problems, option_problems
from flax_mesh.models.generation.memory import check_cache
from flax_mesh.processes.output import reader_has_ended
from flax_mesh.text import listed

SMALLER_CACHE = "lower --max-tokens, --cache-length or --batch-size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue prompts. The text is printed to standard output, token by token for a single prompt; all else is "
        "printed to standard error."
    )
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input, 3 the checkpoint is damaged."
    add_trained(parser)
    parser.add_argument("--prompt", metavar="TEXT", action="append", default=[], help="a prompt; may be repeated")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt in every line; of a .jsonl or .ndjson file {"prompt": TEXT} or {"tokens": [ID, ...]}',
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, default=64, help="tokens per prompt (default: 64)")
    sampled = "0: always the most probable token (default: 0)"
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help=f"of the sampling; {sampled}")
    parser.add_argument("--top-k", metavar="K", type=int, default=0, help="sample of the K most probable tokens only")
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample of the most probable tokens only, as few as have the probability P together",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument(
        "--stop",
        metavar="TOKEN",
        action="append",
        default=[],
        help="a token that ends a text, as an id or as its text; may be repeated. The end tokens of the model "
        "(eos_token_id) always do",
    )
    parser.add_argument("--batch-size", metavar="N", type=int, default=8, help="prompts computed together (default: 8)")
    parser.add_argument(
        "--cache-length",
        metavar="N",
        type=int,
        help="tokens of a prompt and its text that the cache can store (default: as many as the longest needs)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the lines of standard input, each with those before it, by the chat template of the tokenizer",
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="of --chat: the message of the system")
    parser.add_argument(
        "--out", metavar="FILE.jsonl", type=os.path.expanduser, help="write a line of JSON for every prompt"
    )
    parser.add_argument("--json", action="store_true", help="print these lines instead of the text")
    parser.add_argument(
        "--report",
        action="store_true",
        help="print the time of a token to standard error, beside the time in which the memory can be read for it",
    )


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.chat or arguments.system:
        return _chat(arguments)
    trained, prompts, rows = _opened(arguments)
    sizes = {name: getattr(arguments, name) for name in ("max_tokens", "batch_size", "cache_length")}
    check_cache(trained.config, trained.mesh, list(map(len, rows)), **sizes, advice=SMALLER_CACHE)
    if note := _length_note(trained.source, max(map(len, rows)) + arguments.max_tokens):
        say(note)
    say(f"tokenizer: {'none' if trained.tokenizer is None else trained.tokenizer.name}")
    stops = frozenset(trained.stop_tokens)
    printer = Printer(prompts, rows, trained.tokenizer, stops, arguments.max_tokens, quiet=arguments.json)

    def on_token(prompt: int, token: int) -> None:
        printer.token(prompt, token)
        if reader_has_ended(sys.stdout) and not arguments.out:
            raise _ReaderEnded

    def on_result(prompt: int, result: Generated) -> None:
        record = json_of(prompts[prompt], rows[prompt], result, trained.tokenizer)
        line = json.dumps(record, ensure_ascii=False) + "\n"
        if arguments.json:
            print(line, end="", flush=True)
        if arguments.out:
            write_file("--out", arguments.out, line, mode="a" if prompt else "w")

    with suppress(_ReaderEnded):
        results = generate(
            trained.model,
            rows,
            sampling=_sampling(arguments),
            stop_tokens=trained.stop_tokens,
            seed=arguments.seed,
            **sizes,
            on_token=on_token,
            on_result=on_result,
            on_report=_say_report if arguments.report else None,
        )
        say(printer.summary())
        if warning := finite_problem([prompt.name for prompt in prompts], results):
            say(f"warning: {warning}; try model.dtype=float32, or another --step")
    return DONE


def _chat(arguments: argparse.Namespace) -> int:
    trained, chat = _opened_chat(arguments)
    tokenizer, stops = trained.tokenizer, [*trained.stop_tokens, *chat.stop_tokens]
    assert tokenizer is not None  # a conversation has one
    sizes = {name: getattr(arguments, name) for name in ("max_tokens", "batch_size", "cache_length")}
    for text in _turns():
        row = chat.ask(text)
        check_cache(trained.config, trained.mesh, [len(row)], **sizes, advice=SMALLER_CACHE)
        if note := _length_note(trained.source, len(row) + arguments.max_tokens):
            say(note)
        printer = Printer([Prompt("line", text)], [row], tokenizer, frozenset(stops), arguments.max_tokens, quiet=False)
        options = {"sampling": _sampling(arguments), "stop_tokens": stops, "seed": arguments.seed, **sizes}
        on_report = _say_report if arguments.report else None
        (result,) = generate(trained.model, [row], **options, on_token=printer.token, on_report=on_report)
        chat.answer(row, result, tokenizer, stops)
        if reader_has_ended(sys.stdout):
            break
    return DONE


def _say_report(report: SpeedReport) -> None:
    for line in str(report).splitlines():
        say(line)


def _turns() -> Iterator[str]:
    """The lines of standard input that are not empty, with a mark before each in a terminal."""
    mark = "> " if sys.stdin.isatty() else ""
    print(mark, end="", file=sys.stderr, flush=True)
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            if text := line.decode().strip():
                yield text
        except UnicodeDecodeError as error:
            raise ConfigError(f"--chat: line {number} of standard input is not UTF-8") from error
        print(mark, end="", file=sys.stderr, flush=True)


def _opened_chat(arguments: argparse.Namespace) -> tuple[TrainedModel, Conversation]:
    """The model and an empty conversation; one error for all mistakes, before anything compiles."""
    mistakes, tokenizer, stops = Mistakes(), None, list[int]()
    chat: Conversation | None = None
    limits = (arguments.max_tokens, arguments.seed, arguments.batch_size, arguments.cache_length, (), 1)
    mistakes.problems += map(as_option, [*_sampling(arguments).problems(), *option_problems(*limits)])
    if not arguments.chat:
        mistakes.problems.append("--system is the first message of --chat; pass --chat too")
    elif given := [f"--{name}" for name in ("prompt", "prompts", "out", "json") if getattr(arguments, name)]:
        mistakes.problems.append(f"--chat reads standard input; remove {listed(given)}")
    request = TrainedRequest(arguments, mistakes)
    if (source := request.source) is not None:
        with mistakes:
            chat = Conversation(source, arguments.system)
        with mistakes:
            if (tokenizer := open_tokenizer(source)) is None:
                raise ConfigError(f"--chat requires a tokenizer.json in {source.files}, to decode answers")
            stops = [*stop_tokens(source), *stop_ids(arguments.stop, tokenizer, source.model.vocab_size)]
    trained = request.load(tokenizer, stops)
    assert chat is not None
    return trained, chat


def _length_note(source: Source, longest: int) -> str:
    """A line if texts may be longer than those that the model was trained on, else ""."""
    if source.sequence_length is None or longest <= source.sequence_length:
        return ""
    of = "the sequences of the training run" if source.decoder is None else "max_position_embeddings"
    return f"note: {longest:,} tokens of a prompt and its text are more than the {source.sequence_length:,} of {of}"


def _files_read(arguments: argparse.Namespace, source: Source | None) -> dict[str, str]:
    files = settings_files(arguments.overrides)
    if arguments.prompts is not None:
        files[f"--prompts {arguments.prompts}"] = os.path.expanduser(arguments.prompts)
    if source is not None:
        files |= {f"the model {path}": str(path) for path in (source.path, source.files)}
    return files


class _ReaderEnded(Exception):
    """The reader of standard output has ended, so the rest need not be generated."""


def _sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(arguments.temperature, arguments.top_k, arguments.top_p)


def _opened(arguments: argparse.Namespace) -> tuple[TrainedModel, list[Prompt], list[np.ndarray]]:
    """The model, the prompts and their ids. Checks without a device come first: one line for every mistake."""
    mistakes, tokenizer = Mistakes(), None
    prompts: list[Prompt] = []
    rows: list[np.ndarray] = []
    stops: list[int] = []
    limits = (arguments.max_tokens, arguments.seed, arguments.batch_size, arguments.cache_length, (), 1)
    mistakes.problems += map(as_option, [*_sampling(arguments).problems(), *option_problems(*limits)])
    with mistakes:
        prompts = read_prompts(arguments.prompt, arguments.prompts)
    request = TrainedRequest(arguments, mistakes)
    if arguments.out is not None:
        with mistakes:
            check_writable("--out", arguments.out, _files_read(arguments, request.source))
    if (source := request.source) is not None:
        vocab_size = source.model.vocab_size
        with mistakes:
            stops += stop_tokens(source)
        with mistakes:
            tokenizer = open_tokenizer(source)
            with mistakes:  # not if the tokenizer cannot be read
                stops += stop_ids(arguments.stop, tokenizer, vocab_size)
            rows = encode_prompts(prompts, tokenizer, vocab_size)
            if arguments.cache_length is not None and not option_problems(*limits):
                names = [prompt.name for prompt in prompts]
                options = ("--cache-length", "--max-tokens ")
                mistakes.problems += length_problems(rows, arguments.max_tokens, arguments.cache_length, names, options)
    return request.load(tokenizer, stops), prompts, rows
