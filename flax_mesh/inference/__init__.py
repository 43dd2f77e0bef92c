"""Trained decoders: opening a checkpoint or a Hugging Face folder, tokenizers, prompts, perplexity."""

from flax_mesh.inference.evaluate import Evaluation as Evaluation
from flax_mesh.inference.open import for_generation as for_generation
from flax_mesh.inference.open import open_trained as open_trained
from flax_mesh.inference.tasks import evaluate_tasks as evaluate_tasks
from flax_mesh.inference.trained import TrainedModel as TrainedModel
