"""`python -m tests.benchmarks NAME`: prints a table and a line of JSON. Without a name it lists the names."""

import importlib
import pkgutil
import sys

import tests.benchmarks

NAMES = sorted(m.name for m in pkgutil.iter_modules(tests.benchmarks.__path__) if not m.ispkg and m.name != "__main__")

if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
    print(f"usage: python -m tests.benchmarks NAME [options]; names: {', '.join(NAMES)}", file=sys.stderr)
    sys.exit(2)
name = sys.argv.pop(1)
sys.exit(importlib.import_module(f"tests.benchmarks.{name}").main())
