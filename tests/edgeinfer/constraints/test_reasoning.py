"""Models that reason: the constraint begins behind the reasoning, with drafts and without."""

import pytest
from constrained import PERSON, check_answer
from drafting import FixedCosts
from gguf import TokenType
from scripted import emitted
from tiny_models import CHATML, write_tiny_model

from edgeinfer.constraints.constraint import Constraints
from edgeinfer.constraints.options import wanted_of

pytestmark = pytest.mark.usefixtures("grammar")

CONTROL, USER_DEFINED = TokenType.CONTROL, TokenType.USER_DEFINED
SEES = "{%- if false -%}<think></think>{%- endif -%}"  # the template knows the tags
OPENED = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
CHANNELS = (
    "{%- for m in messages -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endfor -%}"
    "{%- if false -%}<|channel|>{%- endif -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"
)
THINK = {"<think>": USER_DEFINED, "</think>": USER_DEFINED}
MARKS = dict.fromkeys(("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"), CONTROL)
NAMED = {"<|channel>": USER_DEFINED, "<channel|>": USER_DEFINED}
RECIPIENTS = CHANNELS.replace("<|channel|>", "<|eom|><|eot|> to=self <atem:function_calls>")
MODELS = {
    "tags": (CHATML + SEES, THINK),
    "controls": (CHATML + SEES, dict.fromkeys(THINK, CONTROL)),
    "opened": (OPENED, THINK),
    "opened, spelt": (OPENED, {}),
    "channels": (CHANNELS, MARKS),
    "named": (CHATML + "{%- if false -%}<|channel>thought<channel|>{%- endif -%}", NAMED),
    "recipients": (RECIPIENTS, dict.fromkeys(("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"), USER_DEFINED)),
    "plain": (CHATML, {}),
}


@pytest.fixture(scope="module")
def open_model(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def open_(name, draft="none"):
        template, special = MODELS[name]
        path = folder / f"{name}.gguf"
        if not path.exists():
            write_tiny_model(path, template=template, special=special, n_ctx_train=1024)
        return loaded(path, draft=draft)

    return open_


def state_of(engine, options):
    """A state for the answer to a message, and its prompt."""
    messages = [{"role": "user", "content": "q"}]
    prompt = engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)
    output = engine.output_format.parser(engine.output_format.opened_by(prompt, "q", str))
    wanted = wanted_of(options)
    return Constraints(engine.tokenizer).read(wanted).state(wanted, len(prompt), output), prompt


@pytest.mark.parametrize(
    "model, before",
    [
        ("tags", "<think>\nhm {}\n</think>"),
        ("tags", "<think></think>"),
        ("tags", "<think>a</think>\n"),
        ("controls", "<think>what is ~</think>?</think>"),
        ("opened", "hm</think>"),
        ("opened", "hm</think>\n"),
        ("opened, spelt", "hm</think>"),
        ("channels", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("channels", "<|channel|>final<|message|>"),
        ("named", "<|channel>thought\nhm<channel|>"),
        ("named", ""),
        ("recipients", " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>"),
        ("recipients", " to=user<|message|>"),
        ("plain", ""),
        ("tags", ""),
    ],
)
def test_the_constraint_begins_behind_the_reasoning(open_model, model, before):
    engine = open_model(model)
    state, prompt = state_of(engine, {"choices": ["yes", "no"]})
    first = {engine.tokenizer.encode(each, add_special=False, continues=True)[0] for each in ("yes", "y", "no", "n")}
    stops = set(engine.tokenizer.stop_ids)
    tokens = emitted(engine.tokenizer, before)
    for place, token in enumerate(tokens):
        mask = state.mask_at(prompt + tokens[:place])
        assert mask.allows(token) and not any(map(mask.allows, stops)), engine.tokenizer.name(token)
    for _ in range(2):  # the second time anew, after another text
        mask = state.mask_at(prompt + tokens)
        line_ends = {id for id in range(mask.n_vocab) if engine.tokenizer.token_bytes(id).strip(b"\r\n") == b""}
        allowed = {id for id in range(mask.n_vocab) if mask.allows(id)} - set(engine.output_format.parser().opening_ids)
        assert allowed - line_ends == first and state.is_complete([*prompt, *tokens, *b"no"])
        if tokens:
            assert not state.is_complete(prompt + tokens[:-1])


@pytest.mark.parametrize("model, before, text", [("named", "<|channel>", "thought"), ("recipients", "", " to=")])
def test_a_mark_or_header_that_is_begun_is_ended(open_model, model, before, text):
    engine = open_model(model)
    state, prompt = state_of(engine, {"choices": ["yes", "no"]})
    prompt += emitted(engine.tokenizer, before)
    for place in range(len(text)):
        mask = state.mask_at([*prompt, *text[:place].encode()])
        pieces = [engine.tokenizer.token_bytes(id) for id in range(mask.n_vocab) if mask.allows(id)]
        rest = text[place:].encode()
        assert rest[:1] in pieces and all(rest.startswith(piece) or piece.startswith(rest) for piece in pieces)
    mask = state.mask_at([*prompt, *text.encode()])
    assert mask.allows(ord("\n")) and mask.allows(ord("x"))


def test_one_token_of_line_ends_may_stand_between(open_model):
    engine = open_model("tags")
    state, prompt = state_of(engine, {"regex": "\n?x"})
    before = [*prompt, *emitted(engine.tokenizer, "<think>a</think>")]
    assert state.mask_at(before).allows(10) and state.mask_at([*before, 10]).allows(10)
    assert not state.mask_at([*before, 10, 10]).allows(10) and state.mask_at([*before, 10, 10]).allows(ord("x"))


@pytest.mark.parametrize("model", ["tags", "controls", "opened", "plain"])
def test_answers_after_reasoning_are_what_was_asked_for_with_drafts_and_without(open_model, model):
    engine, drafting = open_model(model), open_model(model, "auto")
    drafting.speculator.costs = FixedCosts()
    bias = dict.fromkeys(range(128, 256), False)  # half a character before the answer would be shown in it
    bias |= {id: 6.0 for id in map(engine.tokenizer.token_id, THINK) if id is not None}
    n_reasoned = 0
    for seed in range(6):
        request = {"seed": seed, "temperature": 1.2, "logit_bias": bias, "max_tokens": 600, "schema": PERSON}
        answers = []
        for each in (engine, drafting):
            answer = each.chat().send("there is the one, there is", **request)
            for _ in answer:
                pass
            answers.append(answer)
        plain, drafted = (answer.completion for answer in answers)
        assert plain.tokens == drafted.tokens and plain.parsed == drafted.parsed
        if plain.finish_reason == "stop":
            n_reasoned += bool(plain.reasoning)
            assert plain.parse_error is None and plain.parsed is not None
            check_answer({"schema": PERSON}, plain.text)
        else:
            assert plain.parsed is None and plain.parse_error
    assert n_reasoned or model == "plain"


def test_an_answer_that_ends_within_the_reasoning_has_no_value(open_model):
    engine = open_model("opened")
    answer = engine.chat().send("q", max_tokens=5, seed=1, schema=PERSON, logit_bias={})
    for _ in answer:
        pass
    assert answer.parsed is None and "had not begun" in answer.completion.parse_error
