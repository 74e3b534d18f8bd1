"""The examples that need no engine run as they are; those with one are run in integrations/."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_paged_decode(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "paged_decode.py"), run_name="__main__")
    assert capsys.readouterr().out.count("output as torch's") == 3
