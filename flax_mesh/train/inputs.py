"""The data of a run: its batches, and the metrics of the data that are held out."""

from collections.abc import Callable
from functools import partial

from flax_mesh.data.corpus import Corpus, load_corpus
from flax_mesh.data.evaluation import host_evaluate, run_eval_fns
from flax_mesh.data.run_data import RunData, token_data, user_data
from flax_mesh.errors import ConfigError
from flax_mesh.recipe.config import data_seed
from flax_mesh.recipe.program import TrainProgram, batch_sharding
from flax_mesh.step.state import TrainState
from flax_mesh.train.metrics import Row

UINT16_IDS = 2**16


def load_data(program: TrainProgram) -> RunData:
    """The batches of the recipe, or the tokens of `data.source`."""
    recipe, axes = program.recipe, program.rules.axes
    if recipe.user_batches is not None:
        return user_data(recipe.user_batches, program.mesh, axes)
    corpus, vocab = load_corpus(recipe.data), getattr(recipe.model, "vocab_size", None)
    if problems := vocabulary_problems(vocab, corpus, recipe.data.source):
        raise ConfigError(problems)
    seed = data_seed(recipe.data, recipe.run)
    sharding = batch_sharding(program.mesh, axes)
    return token_data(corpus, recipe.data, seed, sharding, vocab, evaluates=recipe.run.eval_every > 0)


def evaluation_of(program: TrainProgram, data: RunData) -> Callable[[TrainState], Row] | None:
    """The metrics of the held-out tokens and of `eval_fns`; None if there are neither or run.eval_every=0."""
    recipe, held_out = program.recipe, data.held_out
    if not recipe.run.eval_every or (held_out is None and not recipe.eval_fns):
        return None

    def evaluate(state: TrainState) -> Row:
        sums = partial(program.evaluate, recipe.optimizer.evaluated(state))
        on_host = host_evaluate(sums, program.mesh, program.rules.axes, program.num_parts)
        tokens = {} if held_out is None else held_out(sums)
        return {**tokens, **run_eval_fns(recipe.eval_fns, on_host)}

    return evaluate


def vocabulary_problems(ids: object, corpus: Corpus, source: str) -> list[str]:
    """One line if the vocabulary is smaller than the vocabulary of the text, or larger than the dtype of the files."""
    size = corpus.vocab_size
    if isinstance(ids, int) and size is not None and ids < size:
        return [f"model.vocab_size={ids} is too small for data.source={source}: text needs {size}"]
    if isinstance(ids, int) and corpus.bin_dtype == "uint16" and ids > UINT16_IDS:
        return [
            f"model.vocab_size={ids} is more than the {UINT16_IDS} ids of uint16, which data.source={source} is read "
            "as. Set data.bin_dtype=uint32 if its tokens are uint32; save tokens of another type as .npy"
        ]
    return []
