"""Vocabularies of checkpoints as GGUF has them, on 10,000 strings against the libraries that the files are made for.

python tests/benchmarks/check_vocabularies.py FOLDER:ROWS ... [--strings 10000] [--seed 0] [--out RECORD.json]

A folder with tokenizer.json is compared with `tokenizers`, one with tokenizer.model with `sentencepiece`, where that is
installed (texts with control tokens are left out there: it does not look for them). Strings with letters of Unicode 16
are left out, which llama.cpp does not know. Differences are counted apart for strings with U+2581, which the libraries
take for a space and llama.cpp for a character beside tokens of spaces. ROWS is the number of embeddings.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tokenizer_strings import real_texts, texts  # noqa: E402

from edgeinfer.exporters.checkpoint import Config, Folder  # noqa: E402
from edgeinfer.exporters.vocabulary import read_vocabulary  # noqa: E402
from edgeinfer.exporters.vocabulary.comparison import tokenizer_of  # noqa: E402
from edgeinfer.models.tokenization.pre_tokenizers import UNICODE_16  # noqa: E402

NEW = re.compile(f"[{re.sub('[0-9A-F]+', lambda code: chr(int(code[0], 16)), UNICODE_16).replace(' ', '')}]")
SPACE_MARK = "\u2581"


def of_tokenizers(path: Path) -> Callable[[str], list[int] | None]:
    library = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: list(library.encode(text, add_special_tokens=False).ids)


def of_sentencepiece(path: Path) -> Callable[[str], list[int] | None]:
    """None for a text that has the name of a control token in it."""
    import sentencepiece  # type: ignore[import-not-found, unused-ignore]

    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(library.get_piece_size())
    names = [library.id_to_piece(id) for id in ids if library.is_control(id) or library.is_unknown(id)]
    names += [library.id_to_piece(id) for id in ids if library.is_byte(id)]
    return lambda text: None if any(name in text for name in names) else list(library.encode(text))


def compare(ours: Any, theirs: Callable[[str], list[int] | None], strings: Iterable[str]) -> dict[str, int]:
    """Figures; the first three differences go to stderr."""
    figures = {"strings": 0, "differences": 0, "differences_without_u2581": 0}
    for text in strings:
        expected = theirs(text)
        if expected is None:
            continue
        figures["strings"] += 1
        found = ours.encode(text, add_special=False, parse_special=True)
        if found == expected:
            continue
        figures["differences"] += 1
        figures["differences_without_u2581"] += SPACE_MARK not in text
        if SPACE_MARK not in text and figures["differences_without_u2581"] <= 3:
            print(
                f"{text!r}\n  {ours.encode(text, add_special=False, parse_special=True)}\n  {expected}", file=sys.stderr
            )
    return figures


def check(folder: Path, n_rows: int, n_strings: int, seed: int) -> dict[str, Any]:
    """Figures of one folder."""
    found = Folder(folder)
    config = Config(found.optional_json("config.json"), folder / "config.json")
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = read_vocabulary(found, config, n_rows)
    seconds = time.perf_counter() - start
    ours = tokenizer_of(keys, folder)
    known = (text for text in texts(seed, list(ours.special_texts[:200]), real_texts([])) if not NEW.search(text))
    strings = [text.encode(errors="replace").decode() for text in itertools.islice(known, n_strings)]
    figures: dict[str, Any] = {"folder": folder.name, "tokens": n_rows, "model": keys["tokenizer.ggml.model"]}
    figures |= {"pre": keys["tokenizer.ggml.pre"], "seconds_to_convert": round(seconds, 1)}
    if (folder / "tokenizer.json").exists():
        figures["tokenizers"] = compare(ours, of_tokenizers(folder / "tokenizer.json"), strings)
    if (folder / "tokenizer.model").exists() and importlib.util.find_spec("sentencepiece"):
        figures["sentencepiece"] = compare(ours, of_sentencepiece(folder / "tokenizer.model"), strings)
    return figures


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER:ROWS")
    parser.add_argument("--strings", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.folders:
        folder, _, rows = name.rpartition(":")
        results.append(check(Path(folder), int(rows), options.strings, options.seed))
        print(results[-1], file=sys.stderr)
    record = {"seed": options.seed, "vocabularies": results, "machine": machine()}
    print(json.dumps(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    counts = [each.get(library, {}) for each in results for library in ("tokenizers", "sentencepiece")]
    return 1 if any(count.get("differences_without_u2581") for count in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
