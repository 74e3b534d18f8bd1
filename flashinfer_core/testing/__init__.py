"""What tests and benchmarks share: one dataclass of parameters for each operation, comparison, poison."""

from flashinfer_core.testing.attention import AttentionCase, assert_attention_close, workspace
from flashinfer_core.testing.ops import ActivationCase, AppendCase, NormCase, RopeCase
from flashinfer_core.testing.tensors import Embedded, assert_close, embed, no_waiting, poisoned, poisoned_memory

__all__ = [
    "ActivationCase",
    "AppendCase",
    "AttentionCase",
    "Embedded",
    "NormCase",
    "RopeCase",
    "assert_attention_close",
    "assert_close",
    "embed",
    "no_waiting",
    "poisoned",
    "poisoned_memory",
    "workspace",
]
