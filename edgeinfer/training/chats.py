"""Saved conversations as texts to train on: a head learns what its model really writes for somebody.

Online Speculative Decoding (Liu et al., arXiv:2310.07177) trains the drafter on what was asked of it. Here this is done
afterwards, from the files that `/save` and sessions write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgeinfer.chat import Conversation
from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.engine import Engine
from edgeinfer.message import Message
from edgeinfer.record_cache import record_name
from edgeinfer.training.author import MIN_ANSWER, encode
from edgeinfer.training.corpus import HELD_SHARE, SETTINGS, Corpus, Part, TrainingText, check_settings, save_texts

_ENDING = ".jsonl"
FOLDER = "chats"  # in the working folder
_CHATS_OF_SHARD = 16


def read_chats(folder: Path, engine: Engine, least: int = 2) -> list[list[Message]]:
    """The conversations of a folder, each once, in an order that does not depend on the names of files.

    least: how many there must be, 1 or 2: to train, one is held out. Raises InvalidArgument where there are fewer, and,
    naming the file, for one that is no conversation. Raises OSError.
    """
    found: dict[str, list[Message]] = {}
    for path in sorted(folder.rglob(f"*{_ENDING}")):
        conversation = Conversation(engine)
        conversation.load(path)
        if any(message["role"] == "assistant" for message in conversation.messages):
            found.setdefault(_digest(conversation.messages), conversation.messages)
    if len(found) < least:
        wanted = "at least two conversations" if least == 2 else "a conversation"
        raise InvalidArgument(
            f"--chats {folder} must have {wanted} with answers, as `/save` writes them, in files *{_ENDING}: found "
            f"{len(found) or 'none'}"
        )
    return [found[digest] for digest in sorted(found)]


def texts_of_chat(engine: Engine, messages: Sequence[Message], context: int) -> list[TrainingText]:
    """A text for each answer: all messages before it in the chat template, then the answer with its end token.

    The tokens are those that the model emitted, where the file has them; an answer of another origin is encoded.
    Answers are cut at the end of the context, and those of which fewer than 8 tokens are left are left out.
    """
    texts: list[TrainingText] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number == 0:
            continue
        before = [{"role": each["role"], "content": each["content"]} for each in messages[:number]]
        try:
            prompt = encode(engine, before)
        except EdgeInferError:  # a template may refuse an order of roles
            continue
        answer = _answer_tokens(engine, message)[: context - len(prompt)]
        if len(answer) >= MIN_ANSWER:
            texts.append(TrainingText(np.array(prompt + answer, dtype=np.int32), len(prompt), is_greedy=False))
    return texts


def write_chats(folder: Path, engine: Engine, chats: Path, target: str, context: int, n_held: int) -> None:
    """Write the texts of saved conversations as the parts "train" and "held" of a folder, unless they are there.

    target: its fingerprint.  n_held: most conversations to hold out, 3 % of them otherwise, and at least one. Raises
    InvalidArgument where the folder has texts of others, and as read_chats.
    """
    found = read_chats(chats, engine)
    digests = [_digest(messages) for messages in found]
    facts = {"target": target, "context": context, "n_held": n_held, "chats": record_name(digests)}
    check_settings(folder / SETTINGS, facts)
    n_out = min(n_held, max(1, round(HELD_SHARE * len(found))))  # in the order of digests, which is as good as drawn
    parts: dict[Part, list[list[Message]]] = {"held": found[:n_out], "train": found[n_out:]}
    for part, conversations in parts.items():
        save_chats(Corpus(folder, part), engine, conversations, context)


def save_chats(corpus: Corpus, engine: Engine, conversations: Sequence[Sequence[Message]], context: int) -> None:
    """Write the texts of conversations as the shards of a corpus, unless they are there; see texts_of_chat."""
    for number, first in enumerate(range(0, len(conversations), _CHATS_OF_SHARD)):
        if not corpus.shard(number).exists():
            group = conversations[first : first + _CHATS_OF_SHARD]
            texts = [text for each in group for text in texts_of_chat(engine, each, context)]
            save_texts(corpus.shard(number), texts)


def _answer_tokens(engine: Engine, message: Message) -> list[int]:
    """The tokens of an answer; the last one is an end token."""
    stop_ids = engine.tokenizer.stop_ids
    tokens = list(message.get("tokens") or engine.tokenizer.encode(message["content"], add_special=False))
    if stop_ids and tokens and tokens[-1] not in stop_ids:
        tokens.append(engine.tokenizer.eos_id if engine.tokenizer.eos_id in stop_ids else min(stop_ids))
    return tokens


def _digest(messages: Sequence[Message]) -> str:
    """A digest of roles and contents. Its order is as good as random."""
    return hashlib.sha256(repr([(each["role"], each["content"]) for each in messages]).encode()).hexdigest()
