"""OpenAI's dialect: what is asked and answered, in whole and as a stream."""

import json

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 3}


def answer(engine, **options):
    """The completion of the same chat without a server."""
    chat = engine.chat()
    chat.messages = [{"role": "user", "content": "hello"}]
    stream = chat.stream(**({"max_tokens": 8, "seed": 3} | options))
    for _ in stream:
        pass
    return stream.completion


# ---- Chats -----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_with_the_text_of_the_engine(server, engine):
    reply = server.post(CHAT, HELLO | {"model": "tiny", "user": "me", "metadata": {"a": "b"}})
    said = reply.json
    expected = answer(engine)
    assert said["object"] == "chat.completion" and said["model"] == "tiny" and said["id"].startswith("chatcmpl-")
    (choice,) = said["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None and choice["index"] == 0
    usage = said["usage"]
    assert usage["prompt_tokens"] == expected.usage.prompt_tokens and usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert reply.headers["x-edgeinfer-ignored"] == "metadata, user"
    assert reply.headers["x-request-id"].startswith("req-")
    assert "access-control-allow-origin" not in reply.headers


def test_a_stream_follows_the_rules_of_the_wire(server, engine):
    reply = server.post(CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}})
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1 and all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 8
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert all(choice["delta"]["content"] for choice in choices[1:-1])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["delta"] == {}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == answer(engine).text


def test_a_stream_has_no_usage_that_nobody_asked_for(server):
    chunks = server.post(CHAT, HELLO | {"stream": True}).events[:-1]
    assert chunks and all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


def test_samples_are_those_of_the_seeds_that_follow(server, engine):
    said = server.ask(CHAT, **HELLO, n=3, temperature=1.5)
    texts = [choice["message"]["content"] for choice in said["choices"]]
    assert texts == [answer(engine, seed=3 + i, temperature=1.5).text for i in range(3)]
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    assert said["usage"]["completion_tokens"] == 24
    assert said["usage"]["prompt_tokens"] == answer(engine).usage.prompt_tokens
    chunks = [each["choices"][0] for each in server.post(CHAT, HELLO | {"n": 2, "stream": True}).events[:-1]]
    for number in range(2):
        own = [chunk for chunk in chunks if chunk["index"] == number]
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "length"
        said = "".join(chunk["delta"].get("content") or "" for chunk in own)
        assert said == answer(engine, seed=3 + number).text


def test_log_probabilities_are_those_of_the_engine(server, engine):
    expected = answer(engine, logprobs=2).logprobs
    said = server.ask(CHAT, **HELLO, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in said] == [each.logprob for each in expected]
    assert [bytes(each["bytes"]) for each in said] == [engine.tokenizer.token_bytes(each.token) for each in expected]
    assert [[top["logprob"] for top in each["top_logprobs"]] for each in said] == [
        [value for _, value in each.top] for each in expected
    ]
    chunks = server.post(CHAT, HELLO | {"stream": True, "logprobs": True, "top_logprobs": 2}).events[:-1]
    streamed = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == said


def test_parameters_reach_the_engine(server, engine):
    text = answer(engine, max_tokens=20).text
    stop = text[3:5]
    said = server.ask(CHAT, **{**HELLO, "max_tokens": 20}, stop=[stop])["choices"][0]
    assert said["message"]["content"] == text[: text.index(stop)] and said["finish_reason"] == "stop"
    first = answer(engine, temperature=0).tokens[0]
    biased = server.ask(CHAT, **HELLO, temperature=0, logit_bias={str(first): -100})["choices"][0]["message"]
    assert biased["content"] == answer(engine, temperature=0, logit_bias={first: -100}).text
    limited = server.ask(CHAT, model="tiny", messages=HELLO["messages"], seed=3, max_tokens=9, max_completion_tokens=2)
    assert limited["usage"]["completion_tokens"] == 2


def test_content_may_be_parts_that_are_texts_and_null_is_not_given(server, engine):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    said = server.ask(
        CHAT, model="tiny", messages=parts, max_tokens=8, seed=3, stop=None, temperature=None, tools=[], n=None
    )
    assert said["choices"][0]["message"]["content"] == answer(engine).text


