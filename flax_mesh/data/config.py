"""The `data` section of a recipe."""

from dataclasses import dataclass, field

from flax_mesh.errors import Problem
from flax_mesh.fields import ADDED, MAX_SIZE, SAME_RESULT, changed_repr, type_problems, value_problems

AT_LEAST_1 = {"at_least": 1, "at_most": MAX_SIZE}
STDLIB = "stdlib"
NO_SOURCE = Problem("data.source", f"must be {STDLIB!r}, a file, a folder or a glob; got an empty string.")


@dataclass(frozen=True)
class DataConfig:
    """The `data` section of a recipe.

    Attributes:
        source: "stdlib" (the source code of Python's standard library) or a path:
            a file: text, or tokens if its suffix is .npy or .bin;
            a folder: its text files at any depth (suffix .txt .md .py .rst .json .csv, or no suffix and UTF-8), without
            hidden files and folders;
            a glob: all matching files ("**" for any depth), either all text or all token files.
        sequence_length: Tokens per row.
        batch_size: Rows of the global batch, over all devices and processes.
        held_out: Share of the files that is held out for evaluation; of a single file, the share of its end.
        seed: Seed of the order of the windows. None: the run's seed.
        eval_batches: Maximum number of held-out batches per evaluation.
        bin_dtype: dtype of the tokens in .bin files, which do not contain it: "uint16" or "uint32", little-endian.
        resumable: false: `make_batches` returns an iterator without `get_state` and `set_state`, such as a generator.
            The run saves checkpoints, but cannot be resumed.
        rows: The rows that `make_batches` makes in each process: "all" rows of the global batch, or "process", those on
            its devices only. It is then called with a second argument, the ProcessRows of this process. Tokens of files
            are always read by the processes that need them.
    """

    __repr__ = changed_repr

    source: str = field(default=STDLIB, metadata={"path": True})
    sequence_length: int = field(default=128, metadata=AT_LEAST_1)
    batch_size: int = field(default=16, metadata=AT_LEAST_1)
    held_out: float = field(default=0.05, metadata={"above": 0, "below": 1})
    seed: int | None = field(default=None, metadata={"at_least": 0})
    eval_batches: int = field(default=4, metadata=AT_LEAST_1)
    bin_dtype: str = field(default="uint16", metadata={"one_of": ("uint16", "uint32")})
    resumable: bool = field(default=True, metadata=SAME_RESULT)
    rows: str = field(default="all", metadata=ADDED | {"one_of": ("all", "process")})


@dataclass(frozen=True)
class ChatConfig(DataConfig):
    """The `data` section of a recipe that trains on rows; see `read_chats`.

    Attributes:
        source: A .jsonl, .jsonl.gz or .parquet file, a folder with a dataset, or the id of a dataset of the hub:
            org/name or org/name@revision.
        split: The split of a dataset.
        subset: The subset of a dataset, which some call its config; "" for the default one.
        train_on: The tokens that the loss counts: all tokens of the "assistant" (also of completions and texts), of its
            "last" message only, or "all".
        packing: Whether several documents share a row. They do not attend to each other.
        add_bos: Whether texts have the token for the beginning that the tokenizer adds, once, also if they begin with
            it. false: none is added.
        on_bad_row: "stop" before the run if there are rows without valid tokens, with a line for each, or "skip" them.
        on_long_row: "stop" before it if documents have more than sequence_length + 1 tokens, or "truncate" them.
    """

    __repr__ = changed_repr

    split: str = field(default="train", metadata=ADDED)
    subset: str = field(default="", metadata=ADDED)
    train_on: str = field(default="assistant", metadata={"one_of": ("assistant", "last", "all")})
    packing: bool = True
    add_bos: bool = field(default=True, metadata=ADDED)
    on_bad_row: str = field(default="stop", metadata={"one_of": ("stop", "skip")})
    on_long_row: str = field(default="stop", metadata={"one_of": ("stop", "truncate")})


def check_data_config(config: DataConfig) -> list[Problem]:
    """One line for every invalid setting. Does not access files."""
    problems = [*type_problems(config, "data."), *value_problems(config, "data.")]
    if config.source == "":
        problems.append(NO_SOURCE)
    return problems
