"""The best layout of a search over the best of all layouts, in spaces that are small enough to plan all of them.

None of these spaces was used to choose the constants of the search. A plan takes about one second of CPU time, a space
one to four minutes. Target: a ratio of at most 1.03.

    python -m tests.benchmarks layouts [--only NAME] [--plans 20]
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flax_mesh.errors import ConfigError, ShardingError
from flax_mesh.models import DecoderConfig, make_decoder, next_token_loss
from flax_mesh.plan.search import search_layouts
from flax_mesh.plan.search.search import parse_chips, plan_layout
from flax_mesh.plan.search.space import MESH, REMAT, SCHEDULE, SEARCHED, STAGES, make_space
from flax_mesh.train import DataConfig, PipelineConfig, TrainConfig
from tests.benchmarks.common.report import options, report, use_cpu

TARGET = 1.03
BASE = DecoderConfig(vocab_size=32000, num_kv_heads=8, scan=True, dtype="bfloat16")
DENSE = replace(BASE, vocab_size=151936, hidden_size=2560, num_layers=12, num_heads=32, head_dim=80, mlp_size=9728)
WIDE = replace(BASE, hidden_size=5120, num_layers=20, num_heads=40, mlp_size=13824)
EXPERTS = replace(BASE, hidden_size=2048, num_layers=8, num_heads=16, mlp_size=1024, num_experts=16)


class Case(NamedTuple):
    """A model on a number of chips: sequence length, rows, microbatches, and the settings that are searched."""

    model: DecoderConfig
    chips: str
    sequence: int
    rows: int
    parts: int
    searched: tuple[str, ...]

    def config(self) -> TrainConfig:
        data, pipeline = DataConfig(sequence_length=self.sequence, batch_size=self.rows), PipelineConfig(self.parts)
        return TrainConfig(make_decoder, next_token_loss, self.model, data=data, pipeline=pipeline)


FULL = {"remat": "full"}
FEW = replace(EXPERTS, num_experts=4, **FULL)
PIPELINE = (MESH, SCHEDULE, STAGES)
CASES = {
    "meshes-4": Case(replace(EXPERTS, num_layers=2, **FULL), "v5e:4", 2048, 64, 1, (MESH,)),
    "dense-8": Case(replace(DENSE, num_layers=6), "v5e:8", 4096, 16, 1, (MESH, STAGES, REMAT)),
    "experts-8": Case(replace(EXPERTS, num_kv_heads=4), "v5e:8", 2048, 64, 1, (MESH, STAGES, REMAT)),
    "pipeline-8": Case(replace(DENSE, num_layers=16, **FULL), "v5p:8", 4096, 32, 8, PIPELINE),
    "dense-16": Case(replace(DENSE, **FULL), "v5p:16", 4096, 64, 1, (MESH, STAGES)),
    "experts-16": Case(replace(FEW, num_layers=4, num_kv_heads=2), "v5p:16", 2048, 128, 1, (MESH, STAGES)),
    "pipeline-16": Case(WIDE, "v5p:16", 4096, 32, 8, PIPELINE),
    "dense-64": Case(replace(DENSE, num_layers=4, num_kv_heads=2, **FULL), "h100:8x8", 4096, 256, 4, (MESH, STAGES)),
    "experts-64": Case(replace(FEW, num_layers=2, num_kv_heads=1), "v5p:64", 4096, 256, 1, (MESH, STAGES)),
    "pipeline-64": Case(replace(WIDE, num_layers=8, num_kv_heads=1), "v5p:64", 4096, 128, 8, (MESH,)),
}


def measure(name: str, case: Case, plans: int) -> dict[str, Any]:
    fixed = [setting for setting in SEARCHED if setting not in case.searched]
    space = make_space(case.config(), parse_chips(case.chips), fixed)
    seconds = []
    for layout in space.layouts:
        config = space.apply(space.settings(layout))
        try:
            plan = plan_layout(config, space.topology, space.batch_of(config))
        except (ConfigError, ShardingError):  # the search leaves it out, too
            continue
        if plan.fits:
            seconds.append(plan.time.seconds)
    found = search_layouts(case.config(), case.chips, fixed=fixed, plans=plans).best
    ratio = found.plan.time.seconds / min(seconds) if found and seconds else None
    row = {"space": name, "layouts": len(space.layouts), "fit": len(seconds), "plans": plans, "over best": ratio}
    print(f"{name}: {ratio} of the best of {len(seconds)} layouts that fit", flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    use_cpu()
    given = options("layouts", arguments, only="", plans=20)
    rows = [measure(name, case, given.plans) for name, case in CASES.items() if given.only in name]
    return report("layouts", arguments, rows, target=TARGET)
