"""The command line: what does not need an engine."""

import pytest

from flashinfer_core.cli import main


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert {"serve-demo", "bench", "check", "explain", "show-config", "aot"} <= set(
        capsys.readouterr().out.replace(",", " ").split()
    )


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nothing"]) == 2
    assert "cpu,serve" in capsys.readouterr().err
