"""The tests run on the extensions that these variables name, for instance on ones built with sanitizers.

To be imported before the package, parts of which hold on to what they import.
"""

import importlib.util
import os
import sys

_NAMES = {
    "EDGEINFER_TEST_STRINGS": "edgeinfer.models._strings",
    "EDGEINFER_TEST_MAPPED": "edgeinfer.models.gguf_reader._mapped",
    "EDGEINFER_TEST_QUANTIZE": "edgeinfer.models.formats._quantize",
    "EDGEINFER_TEST_SAMPLER": "edgeinfer._sampler",
    "EDGEINFER_TEST_CORE": "edgeinfer.backends.native._core",
}

for _variable, _name in _NAMES.items():
    _path = os.environ.get(_variable)
    if _path:
        _spec = importlib.util.spec_from_file_location(_name, _path)
        if _spec is None or _spec.loader is None:
            raise ImportError(f"{_variable}={_path} is no extension module")
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])
