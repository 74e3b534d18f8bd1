"""Options and fixtures of all tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "flashinfer_core",
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("flashinfer_core")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tensors of the tests lie: cpu (the default) or cuda")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    device: str = request.config.getoption("--device")
    if device.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return device
