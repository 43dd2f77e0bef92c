"""The manifests for Kubernetes in docs/multiprocess.md: the published schema of JobSet, numbers that agree."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flax_mesh.processes.start import Processes, parse_processes
from tests.multiprocess.processes import ROOT

PUBLISHED = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
PAGE = (ROOT / "docs" / "multiprocess.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
MANIFESTS = {"tpu": BLOCKS[0], "gpu": BLOCKS[1]}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def problems(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """The parts of `value` that the schema of a custom resource does not accept."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path} is not a quantity"]
    if not isinstance(value, TYPES[schema["type"]]):
        return [f"{path} is no {schema['type']}"]
    found = []
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{path}.{key} is missing" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            inner = known.get(key, others)
            found += [f"{path}.{key} is unknown"] if inner is None else problems(item, inner, f"{path}.{key}")
    elif isinstance(value, list):
        found += [line for at, item in enumerate(value) for line in problems(item, schema["items"], f"{path}[{at}]")]
    elif "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path} is below {schema['minimum']}")
    return found


def manifest_problems(manifest: dict[str, Any]) -> list[str]:
    rest = {key: value for key, value in manifest.items() if key != "metadata"}  # which is the same in all schemas
    return problems(rest, PUBLISHED["schema"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_agrees_with_the_schema_and_with_itself(name):
    manifest = yaml.safe_load(MANIFESTS[name])
    assert manifest["apiVersion"] == f"{PUBLISHED['group']}/{PUBLISHED['version']}"
    assert manifest["kind"] == PUBLISHED["kind"] and manifest["metadata"].keys() <= {"name", "annotations"}
    assert not manifest_problems(manifest)
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (devices,) = container["resources"]["limits"].values()
    count = job.get("replicas", 1) * spec["completions"]
    (mesh,) = [word for word in container["command"] if word.startswith("mesh.shape=")]
    assert spec["parallelism"] == spec["completions"]
    assert math.prod(map(int, re.findall(r":(\d+)", mesh))) == count * devices
    given = [word.removeprefix("--process=") for word in container["command"] if word.startswith("--process=")]
    host = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    expected = [Processes(3, count, f"{host}:8476")] * (name == "gpu")  # JAX finds the processes of TPUs
    assert [parse_processes(text.replace("$(JOB_COMPLETION_INDEX)", "3")) for text in given] == expected


def test_mistakes_in_a_manifest_are_found():
    manifest = yaml.safe_load(MANIFESTS["gpu"])
    for change, expected in (
        (lambda job: job["spec"].update(backoffLimits=1), "backoffLimits is unknown"),
        (lambda job: job["spec"].update(completions="4"), "completions is no integer"),
        (lambda job: job["spec"].pop("template"), "template is missing"),
        (lambda job: job["spec"]["template"]["spec"]["containers"][0].pop("name"), "name is missing"),
    ):
        wrong = copy.deepcopy(manifest)
        change(wrong["spec"]["replicatedJobs"][0]["template"])
        assert [line.endswith(expected) for line in manifest_problems(wrong)] == [True]
