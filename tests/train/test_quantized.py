"""A model that qwix quantizes: the example of docs/quantized.md, on one device, on a mesh and as a pipeline."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quantized.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of methods that qwix calls
def test_losses_of_a_model_that_qwix_quantizes_are_equal_on_every_mesh(tmp_path, monkeypatch):
    pytest.importorskip("qwix", reason="comes with the extra qwix")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = {"__name__": "example"}
    exec(compile(code.replace("jax.config.update", "# "), str(PAGE), "exec"), names)  # these tests have 8 devices
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"make_quantized-pp2,fsdp2", "make_decoder-fsdp1"}
