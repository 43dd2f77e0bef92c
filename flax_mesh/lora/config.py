"""LoraConfig: the section `lora` of a recipe."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flax_mesh.errors import ConfigError, Problem
from flax_mesh.lora.add import add_lora
from flax_mesh.step.loss import Batch, LossFn


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: all parameters of the model are frozen, and only the factors A and B are trained.

    Attributes:
        rank: The size of the dim between A and B. 0: no adapters.
        alpha: A weight changes by alpha / rank * A B. 0: by A B.
        modules: A pattern; `re.search` finds it in the paths of the weights to adapt: "attention/(q|v)/kernel".
    """

    rank: int = field(default=0, metadata={"at_least": 0, "at_most": 2**16})
    alpha: float = field(default=0.0, metadata={"at_least": 0})
    modules: str = "(attention|delta)/(q|k|v|o|(q|kv)_(down|up))/kernel"  # of latent attention and delta nets too

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank if self.alpha else 1.0

    def adapted(self, make: Callable[[], Any], loss_fn: LossFn, batch: Batch, seed: int) -> Callable[[], Any]:
        """`make` with adapters. Raises ConfigError with the setting of each mistake."""
        try:
            return add_lora(
                make, loss_fn, batch, rank=self.rank, alpha=self.alpha or None, modules=self.modules, seed=seed
            )
        except ConfigError as error:
            raise ConfigError([Problem("lora.modules", f": {line}") for line in error.problems]) from error
