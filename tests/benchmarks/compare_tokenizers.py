"""Differences between edgeinfer's tokeniser and llama.cpp's. There must be none.

python tests/benchmarks/compare_tokenizers.py MODEL_OR_VOCAB.gguf ... [--strings 10000] [--seed N] [--texts FILE ...]

Each string is encoded twice, with special tokens parsed and not; ids, pieces, stop tokens and the rest of what a
vocabulary says are compared as well. --pre all repeats it with every pre-tokeniser that edgeinfer knows, in copies of
the vocabulary that name it. Needs llama-cpp-python. The last line on stdout is JSON with every figure.
"""

import argparse
import ctypes
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import PRE_TOKENIZERS, Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from late import Late  # noqa: E402
from tokenizer_strings import real_texts, texts  # noqa: E402

if TYPE_CHECKING:
    import llama_cpp
else:
    llama_cpp = Late("llama_cpp")


class Oracle:
    """llama.cpp's vocabulary of a file."""

    def __init__(self, path: str) -> None:
        _silence()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.model)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return list(ids[:n])

    def piece(self, id: int) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        n = llama_cpp.llama_token_to_piece(self.vocab, id, buffer, len(buffer), 0, True)
        return buffer.raw[:n]

    def facts(self) -> dict[str, Any]:
        every = range(self.n_vocab)
        return {
            "n_vocab": self.n_vocab,
            "bos_id": llama_cpp.llama_vocab_bos(self.vocab),
            "eos_id": llama_cpp.llama_vocab_eos(self.vocab),
            "add_bos": llama_cpp.llama_vocab_get_add_bos(self.vocab),
            "add_eos": llama_cpp.llama_vocab_get_add_eos(self.vocab),
            "stop_ids": {id for id in every if llama_cpp.llama_vocab_is_eog(self.vocab, id)},
            # llama.cpp writes its own note for a token that is not in the byte alphabet; for us it is plain text.
            "pieces": [None if b"[UNK_BYTE_0x" in (piece := self.piece(id)) else piece for id in every],
        }


@functools.cache
def _ignore() -> Any:
    """What llama.cpp logs with; kept, as it calls it as long as the process lives."""
    return llama_cpp.llama_log_callback(lambda level, text, user_data: None)


def _silence() -> None:
    llama_cpp.llama_log_set(_ignore(), ctypes.c_void_p(0))


def facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What Oracle.facts gives, of ours."""
    names = ("n_vocab", "bos_id", "eos_id", "add_bos", "add_eos")
    return {name: getattr(tokenizer, name) for name in names} | {
        "stop_ids": set(tokenizer.stop_ids),
        "pieces": [tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab)],
    }


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(path: str, n_strings: int, seed: int, real: list[str]) -> dict[str, Any]:
    """Figures of one file; differences are printed on stderr, ten at most."""
    with ModelFile.open(path) as file:
        tokenizer = Tokenizer.from_file(file)
    oracle = Oracle(path)
    ours, theirs = facts(tokenizer), oracle.facts()
    known = [piece is not None for piece in theirs["pieces"]]
    for pieces in (ours, theirs):
        pieces["pieces"] = list(itertools.compress(pieces["pieces"], known))
    wrong = [name for name in ours if ours[name] != theirs[name]]
    for name in wrong:
        print(f"{path}: {name} differs: {_first_difference(ours[name], theirs[name])}", file=sys.stderr)
    specials = [*tokenizer.special_texts[:200], *tokenizer.special_texts[-200:], "<|im_end|>", "</s>", "<0x0A>"]
    n_different = 0
    for text in itertools.islice(texts(seed, specials, real), n_strings):
        for parse_special in (False, True):
            got = tokenizer.encode(text, parse_special=parse_special)
            expected = oracle.encode(text, True, parse_special)
            if got != expected:
                n_different += 1
                if n_different <= 10:
                    print(f"{path}: {text!r} parse_special={parse_special}\n  {got}\n  {expected}", file=sys.stderr)
    oracle.close()
    return {"file": Path(path).name, "strings": n_strings, "differences": n_different, "facts_that_differ": wrong}


def _first_difference(ours: object, theirs: object) -> str:
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        index = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        n = sum(a != b for a, b in zip(ours, theirs, strict=True))
        return f"{n} elements, first [{index}] {ours[index]!r}, llama.cpp {theirs[index]!r}"
    return f"{ours!r:.200}, llama.cpp {theirs!r:.200}"


def load_times(path: str, repeats: int) -> dict[str, float]:
    """Median milliseconds from a path to a tokeniser, ours and theirs by turns."""

    def ours() -> None:
        with ModelFile.open(path) as file:
            Tokenizer.from_file(file)

    loaders: dict[str, Callable[[], None]] = {"load_ms": ours, "load_ms_llama_cpp": lambda: Oracle(path).close()}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(repeats):
        for name, load in loaders.items():
            start = time.perf_counter()
            load()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def with_pre(path: str, pre: str, folder: str) -> str:
    """A copy of a byte-level vocabulary, without weights, that names another pre-tokeniser."""
    import gguf

    with ModelFile.open(path) as file:
        metadata: dict[str, Any] = dict(file.metadata)
    copy = str(Path(folder) / f"{Path(path).stem}.{pre}.gguf")
    writer = gguf.GGUFWriter(copy, "llama")
    for key, value in metadata.items():
        if not key.startswith("tokenizer.ggml.") or key == "tokenizer.ggml.pre":
            continue
        if key.endswith("_token_id"):
            writer.add_uint32(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, np.asarray(value, np.int32).tolist() if isinstance(value[0], int) else value)
    writer.add_string("tokenizer.ggml.pre", pre)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        step()
    return copy


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="MODEL_OR_VOCAB.gguf")
    parser.add_argument("--strings", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="files whose paragraphs are used as well")
    parser.add_argument("--pre", nargs="*", default=[], help="names of pre-tokenisers, or all")
    parser.add_argument("--repeats", type=int, default=5, help="loads of each file, of which the median is given")
    options = parser.parse_args()
    real = real_texts(options.texts)
    results = []
    for path in options.paths:
        results.append(compare(path, options.strings, options.seed, real) | load_times(path, options.repeats))
        print(results[-1], file=sys.stderr)
        for pre in sorted(PRE_TOKENIZERS) if options.pre == ["all"] else options.pre:
            with tempfile.TemporaryDirectory() as folder:
                copy = with_pre(path, pre, folder)
                results.append(compare(copy, options.strings, options.seed, real))
                print(results[-1], file=sys.stderr)
    n_different = sum(result["differences"] + len(result["facts_that_differ"]) for result in results)
    report = {"differences": n_different, "seed": options.seed, "vocabularies": results, "machine": machine()}
    print(json.dumps(report))
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
