"""Changes of a run to its checkpoints while another program reads them."""

import shutil
from pathlib import Path

from flax_mesh.checkpoint.checksums import write_checksums


def delete(step: Path) -> None:
    """As a run does, which renames the folder first."""
    shutil.rmtree(step.rename(step.with_name(f"{step.name}.deleted")))


def replace(step: Path) -> None:
    """Delete a step once there is a newer one, as a run does that retains one checkpoint."""
    newer = Path(shutil.copytree(step, step.with_name(str(int(step.name) + 1))))
    (newer / "step").write_text(newer.name)
    write_checksums(newer)
    delete(step)


def before(monkeypatch, module, name: str, act) -> None:
    """Call `act(arguments)` once, before the first call of a function of the package."""
    function, left = getattr(module, name), [act]

    def call(*arguments, **options):
        for one in left[:]:
            left.clear()
            one(*arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, call)
