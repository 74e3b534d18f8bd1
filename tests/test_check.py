"""``flashinfer-core check``, as far as it needs no engine; with one it is in integrations/."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest

from flashinfer_core.cli import main


def install(monkeypatch: pytest.MonkeyPatch, engine: str | None, plugin: ModuleType | None) -> None:
    def version(name: str) -> str:
        if name == engine:
            return "1.2.3"
        raise metadata.PackageNotFoundError(name)

    points = []
    if plugin is not None:
        monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
        points = [metadata.EntryPoint("flashinfer_core", f"{plugin.__name__}:register", "any")]
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    for name in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def plugin_that(answers: str | Exception) -> ModuleType:
    def check() -> str:
        if isinstance(answers, Exception):
            raise answers
        return answers

    plugin = ModuleType("a_plugin")
    plugin.check = check  # type: ignore[attr-defined]
    return plugin


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("answers", "status", "words"),
    [
        ("--flag NAME", 0, "1.2.3 serves with our backend when it is given --flag NAME"),
        (ImportError("no kernels"), 1, "1.2.3 would not serve with our backend: ImportError: no kernels"),
        (None, 1, "does not know our plug-in; install flashinfer-core into the environment of"),
    ],
)
def test_answers(
    engine: str,
    answers: str | Exception | None,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(monkeypatch, engine, None if answers is None else plugin_that(answers))
    assert main(["check", engine]) == status
    shown = capsys.readouterr().out
    assert shown.startswith(f"{engine}: ")
    assert words in shown


def test_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, None, plugin_that("--flag"))
    assert main(["check", "sglang"]) == 1
    assert "sglang: not installed; pip install 'flashinfer-core[sglang]'" in capsys.readouterr().out


def test_plugin_left_out_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "sglang", plugin_that("--flag"))
    monkeypatch.setenv("SGLANG_PLUGINS", "one, other")
    assert main(["check", "sglang"]) == 1
    assert "SGLANG_PLUGINS leaves our plug-in out; add flashinfer_core to it" in capsys.readouterr().out
    monkeypatch.setenv("SGLANG_PLUGINS", "one, flashinfer_core")
    assert main(["check", "sglang"]) == 0


def test_unknown_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
