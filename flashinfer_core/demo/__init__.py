"""The demo: a small real model served by an engine with the attention of this library."""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do next."""
