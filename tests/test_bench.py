"""The benchmarks of GPU kernels: their arithmetic and checks on the CPU, and one short run on a GPU."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from flashinfer_core.bench import attention, gpu, host, ops, peers, report
from flashinfer_core.bench.__main__ import main

CPU = torch.device("cpu")
ROWS = {row.name: row for row in attention.rows()}


def test_every_row_has_recorded_times() -> None:
    names = [*ROWS, *(row.name for row in ops.rows())]
    assert all(peers.recorded_us(name) for name in names)
    host_rows = {f"{name}, batch {batch}" for batch in host.BATCHES for name, _ in host.calls(batch, CPU)}
    recorded = set(peers.recorded()["rows"]) - set(names)
    assert {name for name in recorded if "on the GPU" not in name} == host_rows
    assert len(recorded) == len(host_rows) + len(host.BATCHES)


@pytest.mark.parametrize(
    ("name", "us", "tflops"),
    [
        ("prefill 1x8192 32/8 d128 causal", 778.016, 706.6125),
        ("prefill 4x4096 32/8 d128 full", 1632.192, 673.6411),
        ("prefill 4x4096 64/64 d128 causal", 1901.888, 578.1159),
        ("prefill 4x4096 32/8 d256 causal", 1555.424, 706.8887),
        ("paged append b8 q512 kv8192 32/8", 816.064, 652.6565),
    ],
)
def test_operations_are_counted_as_in_the_recorded_figures(name: str, us: float, tflops: float) -> None:
    assert ROWS[name].operations / us / 1e6 == pytest.approx(tflops, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "us", "gbs"),
    [
        ("decode 1x8192 32/8", 23.968, 1399.968),
        ("decode 64x2048 32/32", 498.048, 4311.8005),
        ("decode 64x4096 fp8kv 32/8", 211.168, 2542.3876),
        ("decode skew 63x512+1x65536 32/8", 122.496, 3269.9519),
        ("cascade shared8192 b64 uniq256", 78.272, 1286.0703),
        ("cascade shared32768 b256 uniq256", 525.568, 766.1296),
    ],
)
def test_bytes_are_counted_as_in_the_recorded_figures(name: str, us: float, gbs: float) -> None:
    assert ROWS[name].bytes / us / 1e3 == pytest.approx(gbs, rel=1e-4)


def test_bytes_of_the_operations() -> None:
    rows = {row.name: row.bytes for row in ops.rows()}
    for name, us, gbs in (
        ("rmsnorm 8192x8192", 64.8608, 4138.6391),
        ("fused_add_rmsnorm 1x4096", 1.706, 19.2075),
        ("rope pos_ids 8192 32/8", 67.3082, 2492.5964),
        ("append_paged 8192 8 heads", 14.5966, 4597.5772),
        ("merge_state 8192x32x128", 48.896, 4117.445),
    ):
        assert rows[name] / us / 1e3 == pytest.approx(gbs, rel=1e-4)


def test_floor() -> None:
    ceilings = gpu.Ceilings(copy_tbs=4.0, read_tbs=5.0, bf16_tflops=800.0, launch_us=1.5)
    assert ceilings.floor_us(8e11, 1e6) == pytest.approx(1000)
    assert ceilings.floor_us(1e6, 5e9) == pytest.approx(1000)
    assert ceilings.floor_us(0, 0, 4e9) == pytest.approx(1000)
    assert ceilings.floor_us(0, 0, 16) == 1.5


SMALL = {
    "ragged": attention.Row("small", ((20, 20), (20, 20)), 4, 2, 64, ragged=True),
    "full": attention.Row("small", ((20, 20),), 4, 2, 64, causal=False, ragged=True),
    "decode": attention.Row("small", ((1, 32), (1, 32)), 4, 2, 64),
    "skew": attention.Row("small", ((1, 16), (1, 128)), 4, 4, 64),
    "append": attention.Row("small", ((7, 48), (7, 48)), 4, 1, 64),
    "cascade": attention.Row("small", ((1, 16), (1, 32)), 4, 2, 64, shared=64),
}


@pytest.mark.parametrize("kind", SMALL)
def test_rows_compute_what_they_say(kind: str, device: str) -> None:
    row = SMALL[kind]
    problem = attention.Problem(row, torch.device(device), torch.device(device))
    problem.check()
    assert row.memory_bound == (kind in ("decode", "skew", "cascade"))
    if row.fits_sdpa and device == "cpu":
        found = problem.sdpa("torch")
        assert isinstance(found, str) or found().shape[1:] == (row.lens[0][0], 4, 64)


def test_a_wrong_result_is_not_timed() -> None:
    problem = attention.Problem(SMALL["decode"], CPU, CPU)
    problem._attend = lambda: torch.randn_like(problem.out)
    with pytest.raises(RuntimeError, match=r"^small: expected a relative error below 0.01, got \d"):
        problem.check()
    with pytest.raises(RuntimeError, match="got nan"):
        gpu.compare("small", torch.full((2,), torch.nan), torch.ones(2))


def test_operations_compute_what_they_say(device: str) -> None:
    where = torch.device(device)
    for call in (
        ops.rmsnorm((3, 40), where),
        ops.fused_add((3, 40), where),
        ops.rope_cos_sin_cache(where, 32),
        ops.rope_pos_ids(where, 32),
        ops.append_paged(where, 256),
        ops.merge_state(where, 32),
    ):
        call()


def test_host_calls(device: str) -> None:
    where = torch.device(device)
    for name, call in host.calls(3, where):
        assert host.host_us(call, where, rounds=1, each=1) > 0, name


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = report.Result("decode 64x2048 32/8", 270.8, 1983.0, "GB/s", 135.4, 1980, 650.4, {"cudnn": 541.6})
    line = result.line()
    for part in ("270.8 us", "1983 GB/s", " 0.50 ", "1980 MHz", "650 W", "fi-tc 135.4 us", "fi-tc 0.50", "FA3 0.53"):
        assert part in line
    assert line.endswith("cudnn, now: 541.6 us (2.00)")
    file = tmp_path / "rows.json"
    assert report.finish([result], Namespace(rows="", json=file, plot=None)) == 0
    assert json.loads(file.read_text())[0]["recorded_us"]["fi-tc"] == 135.4
    assert report.finish([], Namespace(rows="nothing", json=None, plot=None)) == 2
    assert "'nothing'" in capsys.readouterr().err
    assert "- MHz    - W  -" in report.Result("new", 1.0, 1.0, "GB/s", 1.0, None, None).line()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot(tmp_path: Path) -> None:
    result = report.Result("decode 64x2048 32/8", 270.8, 1983.0, "GB/s", 135.4, None, None)
    report.finish([result], Namespace(rows="", json=None, plot=tmp_path / "rows.png"))
    assert (tmp_path / "rows.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["attention", "ops"])
def test_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([name]) == 2
    assert "error: no CUDA device" in capsys.readouterr().err
    assert main(["host", "--device", "cuda"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([name, "--plot", "rows.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_unknown_peer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["attention", "--peer", "cudnn,other"]) == 2
    assert "--peer: no 'other'; there are cudnn, torch" in capsys.readouterr().err


def test_one_row_on_a_gpu(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if device == "cpu":
        pytest.skip("times a GPU")
    file = tmp_path / "rows.json"
    options = ["--device", device, "--seconds", "0.01", "--json", str(file)]
    assert main(["attention", "--rows", "decode 1x8192", "--peer", "torch", "--plan", "device", *options]) == 0
    (row,) = json.loads(file.read_text())
    assert 0 < row["floor_us"] < row["us"]
    assert row["measured_us"]["torch"] > 0
    assert main(["ops", "--rows", "rmsnorm 128x8192", *options]) == 0
    assert len(json.loads(file.read_text())) == 2
    assert "decode 1x8192 32/8" in capsys.readouterr().out
