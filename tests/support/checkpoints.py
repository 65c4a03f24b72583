"""Checkpoints as they are published on Hugging Face, written by other code than what reads them."""

import json
import struct
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

BITLINEAR = {"quant_method": "bitnet"}
DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16, "U8": np.uint8, "I8": np.int8}
DTYPES |= {
    "BOOL": np.bool_,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
}

TEXT = (Path(__file__).parents[1] / "benchmarks" / "sample.txt").read_text()
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog 12345 times.",
    "  Naïve café\n\n\t你好 🙂 don't WE'RE",
    "def f(x):\n    return x ** 2",
    TEXT[:2000],
]
SPECIAL = ["<|begin|>", "<|end|>", "<|eot_id|>"]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """tensors: (dtype, values) by name; those of BF16 and of eight bits as their bits."""
    entries, data = {}, b""
    for name, (dtype, values) in tensors.items():
        raw = values.astype(DTYPES[dtype]).tobytes()
        entries[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def packed(trits: np.ndarray) -> np.ndarray:
    """Row by row, as transformers packs."""
    n = len(trits) // 4
    out = np.zeros((n, trits.shape[1]), dtype=np.uint8)
    for row, codes in enumerate(trits + 1):
        out[row % n] |= codes.astype(np.uint8) << 2 * (row // n)
    return out


def byte_level(folder: Path, pattern: str | None = LLAMA3, ignore_merges: bool = True) -> tokenizers.Tokenizer:
    """Byte-level BPE as llama 3 has it, or with GPT-2's own words."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    made.save(str(folder / "tokenizer.json"))
    return made


def sentence_piece(folder: Path) -> tokenizers.Tokenizer:
    """As a SentencePiece model is converted: a merge for each way to make a token, in the order of their scores."""
    words = "▁the ▁of ▁and ▁to er in on en re at es or ▁a ▁s ▁th ▁de he th nd qu ick lazy ▁do ing is".split()
    pieces = sorted({char for text in (*TEXTS[:3], *words) for char in text.replace(" ", "▁")} - {"你", "🙂"})
    scored = [word for word in words if word not in pieces]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored, *pieces]
    ids = {token: id for id, token in enumerate(tokens)}
    cuts = [(token[:at], token[at:]) for token in scored for at in range(1, len(token))]
    merges = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
    made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    return made
