"""Draft models of another vocabulary: the translation there and back, and the same text whatever they draft."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from drafting import FAILURES, FixedCosts, let_fail
from exactness import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from other_vocabulary import write_reordered
from tiny_models import write_tiny_model

from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.acceptance import AcceptanceTable, ChainLengthRule
from edgeinfer.speculation.drafters import cross_vocabulary_text
from edgeinfer.speculation.drafters.base import Context
from edgeinfer.speculation.drafters.cross_vocabulary import CrossVocabularyDrafter
from edgeinfer.speculation.drafters.cross_vocabulary_text import CrossVocabularyText
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.tree import checked

PROMPT = "hello world, is the one and the other one, hello"
REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.0, "repeat_penalty": 1.3},
]
FRAGMENTS = [
    "hello",
    " world",
    " the",
    "in",
    "é",
    "日本",
    "🙂",
    "\n",
    "  ",
    " ",
    "1",
    ", ",
    "<|im_end|>",
    "<|im_start|>",
    "z" * 40,
]


pytestmark = pytest.mark.usefixtures("native")


# ---- There and back --------------------------------------------------------------------------------------------------


def tokenizer_of(path: Path, **changes: object) -> Tokenizer:
    with ModelFile.open(path) as file:
        values = file.metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return Tokenizer.from_file(cast(ModelFile, SimpleNamespace(path=path, metadata=values)))


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    bpe, spm = folder / "bpe.gguf", folder / "spm.gguf"
    write_tiny_model(bpe, n_vocab=330)
    write_tiny_model(spm, n_vocab=420, vocabulary="spm")
    return {
        "bpe": tokenizer_of(bpe),
        "few": tokenizer_of(write_tiny_model(folder / "few.gguf", n_vocab=265)),
        "spm": tokenizer_of(spm),
        "begun": tokenizer_of(spm, bos_token_id=1, add_bos_token=True, add_space_prefix=True),
        "begun bpe": tokenizer_of(bpe, add_bos_token=True),
    }


PAIRS = [("bpe", "spm"), ("spm", "bpe"), ("bpe", "few"), ("few", "bpe"), ("bpe", "begun"), ("spm", "begun bpe")]
PAIRS += [("begun bpe", "begun")]


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
@settings(max_examples=60)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=80), rng=st.randoms())
def test_a_text_becomes_the_tokens_that_the_draft_model_would_read(vocabularies, pair, parts, rng):
    """In one update, and token by token with corrections."""
    target, draft = (vocabularies[name] for name in pair)
    text = "".join(parts)
    ids = target.encode(text, parse_special=True)
    translation = CrossVocabularyText(target, draft)
    translation.update(ids)
    assert translation.is_complete and translation.tokens == draft.encode(text, parse_special=True)

    growing, own = CrossVocabularyText(target, draft), []
    for n in sorted({rng.randrange(1, len(ids) + 1) for _ in range(8)}) + [len(ids)]:
        for now in (own[: rng.randrange(len(own) + 1)] + ids[:2], None):  # another text, then this one again
            if now is None:
                own.extend(ids[len(own) : n])
                now = own
            before = list(growing.tokens)
            n_same = growing.update(now)
            fresh = CrossVocabularyText(target, draft)
            fresh.update(list(now))
            assert growing.tokens == fresh.tokens and growing.is_complete == fresh.is_complete
            assert growing.tokens[:n_same] == before[:n_same]


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
@settings(max_examples=60)
@given(parts=st.lists(st.sampled_from([one for one in FRAGMENTS if "|" not in one]), min_size=1, max_size=20))
def test_what_is_drafted_becomes_the_same_text_in_the_targets_tokens(vocabularies, pair, parts):
    target, draft = (vocabularies[name] for name in pair)
    text = "".join(parts)
    drafted = draft.encode(text, add_special=False, continues=True)
    found = CrossVocabularyText(target, draft).to_target(drafted)
    assert b"".join(target.token_bytes(id) for id, _ in found) == text.encode()
    assert [id for id, _ in found] == target.encode(text, add_special=False, continues=True)
    assert [i for _, begun in found for i in begun] == list(range(len(drafted)))


def test_characters_that_are_not_whole_are_waited_for(vocabularies):
    bpe, spm = vocabularies["bpe"], vocabularies["spm"]
    translation = CrossVocabularyText(bpe, spm)
    ids = bpe.encode("a é")
    translation.update(ids[:-1])
    assert not translation.is_complete and spm.decode(translation.tokens) == "a "
    translation.update(ids)
    assert translation.is_complete and spm.decode(translation.tokens) == "a é"
    drafted = spm.encode("in 日", add_special=False)
    assert bpe.decode([id for id, _ in translation.to_target(drafted[:-1])]) == "in "
    invalid = [bpe.encode("é")[1], *bpe.encode("a")]  # a byte that continues nothing
    assert CrossVocabularyText(spm, bpe).to_target(invalid) == []


def test_control_tokens_are_those_of_the_same_name_and_else_text(vocabularies):
    bpe, spm = vocabularies["bpe"], vocabularies["begun"]
    end, begin = bpe.token_id("<|im_end|>"), spm.token_id("<s>")
    there, back = CrossVocabularyText(bpe, spm), CrossVocabularyText(spm, bpe)
    assert there.update([end]) == 1 and there.tokens == [begin, spm.token_id("<|im_end|>")]
    back.update([begin, spm.token_id("</s>"), spm.token_id("<|im_end|>")])
    assert back.tokens == [*bpe.encode("</s>"), end]
    of_a = bpe.encode("a")
    assert back.to_target([*of_a, end]) == [
        (spm.encode("a", add_special=False, continues=True)[0], [0]),
        (spm.token_id("<|im_end|>"), [1]),
    ]
    assert there.to_target([spm.token_id("</s>")]) == []


def test_pieces_end_somewhere_where_no_word_does(vocabularies, monkeypatch):
    bpe, spm = vocabularies["bpe"], vocabularies["spm"]
    translation, ids = CrossVocabularyText(bpe, spm), bpe.encode("日本" * 300)
    translation.update(ids)
    assert spm.decode(translation.tokens) == "日本" * 300 and len(translation._ends) > 5
    before = translation.tokens[:-20]
    assert translation.update([*ids, *bpe.encode("x")]) > len(before) - cross_vocabulary_text._LONG_PIECE


# ---- Drafts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that writes digits and capital letters only, each a token in any vocabulary."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, tensor_type="F16", n_embd=256, n_ctx_train=256)
    with ModelFile.open(path) as file:
        info, at = file.tensors["output.weight"], 0
        tokens = file.metadata["tokenizer.ggml.tokens"]
        rows = np.frombuffer(file.data("output.weight").tobytes(), np.float16).reshape(info.shape).copy()
        raw = path.read_bytes()
        at = raw.index(file.data("output.weight").tobytes())
    rows[
        [i for i, token in enumerate(tokens) if not (len(token) == 1 and (token.isdigit() or "A" <= token <= "Z"))]
    ] = 0
    path.write_bytes(raw[:at] + rows.tobytes() + raw[at + rows.nbytes :])
    return path


@pytest.fixture(scope="module")
def reordered(model, tmp_path_factory):
    """The same model in another order of tokens: it drafts what the model writes, but for the rounding."""
    order = list(range(291))
    random.Random(3).shuffle(order)
    return write_reordered(tmp_path_factory.mktemp("draft") / "draft.gguf", model, order)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    path = tmp_path_factory.mktemp("stranger") / "spm.gguf"
    return write_tiny_model(path, vocabulary="spm", n_vocab=300, n_ctx_train=256, seed=4)


def drafting_with(opened, model, draft, **options):
    engine = opened(model, draft=[str(draft)], **options)
    engine.speculator.costs = FixedCosts()
    (drafter,) = engine.speculator.drafters
    assert isinstance(drafter, CrossVocabularyDrafter) and drafter.name == "model"
    return engine


def tokens_of(engine, request, n=48, prompt=PROMPT):
    return engine.generate(prompt, max_tokens=n, **request).tokens


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
@pytest.mark.parametrize("draft", ["reordered", "stranger"])
def test_the_text_is_that_of_plain_decoding(opened, plain, model, reordered, stranger, draft, request_):
    engine = drafting_with(opened, model, {"reordered": reordered, "stranger": stranger}[draft])
    for prompt in (
        PROMPT,
        PROMPT + " again",
        "<|im_start|>user\nsomething else<|im_end|>\n",
        PROMPT + " again and again",
    ):
        completion = engine.generate(prompt, max_tokens=48, **request_)
        assert completion.tokens == tokens_of(plain, request_, prompt=prompt)
        assert completion.timings.speculation.dropped == {}
        if draft == "reordered" and request_ == REQUESTS[0]:
            assert completion.timings.speculation.by_drafter["model"].accepted > 20


def test_what_is_drafted_from_is_what_a_new_cache_gives_and_nothing_is_read_twice(opened, model, reordered):
    """Over requests that go on, go back, and change altogether."""
    engine = drafting_with(opened, model, reordered)
    (drafter,) = engine.speculator.drafters
    forward, fed = drafter.session.forward, []

    def spy(tokens, *arguments, **options):
        out = forward(tokens, *arguments, **options)
        text = [*drafter._tokens[: drafter.session.n_past], *tokens]
        fed.append((len(tokens), text, out.logits.copy()))
        return out

    drafter.session.forward = spy
    for prompt in (PROMPT, PROMPT + " and", PROMPT[:20], "something else", PROMPT):
        before = len(fed)
        completion = engine.generate(prompt, max_tokens=24, temperature=0.0)
        n_text = completion.usage.prompt_tokens + 24
        assert (
            sum(n for n, _, _ in fed[before:]) <= n_text + completion.timings.speculation.rejected + len(fed) - before
        )
    expected = engine.tokenizer.decode(engine.tokenize(PROMPT))
    assert drafter._own.decode(fed[-1][1]).startswith(expected[:40])
    for _, text, logits in fed[:: max(1, len(fed) // 12)]:
        drafter.session.truncate(0)
        again = forward(text).logits
        assert same_bits(again, logits)


def test_words_that_grow_letter_by_letter_are_read_again_as_what_they_are_then(opened, vocabularies, tmp_path):
    """The cache holds the tokens of the text as it is now, not those that its beginning once was."""
    draft = write_tiny_model(tmp_path / "draft.gguf", n_vocab=330, n_ctx_train=256)
    session = opened(draft, draft="none").session
    drafter = CrossVocabularyDrafter(session, vocabularies["few"], vocabularies["bpe"], FixedCosts())
    context = Context([], lambda logits, text: int(logits.argmax()), True)
    context.acceptance = AcceptanceTable()
    context.acceptance.length_rule = ChainLengthRule(FixedCosts().milliseconds(0))
    drafter.start(context)
    n_changed = 0
    for id in vocabularies["few"].encode("hello world, the other one is here and there"):
        before = list(drafter._tokens)
        context.tokens.append(id)
        tree = drafter.propose(context, 3)
        assert len(checked(tree, 265, 3)) == len(tree)
        expected = vocabularies["bpe"].encode(vocabularies["few"].decode(context.tokens))
        assert drafter._tokens[: len(expected)] == expected and session._sequence == drafter._tokens
        n_changed += before[: len(expected)] != expected[: len(before)]
    assert n_changed > 5


@pytest.mark.parametrize("is_translated", [True, False], ids=["translated", "same vocabulary"])
def test_unverified_tokens_that_were_rejected_are_not_taken_for_the_text(opened, model, reordered, is_translated):
    """A drafter that continues unverified tokens, and a text that takes another branch."""
    engine = opened(model, draft=[str(reordered if is_translated else model)])
    (drafter,) = engine.speculator.drafters
    text = engine.tokenize("0 1 2 3 ABC")

    def proposed(tokens, n_unverified=0):
        context = Context(list(tokens), lambda logits, text: int(logits.argmax()), True, n_unverified=n_unverified)
        context.acceptance = AcceptanceTable()
        context.acceptance.length_rule = ChainLengthRule(FixedCosts().milliseconds(0))
        return drafter.propose(context, 6)

    tree, path, above = proposed(text), [], -1
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent == above:
            path.append(token)
            above = node
    assert len(path) > 2
    proposed([*text, *path[:2]], 2)
    other = [*text, *engine.tokenize("987")]
    assert other[len(text)] != path[0]
    proposed(other)
    expected = drafter._converted.tokens if is_translated else other
    assert drafter._tokens[: len(other)] == expected and len(expected) == len(other)


@pytest.mark.parametrize("room", range(1, 12, 2))
def test_a_context_that_is_nearly_full_is_filled_to_the_end(opened, plain, model, stranger, room):
    n_prompt = len(plain.tokenize(PROMPT))
    engine = drafting_with(opened, model, stranger, n_ctx=n_prompt + room)
    completion = engine.generate(PROMPT, temperature=0.0)
    assert completion.tokens == tokens_of(plain, REQUESTS[0], room) and completion.timings.speculation.dropped == {}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_that_fails_changes_no_token(opened, plain, model, reordered, tmp_path, failure):
    copy = tmp_path / "draft.gguf"
    copy.write_bytes(reordered.read_bytes())
    engine = drafting_with(opened, model, copy)
    n_calls = let_fail(engine.speculator.drafters[0].session, failure, copy)
    completion = engine.generate(PROMPT, max_tokens=48, temperature=0.0)
    assert completion.tokens == tokens_of(plain, REQUESTS[0]) and n_calls() > 6
    assert list(completion.timings.speculation.dropped) == ([] if failure == "cut file" else ["model"])


def test_a_vocabulary_that_differs_in_padding_only_is_the_same(opened, tmp_path):
    long = write_tiny_model(tmp_path / "long.gguf", n_vocab=500, n_ctx_train=256)
    with ModelFile.open(long) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
    assert tokens[-20].startswith("[PAD") and "<|im_end|>" in tokens[:-20]
    short = write_tiny_model(tmp_path / "short.gguf", n_vocab=480, n_ctx_train=256)
    for target, draft in ((long, short), (short, long)):
        drafter = opened(target, draft=[str(draft)]).speculator.drafters[-1]
        assert isinstance(drafter, ModelDrafter) and not isinstance(drafter, CrossVocabularyDrafter)


def test_a_vocabulary_that_nothing_can_be_translated_into_is_left_out_with_the_reason(opened, model, tmp_path):
    draft = write_reordered(tmp_path / "odd.gguf", model, range(290, -1, -1), tokenizer__ggml__pre="unheard-of")
    with pytest.warns(RuntimeWarning, match="without model: .*tokenizer.ggml.pre must be one of"):
        assert opened(model, draft=[str(draft)]).speculator is None
