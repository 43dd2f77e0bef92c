"""The hook "tensorboard": the numbers of every row as scalars, in RUN_FOLDER/tensorboard."""

from pathlib import Path

from flax_mesh.train.hooks.load import Row, numbers

FOLDER = "tensorboard"


class TensorBoard:
    def __init__(self, folder: Path, config: object, start: int):
        from tensorboardX import SummaryWriter

        # purge_step: TensorBoard then ignores the rows that this run computes again. Without the suffix, a run that
        # resumes within a second would write to the file of the one before.
        self._writer = SummaryWriter(
            str(folder / FOLDER), filename_suffix=f".from_step_{start}", purge_step=start + 1 if start else None
        )

    def __call__(self, row: Row) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()  # a row that metrics.jsonl contains is not lost here either

    def close(self) -> None:
        self._writer.close()
