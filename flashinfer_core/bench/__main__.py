"""``python -m flashinfer_core.bench NAME ...``: run one benchmark."""

import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = ("attention", "ops", "host", "cpu", "serve")


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the arguments after the name to the benchmark's own ``main`` and return its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ("",)
    if name not in BENCHMARKS:
        print(f"usage: python -m flashinfer_core.bench {{{','.join(BENCHMARKS)}}} [--help] ...", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"flashinfer_core.bench.{name}").main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
