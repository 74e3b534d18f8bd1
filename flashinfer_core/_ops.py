"""Calls into native code that `torch.compile` can keep in its graphs.

Eager code passes tensors to native code by address. A compiler that traces such a call would bake in the addresses of
its example tensors, so while `torch.compile` traces, the call goes through an operator that it knows as a black box
which writes to some of its arguments. Eager calls skip the operator: the dispatcher would cost as much as a small
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

_P = ParamSpec("_P")


def native_op(arguments: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Make a function a custom operator while `torch.compile` traces; at other times calls reach it directly.

    Parameters
    ----------
    arguments
        The arguments in the language of torch's operator schemas, such as ``Tensor x, Tensor(a!) out, float eps``;
        ``(a!)`` marks what is written to. The operator has the function's name and returns nothing.
    """

    def decorate(function: Callable[_P, None]) -> Callable[_P, None]:
        name = function.__name__.lstrip("_")
        qualified = f"flashinfer_core::{name}"
        torch.library.define(qualified, f"({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, ("cpu", "cuda"), function)
        torch.library.register_fake(qualified, _nothing)
        operator: Callable[_P, None] = getattr(torch.ops.flashinfer_core, name).default

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
            if torch.compiler.is_compiling():
                operator(*args, **kwargs)
            else:
                function(*args, **kwargs)

        return call

    return decorate


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand in for an operator on tensors without memory."""
