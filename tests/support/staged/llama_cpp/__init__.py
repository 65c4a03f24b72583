"""The real llama_cpp, changed by the source in the file that LLAMA_CPP_STAGE names. See support/staging.py."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).parents[1]
sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != _HERE.resolve()]
_spec = importlib.machinery.PathFinder.find_spec("llama_cpp", sys.path)
assert _spec is not None and _spec.loader is not None
_real = importlib.util.module_from_spec(_spec)
sys.modules["llama_cpp"] = _real
_spec.loader.exec_module(_real)
exec(Path(os.environ["LLAMA_CPP_STAGE"]).read_text(), {"llama_cpp": _real})
