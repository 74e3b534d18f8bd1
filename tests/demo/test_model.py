"""The cache of the demo model: complete or absent, verified, made again when damaged."""

from pathlib import Path

import pytest

from flashinfer_core.demo import model


@pytest.fixture
def makings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replace download and conversion by a small file, and return the list of folders made."""
    made: list[Path] = []

    def convert(gguf: Path, folder: Path) -> Path:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        made.append(folder)
        return folder

    def download(folder: Path) -> Path:
        (folder / "weights.gguf").write_bytes(b"weights")
        return folder / "weights.gguf"

    monkeypatch.setenv("FLASHINFER_CORE_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "_download", download)
    monkeypatch.setattr(model, "_convert", convert)
    return made


def test_model_is_made_once(makings: list[Path], tmp_path: Path) -> None:
    folder = model.prepare_model()
    assert folder == model.prepare_model()
    assert len(makings) == 1
    assert folder.is_relative_to(tmp_path)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [model.MODEL_NAME]


@pytest.mark.parametrize("damage", ["changed", "missing", "unlisted"])
def test_damaged_model_is_made_again(makings: list[Path], damage: str) -> None:
    folder = model.prepare_model()
    weights = folder / "model.safetensors"
    if damage == "changed":
        weights.write_bytes(b"weighty")
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / model.CHECKSUMS).unlink()
    assert not model.is_intact(folder)
    model.prepare_model()
    assert weights.read_bytes() == b"weights"
    assert len(makings) == 2


def test_unfinished_model_is_not_used(makings: list[Path]) -> None:
    unfinished = model.cache_folder() / "models" / f".{model.MODEL_NAME}.unfinished" / model.MODEL_NAME
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"weig")
    assert (model.prepare_model() / "model.safetensors").read_bytes() == b"weights"
    assert len(makings) == 1


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHINFER_CORE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / "flashinfer_core"
    monkeypatch.setenv("FLASHINFER_CORE_CACHE", str(tmp_path / "own"))
    assert model.cache_folder() == tmp_path / "own"
