"""Every exported name takes the arguments of FlashInfer 0.7.4, in its order and with its defaults.

`data/signatures.json` holds those of the names that this version exports and that are not its own.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import flashinfer_core

SIGNATURES: dict[str, str] = json.loads((Path(__file__).parent / "data" / "signatures.json").read_text())
CALLABLE = {name: text for name, text in SIGNATURES.items() if text.startswith("(")}
OURS = {"batch_decode_with_kv_cache", "bench", "merge_attention_states"}
OTHERS = {name: text for name, text in SIGNATURES.items() if not text.startswith("(")}


def find(name: str) -> Any:
    return functools.reduce(inspect.getattr_static, name.split("."), flashinfer_core)


def test_every_exported_name_is_compared() -> None:
    assert {name.partition(".")[0] for name in SIGNATURES} == set(flashinfer_core.__all__) - OURS


@pytest.mark.parametrize("name", CALLABLE)
def test_arguments(name: str) -> None:
    text = CALLABLE[name].replace("****", "**")
    takes_anything = "*deprecated_positional_args" in text  # there our signature is the more precise one
    text = text.replace(", *args, *,", ", *args,").replace("*deprecated_positional_args, ", "*args, ")
    theirs = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(theirs, ast.FunctionDef)
    wanted = [*theirs.args.args, *theirs.args.kwonlyargs]
    defaults = [*theirs.args.defaults, *theirs.args.kw_defaults]
    found = find(name)
    ours = inspect.signature(found.func if isinstance(found, functools.partialmethod) else found).parameters
    if {"args", "kwargs"} <= set(ours) and not takes_anything:
        return  # workspace_size hands its arguments to plan, which is compared
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(theirs.args.args)] == [a.arg for a in theirs.args.args]
    assert {a.arg for a in wanted} <= set(ours)
    for argument, default in zip(wanted[len(wanted) - len(defaults) :], defaults, strict=True):
        expected = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        assert ours[argument.arg].default == expected, argument.arg


@pytest.mark.parametrize("name", OTHERS)
def test_aliases_and_properties(name: str) -> None:
    found, text = find(name), OTHERS[name]
    owner = name.rpartition(".")[0]
    if text == "property":
        assert isinstance(found, property)
    elif text.startswith("alias functools.partialmethod("):
        base, keyword = text.removeprefix("alias functools.partialmethod(").rstrip(")").split(", ")
        assert isinstance(found, functools.partialmethod)
        assert found.func is find(f"{owner}.{base}")
        assert found.keywords == {keyword.partition("=")[0]: True}
    else:
        assert found is find(f"{owner}.{text.removeprefix('alias ')}")
