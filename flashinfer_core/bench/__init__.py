"""Benchmarks: ``python -m flashinfer_core.bench NAME``."""
