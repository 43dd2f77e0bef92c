"""Object stores: paths of the kind s3://bucket/run, which code that reads files takes as it takes a Path."""

from flax_mesh.store.paths import DRIVERS as DRIVERS
from flax_mesh.store.paths import StorePath as StorePath
from flax_mesh.store.paths import context as context
from flax_mesh.store.paths import is_present as is_present
from flax_mesh.store.paths import on_this_machine as on_this_machine
from flax_mesh.store.paths import stored_path as stored_path
from flax_mesh.store.paths import stored_path_problem as stored_path_problem
