"""The examples that need no engine run as they are, on the GPU if there is one; those with one run in integrations/."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "lines"), [("paged_decode", 3), ("cuda_graph_decode", 3), ("shared_prefix", 2), ("model_loop", 3)]
)
def test_example(name: str, lines: int, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("output as torch's") == lines
    if name != "paged_decode" and device == "cuda":
        assert out.count(" on cuda: ") == lines
