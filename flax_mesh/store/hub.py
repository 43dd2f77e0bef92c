"""Models and datasets of the Hugging Face hub, `org/name` or `org/name@revision`, in the cache of huggingface_hub."""

import importlib.util
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from flax_mesh.errors import ConfigError
from flax_mesh.fields import path_problem, user_path
from flax_mesh.store.paths import stored_path
from flax_mesh.text import one_line

MODEL, DATASET = "model", "dataset"
SETTINGS, CARD = "settings", "card"  # of a model and of a dataset: small files, for the commit and for settings
# What to load -> the kind of repository, and its files. A file of a model that is in a folder belongs to another
# format, as do `consolidated` parameters.
FILES: dict[str, tuple[str, dict[str, list[str]]]] = {
    MODEL: (
        MODEL,
        {
            "allow_patterns": ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            "ignore_patterns": ["*/*", "consolidated*"],
        },
    ),
    DATASET: (DATASET, {}),
    SETTINGS: (MODEL, {"allow_patterns": ["config.json", "adapter_config.json"]}),
    CARD: (DATASET, {"allow_patterns": ["README.md"]}),
}
DATA_FILES = (".jsonl", ".gz", ".parquet", ".json", ".npy", ".bin", ".txt")  # no id ends like this
_NAME = r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_ID, _WITH_COMMIT = (
    re.compile(rf"{_NAME}(?:@(?P<revision>[\w./-]+))?"),
    re.compile(rf"{_NAME}@(?P<commit>[0-9a-f]{{40}})"),
)


def model_folder(source: str | os.PathLike[str], kind: str = MODEL) -> Path:
    """The folder at a path, or the folder in the cache of a model of the hub, which is downloaded if it is not there.

    A path that exists comes first. A text that cannot be an id is a path too, whether it exists or not. ConfigError for
    an id that cannot be loaded. `kind` is a key of FILES; SETTINGS loads no parameters.
    """
    path = stored_path(source)
    match = _id_of(source)
    if match is None or os.path.lexists(path):
        return path
    snapshot = _snapshot(match["name"], match["revision"], kind)
    if isinstance(snapshot, str):
        raise ConfigError(snapshot)
    return snapshot


def _id_of(source: str | os.PathLike[str]) -> re.Match[str] | None:
    """The parts of an id; None for a path object, and for a text that names a file of data."""
    if not isinstance(source, str) or source.endswith(DATA_FILES):
        return None
    return _ID.fullmatch(source)


def with_commit(source: str, earlier: str = "", kind: str = MODEL) -> str:
    """`org/name@commit` for an id: the commit of its revision or, of the main branch, of `earlier` with the same name.

    An id that already has a commit, a path, and an id that cannot be loaded are returned unchanged.
    """
    before, match = commit_of(earlier), _id_of(source)
    if match is None or path_problem(source) or os.path.lexists(user_path(source)) or commit_of(source):
        return source
    if before and before[0] == match["name"] and match["revision"] in (None, "main"):
        return earlier
    try:
        return f"{match['name']}@{model_folder(source, CARD if kind == DATASET else SETTINGS).name}"
    except ConfigError:
        return source


def commit_of(source: str) -> tuple[str, str] | None:
    """The name and the commit of `org/name@commit`, None for other texts."""
    match = _WITH_COMMIT.fullmatch(source)
    return (match["name"], match["commit"]) if match else None


@cache  # one commit for all readers of a program, also if the branch moves
def _snapshot(name: str, revision: str | None, content: str) -> Path | str:
    """The folder, or the text of an error, which is not asked for again."""
    kind, files = FILES[content]
    given = name + (f"@{revision}" if revision else "")
    both = f"{given} is not a path of this machine, and as a {kind} of the Hugging Face hub"
    if importlib.util.find_spec("huggingface_hub") is None:
        return f'{both} it requires the package huggingface_hub: pip install "flax-mesh[hub]"'
    import huggingface_hub
    from huggingface_hub import errors

    network: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # of its HTTP client, whose name differs by version
    download: Callable[..., str] = getattr(huggingface_hub, "snapshot_download")  # noqa: B009 (its type is not known)
    try:
        folder = download(name, revision=revision, repo_type=kind, **files)
    except errors.GatedRepoError:
        page = f"https://huggingface.co/{'datasets/' * (kind == DATASET)}{name}"
        reason = f"requires access: ask for it at {page}, and log in with: hf auth login"
    except errors.RepositoryNotFoundError:
        reason = "does not exist, or is private: log in with: hf auth login"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision}"
    except errors.LocalEntryNotFoundError:
        reason = "is not in the cache of this machine, or only a part of it, and the hub cannot be reached"
    except (OSError, ValueError, RuntimeError, network) as error:
        reason = f"cannot be downloaded: {one_line(error, 200)}"
    else:
        return Path(folder)
    options = " --repo-type dataset" * (kind == DATASET) + (f" --revision {revision}" if revision else "")
    command = f"hf download {name}{options}"
    return f"{both} it {reason}. Correct the path or the id, or download the {kind} with: {command}"
