"""Files that llama.cpp loads although something in them is odd: they load here too, with the same tokens."""

import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import gguf
import pytest
from gguf_mutations import number, read_layout, text, texts, with_values
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import EdgeInferError
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

TEXTS = ["hello world", "the theatre", "a  b\n\ncé日", "<|im_start|>user\nhi<|im_end|>"]
N_BPE, N_SPM = 300, 400
SCORES = [0.0 if id < 259 else -float(id) for id in range(N_SPM)]
T = "tokenizer.ggml."

# Of a byte-level vocabulary, by what is odd: the keys that are, and what the warning says, if anything.
BPE: dict[str, tuple[dict[str, bytes | None], str]] = {
    "eos outside": ({T + "eos_token_id": number("I", 5000)}, "eos_token_id is 5000, and there are 300 tokens"),
    "eos just outside": ({T + "eos_token_id": number("I", N_BPE)}, "eos_token_id is 300"),
    "bos outside": ({T + "bos_token_id": number("I", 2**31)}, "bos_token_id is 2147483648"),
    "eot outside": ({T + "eot_token_id": number("I", 5000)}, "eot_token_id is 5000"),
    "padding outside": ({T + "padding_token_id": number("I", 5000)}, ""),
    "Latin-1 in the name": ({"general.name": text("Modèle".encode("latin-1"))}, "key 'general.name' value is no UTF-8"),
    "Latin-1 in a license": ({"general.license": text(b"\xa9 2024")}, "key 'general.license' value is no UTF-8"),
    "Latin-1 in tags": ({"general.tags": texts(b"ok", b"fran\xe7ais")}, "'general.tags' value.1. is no UTF-8"),
    "Latin-1 in the template": (
        {"tokenizer.chat_template": text(b"{% for m in messages %}\xe9{{ m.content }}{% endfor %}")},
        "chat_template' value is no UTF-8",
    ),
    "a surrogate in a name": ({"general.author": text(b"\xed\xa0\x80")}, "'general.author' value is no UTF-8"),
    "NaN that nothing reads": ({"general.some": number("f", math.nan)}, ""),
    "infinity that nothing reads": ({"general.some": number("d", math.inf)}, ""),
    "NaN in an array": ({"general.some": number("f", math.nan, 1.0)}, ""),
    "an empty array": ({"general.some": number("i", array=True)}, ""),
    "an empty text": ({"general.name": text(b"")}, ""),
    "a key of all types": ({f"general.of_{code}": number(code, 1) for code in "BbHhIifQqd?"}, ""),
    "no pre-tokeniser": ({T + "pre": None}, "pre is missing: the default pre-tokeniser is used"),
    "an empty pre-tokeniser": ({T + "pre": text(b"")}, "pre is missing"),
    "no token types": ({T + "token_type": None}, ""),
    "token types out of range": ({T + "token_type": number("i", *[9] * 256, *[1] * 41, 3, 3, 3)}, ""),
    "more token types than tokens": ({T + "token_type": number("i", *[1] * 297, 3, 3, 3, 1, 1)}, ""),
    "a truth value of 2": ({T + "add_bos_token": b"\7\0\0\0\2"}, ""),
    "merges without a space": ({T + "merges": texts(b"h e", b"he", b"he l")}, ""),
    "merges of three": ({T + "merges": texts(b"h e", b"h e l", b"l l")}, ""),
    "merges that make no token": ({T + "merges": texts(b"h e", b"q z", b"l l")}, ""),
    "merges that are no UTF-8": ({T + "merges": texts(b"h e", b"q \xff")}, "merges' value.1. is no UTF-8"),
    "an empty template": ({"tokenizer.chat_template": text(b"")}, ""),
    "a template by its name": ({"tokenizer.chat_template": text(b"chatml")}, ""),
    "a template that is a number": ({"tokenizer.chat_template": number("I", 3)}, "must be a string: found 3"),
    "a context of 2^31": ({"llama.context_length": number("I", 2**31)}, ""),
    "sizes for each layer": (
        {"llama.attention.head_count": number("I", 4, 4), "llama.feed_forward_length": number("I", 288, 288)},
        "",
    ),
    "an alignment of 64": ({"general.alignment": number("I", 64)}, ""),
}
SPM: dict[str, tuple[dict[str, bytes | None], str]] = {
    "bos outside": ({T + "bos_token_id": number("I", 5000)}, "bos_token_id is 5000"),
    "eos outside": ({T + "eos_token_id": number("I", 2**32 - 2)}, "eos_token_id is 4294967294"),
    "no scores": ({T + "scores": None}, "scores is missing: all tokens count alike"),
    "more scores than tokens": ({T + "scores": number("f", *SCORES, 1.0, math.nan)}, ""),
    "infinite scores": ({T + "scores": number("f", *SCORES[:-9], *[-math.inf] * 9)}, ""),
    "a separator outside": ({T + "seperator_token_id": number("I", 5000)}, ""),
}
# And by an edit of the tokens: the id, its new text, what its bytes are then.
TOKENS = {
    "no UTF-8": (350, b"\xe9\xff", b"\xe9\xff"),
    "half a character": (350, b"\xe2\x96", b"\xe2\x96"),
    "empty": (350, b"", b"[EMPTY_350]"),
}
# What llama.cpp refuses, too.
REFUSED = {
    "unknown pre-tokeniser": {T + "pre": text(b"foo")},
    "fewer token types than tokens": {T + "token_type": number("i", *[1] * 200)},
    "no tokens": {T + "tokens": None},
    "no merges": {T + "merges": None},
    "another architecture": {"general.architecture": text(b"LLAMA")},
    "an architecture that is no UTF-8": {"general.architecture": text(b"llam\xe9")},
    "no alignment": {"general.alignment": number("I", 33)},
    "an array of arrays": {"general.some": b"\t\0\0\0\t\0\0\0" + (1).to_bytes(8, "little") + bytes(16)},
}
# What llama.cpp reads and computes nonsense with: refused, with the key.
NONSENSE = {
    "llama.attention.layer_norm_rms_epsilon": number("f", math.nan),
    "llama.rope.freq_base": number("f", math.nan),
    "llama.rope.scaling.factor": number("f", math.nan),
}

