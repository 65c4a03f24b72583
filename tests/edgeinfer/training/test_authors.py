"""What the target writes to be trained on: turns and penalties side by side in torch, and prompts of its own."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from parts import missing
from tiny_models import write_tiny_model

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch

import edgeinfer
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.engine import Engine
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.sampling import SamplingParams
from edgeinfer.training.author import NativeAuthor
from edgeinfer.training.batch_author import BatchAuthor
from edgeinfer.training.corpus import AnswerRequest, Mix, TrainingText
from edgeinfer.training.own_prompts import message_begin, own_prompts
from edgeinfer.training.prompts import Prompt
from edgeinfer.training.target import KVCache, TorchTarget

CPU = torch.device("cpu")
CONVERSATIONS = [Prompt(tuple(f"turn {turn} of {n} " * (n + 1) for turn in range(1 + n % 3))) for n in range(5)]
PENALTIES = {"repeat_penalty": 1.4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("authors") / "m.gguf", tensor_type="F32", n_embd=64)


def both_authors(
    path: Path, requests: Sequence[AnswerRequest], cache_bytes: int = 1 << 30
) -> tuple[list[TrainingText], list[TrainingText]]:
    """(native, torch) answers."""
    with edgeinfer.load(path, n_ctx=256, n_batch=256, draft="none") as engine, ModelFile.open(path) as file:
        target = TorchTarget(file, read_spec(file), CPU)
        batch = BatchAuthor(target, engine, 256, 16, n_prompts=32, cache_bytes=cache_bytes)
        return NativeAuthor(engine, 256, 16).write(requests), batch.write(requests)


@pytest.mark.parametrize("last_n", [4, 64, -1])
def test_torch_writes_every_turn_with_the_penalties_of_the_native_engine(path: Path, last_n: int) -> None:
    params = SamplingParams(temperature=0.0, penalty_last_n=last_n, seed=0, **PENALTIES)
    native, ours = both_authors(path, [AnswerRequest(prompt, params) for prompt in CONVERSATIONS])
    plain, _ = both_authors(path, [AnswerRequest(prompt, SamplingParams(temperature=0.0)) for prompt in CONVERSATIONS])
    assert len(ours) == len(native) == sum(len(prompt.turns) for prompt in CONVERSATIONS)
    same = [mine.tokens.tolist() == other.tokens.tolist() for mine, other in zip(ours, native, strict=True)]
    assert sum(same) >= len(same) - 1  # one may have two tokens as likely
    assert [text.tokens.tolist() for text in native] != [text.tokens.tolist() for text in plain]


def test_texts_are_written_in_groups_whose_caches_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    answers = BatchAuthor.answers

    def noted(author: BatchAuthor, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        sizes.append(len(prompts))
        return answers(author, prompts, params)

    monkeypatch.setattr(BatchAuthor, "answers", noted)
    greedy = [AnswerRequest(Prompt((f"{n} of them",)), SamplingParams(temperature=0.0)) for n in range(7)]
    with ModelFile.open(path) as file:
        n_bytes = KVCache.bytes_of(read_spec(file), 128)
    native, ours = both_authors(path, greedy, n_bytes)
    assert len(sizes) > 1 and sum(sizes) == 7
    assert [text.n_prompt for text in ours] == [text.n_prompt for text in native]


def test_parameters_that_torch_does_not_sample_by_are_refused(path: Path) -> None:
    for options in ({"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(InvalidArgument, match=f"found {next(iter(options))} = .*author = .native. in --config"):
            both_authors(path, [AnswerRequest(CONVERSATIONS[0], SamplingParams(seed=1, **options))])


def test_a_share_of_the_sampled_answers_is_sampled_as_the_chat_does() -> None:
    chat = SamplingParams(temperature=0.2, repeat_penalty=1.1)
    mix = Mix(3, 0.5, 0.8, 2, chat, 0.5)
    found = [request.params for request in mix.requests([Prompt((str(n),)) for n in range(400)])]
    greedy = [params for params in found if params.is_greedy]
    as_chat = [params for params in found if params.repeat_penalty == 1.1]
    assert 0.2 < len(greedy) / len(found) < 0.3  # of the first answers a half
    assert 0.4 < len(as_chat) / (len(found) - len(greedy)) < 0.6
    assert all(params.temperature == 0.2 for params in as_chat) and len({params.seed for params in as_chat}) > 200
    assert not any(request.params.repeat_penalty == 1.1 for request in Mix(3, 0.5, 0.8).requests([Prompt(("x",))]))


@pytest.mark.parametrize("author", ["native", "torch"])
def test_the_model_writes_prompts_where_a_message_begins(path: Path, author: str, tmp_path: Path) -> None:
    with edgeinfer.load(path, n_ctx=512, n_batch=512, draft="none") as engine, ModelFile.open(path) as file:
        begin = engine.detokenize(message_begin(engine))
        whole = engine.template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=False)
        assert whole.startswith(begin + "Hello")
        target = TorchTarget(file, read_spec(file), CPU)
        writer = NativeAuthor(engine, 512, 96) if author == "native" else BatchAuthor(target, engine, 512, 96, 16)
        found = own_prompts(tmp_path / "own.jsonl", engine, writer, 6, 1, lambda what, share: None)
        again = own_prompts(tmp_path / "again.jsonl", engine, writer, 6, 1, lambda what, share: None)
        assert found == again == own_prompts(tmp_path / "own.jsonl", engine, Silent(), 6, 2, lambda what, share: None)
    assert len(set(found)) == 6 and all(len(prompt.turns[0]) >= 8 for prompt in found)
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert [line["turns"] for line in lines] == [list(prompt.turns) for prompt in found]


class Silent:
    """An author that ends nothing that it begins."""

    n_prompts = 16

    def write(self, requests: Sequence[AnswerRequest]) -> list[TrainingText]:
        raise AssertionError("nothing is to be answered")

    def continued(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [[5, 6, 7] for _ in prompts]


def test_a_model_that_ends_no_message_is_named(path: Path, tmp_path: Path) -> None:
    engine: Engine
    with (
        edgeinfer.load(path, n_ctx=64, draft="none") as engine,
        pytest.raises(InvalidArgument, match=r"must write 6 prompts: found 0 .* of 24 messages .* --own-prompts"),
    ):
        own_prompts(tmp_path / "own.jsonl", engine, Silent(), 6, 1, lambda what, share: None)
    assert not (tmp_path / "own.jsonl").exists()
