"""What the demo shows while it works."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

console = Console(markup=False, highlight=False, soft_wrap=True)


@contextmanager
def step(title: str) -> Iterator[Callable[[str], None]]:
    """Show that a slow step is running, and at its end the time it took.

    On a terminal a spinner turns, and the function given to the body shows a detail beside it. Elsewhere the step is
    announced by one line.
    """
    start = time.monotonic()
    if not console.is_terminal:
        console.print(f"{title} ...")
    with console.status(title) as status:

        def show(detail: str) -> None:
            line = f"{title} ({time.monotonic() - start:.0f} s) {detail}"
            status.update(line[: console.width - 3])

        yield show
    console.print(f"{title}: {time.monotonic() - start:.1f} s")
