"""`flax-mesh generate`: continue prompts with a trained decoder."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from flax_mesh.cli.common import DONE, Mistakes, check_writable, use_platform, with_files, write_file
from flax_mesh.cli.text.generated import Printer, json_of
from flax_mesh.errors import ConfigError, Problem
from flax_mesh.fields import integer_problems
from flax_mesh.inference.memory import cache_problem
from flax_mesh.inference.open import load_trained
from flax_mesh.inference.prompts import Prompt, encode_prompts, read_prompts, stop_ids
from flax_mesh.inference.source import Settings, Source, find_source, read_settings
from flax_mesh.inference.tokenizer import Tokenizer, open_tokenizer, stop_tokens
from flax_mesh.models import Generated, Sampling, generate
from flax_mesh.models.cache import cache_shape
from flax_mesh.models.generate import length_problems, option_problems
from flax_mesh.processes.output import reader_has_ended


def add_source(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that open a trained decoder."""
    parser.add_argument(
        "source", metavar="DIR", help="a run folder, its checkpoints/, one step in it, or a Hugging Face folder"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings of the mesh and the model, and run.platform, such as mesh.shape=dp:2,tp:2 model.dtype=bfloat16",
    )
    parser.add_argument("--step", metavar="N", type=int, help="this step (default: the newest valid one)")
    parser.add_argument(
        "--no-average",
        action="store_true",
        help="use the parameters themselves, not their moving average (optimizer.ema)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue prompts. The text is printed to standard output, token by token for a single prompt; all else is "
        "printed to standard error."
    )
    parser.epilog = "Exit codes: 0 success, 1 unexpected error, 2 invalid input, 3 the checkpoint is damaged."
    add_source(parser)
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
        help="a token that ends a text, as an id or as its text; may be repeated. Those of the model "
        "(eos_token_id) always do",
    )
    parser.add_argument("--batch-size", metavar="N", type=int, default=8, help="prompts computed together (default: 8)")
    parser.add_argument(
        "--cache-length",
        metavar="N",
        type=int,
        help="tokens of a prompt and its text that the cache can store (default: as many as the longest needs)",
    )
    parser.add_argument("--out", metavar="FILE.jsonl", help="write a line of JSON for every prompt")
    parser.add_argument("--json", action="store_true", help="print these lines instead of the text")


class Request(NamedTuple):
    """Everything that the command line asks for, checked."""

    source: Source
    settings: Settings
    tokenizer: Tokenizer | None
    prompts: list[Prompt]
    rows: list[np.ndarray]
    stops: list[int]
    sampling: Sampling


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    request = _checked(arguments)
    use_platform(request.settings.config.run.platform)
    say = partial(print, file=sys.stderr, flush=True)
    trained = load_trained(
        request.source, request.settings, request.tokenizer, average=not arguments.no_average, say=say
    )
    sizes = {name: getattr(arguments, name) for name in ("max_tokens", "batch_size", "cache_length")}
    num_rows, num_slots = cache_shape(trained.config.axes, trained.mesh, list(map(len, request.rows)), **sizes)
    if problem := cache_problem(trained.config, trained.mesh, num_rows, num_slots):
        raise ConfigError(problem)
    if note := _length_note(request, arguments.max_tokens):
        say(note)
    say(f"tokenizer: {'none' if request.tokenizer is None else request.tokenizer.name}")
    stops = frozenset(request.stops)
    printer = Printer(
        request.prompts, request.rows, request.tokenizer, stops, arguments.max_tokens, quiet=arguments.json
    )

    def on_token(prompt: int, token: int) -> None:
        printer.token(prompt, token)
        if reader_has_ended(sys.stdout) and not arguments.out:
            raise _ReaderEnded

    def on_result(prompt: int, one: Generated) -> None:
        found = json_of(request.prompts[prompt], request.rows[prompt], one, request.tokenizer)
        line = json.dumps(found, ensure_ascii=False) + "\n"
        if arguments.json:
            print(line, end="", flush=True)
        if arguments.out:
            write_file("--out", arguments.out, line, mode="a" if prompt else "w")

    with suppress(_ReaderEnded):
        generate(
            trained.model,
            request.rows,
            sampling=request.sampling,
            stop_tokens=request.stops,
            seed=arguments.seed,
            **sizes,
            on_token=on_token,
            on_result=on_result,
        )
        say(printer.summary())
    return DONE


def _length_note(request: Request, max_tokens: int) -> str:
    """A line if texts may be longer than those that the model was trained on, else ""."""
    source, longest = request.source, max(map(len, request.rows)) + max_tokens
    if source.sequence_length is None or longest <= source.sequence_length:
        return ""
    of = "the sequences of the training run" if source.decoder is None else "max_position_embeddings"
    return f"note: {longest:,} tokens of a prompt and its text are more than the {source.sequence_length:,} of {of}"


class _ReaderEnded(Exception):
    """The reader of standard output has ended, so the rest need not be generated."""


def _checked(arguments: argparse.Namespace) -> Request:
    """Check everything that needs no device. One error has a line for every mistake."""
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    mistakes, prompts, settings, tokenizer, source = Mistakes(), [], None, None, None
    rows: list[np.ndarray] = []
    stops: list[int] = []
    limits = (arguments.max_tokens, arguments.seed, arguments.batch_size, arguments.cache_length, (), 1)
    mistakes.problems += map(as_option, [*sampling.problems(), *option_problems(*limits)])
    if arguments.out:
        with mistakes:
            check_writable("--out", arguments.out)
    with mistakes:
        prompts = read_prompts(arguments.prompt, arguments.prompts)
    with mistakes:
        source = find_source(arguments.source, arguments.step)
    if source is not None:
        vocab_size = source.model.vocab_size
        with mistakes:
            settings = read_settings(source, with_files(arguments.overrides))
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
    mistakes.raise_if_any()
    assert source is not None and settings is not None
    return Request(source, settings, tokenizer, prompts, rows, stops, sampling)


def as_option(problem: Problem) -> Problem:
    """`--max-tokens must be ...` for `max_tokens must be ...`."""
    return problem.renamed(f"--{problem.setting.replace('_', '-')}")


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Raise one ConfigError for the options that are set and not at least 1."""
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if problems := integer_problems(values):
        raise ConfigError([as_option(problem) for problem in problems])
