"""llama.cpp's own dialect."""

import json

import pytest
from gguf import TokenType
from http_server import running
from tiny_models import write_tiny_model

import edgeinfer

OPTIONS = {"n_predict": 8, "seed": 3}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_a_prompt_is_completed(server, engine):
    expected = engine.generate("hello", max_tokens=8, seed=3)
    said = server.ask("/completion", prompt="hello", **OPTIONS, cache_prompt=True, id_slot=-1, return_tokens=True)
    assert said["content"] == expected.text and said["tokens"] == list(expected.tokens) and said["stop"] is True
    assert said["stop_type"] == "limit" and said["tokens_predicted"] == 8 and said["truncated"] is False
    assert said["tokens_evaluated"] == expected.usage.prompt_tokens and said["generation_settings"]["seed"] == 3
    assert said["timings"]["predicted_n"] == 8
    *pieces, last = server.post("/completions", {"prompt": "hello", "stream": True, **OPTIONS}).events
    assert "".join(piece["content"] for piece in pieces) == expected.text and last["stop"] is True
    assert [token for piece in pieces for token in piece["tokens"]] == list(expected.tokens)
    assert all(piece["stop"] is False for piece in pieces) and last["content"] == ""


def test_prompts_of_texts_and_tokens(server, engine):
    tokens = engine.tokenize("hello")
    mixed = [*tokens, " there"]
    said = server.ask("/completion", prompt=["hello", mixed, tokens], **OPTIONS)
    joined = [*tokens, *engine.tokenize(" there", add_special=False)]
    expected = [engine.generate(prompt, max_tokens=8, seed=3).text for prompt in (tokens, joined, tokens)]
    wrapped = server.ask("/completion", prompt=[{"prompt_string": "hello"}, tokens], **OPTIONS)
    assert [each["content"] for each in wrapped] == expected[:1] * 2
    media = {"prompt": {"prompt_string": "hello", "multimodal_data": ["x"]}} | OPTIONS
    assert server.post("/completion", media).status == 400
    assert [each["content"] for each in said] == expected and [each["index"] for each in said] == [0, 1, 2]


def test_stop_words_probabilities_and_ends(server, engine):
    text = engine.generate("hello", max_tokens=20, seed=3).text
    stop = text[3:5]
    said = server.ask("/completion", prompt="hello", n_predict=20, seed=3, stop=[stop, "never"])
    assert (said["content"], said["stop_type"], said["stopping_word"]) == (text[: text.index(stop)], "word", stop)
    expected = engine.generate("hello", max_tokens=8, seed=3, logprobs=2).logprobs
    found = server.ask("/completion", prompt="hello", n_probs=2, **OPTIONS)["completion_probabilities"]
    assert [each["logprob"] for each in found] == [each.logprob for each in expected]
    assert [[top["id"] for top in each["top_logprobs"]] for each in found] == [
        [id for id, _ in each.top] for each in expected
    ]
    first = expected[0].token
    biased = server.ask("/completion", prompt="hello", **OPTIONS, logit_bias=[[first, False]], return_tokens=True)
    assert biased["generation_settings"]["logit_bias"] == [{"token": first, "bias": None}]
    assert biased["tokens"][0] != first


