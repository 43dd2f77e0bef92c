"""`python child.py PACKAGE PATH SECONDS`: a tokenizer that reads a request from every line.

It is a separate process because tokenizers and chat templates are untrusted: they may make a package abort, take all of
the memory, or run without end in code that Python cannot interrupt. The operating system then ends this process, after
the seconds of computation that a request has or at half of the memory of the machine. It imports only the package.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MOST_IDS = 2**24  # of a text: the process that asks reads them
OUT_OF_MEMORY = 9  # the exit code
WAITING = 60  # times the seconds of computation: the limit with all waiting


def read_file(path: str) -> object:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()  # the file may store both, for batches of training: prompts and texts would change
    tokenizer.no_padding()
    return tokenizer


def read_folder(path: str) -> object:
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    tokenizer.model_max_length = 2**31  # data.sequence_length is the limit
    return tokenizer


def facts(tokenizer: Any) -> dict[str, object]:
    """Of a tokenizer of transformers."""
    return {
        "size": max(tokenizer.get_vocab().values(), default=-1) + 1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "chat_template": bool(tokenizer.chat_template),
    }


def answer_file(tokenizer: Any, request: dict[str, Any]) -> object:
    """The text of ids, or the ids of a text and the characters before the end of each of them."""
    if "ids" in request:
        return tokenizer.decode(request["ids"], skip_special_tokens=True)
    encoding = tokenizer.encode(request["text"], add_special_tokens=request["special"])
    return encoding.ids, [end for _, end in encoding.offsets]


def answer_folder(tokenizer: object, request: dict[str, Any]) -> object:
    """The result of a method of the tokenizer, with the arguments in the request."""
    result = getattr(tokenizer, request["method"])(*request["arguments"], **request["options"])
    if isinstance(result, str):
        return result
    if len(result["input_ids"]) > MOST_IDS:
        raise ValueError(f"it has {len(result['input_ids']):,} tokens, more than {MOST_IDS:,}")
    return {name: result[name] for name in ("input_ids", "assistant_masks") if name in result}


PACKAGES: dict[str, tuple[Callable[[str], object], Callable[..., object], Callable[..., object]]] = {
    "tokenizers": (read_file, lambda tokenizer: None, answer_file),
    "transformers": (read_folder, facts, answer_folder),
}


def limit_memory() -> tuple[int, bool]:
    """The limit in bytes, and whether it is an earlier one, such as of `ulimit -v`."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    earlier = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    memory = min([half, *earlier])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    return memory, memory < half


def _timed(seconds: int, call: Callable[[], object]) -> tuple[object, str | None]:
    """The result of `call()`, or the text of its error."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of the CPU, so that a loaded machine ends nothing
    signal.alarm(WAITING * seconds)
    try:
        return call(), None
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # a panic of the package is not an Exception
        name = type(error).__name__
        return None, f"{name}: {error}" if isinstance(error, LookupError) else str(error) or name
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def main(package: str, path: str, seconds: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends the process that asks, which then ends this one
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no reply
    reply = lambda value: print(json.dumps(value), file=replies, flush=True)  # noqa: E731
    reply(limit_memory())
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # in a container with less memory than the machine, Linux ends this process first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read, facts_of, answer = PACKAGES[package]
    tokenizer, error = _timed(int(seconds), lambda: read(path))
    result = None
    if error is None:
        result, error = _timed(int(seconds), lambda: facts_of(tokenizer))
    reply((result, error))
    for line in sys.stdin if error is None else ():
        seconds, _, request = line.partition(" ")
        reply(_timed(int(seconds), lambda request=request: answer(tokenizer, json.loads(request))))


if __name__ == "__main__":
    main(*sys.argv[1:])
