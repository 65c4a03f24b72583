"""/tokenize, /detokenize, /apply-template, /props and /slots."""

from __future__ import annotations

from typing import Any, cast

from edgeinfer.chat import Conversation, PromptOptions
from edgeinfer.common.arguments import shown
from edgeinfer.scheduling.sequence import Sequence
from edgeinfer.server.about import abilities
from edgeinfer.server.dialects.llama_cpp.reading import text_of
from edgeinfer.server.dialects.openai.messages import read_chat_parts, read_template_options
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.fill_in import marks_of
from edgeinfer.server.problem import Problem
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server


async def tokenize(server: Server, exchange: Exchange) -> None:
    """Token ids of a text, with their texts where asked for. vLLM calls the text `prompt`."""
    body = await exchange.json()
    is_vllm = "prompt" in body and "content" not in body
    text = text_of(body, "prompt" if is_vllm else "content")
    adds = body.get("add_special_tokens") is not False if is_vllm else body.get("add_special") is True
    exchange.watch()
    async with server.models.use(_model(body)) as served, server.running(exchange, 0) as run:
        add_special, parse_special = adds, body.get("parse_special") is not False
        tokens: Any = await run.call(
            lambda: served.engine.tokenize(text, add_special=add_special, parse_special=parse_special)
        )
        if body.get("with_pieces") is True:
            tokens = [{"id": id, "piece": _piece(served, id)} for id in tokens]
        more = {"count": len(tokens), "max_model_len": served.engine.n_ctx} if is_vllm else {}
    await exchange.reply_json({"tokens": tokens, **more})


async def detokenize(server: Server, exchange: Exchange) -> None:
    """The text of token ids."""
    body = await exchange.json()
    tokens = body.get("tokens")
    async with server.models.use(_model(body)) as served:
        n_vocab = served.engine.tokenizer.n_vocab
        if not isinstance(tokens, list) or not all(type(id) is int and 0 <= id < n_vocab for id in tokens):
            raise Problem(400, f"tokens must be ids 0 to {n_vocab - 1}: found {shown(tokens)}", param="tokens")
        text = served.engine.detokenize(tokens)
        await exchange.reply_json({"content": text, "prompt": text})  # the second as vLLM names it


async def tokenizer_info(server: Server, exchange: Exchange) -> None:
    """Special tokens and the template, as vLLM names them, so that lm-eval needs no tokenizer of its own."""
    async with server.models.use(None) as served:
        engine, tokenizer = served.engine, served.engine.tokenizer
        names = {
            key: None if id is None else tokenizer.name(id)
            for key, id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        }
        template = engine.template.source if abilities(engine).chats else None
        found = {
            **names,
            "pad_token": names["eos_token"],
            "chat_template": template,
            "add_bos_token": tokenizer.add_bos,
        }
        await exchange.reply_json({**found, "vocab_size": tokenizer.n_vocab, "model_max_length": engine.n_ctx})


async def apply_template(server: Server, exchange: Exchange) -> None:
    """The prompt that messages make."""
    body = await exchange.json()
    messages, tools = read_chat_parts(body, server.limits)
    options = cast(PromptOptions, {**tools, **read_template_options(body)})
    begins = body.get("add_generation_prompt", True)
    if not isinstance(begins, bool):
        raise Problem(400, "add_generation_prompt must be true or false", param="add_generation_prompt")
    exchange.watch()
    async with server.models.use(_model(body)) as served, server.running(exchange, 0) as run:

        def render() -> str:
            conversation = Conversation(served.engine)
            conversation.messages = messages
            return served.engine.detokenize(conversation.prompt(add_generation_prompt=begins, **options))

        prompt = await run.call(render)
    await exchange.reply_json({"prompt": prompt})


async def props(server: Server, exchange: Exchange) -> None:
    """What the model and the server are set to."""
    async with server.models.use(None) as served:
        engine, can = served.engine, abilities(served.engine)
        tokenizer = engine.tokenizer
        await exchange.reply_json(
            {
                "default_generation_settings": {"n_ctx": engine.n_ctx, "params": _params(served)},
                "total_slots": engine.scheduler.n_parallel,
                "model_alias": served.id,
                "model_path": engine.path.name,
                "chat_template": engine.template.source if can.chats else "",
                "bos_token": "" if tokenizer.bos_id is None else tokenizer.name(tokenizer.bos_id),
                "eos_token": "" if tokenizer.eos_id is None else tokenizer.name(tokenizer.eos_id),
                "modalities": {"vision": False, "audio": False},
                "can_infill": marks_of(engine) is not None,
                "build_info": "edgeinfer",
                "is_sleeping": False,
            }
        )


async def slots(server: Server, exchange: Exchange) -> None:
    """The places of texts, without anything of their prompts. Raises Problem where the server does not show them."""
    if not server.shown.slots:
        raise Problem(501, "this server does not show its slots: it was started with --no-slots", code="not_supported")
    found: list[dict[str, Any]] = []
    for served in server.models.loaded:
        running = [each for each in served.engine.scheduler.texts if each.session is not None]
        for number in range(served.engine.scheduler.n_parallel):
            text = running[number] if number < len(running) else None
            found.append(
                {
                    "id": len(found),
                    "model": served.id,
                    "n_ctx": served.engine.n_ctx,
                    "is_processing": text is not None,
                    "n_prompt_tokens": 0 if text is None else text.n_prompt,
                    "next_token": [_progress(text)],
                }
            )
    if found and exchange.query.get("fail_on_no_slot") and all(each["is_processing"] for each in found):
        raise Problem(503, "no slot available", retry_after=1)
    await exchange.reply_json(found)


def _progress(text: Sequence | None) -> dict[str, Any]:
    """Tokens that a text has and may still get; -1 where nothing runs."""
    if text is None:
        return {"has_next_token": False, "n_decoded": 0, "n_remain": -1}
    return {"has_next_token": not text.has_ended, "n_decoded": text.n_ready, "n_remain": max(0, text.n_left)}


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) and model else None


def _piece(served: Served, id: int) -> str | list[int]:
    """The text of a token, or its bytes where they are none."""
    data = served.engine.tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _params(served: Served) -> dict[str, Any]:
    params = served.engine.default_params
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
    own = {"n_predict": -1, "seed": -1 if params.seed is None else params.seed}
    return {name: getattr(params, name) for name in names} | own
