"""`edgeinfer distill` as a whole, on a tiny model: it learns, it goes on where it was, it refuses what is wrong."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from distill_arguments import with_config
from draft_matches import assert_matches_agree
from drafting import FixedCosts
from numpy.testing import assert_array_equal
from parts import missing
from tiny_models import write_tiny_model

if importlib.util.find_spec("torch") is None:
    missing("train", "torch is not installed: pip install 'edgeinfer[train]'")
import torch

import edgeinfer
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.cli import main
from edgeinfer.models import read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.training import rounding
from edgeinfer.training import trainer as trainer_module
from edgeinfer.training.objective import Objective
from edgeinfer.training.rounding import rounded
from edgeinfer.training.trainer import Schedule

FAST = "--tokens 1500 --max-tokens 40 --context 96 --draft-vocab 96 --batch-tokens 480 --n-held 6".split()
FAST += "--learning-rate 3e-3 --steps 2 --epochs 3 --rounds 1 --taps auto --evaluate-every 4".split()
FAST += "--threads 1 --tasks 12".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model m.gguf whose text can be foretold to some degree, and prompts p.jsonl."""
    folder = tmp_path_factory.mktemp("given")
    write_tiny_model(folder / "m.gguf", tensor_type="Q8_0", n_embd=64, n_layers=2)
    lines = [json.dumps({"turns": [f"hello {n} world"]}) for n in range(60)]
    (folder / "p.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def work(given: Path) -> Path:
    """A folder with texts and features, made once."""
    result = run(given, given / "first.gguf", "--work", given / "work")
    assert result.exit_code == 0, result.output
    return given / "work"


def run(given: Path, out: Path, *options: object) -> Result:
    arguments = ["distill", given / "m.gguf", "--prompts", given / "p.jsonl", "--out", out, *FAST, *options]
    config = out.with_name(f"{out.name}.toml") if out.parent.is_dir() else given / "config.toml"
    return CliRunner().invoke(main, with_config(arguments, config), prog_name="edgeinfer")


def fresh(work: Path, folder: Path) -> Path:
    """A folder with the same texts and features, and no checkpoint."""
    folder.mkdir()
    for path in work.iterdir():
        if path.name != "checkpoint.pt":
            os.link(path, folder / path.name)
    return folder


def weights(head: Path) -> dict[str, bytes]:
    with ModelFile.open(head) as file:
        return {name: file.data(name).tobytes() for name in file.tensors}


def test_a_head_learns_to_foretell_its_target(given: Path, work: Path, tmp_path: Path) -> None:
    untrained = run(
        given, tmp_path / "a.gguf", "--work", fresh(work, tmp_path / "a"), "--learning-rate", "1e-12", "--json"
    )
    plot = ["--plot", tmp_path / "b.png"] if importlib.util.find_spec("matplotlib") else []
    trained = run(given, tmp_path / "b.gguf", "--work", fresh(work, tmp_path / "b"), "--json", *plot)
    assert untrained.exit_code == trained.exit_code == 0, untrained.output + trained.output
    before, after = (json.loads(result.stdout) for result in (untrained, trained))
    assert after["match_by_depth"][0] > before["match_by_depth"][0] + 0.3
    assert after["tokens_per_step"]["4"] > before["tokens_per_step"]["4"] + 0.3
    assert 1.0 <= after["tokens_per_step"]["4"] <= after["tokens_per_step"]["8"] <= after["tokens_per_step"]["16"]
    assert after == json.loads((tmp_path / "b.json").read_text())
    assert after["tokens_trained"] == after["curve"][-1]["tokens"] > 1500
    assert 0 < after["texts_of_tasks"] < 12 < after["texts"]
    assert 0 < after["curve"][-1]["token_loss"] < before["curve"][-1]["token_loss"] - 0.3  # of the same batches
    points = [point["tokens"] for point in after["curve"]]
    assert points == sorted(set(points))
    if plot:
        assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_training_goes_on_from_a_head(given: Path, work: Path, tmp_path: Path) -> None:
    first, folder = given / "first.gguf", fresh(work, tmp_path / "a")
    result = run(given, tmp_path / "a.gguf", "--work", folder, "--init", first, "--learning-rate", "1e-12", "--json")
    assert result.exit_code == 0, result.output
    report, before = json.loads(result.stdout), json.loads((given / "first.json").read_text())
    assert report["match_by_depth"][0] == pytest.approx(before["match_by_depth"][0], abs=0.02)
    assert report["settings"]["init"] == "first.gguf"
    again = run(given, tmp_path / "a.gguf", "--work", folder, "--learning-rate", "1e-12")
    assert again.exit_code == 2 and "init" in again.output
    other = run(given, tmp_path / "b.gguf", "--work", tmp_path / "b", "--init", first, "--blocks", "2")
    assert other.exit_code == 3 and "found 1 blocks; give its blocks and taps (--config)" in other.output
    assert not (tmp_path / "b").exists()


def test_answers_of_another_run_are_trained_on_too(given: Path, work: Path, tmp_path: Path) -> None:
    options = ["--work", tmp_path / "b", "--seed", "2", "--tasks", "0", "--epochs", "1", "--rounds", "0", "--json"]
    (tmp_path / "some.jsonl").write_text("\n".join((given / "p.jsonl").read_text().splitlines()[:30]))
    held = ["--work", tmp_path / "a", "--held-out", tmp_path / "some.jsonl"]
    result = run(given, tmp_path / "b.gguf", *options, *held, "--texts-of", work)
    assert result.exit_code == 2 and f"--texts-of {work} has answers to prompts that are held out" in result.stderr
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "what else"}))
    options += ["--held-out", tmp_path / "held.jsonl"]
    alone, both = (run(given, tmp_path / "b.gguf", *options, *more) for more in ([], ["--texts-of", work]))
    assert (
        alone.exit_code == 0
        and both.exit_code == 2
        and "was made with other settings: expected texts = " in both.stderr
    )
    (tmp_path / "b" / "checkpoint.pt").unlink()
    both = run(given, tmp_path / "b.gguf", *options, "--texts-of", work)
    assert both.exit_code == 0, both.output
    report, first = json.loads(both.stdout), json.loads((given / "first.json").read_text())
    assert report["settings"]["texts_of"] == ["work"] and report["texts_of_tasks"] == first["texts_of_tasks"]
    for count in ("texts", "answer_tokens"):
        assert report[count] == json.loads(alone.stdout)[count] + first[count]