@pytest.mark.parametrize(
    "change, param, code",
    [
        ({"reasoning_effort": "low"}, "reasoning_effort", "unknown_parameter"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "unknown_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"n": 0}, "n", None),
        ({"n": 65}, "n", None),
        ({"n": True}, "n", None),
        ({"stream": "yes"}, "stream", None),
        ({"temperature": "hot"}, None, None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"messages": []}, "messages", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            None,
        ),
        ({"messages": [{"role": "user", "content": "a"}] * 2049}, "messages", None),
        ({"model": 3}, "model", None),
        ({"model": None}, "model", None),
        ({"logit_bias": {"999999": 1}}, None, None),
        ({"response_format": {"type": "xml"}}, "response_format", None),
        ({"stop": [""]}, None, None),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_what_is_wrong_is_refused_by_name(server, change, param, code):
    reply = server.post(CHAT, HELLO | change)
    error = reply.json["error"]
    assert reply.status == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_prompt_is_never_cut(server, engine):
    long = [{"role": "user", "content": "hello there " * 400}]
    reply = server.post(CHAT, {"model": "tiny", "messages": long})
    error = reply.json["error"]
    assert reply.status == 400 and error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == engine.n_ctx
    assert server.post(CHAT, {"model": "tiny", "messages": long, "stream": True}).status == 400


def test_a_model_is_found_by_its_names_alone(server):
    for name in ("tiny", "Tiny", "tiny:latest", "tiny.gguf", "Tiny Alias"):
        assert server.post(CHAT, HELLO | {"model": name, "max_tokens": 1}).status == 200
    reply = server.post(CHAT, HELLO | {"model": "gpt-4"})
    assert reply.status == 404 and reply.json["error"]["code"] == "model_not_found"


# ---- What an answer may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_keeps_to_a_schema_a_regex_and_choices(ending, stream):
    def said(**options):
        reply = ending.post(CHAT, HELLO | {"max_tokens": 60, "stream": stream} | options)
        assert reply.status == 200, reply.body
        if not stream:
            return reply.json["choices"][0]["message"]["content"]
        return "".join(each["choices"][0]["delta"].get("content") or "" for each in reply.events[:-1])

    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert isinstance(json.loads(said(response_format=described))["a"], bool)
    assert set(said(regex="[ab]{4}")) <= set("ab")
    assert said(choices=["red", "blue"]) in ("red", "blue")
    assert said(grammar='root ::= "yes" | "no"') in ("yes", "no")


@pytest.mark.parametrize(
    "wrong", [{"regex": "(" * 5000}, {"regex": "a{"}, {"grammar": "start: x"}, {"schema": {"$ref": "http://x"}}]
)
def test_a_constraint_that_cannot_be_read_is_refused_and_the_server_goes_on(ending, wrong):
    reply = ending.post(CHAT, HELLO | wrong)
    assert reply.status == 400 and reply.json["error"]["message"]
    assert "token that ends a text" not in reply.json["error"]["message"]
    assert ending.get("/health").status == 200


# ---- Completions -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_completed_as_by_the_engine(server, engine):
    expected = engine.generate("hello", max_tokens=8, seed=3)
    said = server.ask(TEXT, model="tiny", prompt="hello", max_tokens=8, seed=3)
    assert said["object"] == "text_completion" and said["choices"][0]["text"] == expected.text
    tokens = server.ask(TEXT, model="tiny", prompt=engine.tokenize("hello"), max_tokens=8, seed=3)
    assert tokens["choices"][0]["text"] == expected.text
    chunks = server.post(TEXT, {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 3, "stream": True}).events
    assert chunks[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1] if chunk["choices"][0]["finish_reason"]] == [
        "length"
    ]


def test_several_prompts_and_samples_have_an_index_each(server, engine):
    said = server.ask(TEXT, model="tiny", prompt=["hello", "there"], n=2, max_tokens=4, seed=3)
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2, 3]
    expected = [
        engine.generate(prompt, max_tokens=4, seed=seed).text for prompt in ("hello", "there") for seed in (3, 4)
    ]
    assert [choice["text"] for choice in said["choices"]] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_token_is_among_the_log_probabilities(ending, stream):
    """lm-eval takes all but the last token for the prompt, whatever token was drawn."""
    engine = ending.engine
    stop, prompt = min(engine.tokenizer.stop_ids), engine.tokenize("hello there")
    (score,) = engine.score(prompt, [[stop]])
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "logprobs": 1, "echo": True, "stream": stream}
    reply = ending.post(TEXT, {**asked, "logit_bias": {str(stop): 100}})
    choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens, values = ([each for part in found for each in part[name]] for name in ("tokens", "token_logprobs"))
    assert choices[-1]["finish_reason"] == "stop" and "".join(choice["text"] for choice in choices) == "hello there"
    assert tokens == [engine.tokenizer.name(id) for id in (*prompt, stop)] and values[-1] == score.logprob
    plain = engine.generate(prompt, max_tokens=1, logprobs=0, logit_bias=dict.fromkeys(engine.tokenizer.stop_ids, -100))
    assert plain.end_logprob is None and engine.generate(prompt, logit_bias={stop: 100}).end_logprob is None


@pytest.mark.parametrize("n_top", [0, 2])
def test_the_token_that_was_drawn_is_always_among_the_alternatives(server, n_top):
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 3, "temperature": 1.5, "logprobs": n_top}
    found = server.ask(TEXT, **asked)["choices"][0]["logprobs"]
    drawn = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    assert all(top[token] == value and len(top) in (n_top, n_top + 1) for token, value, top in drawn)
    assert len(found["tokens"]) == 8 and (n_top or all(len(top) == 1 for top in found["top_logprobs"]))


