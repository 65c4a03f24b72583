"""The vocabulary of a Hugging Face checkpoint as the keys of a GGUF file.

Three kinds are converted: byte-level BPE and BPE with byte fallback of tokenizer.json, and tokenizer.model, which is
SentencePiece's. The result is compared with the library `tokenizers` on many texts and refused if it differs.
"""

from edgeinfer.exporters.vocabulary.convert import read_vocabulary

__all__ = ["read_vocabulary"]
