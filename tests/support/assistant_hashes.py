"""Keys and tensors that llama.cpp converts tiny assistants of Gemma 4 to; ours are in test_gemma4_assistant.py.

    python tests/support/assistant_hashes.py LLAMA_CPP > tests/exporters/drafters/assistant_hashes.json

LLAMA_CPP: as in converter_hashes.py.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path

from converter_hashes import converted, hashes
from tiny_assistant_checkpoints import CASES, N_VOCAB, write_assistant


def main() -> None:
    llama_cpp = Path(sys.argv[1]).resolve()
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    logging.disable(logging.WARNING)
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            folder = write_assistant(Path(name) / "model", case)
            vocab = {str(id): id for id in range(N_VOCAB)}
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
            converted(folder, Path(name) / "model.gguf")
            found[case] = hashes(Path(name) / "model.gguf")
    print(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
