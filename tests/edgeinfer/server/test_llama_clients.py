"""What llama.cpp's clients ask for beside an answer: progress, times, prompts, metrics by its names."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from http_server import SECONDS, held, running
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.server.pace import Pace
from edgeinfer.server.served import Served
from edgeinfer.server.server import Shown

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 3}
OPTIONS = {"n_predict": 8, "seed": 3}
LONG = "the quick brown fox " * 12
TIMES = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


@pytest.fixture(scope="module")
def pieces(model):
    """A server that reads prompts in pieces of 32 tokens."""
    with edgeinfer.load(model, backend="native", parallel=2, draft="none", n_batch=32) as engine:
        engine.tokenizer.stop_ids = frozenset()
        with running(engine) as found:
            yield found


def streams(server, tag, **more):
    """Parts of streams of three dialects with the same prompt."""
    bodies = {
        CHAT: {"model": "tiny", "messages": [{"role": "user", "content": f"{tag} {LONG}"}], "max_tokens": 4},
        TEXT: {"model": "tiny", "prompt": f"{tag} {LONG}", "max_tokens": 4},
        "/completion": {"prompt": f"{tag} {LONG}", "n_predict": 4},
        "/v1/responses": {"model": "tiny", "input": f"{tag} {LONG}", "max_output_tokens": 4},
    }
    for path, body in bodies.items():
        reply = server.post(path, {**body, "seed": 3, "stream": True, **more})
        assert reply.status == 200, reply.body
        yield path, [each for each in reply.events if each != "[DONE]"]


# ---- Progress and times ----------------------------------------------------------------------------------------------


def test_the_progress_of_a_prompt_is_told_where_it_is_asked_for(pieces):
    for path, parts in streams(pieces, "progress", return_progress=True):
        told = [each["prompt_progress"] for each in parts if "prompt_progress" in each]
        assert told[0]["processed"] == told[0]["cache"] and told[0]["time_ms"] == 0, path
        assert told[-1]["processed"] == told[-1]["total"] and told[-1]["time_ms"] > 0
        steps = [each["processed"] for each in told]
        assert steps == sorted(set(steps)) and {each["total"] for each in told} == {told[0]["total"]}
        if not told[0]["cache"]:
            assert len(told) > 2
        places = ["prompt_progress" in each for each in parts]
        n_before = {CHAT: 1, "/v1/responses": 2}.get(path, 0)  # what a stream begins with
        assert not any(places[:n_before]) and all(places[n_before : n_before + len(told)])
        if path == "/v1/responses":
            assert all(each["type"] == "response.in_progress" for each in parts if "prompt_progress" in each)
    again = next(parts for _, parts in streams(pieces, "progress", return_progress=True))
    told = [each["prompt_progress"] for each in again if "prompt_progress" in each]
    assert told[0]["cache"] > 0 and len(told) == 2


def test_nobody_is_told_who_did_not_ask(pieces):
    for _, parts in streams(pieces, "silent"):
        assert not any("prompt_progress" in each for each in parts)
        assert not any("timings" in each for each in parts if not each.get("stop"))
    for path in (CHAT, TEXT):
        body = HELLO if path == CHAT else {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        assert not {"timings", "__verbose"} & pieces.ask(path, **body).keys()


def test_times_come_with_each_part_where_they_are_asked_for(pieces):
    for path, parts in streams(pieces, "times", timings_per_token=True, return_progress=True):
        timed = [each["timings"] for each in parts if "timings" in each]
        assert all(set(each) >= TIMES and all(value >= 0 for value in each.values()) for each in timed), path
        counts = [each["predicted_n"] for each in timed]
        assert counts[0] == 0 and counts[-1] == 4 and counts == sorted(counts) and len(set(counts)) > 2
        assert timed[0]["prompt_n"] == 0 and timed[0]["prompt_ms"] == 0 and timed[-1]["prompt_ms"] > 0
    said = pieces.ask(CHAT, **HELLO, timings_per_token=True)
    assert said["timings"]["predicted_n"] == 8 == said["usage"]["completion_tokens"]
    first = pieces.post(CHAT, HELLO | {"stream": True, "timings_per_token": True}).events[0]
    assert "timings" not in first


def test_times_of_one_token_are_no_rate():
    pace = Pace(10, began=0.0)
    assert pace.timings()["prompt_ms"] == 0
    pace.n_cached = pace.n_read = 4
    pace.read(0.5)
    assert pace.n_read == 7 and pace.progress()["processed"] == 7
    pace.read(1.0)
    pace.made(1)
    first = pace.first
    assert first == pace.now
    times = pace.timings()
    pace.made(2)
    assert pace.first == first and pace.n_made == 3
    assert times["prompt_n"] == 6 and times["cache_n"] == 4 and times["predicted_per_second"] == 0
    pace.first, pace.now, pace.n_made = 1.0, 3.0, 5
    times = pace.timings()
    assert (times["predicted_ms"], times["predicted_per_second"], times["predicted_per_token_ms"]) == (2000, 2, 500)
    assert times["prompt_per_second"] == 6 and times["prompt_per_token_ms"] == pytest.approx(1000 / 6)


@pytest.mark.parametrize("name", ["timings_per_token", "return_progress", "verbose"])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/completion", "/v1/responses"])
def test_flags_that_are_none_are_refused(server, path, name):
    body = {**HELLO, "prompt": "hello", "input": "hello"}
    own = {CHAT: ("model", "messages"), TEXT: ("model", "prompt"), "/v1/responses": ("model", "input")}
    body = {key: body[key] for key in own.get(path, ("prompt",))} | {name: "yes"}
    assert server.post(path, body).status == 400


# ---- Prompts ---------------------------------------------------------------------------------------------------------


def test_the_prompt_is_shown_where_it_is_asked_for(server, engine):
    prompt = engine.template.render(HELLO["messages"])
    shown = server.ask(CHAT, **HELLO, verbose=True)["__verbose"]
    assert shown["prompt"] == prompt and shown["params"]["seed"] == 3
    assert shown["prompt_tokens"] == engine.template.encode(engine.tokenizer, HELLO["messages"])
    events = server.post(CHAT, HELLO | {"stream": True, "verbose": True}).events
    (last,) = [each for each in events if "__verbose" in each]
    assert last["choices"][0]["finish_reason"] == "length" and last["__verbose"]["prompt"] == prompt
    said = server.ask(TEXT, model="tiny", prompt="hello", max_tokens=2, verbose=True)
    assert said["__verbose"]["prompt"] == engine.detokenize(engine.tokenize("hello"))
    with running(engine, shown=Shown(prompts=True)) as all_shown:
        assert all_shown.ask(CHAT, **HELLO)["__verbose"]["prompt"] == prompt
        assert "__verbose" not in all_shown.ask(CHAT, **HELLO, verbose=False)


def test_the_tokens_of_a_prompt_are_counted(server, engine):
    n = len(engine.template.encode(engine.tokenizer, HELLO["messages"]))
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert server.ask(path, model="tiny", messages=HELLO["messages"])["input_tokens"] == n
    assert server.post("/v1/chat/completions/input_tokens", {"model": "tiny"}).status == 400


def test_an_answer_that_is_begun_is_gone_on_with_in_every_dialect(server, engine):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]
    prompt = engine.template.render(messages[:1]) + "Well"
    expected = engine.generate(prompt, max_tokens=8, seed=3).text
    assert server.ask(CHAT, **HELLO | {"messages": messages})["choices"][0]["message"]["content"] == expected
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert server.ask(CHAT, **HELLO | {"messages": messages}, **more)["choices"][0]["message"]["content"] == expected
    said = server.ask("/v1/messages", model="tiny", messages=messages, max_tokens=8, seed=3)
    assert said["content"][0]["text"] == expected
    said = server.ask("/api/chat", model="tiny", messages=messages, stream=False, options={"num_predict": 8, "seed": 3})
    assert said["message"]["content"] == expected
    assert server.ask("/apply-template", messages=messages)["prompt"] == prompt


@pytest.mark.parametrize(
    "more, n_messages",
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, 2),
        ({"continue_final_message": True}, 1),
        ({"continue_final_message": False}, 2),
        ({"add_generation_prompt": False}, 1),
        ({"continue_final_message": "yes"}, 2),
    ],
)
def test_an_answer_that_is_begun_and_is_not_is_refused(server, more, n_messages):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}][:n_messages]
    assert server.post(CHAT, HELLO | {"messages": messages} | more).status == 400


def test_a_template_is_applied_without_the_beginning_of_an_answer(server, engine):
    messages = HELLO["messages"]
    without = engine.template.render(messages, add_generation_prompt=False)
    assert server.ask("/apply-template", messages=messages, add_generation_prompt=False)["prompt"] == without
    assert server.post("/apply-template", {"messages": messages, "add_generation_prompt": 1}).status == 400
    assert server.post("/apply-template", {"messages": messages, "chat_template_kwargs": [1]}).status == 400


def test_templates_are_told_whether_to_reason(model):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
    )
    with edgeinfer.load(model, backend="native", parallel=2, draft="none", chat_template=template) as engine:
        engine.tokenizer.stop_ids = frozenset()
        with running(engine) as server:
            messages, off = HELLO["messages"], {"enable_thinking": False}
            assert server.ask("/apply-template", messages=messages)["prompt"].endswith("[assistant]")
            said = server.ask("/apply-template", messages=messages, chat_template_kwargs=off)["prompt"]
            assert said.endswith("<think>\n\n</think>")
            n_on, n_off = (len(engine.tokenize(text)) for text in ("[user]hello[assistant]", said))
            ollama = {"model": "tiny", "messages": messages, "stream": False}
            usages = [
                server.ask(CHAT, **HELLO)["usage"]["prompt_tokens"],
                server.ask(CHAT, **HELLO, chat_template_kwargs=off)["usage"]["prompt_tokens"],
                server.ask("/api/chat", **ollama)["prompt_eval_count"],
                server.ask("/api/chat", **ollama, think=False)["prompt_eval_count"],
                server.ask("/v1/messages", model="tiny", messages=messages, max_tokens=2)["usage"]["input_tokens"],
            ]
            assert usages == [n_on, n_off, n_on, n_off, n_on]
            assert server.get("/props").json["chat_template"] == template
            assert server.ask("/api/show", model="tiny")["template"] == template
            refused = server.post(CHAT, HELLO | {"chat_template_kwargs": {"messages": []}})
            assert refused.status == 400 and "gets no value named 'messages'" in refused.json["error"]["message"]


# ---- /completion -----------------------------------------------------------------------------------------------------


def test_fields_of_an_answer_are_chosen_by_their_paths(server):
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "none", "content/none"]
    said = server.ask("/completion", prompt="hello", **OPTIONS, response_fields=fields)
    assert said == {"content": said["content"], "generation_settings/n_predict": 8, "timings/predicted_n": 8}
    whole = server.ask("/completion", prompt="hello", **OPTIONS, response_fields=[])
    assert whole["content"] == said["content"] and len(whole) > 10
    assert server.post("/completion", {"prompt": "hello", "response_fields": "content"}).status == 400


def test_the_bias_of_a_text_is_that_of_its_tokens(server, engine):
    ids = engine.tokenize("the fox", add_special=False)
    for given in ([["the fox", False]], {"the fox": False}):
        said = server.ask("/completion", prompt="hello", **OPTIONS, logit_bias=given)
        banned = said["generation_settings"]["logit_bias"]
        assert sorted(each["token"] for each in banned) == sorted(set(ids))
        assert all(each["bias"] is None for each in banned)
    said = server.ask("/completion", prompt="hello", **OPTIONS, logit_bias={"65": 2})
    assert said["generation_settings"]["logit_bias"] == [{"token": 65, "bias": 2.0}]


def test_tokens_of_an_answer_come_where_they_are_asked_for(server, engine):
    expected = list(engine.generate("hello", max_tokens=8, seed=3).tokens)
    assert server.ask("/completion", prompt="hello", **OPTIONS)["tokens"] == []
    assert server.ask("/completion", prompt="hello", **OPTIONS, return_tokens=True)["tokens"] == expected
    parts = server.post("/completion", {"prompt": "hello", **OPTIONS, "stream": True}).events
    assert [token for part in parts[:-1] for token in part["tokens"]] == expected


def test_probabilities_after_sampling_are_those_of_the_engine(server, engine):
    asked = {"prompt": "hello", **OPTIONS, "n_probs": 3, "post_sampling_probs": True, "temperature": 0.7}
    sampling = {"max_tokens": 8, "seed": 3, "temperature": 0.7, "logprobs": 3, "sampled_logprobs": True}
    expected = engine.generate("hello", **sampling).logprobs
    found = server.ask("/completion", **asked)["completion_probabilities"]
    assert [each["prob"] for each in found] == [math.exp(each.logprob) for each in expected]
    assert [[(top["id"], top["prob"]) for top in each["top_probs"]] for each in found] == [
        [(id, math.exp(value)) for id, value in each.top] for each in expected
    ]
    assert all("logprob" not in each and 0 < each["prob"] <= 1 for each in found)
    assert "completion_probabilities" not in server.ask("/completion", **asked | {"n_probs": 0})
    refused = server.post("/completion", asked | {"grammar": 'root ::= "a"'})
    assert refused.status == 400 and "sampled_logprobs" in refused.json["error"]["message"]


def test_settings_tell_the_limit(server):
    settings = server.ask("/completion", prompt="hello", **OPTIONS)["generation_settings"]
    assert settings["n_predict"] == settings["max_tokens"] == 8 and settings["seed"] == 3


@pytest.mark.parametrize("extra", [[{}], [{"filename": "a"}], [{"filename": 3, "text": "b"}], [{"text": 3}], ["a"], {}])
def test_files_beside_a_text_to_fill_in_need_a_text(server, extra):
    reply = server.post("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": extra or [extra]})
    assert reply.status == 400


def test_a_server_has_a_limit_for_who_names_none(engine):
    unlimited = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    with running(engine, predict=3) as server:
        for more, n in (({}, 3), ({"n_predict": 5}, 5), ({"n_predict": -1}, 508)):
            said = server.ask("/completion", prompt="hello", seed=3, **more)
            assert said["tokens_predicted"] == n and said["truncated"] is (n == 508)
        assert server.ask(CHAT, **unlimited)["usage"]["completion_tokens"] == 3
        assert server.ask(CHAT, **HELLO)["usage"]["completion_tokens"] == 8
        assert server.ask(TEXT, model="tiny", prompt="hello", n_predict=5)["usage"]["completion_tokens"] == 5


# ---- What a server shows ---------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it(server):
    long = {"messages": [{"role": "user", "content": "hello there " * 400}], "model": "tiny"}
    own, openai = (server.post(path, long).json["error"] for path in ("/chat/completions", CHAT))
    assert own["type"] == "exceed_context_size_error" and openai["type"] == "invalid_request_error"
    assert own["code"] == openai["code"] == "context_length_exceeded" and own["n_ctx"] == openai["n_ctx"] == 512
    said = server.post("/completion", {"prompt": "hello there " * 400}).json["error"]["message"]
    assert "exceeds the available context size" in said and "512" in said


def test_page_and_slots_can_be_hidden_and_tags_shown(engine):
    with running(engine, shown=Shown(page=False, slots=False, tags=["chat", "small"])) as server:
        assert server.get("/").status == 404 and server.get("/slots").status == 501
        assert server.get("/v1/models").json["data"][0]["tags"] == ["chat", "small"]
    with running(engine) as server:
        assert server.get("/").status == 200 and "tags" not in server.get("/v1/models").json["data"][0]
        (slot, *_) = server.get("/slots").json
        assert slot["next_token"] == [{"has_next_token": False, "n_decoded": 0, "n_remain": -1}]


def test_slots_tell_what_a_text_may_still_get(engine):
    body = {"prompt": "hello", "n_predict": 60, "seed": 3}
    with running(engine) as server, ThreadPoolExecutor(1) as threads:
        with held(engine, 5) as gate:
            asked = threads.submit(server.post, "/completion", body)
            server.wait(lambda: gate.holds)
            (slot,) = (each for each in server.get("/slots").json if each["is_processing"])
            gate.let()
        assert asked.result(SECONDS).json["tokens_predicted"] == 60
    assert slot["next_token"] == [{"has_next_token": True, "n_decoded": 5, "n_remain": 55}]


def test_metrics_have_the_names_of_llama_cpp_too(model):
    with edgeinfer.load(model, backend="native", parallel=2, draft=["suffix"]) as engine:
        engine.tokenizer.stop_ids = frozenset()
        with running(engine) as server:
            said = [server.ask("/completion", prompt=LONG, n_predict=n, temperature=0)["timings"] for n in (8, 40)]
            server.wait(lambda: not server.texts)
            reply = server.get("/metrics")
    assert int(reply.headers["process-start-time-unix"]) == server.server.started
    text = reply.body.decode()
    values = {name: float(value) for name, value in re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE)}
    assert all(f"# HELP llamacpp:{name} " in text and f"# TYPE llamacpp:{name} " in text for name in values)
    assert values["prompt_tokens_total"] == sum(each["prompt_n"] for each in said)
    assert values["prompt_tokens_cached_total"] == sum(each["cache_n"] for each in said) > 0
    assert values["tokens_predicted_total"] == 48 and values["requests_processing"] == 0
    assert 0 < values["n_decode_total"] <= 50 and values["n_busy_slots_per_decode"] == 1
    assert values["n_tokens_max"] == said[0]["prompt_n"] + said[0]["cache_n"] + 40
    assert values["spec_decode_num_draft_tokens_total"] == sum(each["draft_n"] for each in said)
    assert values["spec_decode_num_accepted_tokens_total"] == sum(each["draft_n_accepted"] for each in said)
    assert values["spec_decode_num_drafts_total"] <= values["spec_decode_num_draft_tokens_total"]
    rate = 46 / values["tokens_predicted_seconds_total"]
    assert values["predicted_tokens_seconds"] == pytest.approx(rate, rel=1e-4)


# ---- Fingerprints ----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_version_the_file_and_the_template(server, model, tmp_path):
    of_chat, of_text = server.ask(CHAT, **HELLO), server.ask(TEXT, model="tiny", prompt="hello", max_tokens=2)
    assert of_chat["system_fingerprint"] == of_text["system_fingerprint"] and re.fullmatch(
        "b[0-9a-f]{12}", of_chat["system_fingerprint"]
    )
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    other = write_tiny_model(tmp_path / "other.gguf", n_ctx_train=512, seed=9)

    def fingerprint(path, source="t"):
        return Served(SimpleNamespace(path=path, template=SimpleNamespace(source=source)), "tiny").fingerprint

    assert fingerprint(model) == fingerprint(copy) != fingerprint(other)
    assert fingerprint(model, "u") != fingerprint(model)
    assert fingerprint(tmp_path / "gone").startswith("b")
    chunks = server.post(CHAT, HELLO | {"stream": True}).events[:-1]
    assert {json.dumps(each["system_fingerprint"]) for each in chunks} == {json.dumps(of_chat["system_fingerprint"])}
