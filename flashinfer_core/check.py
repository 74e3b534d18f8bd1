"""Whether an engine would serve with our backend: the answer of ``flashinfer-core check``."""

from __future__ import annotations

from importlib import import_module

from flashinfer_core.adapters import ADAPTERS


def check(engine: str) -> tuple[bool, str]:
    """Load an engine's registry with our plug-in, as the engine does when it starts.

    Parameters
    ----------
    engine
        A key of `flashinfer_core.adapters.ADAPTERS`.

    Returns
    -------
    tuple of bool and str
        Whether its flag would select our backend, and the flag, or the reason why not. What a certain model asks for is
        only known when the engine starts with it.
    """
    adapter = ADAPTERS[engine]
    obstacle = adapter.obstacle()
    if obstacle is not None:
        return False, f"{engine}: {obstacle}"
    point, found = adapter.entry_point(), adapter.distribution()
    assert point is not None
    assert found is not None
    try:
        flag: str = import_module(point.module).check()
    except Exception as error:  # whatever an engine's import may raise is the reason
        return False, f"{engine}: {' '.join(found)} would not serve with our backend: {type(error).__name__}: {error}"
    return True, f"{engine}: {' '.join(found)} serves with our backend when it is given {flag}"
