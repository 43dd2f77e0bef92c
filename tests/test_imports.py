"""The side effects of importing flax_mesh, in a new process, and the import of every module."""

import importlib
import json
import pkgutil
import subprocess
import sys

import flax_mesh

CODE = """
import json, sys
import jax, flax.nnx
before, settings = set(sys.modules), dict(jax.config.values)
import flax_mesh
changed = [name for name, value in jax.config.values.items() if settings[name] != value]
print(json.dumps([sorted(set(sys.modules) - before), changed]))
"""


def test_importing_loads_only_its_own_modules_and_changes_no_settings():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    modules, changed = json.loads(done.stdout.splitlines()[-1])
    packages = {name.split(".")[0] for name in modules}
    assert "flax_mesh.sharding.transfer" in modules and not changed
    assert not packages & {"orbax", "tensorstore", "rich"}
    assert packages <= {"flax_mesh", "jax", *sys.stdlib_module_names}, packages


def test_training_can_be_imported_without_xxhash():
    code = "import sys; sys.modules['xxhash'] = None; import flax_mesh.models, flax_mesh.train"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_module_can_be_imported():
    names = [module.name for module in pkgutil.walk_packages(flax_mesh.__path__, "flax_mesh.")]
    assert len(names) > 150
    for name in names:
        if not name.endswith(".__main__"):  # these run a command
            importlib.import_module(name)
