"""The training step of a single program: train state, loss function, train and evaluation step."""

from flax_mesh.step.loss import Batch as Batch
from flax_mesh.step.loss import LossFn as LossFn
from flax_mesh.step.loss import Metrics as Metrics
from flax_mesh.step.loss import apply_gradients as apply_gradients
from flax_mesh.step.loss import run_loss as run_loss
from flax_mesh.step.loss import sums_of as sums_of
from flax_mesh.step.state import TrainState as TrainState
from flax_mesh.step.state import TreeDefinition as TreeDefinition
from flax_mesh.step.state import abstract_train_state as abstract_train_state
from flax_mesh.step.state import init_train_state as init_train_state
from flax_mesh.step.step import Step as Step
from flax_mesh.step.step import in_mesh as in_mesh
from flax_mesh.step.step import make_eval_step as make_eval_step
from flax_mesh.step.step import make_train_step as make_train_step
