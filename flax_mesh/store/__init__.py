"""Where models, data and runs are, besides folders of this machine: object stores, and the Hugging Face hub.

Paths of the kind s3://bucket/run, which code that reads files takes as it takes a Path, and ids such as org/name.
"""

from flax_mesh.store.hub import DATASET as DATASET
from flax_mesh.store.hub import SETTINGS as SETTINGS
from flax_mesh.store.hub import commit_of as commit_of
from flax_mesh.store.hub import model_folder as model_folder
from flax_mesh.store.hub import with_commit as with_commit
from flax_mesh.store.paths import DRIVERS as DRIVERS
from flax_mesh.store.paths import StorePath as StorePath
from flax_mesh.store.paths import context as context
from flax_mesh.store.paths import is_present as is_present
from flax_mesh.store.paths import on_this_machine as on_this_machine
from flax_mesh.store.paths import stored_path as stored_path
from flax_mesh.store.paths import stored_path_problem as stored_path_problem