CHILD = """
import ctypes, json, sys
from llama_cpp import llama_cpp as lib
silent = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(silent, None)
paths, texts = json.loads(sys.argv[1])
for path in paths:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        print(json.dumps(None), flush=True)
        continue
    vocab = lib.llama_model_get_vocab(model)
    ids = []
    for text in texts:
        buffer, raw = (ctypes.c_int32 * 256)(), text.encode()
        ids.append(list(buffer[: lib.llama_tokenize(vocab, raw, len(raw), buffer, 256, False, True)]))
    print(json.dumps([lib.llama_vocab_bos(vocab), lib.llama_vocab_eos(vocab), ids]), flush=True)
    lib.llama_model_free(model)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "bpe": write_tiny_model(folder / "bpe.gguf", "llama", "F16", n_vocab=N_BPE).read_bytes(),
        "spm": write_tiny_model(folder / "spm.gguf", "llama", "F16", n_vocab=N_SPM, vocabulary="spm").read_bytes(),
    }


@pytest.fixture(scope="module")
def written(plain: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of all cases, by kind of vocabulary and name."""
    folder = tmp_path_factory.mktemp("lenient")
    found = {}
    for kind, cases in (("bpe", BPE), ("spm", SPM)):
        for index, (name, (values, _)) in enumerate(cases.items()):
            found[f"{kind}: {name}"] = path = folder / f"{kind}-{index}.gguf"
            path.write_bytes(with_values(plain[kind], values))
    for index, (name, (id, token, _)) in enumerate(TOKENS.items()):
        found[f"token: {name}"] = path = folder / f"token-{index}.gguf"
        tokens = tokens_of(plain["spm"], path)
        tokens[id] = token
        path.write_bytes(with_values(plain["spm"], {T + "tokens": texts(*tokens)}))
    return found


def tokens_of(data: bytes, scratch: Path) -> list[bytes]:
    scratch.write_bytes(data)
    field = gguf.GGUFReader(scratch).fields[T + "tokens"]
    return [bytes(field.parts[index]) for index in field.data]


