"""`python tokenizer_child.py FILE SECONDS`: encodes and decodes with a tokenizer.json, a request in every line.

It is a separate process because the file is untrusted: it may make the package tokenizers abort, or run without end
in code that Python cannot interrupt. The operating system then ends this process, after the seconds that a request has
or at half of the memory of the machine. It imports only tokenizers, to start in milliseconds.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def read(path: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()  # the file may store both, for batches of training: prompts and texts would change
    tokenizer.no_padding()
    return tokenizer


def answer(tokenizer: Any, request: dict[str, Any]) -> Any:
    """The text of ids, or the ids of a text and the characters before the end of each of them."""
    if "ids" in request:
        return tokenizer.decode(request["ids"], skip_special_tokens=True)
    encoding = tokenizer.encode(request["text"], add_special_tokens=request["special"])
    return encoding.ids, [end for _, end in encoding.offsets]


def _timed(seconds: int, call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of `call()`, or the text of its error."""
    signal.alarm(seconds)
    try:
        return call(), None
    except BaseException as error:  # a panic of the package is not an Exception
        return None, str(error) or type(error).__name__
    finally:
        signal.alarm(0)


def main(path: str, seconds: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends the process that asks, which then ends this one
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer, error = _timed(int(seconds), lambda: read(path))
    print(json.dumps([None, error]), flush=True)
    for line in sys.stdin if error is None else ():
        request = json.loads(line)
        print(json.dumps(_timed(request["seconds"], lambda request=request: answer(tokenizer, request))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
