"""What SGLang looks at when it is imported, for the tests that import it themselves."""

import importlib.util
import os
import runpy
import sys

import torch

from flashinfer_core.demo.engines import SGLANG, SGLANG_CPU

if importlib.util.find_spec("sglang") is not None and not torch.cuda.is_available():
    os.environ.update({name: value for name, value in SGLANG.environment().items() if name != "PYTHONPATH"})
    sys.path.append(str(SGLANG_CPU))
    runpy.run_path(str(SGLANG_CPU / "sitecustomize.py"))
