"""The run that several files open."""

from tests.inference.small_run import run as run
