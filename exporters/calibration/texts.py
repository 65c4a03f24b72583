"""The texts on which importance matrices and losses are measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.backends.native.model import NativeModel
from edgeinfer.common.errors import ContextOverflow, InvalidArgument, ModelFileError, TemplateError
from edgeinfer.common.user_text import sample_of
from edgeinfer.exporters.calibration.prompts import HELD_OUT, PROMPTS
from edgeinfer.exporters.calibration.running import greedy_tokens
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.calibration_text import TEXT

CHUNK_TOKENS = 512  # of a text that is read from a file: each chunk is a text of its own
ANSWER_TOKENS = 64
MOST_TOKENS = 32 * CHUNK_TOKENS  # of a file; more change an importance matrix little
DEFAULT = "the model's own answers to built-in prompts"


def check_tokens(file: ModelFile) -> list[int]:
    """Some hundred tokens of prose and code, which are not those of calibration, by the tokenizer of a model.

    Where a file has no tokenizer, tokens all over the vocabulary. Raises ModelFileError for one that makes no tokens.
    """
    try:
        tokenizer = Tokenizer.from_file(file)
    except ModelFileError:
        n_vocab = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 1
        return [7919 * n % n_vocab for n in range(1, 400)]
    tokens = tokenizer.encode(TEXT)
    if len(tokens) < 2:
        raise ModelFileError(f"{file.path}: its tokenizer makes {len(tokens)} tokens of a page of text: it is damaged")
    return tokens


def texts_of_file(path: Path, file: ModelFile) -> list[list[int]]:
    """The text of a file, in chunks of tokens. Raises InvalidArgument for a text that has too few, OSError."""
    text = sample_of(path)
    tokens = Tokenizer.from_file(file).encode(text)[:MOST_TOKENS]
    if len(tokens) < 16:
        raise InvalidArgument(f"{path}: must have at least 16 tokens to calibrate on: found {len(tokens)}")
    return [tokens[first : first + CHUNK_TOKENS] for first in range(0, len(tokens), CHUNK_TOKENS)]


def own_answers(model: NativeModel, file: ModelFile, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Each built-in prompt with the model's own answer, as tokens. n_ctx of the model: at least `answer_context`."""
    tokenizer = Tokenizer.from_file(file)
    texts = [asked(file, tokenizer, prompt) for prompt in prompts]
    answers = greedy_tokens(model, texts, ANSWER_TOKENS, tokenizer.stop_ids)
    return [[*text, *answer] for text, answer in zip(texts, answers, strict=True)]


def answer_context(file: ModelFile) -> int:
    """Tokens of the longest prompt with its answer."""
    tokenizer = Tokenizer.from_file(file)
    return ANSWER_TOKENS + max(len(asked(file, tokenizer, prompt)) for prompt in (*PROMPTS, *HELD_OUT))


def asked(file: ModelFile, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt as the model's template has it, or as plain text where it has none."""
    try:
        template = ChatTemplate.from_file(file, tokenizer)
        return template.encode(tokenizer, [{"role": "user", "content": prompt}])
    except (TemplateError, ModelFileError, ContextOverflow):
        return tokenizer.encode(f"{prompt}\n\n")
