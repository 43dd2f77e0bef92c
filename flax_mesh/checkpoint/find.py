"""Where the checkpoints are that a user means by a path."""

from pathlib import Path

from flax_mesh.errors import ConfigError

CHECKPOINTS = "checkpoints"  # below a run folder


def find_checkpoints(path: str | Path) -> tuple[Path, int | None]:
    """(folder of checkpoints, step or None) of a run folder, a folder of checkpoints, or the folder of one step.

    ConfigError where it is none of these.
    """
    path = Path(path).expanduser()
    if path.name.isdecimal() and (path / "state").is_dir():
        return path.parent, int(path.name)
    for folder in (path / CHECKPOINTS, path):
        if folder.is_dir() and any((step / "state").is_dir() for step in folder.iterdir() if step.name.isdecimal()):
            return folder, None
    what = "holds no checkpoint" if path.is_dir() else "is no folder"
    raise ConfigError(f"{path} {what}; name a run folder, its {CHECKPOINTS}/, or one step in there")
