"""`edgeinfer evaluate` on a tiny model: what it reports is what `distill` reported, and what is wrong is refused."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from distill_arguments import with_config
from draft_matches import assert_matches_agree
from parts import missing
from tiny_heads import write_tiny_eagle3
from tiny_models import write_tiny_model

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")

import edgeinfer
from edgeinfer.chat import Conversation
from edgeinfer.cli import main

COMMON = "--max-tokens 40 --context 160 --threads 1 --json".split()
TRAIN = "--tokens 1500 --draft-vocab 96 --batch-tokens 480 --learning-rate 3e-3 --steps 2 --epochs 3".split()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], prog_name="edgeinfer")


def line(n: int) -> str:
    kind = "even:two" if n % 2 == 0 else "odd"
    return json.dumps({"turns": [f"hello {n} world", "and then"][: 1 + n % 3 % 2], "category": kind})


@pytest.fixture(scope="module", params=["none", "auto"])
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model m.gguf, a head h.gguf for it with its report h.json, and its prompts: p, and held out q."""
    folder = tmp_path_factory.mktemp("given")
    write_tiny_model(folder / "m.gguf", tensor_type="Q8_0", n_embd=64, n_layers=2)
    (folder / "p.jsonl").write_text("\n".join(map(line, range(40))))
    (folder / "q.jsonl").write_text("\n".join(map(line, range(40, 48))))
    files = ["--prompts", folder / "p.jsonl", "--held-out", folder / "q.jsonl", "--out", folder / "h.gguf"]
    options = with_config([*files, *TRAIN, *COMMON, "--taps", request.param], folder / "config.toml")
    result = run("distill", folder / "m.gguf", *options)
    assert result.exit_code == 0, result.output
    return folder


def test_what_it_reports_is_what_distill_reported(given: Path) -> None:
    result = run("evaluate", given / "m.gguf", given / "h.gguf", "--prompts", given / "q.jsonl", *COMMON)
    assert result.exit_code == 0, result.output
    found, expected = json.loads(result.stdout), json.loads((given / "h.json").read_text())
    assert found["held_out_texts"] == expected["held_out_texts"] > 8
    assert found["vocabulary_coverage"] == expected["vocabulary_coverage"]
    n_positions = 40 * expected["held_out_texts"]
    assert_matches_agree(found["match_by_depth"], expected["match_by_depth"], n_positions, 0.02)
    assert found["tokens_per_step"] == pytest.approx(expected["tokens_per_step"], rel=0.02)
    assert found["match_by_depth"][0] > 0.2


def test_categories_make_up_the_whole(given: Path) -> None:
    def report(*options: object) -> dict[str, Any]:
        result = run("evaluate", given / "m.gguf", given / "h.gguf", *options, *COMMON)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    whole = report("--prompts", given / "q.jsonl")
    parts = whole["by_category"]
    assert list(parts) == ["even", "odd"]
    assert sum(part["held_out_texts"] for part in parts.values()) == whole["held_out_texts"]
    low, high = sorted(part["match_by_depth"][0] for part in parts.values())
    assert low < whole["match_by_depth"][0] < high
    lines = [text for text in (given / "q.jsonl").read_text().splitlines() if "odd" in text]
    (given / "odd.jsonl").write_text("\n".join(lines))
    odd = report("--prompts", given / "odd.jsonl")
    assert odd["by_category"]["odd"] == parts["odd"]
    assert {key: odd[key] for key in parts["odd"]} == parts["odd"]
    sampled = report("--prompts", given / "odd.jsonl", "--temp", "0.9")
    assert sampled["temperature"] == 0.9 and sampled["match_by_depth"] != odd["match_by_depth"]


def test_saved_conversations_are_judged_as_their_answers_are(given: Path, tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    questions = [json.loads(text) for text in (given / "q.jsonl").read_text().splitlines()]
    with edgeinfer.load(given / "m.gguf", draft="none", n_threads=1) as engine:
        for number, question in enumerate(questions):
            chat = Conversation(engine)
            for turn in question["turns"]:
                list(chat.send(turn, max_tokens=40, temperature=0.0))
            chat.save(tmp_path / "chats" / f"{number}.jsonl")

    def report(*options: object) -> dict[str, Any]:
        result = run("evaluate", given / "m.gguf", given / "h.gguf", *options, "-c", 160, "-t", 1, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    saved = report("--chats", tmp_path / "chats")
    asked = report("--prompts", given / "q.jsonl", "--max-tokens", 40)
    assert saved["chats"] == "chats" and "temperature" not in saved and list(saved["by_category"]) == ["all"]
    assert saved["held_out_texts"] > 8
    assert_matches_agree(saved["match_by_depth"], asked["match_by_depth"], 40 * asked["held_out_texts"], 0.05)
    for number in range(1, len(questions)):
        (tmp_path / "chats" / f"{number}.jsonl").unlink()
    assert report("--chats", tmp_path / "chats")["held_out_texts"] == len(questions[0]["turns"])


def test_the_table_has_a_row_for_each_category(given: Path) -> None:
    plain = [option for option in COMMON if option != "--json"]
    result = run("evaluate", given / "m.gguf", given / "h.gguf", "--prompts", given / "q.jsonl", *plain)
    assert result.exit_code == 0, result.output
    assert [text.split()[0] for text in result.stdout.splitlines()[1:]] == ["even", "odd", "in"]


def test_what_cannot_be_judged_is_refused(given: Path, tmp_path: Path) -> None:
    def refused(model: Path, head: Path, *options: object) -> Result:
        return run("evaluate", model, head, "--prompts", given / "q.jsonl", *COMMON, *options)

    other = write_tiny_model(tmp_path / "o.gguf", tensor_type="Q8_0", n_embd=32)
    result = refused(other, given / "h.gguf")
    assert result.exit_code == 3 and "use the head of this model" in result.stderr
    result = refused(given / "m.gguf", given / "m.gguf")
    assert result.exit_code == 3 and "m.gguf" in result.stderr
    eagle3 = write_tiny_eagle3(tmp_path / "e.gguf", given / "m.gguf", target_layers=(1, 1, 2))
    result = refused(given / "m.gguf", eagle3)
    assert result.exit_code == 3 and "must be a head of the form 'draft-head' to be judged" in result.stderr
    result = refused(given / "m.gguf", given / "h.gguf", "--chats", tmp_path)
    assert result.exit_code == 2 and "which answers to compare with: found both" in result.stderr
    result = run("evaluate", given / "m.gguf", given / "h.gguf")
    assert result.exit_code == 2 and "which answers to compare with: found neither" in result.stderr
    result = run("evaluate", given / "m.gguf", given / "h.gguf", "--chats", tmp_path)
    assert result.exit_code == 2 and "must have a conversation with answers" in result.stderr
    result = refused(given / "m.gguf", given / "h.gguf", "--context", "40")
    assert result.exit_code == 2 and "--max-tokens 40 must leave room for a prompt in --ctx-size 40" in result.stderr
    result = refused(given / "m.gguf", given / "h.gguf", "--context", "32", "--max-tokens", "4")
    assert result.exit_code == 2 and "--ctx-size 32 leaves no room for an answer to a prompt" in result.stderr
