"""The modules that importing flax_mesh and printing help imports, in a new process, and the import of every module."""

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import flax_mesh

CODE = """
import json, sys
import jax, flax.nnx
before, settings = set(sys.modules), dict(jax.config.values)
from flax_mesh import *
changed = [name for name, value in jax.config.values.items() if settings[name] != value]
print(json.dumps([sorted(set(sys.modules) - before), changed]))
sys.modules["xxhash"] = None  # as if it was not installed
import flax_mesh.models, flax_mesh.train
"""


def test_importing_loads_only_its_own_modules_changes_no_settings_and_training_does_not_require_xxhash():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    modules, changed = json.loads(done.stdout.splitlines()[-1])
    packages = {name.split(".")[0] for name in modules}
    assert "flax_mesh.sharding.transfer" in modules and not changed
    assert not packages & {"orbax", "tensorstore", "rich"}
    assert packages <= {"flax_mesh", "jax", *sys.stdlib_module_names}, packages


HELP = """
import sys
from contextlib import suppress
from flax_mesh.cli.main import command
for words in (["--help"], ["train", "--help"], ["--version"]):
    sys.argv = ["flax-mesh", *words]
    with suppress(SystemExit):
        command()
    print(" ".join(words), "jax" in sys.modules)
"""


def test_help_and_versions_do_not_import_jax():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert "\n--help False\n" in done.stdout and "\ntrain --help False\n" in done.stdout
    assert (
        done.stdout.endswith(")\n--version False\n")
        and f"(jax {version('jax')}, flax {version('flax')})" in done.stdout
    )
    assert "usage: flax-mesh [-h]" in done.stdout and "--print-config" in done.stdout


def test_every_module_can_be_imported():
    names = [module.name for module in pkgutil.walk_packages(flax_mesh.__path__, "flax_mesh.")]
    assert len(names) > 150
    # __main__ runs a command, and a subclass of a class of lm-eval needs its package, which most installations lack.
    needs = {"flax_mesh.inference.lm": importlib.util.find_spec("lm_eval") is None}
    for name in names:
        if not name.endswith(".__main__") and not needs.get(name):
            importlib.import_module(name)