def test_saved_conversations_are_trained_on_as_they_are(given: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    write_chats(chats, given, 40)
    first = run_on_chats(given, tmp_path / "first.gguf", chats)
    assert first.exit_code == 0, first.output
    report = json.loads((tmp_path / "first.json").read_text())
    assert 70 < report["texts"] <= 2 * 39 and report["held_out_texts"] == 2 and report["prompts"] is None
    assert report["match_by_depth"][0] > 0.3 and "before" not in report
    options = ["--init", tmp_path / "first.gguf", "--seed", "2"]
    second = run_on_chats(given, tmp_path / "second.gguf", chats, *options)
    assert second.exit_code == 0, second.output
    before = json.loads((tmp_path / "second.json").read_text())["before"]
    assert_matches_agree(before["match_by_depth"], report["match_by_depth"], 20 * report["held_out_texts"], 0.02)
    assert "before training    0." in second.output
    write_chats(chats, given, 41)
    changed = run_on_chats(given, tmp_path / "second.gguf", chats, *options)
    assert changed.exit_code == 2 and "was made with other settings: expected chats" in changed.stderr


def write_chats(folder: Path, given: Path, n: int) -> None:
    """Conversations with a model, some answers of which have their tokens, and some are of no length."""
    folder.mkdir(exist_ok=True)
    with edgeinfer.load(given / "m.gguf", draft="none") as engine:
        for number in range(n):
            chat = edgeinfer.Conversation(engine)
            if (folder / f"{number}.jsonl").exists():
                continue
            for text in (f"hello {number} world", "and again"):
                for _ in chat.send(text, max_tokens=20, temperature=0.5, seed=number):
                    pass
            chat.save(folder / f"{number}.jsonl")


def run_on_chats(given: Path, out: Path, chats: Path, *options: object) -> Result:
    fast = [*FAST[: FAST.index("--tasks")], "--context", 192]
    arguments = ["distill", given / "m.gguf", "--chats", chats, "--out", out, *fast, *options]
    return CliRunner().invoke(main, with_config(arguments, out.with_name(f"{out.name}.toml")), prog_name="edgeinfer")


def test_texts_of_another_target_are_not_trained_on(given: Path, work: Path, tmp_path: Path) -> None:
    options = ["--work", fresh(work, tmp_path / "work"), "--texts-of"]
    (tmp_path / "empty").mkdir()
    result = run(given, tmp_path / "h.gguf", *options, tmp_path / "empty")
    assert (
        result.exit_code == 2 and "must have texts that the target" in result.stderr and "found none" in result.stderr
    )
    other = fresh(work, tmp_path / "other")
    facts = json.loads((other / "texts.json").read_text())
    (other / "texts.json").unlink()
    for key, value, words in [
        ("target", "0123456789abcdef0123", "found those of the target '0123456789abcdef"),
        ("context", 97, "must have texts of at most --ctx-size 96 tokens: found 97"),
    ]:
        (other / "texts.json").write_text(json.dumps(facts | {key: value}))
        result = run(given, tmp_path / "h.gguf", *options, other)
        assert result.exit_code == 2 and words in result.stderr, result.output


def test_the_file_is_as_documented(given: Path, work: Path) -> None:
    with ModelFile.open(given / "first.gguf") as head, ModelFile.open(given / "m.gguf") as target:
        keys = {key.removeprefix("draft-head."): value for key, value in head.metadata.items()}
        shapes = {name: info.shape for name, info in head.tensors.items()}
        vocabulary = head.data("draft_vocab").view("<i4")
        spec = read_head_beside(head, target, read_spec(target))
        output = head.tensors["output.weight"]
        rows = dequantize(output.type, head.data("output.weight"), output.shape)
        info = target.tensors["output.weight"]
        expected = dequantize(info.type, target.data("output.weight"), info.shape)[vocabulary]
        eos = target.metadata["tokenizer.ggml.eos_token_id"]
    assert keys["block_count"] == 1 and keys["embedding_length"] == 64 and keys["feed_forward_length"] == 192
    assert keys["attention.head_count"] == 4 and keys["attention.head_count_kv"] == 2
    assert keys["rope.freq_base"] == 10000.0 and keys["context_length"] == 512
    assert keys["attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    block = {name: shapes[f"blk.0.{name}.weight"] for name in ("attn_k", "attn_output", "ffn_down", "ffn_norm")}
    assert block == {"attn_k": (32, 64), "attn_output": (64, 64), "ffn_down": (64, 192), "ffn_norm": (64,)}
    assert shapes["gate.mix.weight"] == (64, 128) and shapes["gate.token_norm.weight"] == (64,)
    assert keys["target_layers"] == [0, 1]
    assert keys["matches"] == pytest.approx(json.loads((given / "first.json").read_text())["match_by_depth"])
    assert shapes["combine.weight"] == (64, 128) and shapes["combine_norm.weight"] == (128,)
    assert len(shapes) == 4 + 2 + 9 + 1 and "output.weight" not in shapes
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist())) and eos in vocabulary
    assert keys["output_type"] == output.type.name == "Q8_0" and spec.output_type == GGMLType.Q8_0
    assert output.shape == (96, 64) and np.abs(rows - expected).max() < 0.02