@pytest.fixture(scope="module")
def theirs(written: dict[str, Path], llama_cpp: ModuleType) -> dict[str, tuple[int, int, list[list[int]]]]:
    """(bos, eos, ids of the texts) by llama.cpp, in a process of its own."""
    arguments = json.dumps([list(map(str, written.values())), TEXTS])
    run = subprocess.run([sys.executable, "-c", CHILD, arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(zip(written, map(json.loads, run.stdout.splitlines()), strict=True))


def opened(path: Path) -> tuple[Tokenizer, str]:
    """The tokeniser of a file, and what warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ModelFile.open(path) as file:
            tokenizer = Tokenizer.from_file(file)
        with edgeinfer.load(path, n_ctx=32, n_threads=1, draft="none") as engine:
            engine.generate("Hi", max_tokens=1)
    assert all(issubclass(each.category, RuntimeWarning) and "\n" not in str(each.message) for each in caught)
    return tokenizer, "\n".join(str(each.message) for each in caught)


CASES = {f"bpe: {name}": warning for name, (_, warning) in BPE.items()}
CASES |= {f"spm: {name}": warning for name, (_, warning) in SPM.items()}


@pytest.mark.parametrize("case", CASES)
def test_what_is_odd_and_does_no_harm_is_loaded(case: str, written: dict[str, Path]) -> None:
    _, warned = opened(written[case])
    assert bool(CASES[case]) == bool(warned) and re.search(CASES[case], warned), warned


@pytest.mark.parametrize("case", [*CASES, *(f"token: {name}" for name in TOKENS)])
def test_its_tokens_are_those_of_llama_cpp(
    case: str, written: dict[str, Path], theirs: dict[str, tuple[int, int, list[list[int]]]]
) -> None:
    assert theirs[case] is not None  # it loads the file
    tokenizer, _ = opened(written[case])
    assert [tokenizer.encode(text, add_special=False, parse_special=True) for text in TEXTS] == theirs[case][2]
    if case.startswith("spm"):  # elsewhere llama.cpp takes Falcon's id 11 for what is missing
        assert (tokenizer.bos_id, tokenizer.eos_id) == tuple(theirs[case][:2])


@pytest.mark.parametrize("case", TOKENS)
def test_an_odd_token_stays_as_its_bytes(case: str, written: dict[str, Path]) -> None:
    tokenizer, _ = opened(written[f"token: {case}"])
    id, _, content = TOKENS[case]
    assert tokenizer.token_bytes(id) == content


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_refuses_is_refused(case: str, plain: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_values(plain["bpe"], REFUSED[case]))
    with pytest.raises(EdgeInferError) as caught:
        edgeinfer.load(path, n_ctx=32, backend="native")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("key", NONSENSE)
def test_nan_in_a_key_that_is_read_is_refused_by_its_name(key: str, plain: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_values(plain["bpe"], {key: NONSENSE[key]}))
    with pytest.raises(EdgeInferError, match=f"{key} must be .*found nan"):
        edgeinfer.load(path, n_ctx=32, backend="native")


def test_nan_among_scores_is_refused(plain: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(with_values(plain["spm"], {T + "scores": number("f", *SCORES[:300], math.nan, *SCORES[301:])}))
    with pytest.raises(EdgeInferError, match="scores must be an array of numbers: found 'NaN for token 300'"):
        edgeinfer.load(path, n_ctx=32, backend="native")


def test_a_chat_uses_the_template_that_a_file_names(written: dict[str, Path]) -> None:
    for case in ("bpe: a template by its name", "bpe: an empty template"):
        with edgeinfer.load(written[case], n_ctx=64, n_threads=1, draft="none") as engine:
            rendered = engine.template.render([{"role": "user", "content": "kept"}])
        assert rendered == "<|im_start|>user\nkept<|im_end|>\n<|im_start|>assistant\n"


def test_the_mutations_of_these_tests_are_read_as_they_are_written(plain: dict[str, bytes]) -> None:
    again = with_values(plain["bpe"], {})
    assert again == plain["bpe"] and read_layout(again).entries.keys() >= {T + "tokens"}
