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
    "U32": np.uint32,
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


def gemma4_vocabulary(folder: Path) -> tokenizers.Tokenizer:
    """As Gemma 4's: merges of characters with "▁" for spaces, lines apart, runs of line ends as tokens."""
    words = "▁the ▁of ▁and ▁to er in on en re at es or ▁a ▁s ▁th ▁de he th nd qu ick lazy ▁do ing is".split()
    pieces = sorted({char for text in (*TEXTS[:3], *words) for char in text.replace(" ", "▁")} - {"你", "🙂"})
    scored = [word for word in words if word not in pieces]
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>"]
    marks += ["<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*marks, *byte_tokens, "\n", "\n\n", "\n\n\n", *scored, *(each for each in pieces if each != "\n")]
    ids = {token: id for id, token in enumerate(tokens)}
    cuts = [(token[:at], token[at:]) for token in scored for at in range(1, len(token))]
    merges = [("\n", "\n"), ("\n\n", "\n"), *(pair for pair in cuts if pair[0] in ids and pair[1] in ids)]
    made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(marks)
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    made.save(str(folder / "tokenizer.json"))
    return made


def write_packed_llama(
    folder: Path, rng: np.random.Generator, tables: tuple[str, ...] = ("model.embed_tokens", "lm_head")
) -> None:
    """A checkpoint as Falcon3-1.58bit is published, with llama 3's kind of vocabulary. tables: one if they are tied."""
    byte_level(folder)
    config = {"model_type": "llama", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    config |= {
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": len(tables) < 2,
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": BITLINEAR}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    tensors: dict[str, tuple[str, np.ndarray]] = {"model.norm.weight": ("F32", np.ones(256))}
    for name in tables:
        tensors[f"{name}.weight"] = ("F16", rng.standard_normal((640, 256)) * 0.1)
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = ("F32", np.ones(256))
        shapes = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256)}
        shapes |= {"self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256)}
        for module, shape in (shapes | {"mlp.down_proj": (256, 512)}).items():
            name = f"model.layers.{layer}.{module}"
            tensors[f"{name}.weight"] = ("U8", packed(rng.integers(-1, 2, shape, dtype=np.int8)))
            tensors[f"{name}.weight_scale"] = ("F32", np.array([16.0]))
    write_safetensors(folder / "model.safetensors", tensors)
