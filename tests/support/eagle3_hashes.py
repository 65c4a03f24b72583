"""Keys and tensors that llama.cpp converts tiny EAGLE-3 heads to; ours in tests/exporters/drafters/test_eagle3.py.

    python tests/support/eagle3_hashes.py LLAMA_CPP > tests/exporters/drafters/eagle3_hashes.json

LLAMA_CPP: as in converter_hashes.py.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
from pathlib import Path

import tiny_eagle3
from converter_hashes import hashes


def converted(folder: Path, target: Path, out: Path) -> None:
    """Run the converter, without a vocabulary."""
    base, conversion = importlib.import_module("conversion.base"), importlib.import_module("conversion")
    hparams = base.ModelBase.load_hparams(folder, False)
    made = conversion.get_model_class(conversion.get_model_architecture(hparams, base.ModelType.TEXT))(
        folder, importlib.import_module("gguf").LlamaFileType.ALL_F32, out, target_model_dir=target
    )
    for each in (made, getattr(made, "impl", made)):
        each.set_vocab = lambda: None
    made.write()


def main() -> None:
    llama_cpp = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    logging.disable(logging.WARNING)
    found = {}
    for case in tiny_eagle3.CASES:
        with tempfile.TemporaryDirectory() as name:
            target = Path(name) / "target"
            target.mkdir()
            (target / "config.json").write_text(json.dumps(tiny_eagle3.TARGET))
            folder = tiny_eagle3.write_head(Path(name) / "head", case)
            converted(folder, target, Path(name) / "head.gguf")
            found[case] = hashes(Path(name) / "head.gguf")
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
