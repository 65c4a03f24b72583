"""What a tokeniser takes, and the most while it is made, against what is planned before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
from large_vocabularies import add_large_bpe, add_large_spm
from tiny_models import CHATML, SPECIAL_TOKENS, add_tokens, byte_characters, named_writer, written

from edgeinfer.memory.process import peak_bytes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

MIB = 1 << 20
N_VOCAB = 150_000
# The first one of another file brings code into memory. Huge pages, where a system gives them unasked, would count
# whole; and each core keeps some pages back from the counts of the others.
PROGRAM = """
import ctypes, json, os, sys
from pathlib import Path
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from edgeinfer.backends.native import _core
from edgeinfer.memory.process import peak_bytes, resident_bytes
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

def made(path):
    file = ModelFile.open(path)
    planned = Tokenizer.memory(file)[1]
    _core.give_back_freed()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    tokenizer = Tokenizer.from_file(file)
    peak = peak_bytes()
    _core.give_back_freed()
    return planned, resident_bytes() - before, peak - before, tokenizer

made(sys.argv[1])
print(json.dumps(made(sys.argv[2])[:3]))
"""


def add_empty(writer: gguf.GGUFWriter, n_vocab: int, special: Any, template: str) -> None:
    """A vocabulary one of whose tokens has no text."""
    tokens = [*byte_characters(), *(f"token {i}" for i in range(n_vocab - 257 - len(SPECIAL_TOKENS))), ""]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    add_tokens(writer, tokens, [gguf.TokenType.NORMAL] * len(tokens), n_vocab, special, template)
    writer.add_token_merges(["a b"])


VOCABULARIES = {
    "spm": add_large_spm,
    "spm joined": partial(add_large_spm, is_apart=False),
    "bpe": add_large_bpe,
    "bpe unordered": partial(add_large_bpe, in_order=False),
    "bpe pairs": partial(add_large_bpe, merges_per_token=2),
    "empty": add_empty,
}


def write_vocabulary(path: Path, add: Callable[..., None], n_vocab: int = N_VOCAB) -> Path:
    writer = named_writer(path, "llama", "F32")
    add(writer, n_vocab, {}, CHATML)
    return written(writer, path)


@pytest.mark.skipif(not peak_bytes(), reason="this system does not tell how much memory a process took at most")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokeniser_takes_what_is_planned(tmp_path: Path, name: str) -> None:
    small, large = (write_vocabulary(tmp_path / f"{n}.gguf", VOCABULARIES[name], n) for n in (4000, N_VOCAB))
    command = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    planned, taken, peak = json.loads(run.stdout)
    caches = MIB  # of words and of tokens, which are empty still
    assert planned - caches - MIB < taken < planned
    assert peak < planned - caches + 8 * N_VOCAB + MIB // 2  # what comes and goes has room before the first answer


def test_words_are_cut_where_no_token_reaches_over(tmp_path: Path) -> None:
    found = {}
    for is_apart in (True, False):
        path = tmp_path / f"{is_apart}.gguf"
        write_vocabulary(path, partial(add_large_spm, is_apart=is_apart), 20_000)
        with ModelFile.open(path) as file:
            found[is_apart] = Tokenizer.from_file(file)._merger._pattern.pattern  # type: ignore[attr-defined]
    assert found == {True: "▁*[^▁]+|▁+", False: "(?s:.+)"}
