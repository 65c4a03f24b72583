"""Keys and tensors that llama.cpp's converter makes of tiny checkpoints; tests/exporters/test_converter.py has ours.

    python tests/support/converter_hashes.py LLAMA_CPP > tests/exporters/converter_hashes.json

LLAMA_CPP: a folder with conversion/ and gguf-py/ of llama.cpp, such as vendor/llama.cpp of the source package of
llama-cpp-python 0.3.36. Needs torch and transformers. Vocabularies are left out: the converter refuses tiny ones.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_checkpoints

N_DIGITS = 16  # of a hash that are kept
# The converter takes a dense Nemotron for one with experts, and writes a file without networks.
COMPARED = [case for case in tiny_checkpoints.CASES if case != "nemotron_h"]
# Keys that say how a file came to be, not what the model is.
APART = ("general.", "tokenizer.", "GGUF.")


def described(kind: str, shape: Sequence[int], data: bytes) -> str:
    """Type, shape and hash of a tensor."""
    return f"{kind} {'x'.join(map(str, shape))} {hashlib.sha256(data).hexdigest()[:N_DIGITS]}"


def converted(folder: Path, out: Path) -> None:
    """Run the converter, without a vocabulary."""
    base, conversion = importlib.import_module("conversion.base"), importlib.import_module("conversion")
    hparams = base.ModelBase.load_hparams(folder, False)
    name = conversion.get_model_architecture(hparams, base.ModelType.TEXT)
    made = conversion.get_model_class(name)(folder, importlib.import_module("gguf").LlamaFileType.ALL_F32, out)
    for each in (made, getattr(made, "impl", made)):
        each.set_vocab = lambda: None
    made.write()


def hashes(path: Path) -> dict[str, Any]:
    """Keys of a GGUF file with their values, and type, shape and hash of each tensor."""
    reader = importlib.import_module("gguf").GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith(APART)}
    tensors = {
        each.name: described(each.tensor_type.name, [int(n) for n in each.shape[::-1]], each.data.tobytes())
        for each in reader.tensors
    }
    computed = [each for each in reader.tensors if each.name.startswith("rope_") or each.name.endswith(".ssm_a")]
    factors = {each.name: each.data.tolist() for each in computed}
    return {"keys": dict(sorted(keys.items())), "tensors": dict(sorted(tensors.items())), "factors": factors}


def main() -> None:
    llama_cpp = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    for case in COMPARED:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            tiny_checkpoints.write(folder, case)
            vocab = {str(id): id for id in range(tiny_checkpoints.N_VOCAB)}  # that of Gemma 3 is counted
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
            converted(folder, Path(name) / "model.gguf")
            found[case] = hashes(Path(name) / "model.gguf")
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