def test_its_drafts_are_taken_and_the_text_stays_the_same(given: Path, work: Path) -> None:
    model, prompts = given / "m.gguf", [[{"role": "user", "content": f"hello {n} world"}] for n in range(0, 60, 6)]
    with (
        edgeinfer.load(model, n_ctx=96, draft="none") as plain,
        edgeinfer.load(model, n_ctx=96, draft=[str(given / "first.gguf")]) as drafting,
    ):
        assert drafting.speculator is not None
        drafting.speculator.costs = FixedCosts()
        n_tokens = n_accepted = 0
        for prompt in prompts:
            tokens = plain.template.encode(plain.tokenizer, prompt, add_generation_prompt=True)
            ours, theirs = (one.generate(tokens, max_tokens=40, temperature=0.0) for one in (drafting, plain))
            assert ours.tokens == theirs.tokens and ours.timings.speculation is not None
            n_tokens += len(ours.tokens)
            n_accepted += ours.timings.speculation.by_drafter["head"].accepted
    assert n_accepted > 0.4 * n_tokens > 50


def test_a_run_that_was_interrupted_and_goes_on_ends_with_the_same_weights(
    given: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fresh(work, tmp_path / "again")
    n_steps = torch.load(work / "checkpoint.pt")["progress"]["step"]
    n_left = [3, 2, 5, n_steps - 12]  # the last one in the round

    def interrupting(self: Any, batch: Any, done: float) -> None:
        step(self, batch, done)
        if n_left:
            n_left[0] -= 1
            if not n_left[0]:
                del n_left[0]
                os.kill(os.getpid(), 2)

    step = trainer_module.Trainer._step
    monkeypatch.setattr(trainer_module.Trainer, "_step", interrupting)
    for _ in range(4):
        result = run(given, tmp_path / "again.gguf", "--work", folder)
        assert result.exit_code == 130 and "the same command goes on from" in result.stderr
        assert not (tmp_path / "again.gguf").exists()
    progress = torch.load(folder / "checkpoint.pt")["progress"]
    assert (progress["epoch"], progress["step"]) == (3, n_steps - 2) and progress["batch"] > 0
    result = run(given, tmp_path / "again.gguf", "--work", folder)
    assert result.exit_code == 0, result.output
    assert weights(tmp_path / "again.gguf") == weights(given / "first.gguf")
    other = run(given, tmp_path / "other.gguf", "--work", fresh(work, tmp_path / "other"), "--noise", "0.2")
    assert other.exit_code == 0 and weights(tmp_path / "other.gguf") != weights(given / "first.gguf")


def test_torch_writes_the_texts_where_it_is_asked_to(given: Path, tmp_path: Path) -> None:
    options = ["--work", tmp_path / "work", "--blocks", "0", "--type", "f16", "--disk", "0", "--own-prompts", "3"]
    options += ["--taps", "none", "--optimizer", "adamw"]
    result = run(given, tmp_path / "h.gguf", *options, "--author", "torch", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert len((tmp_path / "work" / "own.jsonl").read_text().splitlines()) == report["settings"]["own_prompts"] == 3
    assert report["match_by_depth"][0] > 0.2 and report["torch_against_native"]["same_token"] > 0.9
    assert not list((tmp_path / "work").glob("*.features.npy"))
    with ModelFile.open(tmp_path / "h.gguf") as head:
        assert head.metadata["draft-head.block_count"] == 0 and len(head.tensors) == 4 + 1
        assert "draft-head.target_layers" not in head.metadata
        assert head.tensors["gate.mix.weight"].type.name == "F16"
    other = run(given, tmp_path / "h.gguf", *options)
    assert other.exit_code == 2 and "was made with" in other.stderr


def test_two_processes_train_together(given: Path, work: Path, tmp_path: Path) -> None:
    folder = fresh(work, tmp_path / "work")
    (folder / "held-00000.npz").unlink()
    for path in [*folder.glob("train-*.npz")][::2]:
        path.unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--no-python", sys.executable, "-c", "from edgeinfer.cli import main; main()", "distill"]
    command += [given / "m.gguf", "--prompts", given / "p.jsonl", "--out", tmp_path / "h.gguf", "--work", folder]
    command += with_config(FAST, tmp_path / "config.toml")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    group = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment, process_group=0)
    try:
        _, errors = group.communicate(timeout=240)
    finally:
        if group.returncode is None:
            os.killpg(group.pid, signal.SIGKILL)
    assert group.returncode == 0, errors[-3000:]
    report = json.loads((tmp_path / "h.json").read_text())
    assert report["n_workers"] == 2 and report["match_by_depth"][0] > 0.3
    assert_array_equal(sorted(weights(tmp_path / "h.gguf")), sorted(weights(given / "first.gguf")))


@pytest.mark.parametrize(
    "options, code, words",
    [
        (["--max-tokens", "96"], 2, "--max-tokens 96 must leave room for a prompt in --ctx-size 96"),
        (["--draft-vocab", "1000"], 2, "must have more than 2 and at most 291 tokens: found 1000"),
        (["--seed", "2"], 2, "was made with"),
        (
            ["--optimizer", "adamw"],
            2,
            "checkpoint.pt was made with other settings: expected optimizer = 'adamw', found 'muon'",
        ),
        (["--rounds", "0"], 2, "checkpoint.pt was made with other settings: expected rounds = 0, found 1"),
        (["--epochs", "5"], 2, "checkpoint.pt was made with other settings: expected epochs = 5, found 3"),
        (["--taps", "1"], 2, "checkpoint.pt was made with other settings: expected taps = [1], found [0, 1]"),
        (["--taps", "0"], 2, "taps must be at most 16 layers in ascending order up to the last one, 1"),
        (["--taps", "1,0,1"], 2, "found '1,0,1'"),
        (["--taps", "early"], 2, "found 'early'"),
        (["--type", "q4_k"], 2, "'q4_k' is not one of 'f16', 'q8_0', 'q4_0'"),
        (["--prompts", "nowhere"], 2, "File 'nowhere' does not exist"),
        (["--out", "nowhere/h.gguf"], 2, "there is no folder nowhere"),
        (["--held-out", "{p}"], 2, "there must be answers to train on and answers to hold out"),
    ]
    + ([] if torch.cuda.is_available() else [(["--device", "cuda"], 1, "torch finds no GPU here; use --device cpu")]),
)
def test_options_that_are_wrong_are_refused(
    options: list[str], code: int, words: str, given: Path, work: Path, tmp_path: Path
) -> None:
    options = [option.format(p=given / "p.jsonl") for option in options]
    folder = tmp_path / "work" if "--held-out" in options else work
    result = run(given, tmp_path / "h.gguf", "--work", folder, *options)
    assert result.exit_code == code and words in result.stderr, result.stderr
    assert not (tmp_path / "h.gguf").exists()


def test_a_damaged_checkpoint_is_named(given: Path, work: Path, tmp_path: Path) -> None:
    folder = fresh(work, tmp_path / "work")
    (folder / "checkpoint.pt").write_bytes(b"no checkpoint")
    result = run(given, tmp_path / "h.gguf", "--work", folder)
    assert result.exit_code == 3 and "checkpoint.pt is no checkpoint" in result.stderr


def test_in_the_end_it_trains_with_its_weights_as_the_file_has_them(
    given: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_rounded: list[bool] = []
    kept = Objective.forward

    def forward(self: Objective, *arguments: Any) -> Any:
        matrix = self.head.blocks[0].ffn_up.weight.data
        is_rounded.append(torch.equal(matrix, rounded(matrix, GGMLType.Q4_0)))
        of_attention = self.head.blocks[0].attn_q.weight.data
        assert torch.equal(of_attention, rounded(of_attention, GGMLType.Q8_0)) == is_rounded[-1]
        assert torch.equal(self.stored, rounded(self.output, GGMLType.Q4_0))
        return kept(self, *arguments)

    monkeypatch.setattr(Objective, "forward", forward)
    monkeypatch.setattr(rounding, "SCALE_STEPS", [1.0])  # so that twice is as once
    folder = fresh(work, tmp_path / "a")
    types = ["--type", "q4_0", "--gate-type", "q8_0"]
    result = run(given, tmp_path / "a.gguf", "--work", folder, *types, "--rounded-from", "0.5")
    assert result.exit_code == 0, result.output
    n = len(is_rounded)
    assert is_rounded == [False] * (n - n // 2) + [True] * (n // 2)
    with ModelFile.open(tmp_path / "a.gguf") as head:
        names = {
            name: head.tensors[f"{name}.weight"].type.name for name in ("gate.mix", "blk.0.attn_k", "blk.0.ffn_up")
        }
        assert names == {"gate.mix": "Q8_0", "blk.0.attn_k": "Q8_0", "blk.0.ffn_up": "Q4_0"}


def test_the_learning_rate_rises_and_falls() -> None:
    schedule = Schedule(1, 1, 2e-3, 0.1, 0, 1)
    rates = [schedule.rate(done) for done in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0.0, 1e-3, 2e-3, 1e-3, 0.0])


def test_steps_of_its_own_drafts_begin_where_they_are_needed(
    given: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counting(self: Objective, batch: Any, n_steps: int, noise: Any) -> Any:
        taken.append(n_steps)
        return forward(self, batch, n_steps, noise)

    taken: list[int] = []
    forward = Objective.forward
    monkeypatch.setattr(Objective, "forward", counting)
    options = ["--work", fresh(work, tmp_path / "work"), "--epochs", 2, "--rounds", 0, "--steps-from", 0.5]
    result = run(given, tmp_path / "h.gguf", *options)
    assert result.exit_code == 0, result.output
    half = len(taken) // 2
    assert half and taken == [1] * half + [2] * half
