"""Changes of a folder in Hugging Face's format."""

import json
import shutil

import numpy as np

from flax_mesh.checkpoint.hf.safetensors import open_safetensors, write_safetensors


def change_config(folder, **change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def change_arrays(folder, change):
    """Write the arrays of `folder` again, as `change` returns them."""
    arrays = change({name: np.array(array) for name, array in open_safetensors(folder).items()})
    config = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    write_safetensors(folder, arrays, arrays.items(), json_files={"config.json": config})
