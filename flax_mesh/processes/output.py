"""Standard output and standard error that never end a process: text that cannot be written is dropped.

A reader that ends (`| head`), a terminal that is closed and a full disk make every later `print` raise an OSError, in
any thread and also at the exit of the interpreter. The commands run with the streams of this file instead, and decide
at one place the meaning of such an error.
"""

import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _File(io.FileIO):
    """A file that drops text that cannot be written. `failure` is the first error, after which nothing is written."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        if self.failure is not None:
            return size
        try:
            return super().write(data) or size  # None if the file does not block and is full
        except OSError as error:
            self.failure = error
            return size


class Output(io.TextIOWrapper):
    """Writes to the file of `stream`. `failure` is the first error of a write."""

    def __init__(self, stream: io.TextIOWrapper):
        self._file = _File(stream.fileno(), "w", closefd=False)
        super().__init__(
            io.BufferedWriter(self._file),
            encoding=stream.encoding,
            errors="backslashreplace",  # a character that the terminal does not have must not end the process either
            line_buffering=stream.line_buffering or stream.write_through,
        )

    @property
    def failure(self) -> OSError | None:
        return self._file.failure


@contextmanager
def tolerant_output() -> Generator[None]:
    """Replaces standard output and standard error by `Output`, unless another program, such as pytest, has done so."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nothing:
        # A stream is None if it was closed when the process started.
        sys.stdout, sys.stderr = (_tolerant(stream or nothing) for stream in before)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before


def output_failure(stream: TextIO) -> OSError | None:
    """Why `stream` cannot be written, or None."""
    return stream.failure if isinstance(stream, Output) else None


def reader_has_ended(stream: TextIO) -> bool:
    """Whether `stream` is a pipe without a reader, as far as a write has shown."""
    return isinstance(output_failure(stream), BrokenPipeError)


def write_stderr(text: str) -> None:
    """Writes at once: from a signal handler, or if the process may be about to end. Errors are ignored."""
    if sys.__stderr__ is not None:  # otherwise another file may have its number
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


def _tolerant(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        return Output(stream)
    except OSError:  # it has no file
        return stream
