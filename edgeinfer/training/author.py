"""Answers of the target as it will run: the native engine writes them, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer.chat import Message
from edgeinfer.completion import Completion
from edgeinfer.engine import Engine
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.training.corpus import Request, Text


class NativeAuthor:
    """Writes with an engine, whose drafts make it faster and change no token.

    max_tokens: of an answer.  Prompts that leave no room for an answer of 8 tokens in engine.n_ctx are left out.
    """

    n_prompts = 16

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine = engine
        self._max_tokens = max_tokens

    def write(self, requests: Sequence[Request]) -> list[Text]:
        """See Author.write."""
        return [text for request in requests for text in self._conversation(request)]

    def _conversation(self, request: Request) -> Iterator[Text]:
        """The answers to the turns of a prompt, each text with all that went before it."""
        messages: list[Message] = []
        for turn in request.prompt.turns:
            messages.append({"role": "user", "content": turn})
            prompt = encode(self._engine, messages)
            if len(prompt) + MIN_ANSWER > self._engine.n_ctx:
                return
            completion = self._engine.generate(prompt, max_tokens=self._max_tokens, params=request.params)
            answer = ended(completion, self._engine.tokenizer)
            yield Text(np.array(prompt + answer, dtype=np.int32), len(prompt), request.params.is_greedy)
            messages.append({"role": "assistant", "content": completion.text})


MIN_ANSWER = 8


def encode(engine: Engine, messages: list[Message]) -> list[int]:
    """The tokens of a conversation that the assistant is to continue."""
    return engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)


def ended(completion: Completion, tokenizer: Tokenizer) -> list[int]:
    """The tokens of an answer, with the end-of-text token behind them where the target drew one."""
    stop = tokenizer.eos_id if tokenizer.eos_id in tokenizer.stop_ids else min(tokenizer.stop_ids, default=None)
    has_stop = completion.finish_reason == "stop" and stop is not None
    return [*completion.tokens, stop] if has_stop and stop is not None else list(completion.tokens)
