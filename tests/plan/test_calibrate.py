"""`flax-mesh plan --calibrate`: the fit, the figures of made samples, and the file of the devices that are here."""

import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flax_mesh.cli import main
from flax_mesh.cli.common import DONE
from flax_mesh.errors import ConfigError
from flax_mesh.hardware import CHIPS, chip_of, load_chip
from flax_mesh.hlo.collectives import read_collectives
from flax_mesh.hlo.program import read_hlo
from flax_mesh.mesh.create import create_mesh
from flax_mesh.models import DecoderConfig
from flax_mesh.plan import calibrate as module
from flax_mesh.plan import plan
from flax_mesh.plan.calibrate import (
    FIGURES,
    KINDS,
    Calibration,
    Sample,
    Sizes,
    base_of,
    calibrate,
    chip_of_samples,
    fit_links,
    forecast,
    unit_network,
)
from flax_mesh.train import DataConfig
from tests.plan.ranking import config_of

SMALL = Sizes((64, 128), (1 << 20,), (1 << 14, 1 << 20))
SHORT = 0.005  # seconds of a repetition
MODEL = DecoderConfig(num_layers=2, hidden_size=32, head_dim=4, mlp_size=32)
DATA = DataConfig(sequence_length=16, batch_size=32)
CHIP = {chip.name: chip for chip in CHIPS}


@pytest.fixture(scope="module")
def measured() -> Calibration:
    if jax.default_backend() != "cpu":
        pytest.skip("the sizes are for CPU devices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TARGET", SHORT)
        return calibrate(jax.devices(), SMALL, rounds=2)


# --- the fit ---

LINES = st.tuples(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))


@example((0.0008662898992128908, 992898484355.0), 126)  # the noise hides what the bytes take
@settings(max_examples=50, deadline=None)
@given(LINES, st.integers(0, 1000))
def test_a_line_is_recovered_and_with_noise_the_forecasts_are_as_wrong_as_the_noise(line, seed):
    terms = [(a, b) for a in (1, 7, 14) for b in (1e4, 1e6, 1e8)]
    true = [a * line[0] + b / line[1] for a, b in terms]
    for factors, limit in ((np.ones(9), 1e-3), (np.exp(np.random.default_rng(seed).uniform(-0.1, 0.1, 9)), 0.25)):
        rows = [(a, b, t * factor) for (a, b), t, factor in zip(terms, true, factors, strict=True)]
        latency, bandwidth, findings = fit_links(rows)
        errors = [math.log((a * latency + b / bandwidth) / t) for (a, b), t in zip(terms, true, strict=True)]
        assert max(map(abs, errors)) < limit
        assert not findings or limit == 0.25


def test_of_kinds_that_differ_the_fit_is_the_harmonic_mean():
    """1.6 of 1 and 4; without the weights it would be 1.18."""
    terms = [(1, 1e5), (1, 1e6), (1, 1e7)]
    *found, findings = fit_links([(a, b, factor * (a * 1e-3 + b / 1e9)) for a, b in terms for factor in (1, 4)])
    assert found == pytest.approx([1.6e-3, 1e9 / 1.6], rel=0.02) and not findings


@pytest.mark.parametrize(
    ("rows", "latency", "bandwidth", "finding"),
    [
        ([(1, 1e6, 1e-3), (1, 2e6, 5e-4), (1, 4e6, 1e-4)], 5e-11 ** (1 / 3), 4e11, "no more time"),
        ([(1, 1e6, 1e-4), (1, 2e6, 3e-4), (1, 4e6, 9e-4)], module.LEAST_LATENCY, None, "no positive latency"),
    ],
    ids=["falling", "negative latency"],
)
def test_implausible_measurements_are_findings_and_the_figures_stay_positive(rows, latency, bandwidth, finding):
    fitted, found, (text,) = fit_links(rows)
    assert finding in text and fitted == pytest.approx(latency)
    assert found == pytest.approx(bandwidth) if bandwidth else 1e9 < found < 1e11


# --- figures of made samples ---


def made(chip, network, peak: float = 1.0, **dtypes: float) -> list[Sample]:
    """The samples that a chip would yield; the products of a dtype at a part of what its figures state."""
    blank = [Sample("matmul", d, n, 1.0) for d in ("bfloat16", "float32") for n in (1024, 2048, 4096)]
    blank += [Sample(kind, "float32", 1 << 28, 1.0) for kind in ("copy", "normalize")]
    blank += [Sample(kind, "float32", size, 1.0) for kind in KINDS for size in (1 << 16, 1 << 20, 1 << 26)]
    return [s._replace(seconds=forecast(s, chip, network) / dtypes.get(s.dtype, 1.0)) for s in blank]


@pytest.mark.parametrize("trusted", [True, False])
def test_the_figures_of_a_chip_are_recovered_from_its_times(trusted):
    base = replace(CHIP["H200"], platform="cpu", peak_flops={"bfloat16": 989e12})
    true = replace(base, peak_flops={"bfloat16": 989e12, "float32": 300e12}, matmul_fraction=0.6, link_fraction=1.0)
    true = replace(true, memory_bandwidth=4e12, link_bandwidth=3e11, hop_latency=3e-6)
    network = lambda chip: unit_network(jax.devices()[:4], chip)  # noqa: E731
    found, findings = chip_of_samples(made(true, network(true)), base, network, trusted=trusted)
    assert not findings
    rates = [found.peak(d) * found.matmul_fraction for d in ("bfloat16", "float32")]
    assert rates == pytest.approx([989e12 * 0.6, 300e12 * 0.6])
    assert found.peak("bfloat16") == pytest.approx(989e12 if trusted else 989e12 * 0.6)
    names = ("memory_bandwidth", "link_bandwidth", "hop_latency")
    assert [getattr(found, n) for n in names] == pytest.approx([getattr(true, n) for n in names], rel=1e-3)


