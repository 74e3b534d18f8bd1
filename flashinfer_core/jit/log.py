"""The library's log: the standard logger ``flashinfer_core``."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("flashinfer_core")
_LEVELS = ("debug", "info", "warning")


def configure() -> None:
    """Print what ``FLASHINFER_CORE_LOG`` asks for (``debug``, ``info``, ``warning``) to standard error.

    Without the variable the logger is left to the application.
    """
    level = os.environ.get("FLASHINFER_CORE_LOG", "").lower()
    if not level or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("flashinfer_core %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if level in _LEVELS:
        logger.setLevel(level.upper())
    else:
        logger.warning("FLASHINFER_CORE_LOG: expected one of %s, got %r", ", ".join(_LEVELS), level)
