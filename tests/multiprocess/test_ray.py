"""Two workers of Ray, one of which is killed: Ray starts both again, and the run equals a run of `flax-mesh launch`."""

import json
from importlib.util import find_spec

import pytest

from flax_mesh.errors import ConfigError
from flax_mesh.train import apply_overrides, load_recipe
from flax_mesh.train import ray as module
from flax_mesh.train.ray import ray_trainer
from tests.multiprocess.launches import LIMIT_S, assert_same_run, run
from tests.multiprocess.processes import Running, all_killed
from tests.multiprocess.ray_job import OPTIONS, STEPS, pids


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp:2,fsdp:4", "fsdp:4,tp:2"])
def test_a_run_under_ray_with_a_killed_worker_equals_a_run_of_launch(mesh, tmp_path):
    if find_spec("ray") is None:
        pytest.skip("needs the package ray")
    seed = "1"
    with all_killed(tmp_path), Running(["-m", "tests.multiprocess.ray_job", str(tmp_path), seed, mesh]) as job:
        ended = job.ended(LIMIT_S)
    assert ended.code == 0, ended.output
    own = tmp_path / f"{seed}-{mesh}"
    assert len(pids(own)) == 4, ended.output  # of two workers before the kill, and two after it
    assert f"{mesh} finished {STEPS} " in ended.output
    assert json.dumps({"path": f"{own}/run/checkpoints/{STEPS}"}) in ended.output
    run(2, 4, tmp_path / "launch", f"mesh.shape={mesh}", *OPTIONS)
    assert_same_run(own / "run", tmp_path / "launch", STEPS)


def test_mistakes_that_concern_ray_are_found_before_it_starts(monkeypatch, tmp_path):
    recipe = load_recipe("recipes/tiny.py")

    def lines(num_workers, resources, *settings, **options):
        with pytest.raises(ConfigError) as caught:
            ray_trainer(lambda: apply_overrides(recipe, settings), num_workers, resources, **options)
        return "\n".join(caught.value.lines)

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    found = lines(0, {"GPU": 1, "memory": "big", "disk": float("nan")}, "run.steps=0", report_every=0)
    for text in (
        "run.steps must be at least 1",
        "num_workers must be at least 1, got 0",
        "report_every must be at least 1, got 0",
        "run.folder must be absolute, got runs/tiny",
        "run.platform=cpu:8 must be auto or gpu, because the resources of a worker are",
        "resources must be finite numbers of at least 0, got {'memory': 'big', 'disk': nan}",
    ):
        assert text in found
    folder = f"run.folder={tmp_path}"
    assert lines(3, {"CPU": 1}, folder) == "run.platform=cpu:8 cannot be divided among 3 workers; use a multiple"
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert lines(2, {"CPU": 1}, folder).endswith("pip install 'flax-mesh[ray]'")
