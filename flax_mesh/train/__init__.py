"""Training: the state and the step; recipes and the training loop."""

from flax_mesh.data.arrays import array_batches as array_batches
from flax_mesh.data.chats import read_chats as read_chats
from flax_mesh.data.config import ChatConfig as ChatConfig
from flax_mesh.data.config import DataConfig as DataConfig
from flax_mesh.data.evaluation import mean_metrics as mean_metrics
from flax_mesh.lora.config import LoraConfig as LoraConfig
from flax_mesh.recipe.config import CheckpointConfig as CheckpointConfig
from flax_mesh.recipe.config import MeshConfig as MeshConfig
from flax_mesh.recipe.config import PipelineConfig as PipelineConfig
from flax_mesh.recipe.config import RunConfig as RunConfig
from flax_mesh.recipe.config import TrainConfig as TrainConfig
from flax_mesh.recipe.load import load_recipe as load_recipe
from flax_mesh.recipe.optimizers.config import OptimizerConfig as OptimizerConfig
from flax_mesh.recipe.overrides import apply_overrides as apply_overrides
from flax_mesh.recipe.program import TrainProgram as TrainProgram
from flax_mesh.recipe.program import build_program as build_program
from flax_mesh.step.batch import place_batch as place_batch
from flax_mesh.step.options import StateLayout as StateLayout
from flax_mesh.step.options import StepOptions as StepOptions
from flax_mesh.step.state import TrainState as TrainState
from flax_mesh.step.state import abstract_train_state as abstract_train_state
from flax_mesh.step.state import init_train_state as init_train_state
from flax_mesh.step.step import make_eval_step as make_eval_step
from flax_mesh.step.step import make_train_step as make_train_step
from flax_mesh.train.loop import TrainResult as TrainResult
from flax_mesh.train.loop import train as train