def test_echo_with_log_probabilities_scores_the_prompt(server, engine):
    tokens = engine.tokenize("hello there is one more")
    (score,) = engine.score(tokens[:1], [tokens[1:]])
    reply = server.ask(
        TEXT, model="tiny", prompt=[tokens, tokens[:1]], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    choice, short = reply["choices"]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:-1] == [each.logprob for each in score.tokens]
    is_greedy = [
        value == max(top.values())
        for value, top in zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True)
    ]
    assert is_greedy == [each.top[0][0] == each.token for each in score.tokens]
    text = choice["text"]
    assert text == engine.detokenize(tokens) + engine.generate(tokens, max_tokens=1, temperature=0).text
    assert [
        text[at : at + len(token)] for at, token in zip(found["text_offset"], found["tokens"], strict=True)
    ] == found["tokens"]
    assert len(short["logprobs"]["tokens"]) == 2
    nothing = server.ask(TEXT, model="tiny", prompt=tokens, max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert len(nothing["logprobs"]["tokens"]) == len(tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [["a"]]},
        {"suffix": 3},
        {"best_of": 3},
        {"logprobs": 5, "echo": True},
    ],
)
def test_a_completion_that_cannot_be_had_is_refused(server, change):
    assert server.post(TEXT, {"model": "tiny", "prompt": "hello", "max_tokens": 2} | change).status == 400


@pytest.mark.parametrize(
    "given", [{"response_format": {"type": "json_object", "schema": {"const": "42"}}}, {"json_schema": {"const": "42"}}]
)
def test_a_schema_as_llama_cpp_has_it_holds(ending, given):
    said = ending.ask(CHAT, **(HELLO | given | {"max_tokens": 40}))
    assert json.loads(said["choices"][0]["message"]["content"]) == "42"


@pytest.mark.parametrize("schema", [123, {"type": 123}, {"type": "hiccup"}])
def test_a_schema_beside_json_object_is_never_ignored(ending, schema):
    assert ending.post(CHAT, HELLO | {"response_format": {"type": "json_object", "schema": schema}}).status == 400


ROUTERS = {  # as vllm-router 0.1.17 and sglang-router write each request anew
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}


def test_what_routers_add_changes_nothing(server):
    plain = server.ask(CHAT, **HELLO)
    assert server.ask(CHAT, **(HELLO | ROUTERS))["choices"] == plain["choices"]
    for name, value in ROUTERS.items():
        if name not in ("logprobs", "ignore_eos", "continue_final_message"):
            assert server.post(CHAT, HELLO | {name: not value}).status == 400, name


@pytest.mark.parametrize("is_chat", [True, False])
def test_no_token_ends_a_text_where_ends_are_ignored(ending, is_chat):
    path, body = (CHAT, HELLO) if is_chat else (TEXT, {"model": "tiny", "prompt": "hello"})
    body = body | {"max_tokens": 200, "seed": 3, "temperature": 1.0}
    assert ending.ask(path, **body)["usage"]["completion_tokens"] < 200
    endless = ending.ask(path, **(body | {"ignore_eos": True}))
    assert endless["usage"]["completion_tokens"] == 200 and endless["choices"][0]["finish_reason"] == "length"
    assert ending.post(path, body | {"ignore_eos": "yes"}).status == 400


# ---- Models and the rest ---------------------------------------------------------------------------------------------


def test_models_are_listed_with_their_context(server, engine):
    listed = server.get("/v1/models").json
    assert listed["object"] == "list" and [each["id"] for each in listed["data"]] == ["tiny"]
    assert listed["data"][0]["context_length"] == engine.n_ctx
    assert listed["data"][0]["aliases"] == ["Tiny Alias", "tiny.gguf"]
    assert server.get("/v1/models/tiny").json == listed["data"][0]
    assert server.get("/v1/models/other/name").status == 404


def test_what_is_not_there_says_so_in_json(server):
    embeddings = server.post("/v1/embeddings", {"input": "x"})
    assert embeddings.status == 501 and "embeddings" in embeddings.json["error"]["message"]
    assert server.get("/nothing").json["error"]["code"] == "not_found"
    reply = server.get(CHAT)
    assert reply.status == 405 and reply.headers["allow"] == "POST" and reply.json["error"]


def test_health_and_metrics(server):
    assert server.get("/health").json == {"status": "ok"}
    server.ask(CHAT, **HELLO)
    server.wait(lambda: not server.texts)
    text = server.get("/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(values["edgeinfer_completion_tokens_total"]) >= 8
    assert values["edgeinfer_places"] == "4" and values["edgeinfer_texts_running"] == "0"
    assert float(values["edgeinfer_time_to_first_token_seconds_count"]) >= 1
    assert any(name.startswith("edgeinfer_memory_planned_bytes{") for name in values)


def test_the_log_has_no_prompts(server):
    n_lines = len(server.log)
    server.ask(CHAT, **HELLO | {"messages": [{"role": "user", "content": "a secret thing"}]})
    server.wait(lambda: any("/v1/chat/completions 200" in line for line in server.log[n_lines:]))
    assert "secret" not in "".join(server.log)


def test_every_path_is_described(server):
    document = server.get("/openapi.json").json
    assert document["openapi"] == "3.0.3" and "/v1/models/{model}" in document["paths"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(HELLO) <= set(chat["properties"]) and chat["required"] == ["model", "messages"]
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(names) == len(set(names)) > 25
