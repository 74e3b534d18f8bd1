"""Where the library keeps its files."""

import os
from pathlib import Path

PACKAGE = Path(__file__).parent


def cache_folder() -> Path:
    """Return the folder for everything that can be made again.

    ``FLASHINFER_CORE_CACHE`` if set, else ``flashinfer_core`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    own = os.environ.get("FLASHINFER_CORE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "flashinfer_core"