def test_texts_to_tokens_and_back(server, engine):
    text = "hello <|im_end|> é"
    assert server.ask("/tokenize", content=text)["tokens"] == engine.tokenize(text, add_special=False)
    plain = server.ask("/tokenize", content=text, parse_special=False)["tokens"]
    assert plain == engine.tokenize(text, add_special=False, parse_special=False)
    assert server.ask("/detokenize", tokens=plain)["content"] == text
    pieces = server.ask("/tokenize", content=text, with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == engine.tokenize(text, add_special=False)
    said = b"".join(
        each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces
    )
    assert said.decode() == text
    assert server.post("/detokenize", {"tokens": [10**9]}).status == 400


def test_texts_to_tokens_as_vllm_has_it(server, engine):
    said = server.ask("/tokenize", prompt="hello", add_special_tokens=False)
    assert said["tokens"] == engine.tokenize("hello", add_special=False) and said["count"] == len(said["tokens"])
    assert server.ask("/tokenize", prompt="hello")["tokens"] == engine.tokenize("hello")
    assert server.ask("/detokenize", tokens=said["tokens"])["prompt"] == "hello"
    info = server.get("/tokenizer_info").json
    assert info["eos_token"] == engine.tokenizer.name(engine.tokenizer.eos_id)
    assert info["chat_template"] == engine.template.source


def test_the_template_is_applied(server, engine):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert server.ask("/apply-template", messages=messages)["prompt"] == engine.template.render(messages)


def test_props_and_slots(server, engine):
    props = server.get("/props").json
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == engine.n_ctx
    assert props["chat_template"] == engine.template.source and "/" not in props["model_path"]
    server.wait(lambda: not server.texts)
    slots = server.get("/slots").json
    assert [slot["is_processing"] for slot in slots] == [False] * 4


@pytest.mark.parametrize(
    "change, status",
    [
        ({"prompt": []}, 400),
        ({"prompt": [["a", None]]}, 400),
        ({"mirostat": 2}, 400),
        ({"mirostat": 0}, 200),
        ({"samplers": ["top_k"]}, 400),
        ({"unknown": 1}, 400),
        ({"n_predict": "many"}, 400),
        ({"prompt": "hello there " * 400}, 400),
        ({"model": "other"}, 404),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_errors_have_the_form_of_llama_server(server, change, status):
    reply = server.post("/completion", {"prompt": "hello", **OPTIONS} | change)
    assert reply.status == status
    if status != 200:
        assert reply.json["error"]["code"] == status and reply.json["error"]["message"]


def test_a_model_without_marks_fills_nothing_in(server):
    assert server.post("/infill", {"input_prefix": "a", "input_suffix": "b"}).status == 501
    assert server.get("/props").json["can_infill"] is False


def test_a_model_with_marks_fills_in(tmp_path):
    special = dict.fromkeys(MARKS, TokenType.CONTROL)
    path = write_tiny_model(tmp_path / "fim.gguf", special=special, n_ctx_train=256, n_vocab=300)
    with edgeinfer.load(path, backend="native", draft="none") as engine, running(engine) as server:
        first, last, middle = map(engine.tokenizer.token_id, MARKS)

        def tokens(text):
            return engine.tokenize(text, add_special=False)

        prompt = [first, *tokens("hello"), last, *tokens("world"), middle]
        expected = engine.generate(prompt, max_tokens=8, seed=3).text
        assert server.ask("/infill", input_prefix="hello", input_suffix="world", **OPTIONS)["content"] == expected
        asked = {"model": "tiny", "prompt": "hello", "suffix": "world"}
        said = server.ask("/v1/completions", **asked, max_tokens=8, seed=3)
        assert said["choices"][0]["text"] == expected
        options = {"num_predict": 8, "seed": 3}
        assert server.ask("/api/generate", **asked, stream=False, options=options)["response"] == expected
        assert "insert" in server.ask("/api/show", model="tiny")["capabilities"]
        extra = [{"filename": "a.py", "text": "one"}]
        more = [*tokens("a.py\none\n"), first, *tokens("hello"), last, *tokens("world"), middle, *tokens("more")]
        said = server.ask(
            "/infill", input_prefix="hello", input_suffix="world", input_extra=extra, prompt="more", **OPTIONS
        )
        assert said["content"] == engine.generate(more, max_tokens=8, seed=3).text


@pytest.mark.parametrize("bias", [[3], [[3]], "a", [[1.5, 1]], {"a": "b"}, [[3, "a"]]], ids=str)
def test_a_bias_that_is_none_is_refused(server, bias):
    assert server.post("/completion", {"prompt": "hello", "logit_bias": bias}).status == 400
