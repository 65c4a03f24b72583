"""Prompts and the texts that answer them: what is read, what is kept, and how a run goes on."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.common.errors import InvalidArgument, ModelFileError, NumericalError
from edgeinfer.common.types import TokenIds
from edgeinfer.sampling import SamplingParams
from edgeinfer.training.corpus import AnswerRequest, Corpus, Mix, TrainingText, check_settings, draft_vocabulary
from edgeinfer.training.features import Features, Halves, as_halves, rows_path, save_rows
from edgeinfer.training.prompts import Prompt, held_out, read_prompts, shuffled

PROMPTS = [Prompt((f"prompt {n}",)) for n in range(40)]


class Writer:
    """Answers prompt n with n % 5 + 3 tokens n, and notes what it was asked."""

    n_prompts = 4

    def __init__(self) -> None:
        self.asked: list[AnswerRequest] = []

    def write(self, requests: Sequence[AnswerRequest]) -> list[TrainingText]:
        self.asked += requests
        return [self._answer(request) for request in requests]

    def continued(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        raise AssertionError("only prompts are answered")

    def _answer(self, request: AnswerRequest) -> TrainingText:
        n = int(request.prompt.turns[0].split()[1])
        return TrainingText(np.full(2 + n % 5 + 3, n, np.int32), 2, request.params.is_greedy)


def silent(what: str, share: float) -> None:
    assert 0.0 <= share <= 1.0


class Stopped(Exception):
    pass


def test_prompts_are_read_once_each(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["a", "b"], "id": 3}\n\n{"prompt": "c"}\n{"turns": ["a", "b"]}\n')
    assert read_prompts(path) == [Prompt(("a", "b")), Prompt(("c",))]
    path.write_text('{"prompt": "a", "category": "of:one"}\n{"prompt": "a", "category": "of:two"}')
    (prompt,) = read_prompts(path)
    assert prompt.category == "of:one" and prompt == Prompt(("a",))


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2 is no JSON"),
        ("[" * 60_000, "line 2 is no JSON"),
        ('{"turns": []}', 'line 2 must have "turns", a list of texts, or "prompt", a text'),
        ('{"turns": ["a", 3]}', "line 2 must have"),
        ('{"turns": [" "]}', "line 2 must have"),
        ('["a"]', "line 2 must have"),
        ('{"text": "a"}', "line 2 must have"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(InvalidArgument, match=words):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(InvalidArgument, match="must have a prompt a line: found none"):
        read_prompts(path)


def test_order_and_split_depend_on_the_prompts_alone() -> None:
    assert shuffled(PROMPTS, 1) == shuffled(PROMPTS[::-1], 1) != shuffled(PROMPTS, 2)
    kept, out = held_out(PROMPTS, 6)
    assert len(out) == 6 and {*kept, *out} == {*PROMPTS} and len(kept) == 34
    assert set(held_out(PROMPTS[::-1], 6)[1]) == set(out)


def test_a_mix_gives_each_prompt_parameters_of_its_own() -> None:
    mix = Mix(7, 0.5, 0.9)
    requests = [mix.request(prompt) for prompt in PROMPTS]
    n_greedy = sum(request.params.is_greedy for request in requests)
    assert 10 <= n_greedy <= 30
    sampled = [request.params for request in requests if not request.params.is_greedy]
    assert {params.temperature for params in sampled} == {0.9}
    assert len({params.seed for params in sampled}) == len(sampled)
    assert [mix.request(prompt) for prompt in PROMPTS] == requests
    assert all(Mix(7, 1.0, 0.9).request(prompt).params.is_greedy for prompt in PROMPTS)


def test_further_answers_are_sampled_anew_after_the_first_ones(tmp_path: Path) -> None:
    once, often = Mix(7, 0.5, 0.9), Mix(7, 0.5, 0.9, n_answers=3)
    requests = often.requests(PROMPTS)
    assert requests[:40] == once.requests(PROMPTS)
    assert [request.prompt for request in requests] == PROMPTS * 3
    assert not any(request.params.is_greedy for request in requests[40:])
    seeds = [request.params.seed for request in requests if not request.params.is_greedy]
    assert len(set(seeds)) == len(seeds)
    corpus = Corpus(tmp_path, "train")
    corpus.write(PROMPTS, often, Writer(), None, silent)
    assert len(corpus.all_texts()) == 120


def test_a_run_that_was_stopped_writes_only_the_shards_that_are_missing(tmp_path: Path) -> None:
    mix = Mix(1, 0.5, 0.8)
    whole, parts = Corpus(tmp_path / "whole", "train"), Corpus(tmp_path / "parts", "train")
    whole.write(PROMPTS, mix, Writer(), None, silent)

    def stop_after(n: int) -> None:
        def report(what: str, share: float) -> None:
            if parts.n_shards >= n:
                raise Stopped

        with pytest.raises(Stopped):
            parts.write(PROMPTS, mix, Writer(), None, report)

    stop_after(1)
    stop_after(3)
    writer = Writer()
    parts.write(PROMPTS, mix, writer, None, silent)
    assert len(writer.asked) == 40 - 3 * 4
    assert parts.n_shards == whole.n_shards == 10
    for shard in range(10):
        assert parts.shard(shard).read_bytes() == whole.shard(shard).read_bytes()
    texts = whole.all_texts()
    assert [text.tokens[0] for text in texts] == list(range(40))
    assert all(text.n_prompt == 2 and text.n_answer == text.tokens[0] % 5 + 3 for text in texts)
    assert [text.is_greedy for text in texts] == [mix.request(prompt).params.is_greedy for prompt in PROMPTS]


def test_writing_ends_with_enough_tokens_and_goes_on_for_more(tmp_path: Path) -> None:
    corpus, mix = Corpus(tmp_path, "train"), Mix(1, 1.0, 0.8)
    corpus.write(PROMPTS, mix, Writer(), 30, silent)
    assert corpus.n_shards == 2  # 18 tokens and 19
    corpus.write(PROMPTS, mix, Writer(), 60, silent)
    assert corpus.n_shards == 4  # and 20 and 21
    assert Corpus(tmp_path, "held").n_shards == 0


def test_several_processes_write_all_shards_between_them(tmp_path: Path) -> None:
    mix, alone, shared = Mix(1, 0.5, 0.8), Corpus(tmp_path / "a", "train"), Corpus(tmp_path / "b", "train")
    alone.write(PROMPTS, mix, Writer(), None, silent)
    for rank in range(3):
        shared.write(PROMPTS, mix, Writer(), None, silent, (rank, 3))
    assert [text.tokens.tolist() for text in shared.all_texts()] == [text.tokens.tolist() for text in alone.all_texts()]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "train")
    corpus.write(PROMPTS, Mix(1, 1.0, 0.8), Writer(), 10, silent)
    whole = corpus.shard(0).read_bytes()
    for damaged in (b"", whole[:100], b"no shard at all"):
        corpus.shard(0).write_bytes(damaged)
        with pytest.raises(ModelFileError, match="train-00000.npz is no shard of texts.*remove it"):
            corpus.texts(0)


def test_a_folder_made_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "work" / "texts.json"
    check_settings(path, {"seed": 1, "context": 96})
    check_settings(path, {"seed": 1, "context": 96})
    assert json.loads(path.read_text()) == {"seed": 1, "context": 96}
    with pytest.raises(
        InvalidArgument, match="was made with other settings: expected seed = 2, found 1: name another folder"
    ):
        check_settings(path, {"seed": 2, "context": 96})


def test_the_draft_vocabulary_has_the_most_frequent_tokens_of_answers_and_what_must_be_there() -> None:
    texts = [
        TrainingText(np.array([9, 9, 9, 5, 5, 7, 3, 3, 3], np.int32), 3, True),
        TrainingText(np.array([8, 7, 2], np.int32), 1, True),
    ]
    assert draft_vocabulary(texts, 12, 4, iter([11])).tolist() == [3, 5, 7, 11]
    assert draft_vocabulary(texts, 12, 4, iter([3])).tolist() == [2, 3, 5, 7]
    assert draft_vocabulary(texts, 12, 12, iter([0])).tolist() == list(range(12))
    assert draft_vocabulary(texts, 12, 4, iter([11]), np.array([2, 9, 10], np.int32)).tolist() == [2, 3, 5, 11]
    assert draft_vocabulary(texts, 12, 5, iter([11]), [9, 2]).tolist() == [2, 3, 5, 7, 11]
    assert draft_vocabulary(texts, 12, 6, iter([11]), [9]).tolist() == [2, 3, 5, 7, 9, 11]  # before others of no answer
    for size in (1, 13):
        with pytest.raises(InvalidArgument, match=f"must have more than 1 and at most 12 tokens: found {size}"):
            draft_vocabulary(texts, 12, size, iter([11]))


def test_a_rare_token_of_high_id_does_not_displace_what_any_text_has() -> None:
    answers = np.concatenate([np.arange(300).repeat(60), np.array([4000, 4000, 4000, 3990])]).astype(np.int32)
    vocabulary = draft_vocabulary([TrainingText(answers, 0, True)], 4096, 320, iter([]))
    assert vocabulary[:319].tolist() == [*range(319)] and vocabulary[319] == 4000


# ---- features ------------------------------------------------------------------------------------------------------


class Halver:
    """Half of each token as its feature, in three numbers; counts the texts it was given."""

    n_texts = 3

    def __init__(self) -> None:
        self.n_recorded = 0

    def record(self, texts: Sequence[TokenIds]) -> list[Halves]:
        self.n_recorded += len(texts)
        return [as_halves(np.repeat(text[:, None] / np.float32(2), 3, axis=1)) for text in texts]


def test_features_are_kept_as_far_as_they_fit_and_computed_again_after_that(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "train")
    corpus.write(PROMPTS, Mix(1, 1.0, 0.8), Writer(), None, silent)
    n_bytes = 6 * sum(len(text.tokens) for text in corpus.texts(0) + corpus.texts(1))
    recorder = Halver()
    features = Features([corpus], recorder, 3, n_bytes)
    features.prepare(silent)
    assert recorder.n_recorded == 8
    assert len(list(tmp_path.glob("*.features.npy"))) == 2
    order = features.samples[::-1]
    for sample, rows in zip(order, features.of(order), strict=True):
        assert rows.tolist() == [[token / 2] * 3 for token in sample.text.tokens.tolist()]
    assert recorder.n_recorded == 40
    again = Halver()
    Features([corpus], again, 3, n_bytes).prepare(silent)
    assert again.n_recorded == 0
    Features([corpus], again, 3, n_bytes, (0, 5)).prepare(silent)  # rows of layers are others
    assert again.n_recorded == 8 and len(list(tmp_path.glob("*.layers-0-5.npy"))) == 2


def test_features_of_several_corpora_stand_side_by_side(tmp_path: Path) -> None:
    mix, recorder = Mix(1, 1.0, 0.8), Halver()
    first, second = Corpus(tmp_path, "train"), Corpus(tmp_path, "tasks")
    first.write(PROMPTS[:6], mix, Writer(), None, silent)
    second.write(PROMPTS[6:11], mix, Writer(), None, silent)
    features = Features([first, second], recorder, 3, 1 << 20)
    features.prepare(silent)
    assert recorder.n_recorded == 11 and [sample.number for sample in features.samples] == [0] * 4 + [1] * 2 + [
        2
    ] * 4 + [3]
    order = features.samples[::-1]
    for sample, rows in zip(order, features.of(order), strict=True):
        assert rows.tolist() == [[token / 2] * 3 for token in sample.text.tokens.tolist()]
    assert recorder.n_recorded == 11


def test_rows_that_come_with_texts_are_not_recorded_again(tmp_path: Path) -> None:
    def keep(shard: Path, texts: Sequence[TrainingText]) -> None:
        assert not shard.exists()  # a run that is stopped here writes both again
        if shard != corpus.shard(1):
            save_rows(rows_path(shard, True), Halver().record([text.tokens for text in texts]), 3)

    corpus, recorder = Corpus(tmp_path, "train"), Halver()
    corpus.write(PROMPTS[:12], Mix(1, 1.0, 0.8), Writer(), None, silent, keep_rows=keep)
    features = Features([corpus], recorder, 3, 1 << 20)
    features.prepare(silent)
    assert recorder.n_recorded == 4
    for sample, rows in zip(features.samples, features.of(features.samples), strict=True):
        assert rows.tolist() == [[token / 2] * 3 for token in sample.text.tokens.tolist()]


def test_features_of_another_model_are_refused(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "train")
    corpus.write(PROMPTS[:4], Mix(1, 1.0, 0.8), Writer(), None, silent)
    Features([corpus], Halver(), 3, 1 << 20).prepare(silent)
    features = Features([corpus], Halver(), 4, 1 << 20)
    with pytest.raises(ModelFileError, match=r"must be \(26, 4\) float16: found float16 \(26, 3\)"):
        features.of(features.samples[:1])
    with pytest.raises(NumericalError, match="must be numbers of at most 65504"):
        as_halves(np.array([[7e4]], np.float32))