def test_products_faster_than_the_peak_of_the_base_are_its_peak():
    base = CHIP["cpu"]
    network = lambda chip: unit_network(jax.devices()[:2], chip)  # noqa: E731
    samples = made(replace(base, peak_flops={"bfloat16": 9e10, "float32": 9e10}), network(base))
    found, _ = chip_of_samples(samples, base, network, trusted=True)
    assert found.matmul_fraction == 1 and found.peak("bfloat16") == pytest.approx(9e10)


def test_one_device_has_the_links_of_the_base():
    samples = [s for s in made(CHIP["cpu"], unit_network(jax.devices()[:2], CHIP["cpu"])) if s.kind not in KINDS]
    found, (finding,) = chip_of_samples(samples, CHIP["cpu"], lambda chip: unit_network([], chip), trusted=False)
    assert "one device has no collectives" in finding
    assert found.link_bandwidth == CHIP["cpu"].link_bandwidth


def test_an_unknown_gpu_has_a_base_and_an_unknown_tpu_is_refused():
    assert base_of("NVIDIA H200", "gpu").name == "H200"
    assert base_of("Some GPU 1", "gpu").name == "H100"
    with pytest.raises(ConfigError, match="no figures are known for 'TPU v99'"):
        base_of("TPU v99", "tpu")


# --- the devices that are here ---


def test_all_kinds_and_sizes_are_measured_and_the_file_of_positive_figures_is_read_back(measured, tmp_path):
    kinds = [(s.kind, s.dtype, s.size) for s in measured.samples]
    assert len(set(kinds)) == len(kinds) == 2 * 2 + 2 * 1 + 4 * 2
    assert all(0 < s.seconds < 10 and s.spread >= 0 for s in measured.samples)
    file = tmp_path / "chip.toml"
    file.write_text(measured.to_toml(), encoding="utf-8")
    found = load_chip(file)
    for name in FIGURES:
        assert 0 < getattr(found, name) < math.inf
        assert getattr(found, name) == pytest.approx(getattr(measured.chip, name), rel=1e-5)
    assert found.peak_flops == pytest.approx(measured.chip.peak_flops, rel=1e-5)
    base = chip_of("cpu")
    assert base is not None and found.memory == base.memory
    assert found.link_bandwidth != base.link_bandwidth and found.memory_bandwidth != base.memory_bandwidth
    comments = [line for line in measured.to_toml().splitlines() if line.startswith("#")]
    assert [line[2:] for line in comments[1:]] == measured.to_text().splitlines()


def test_the_work_of_a_sample():
    found = {kind: Sample(kind, "float32", 100, 1.0).work for kind in ("matmul", "copy", "normalize", *KINDS)}
    assert found == {"matmul": 2e6, "copy": 200, "normalize": 300, **dict.fromkeys(KINDS, 100)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_runs_the_collective_that_it_is_named_after_with_the_payload_of_its_size(kind):
    mesh = create_mesh((4,), (module.AXIS,), devices=jax.devices()[:4])
    case = module._collective(mesh, kind, 1 << 14)
    program = case.program.lower(1, case.x, *case.rest).compile()
    assert {(one.kind, one.payload_bytes) for one in read_collectives(read_hlo(program), mesh)} == {(kind, case.size)}
    assert case.size == 1 << 14


def test_repeated_products_neither_overflow_nor_vanish():
    mesh = create_mesh((2,), (module.AXIS,), devices=jax.devices()[:2])
    case = module._matmul(mesh, "float32", 64)
    assert case.x.shape == (2 * 64, 64)
    before = np.linalg.norm(case.x)
    case.times = 1001
    case.run()
    assert np.linalg.norm(case.x) == pytest.approx(before, rel=1e-2)


@pytest.mark.slow
def test_a_plan_uses_the_file(measured, tmp_path):
    file = tmp_path / "chip.toml"
    config = config_of("fsdp:8", "none", MODEL, DATA)
    seconds = []
    for factor in (1, 4):  # the file of a chip that is 4 times slower
        chip = measured.chip
        peaks = {name: peak / factor for name, peak in chip.peak_flops.items()}
        slower = replace(chip, peak_flops=peaks, memory_bandwidth=chip.memory_bandwidth / factor)
        slower = replace(slower, link_bandwidth=chip.link_bandwidth / factor, hop_latency=chip.hop_latency * factor)
        file.write_text(replace(measured, chip=slower).to_toml(), encoding="utf-8")
        seconds.append(plan(replace(config, run=replace(config.run, hardware=str(file)))).time.seconds)
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=1e-3)


# --- the command ---


def test_the_command_writes_the_file(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "cpu_sizes", lambda count: SMALL)
    monkeypatch.setattr(module, "measure", lambda *_: measured.samples)
    file = tmp_path / "chip.toml"
    file.write_text("an older file")
    assert main(["plan", "--calibrate", str(file)]) == DONE
    out = capsys.readouterr().out
    assert re.search(r"^matmul +bfloat16 64 +\d", out, re.MULTILINE)
    assert re.search(r"^memory_bandwidth +1e\+10 +\d", out, re.MULTILINE)
    assert out.endswith(f"{file}: written; use it with run.hardware={file}\n")
    assert load_chip(file).platform == jax.default_backend()
