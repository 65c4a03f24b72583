"""A draft head trained on saved conversations: its acceptance before and after, on dialogues that it has not seen.

    python tests/benchmarks/bench_chats_head.py MODEL.gguf HEAD.gguf [--work FOLDER] [--epochs 4] [--rate 5e-4]
        [--tokens 256] [--measured-tokens 128] [--threads 1] [--nodes 8] [--out FILE.json]

40 dialogues of three questions about cooking and the household are held with the model, sampled as `edgeinfer chat`
samples it, and saved as `/save` saves them; 32 to train on, 8 about other dishes and tasks to measure on. `edgeinfer
distill --chats` continues from HEAD on the former. On the latter, answered again greedily and as the chat samples, each
contender drafts trees of up to --nodes nodes, as if verifying and drafting cost nothing: tokens per pass and acceptance
rates are those of the drafts, on any machine under any load. Contenders: the head alone, before and after; the drafts
that need no file ("model-free"); the same with the answers of the 32 dialogues in a file (--draft-memory); and the head
beside them, before and after. Texts must be equal to those without drafts. `edgeinfer evaluate` gives the acceptance of
both heads on the 8 dialogues as they were saved.

Everything is kept in --work, and the same command goes on from there. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from dialogues import Dialogue, Drafts, finish, held
from records import Records

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from drafting import FixedCosts  # noqa: E402

import edgeinfer  # noqa: E402
from edgeinfer.chat import Conversation  # noqa: E402
from edgeinfer.models.draft_head import read_head  # noqa: E402
from edgeinfer.models.gguf import ModelFile  # noqa: E402
from edgeinfer.sampling import SamplingParams  # noqa: E402
from edgeinfer.speculation.payoff import Payoff  # noqa: E402

DISHES = (
    *("tomato soup", "an omelette", "apple pie", "vegetable curry", "roast chicken", "pancakes", "beef stew"),
    *("mushroom risotto", "banana bread", "fish tacos", "lentil salad", "potato gratin", "chocolate muffins"),
    *("fried rice", "spaghetti with meatballs", "onion quiche", "cheese scones", "pumpkin soup", "grilled salmon"),
    "oat cookies",
)
TASKS = (
    *("clean an oven", "wash a wool sweater", "unclog a kitchen sink", "remove a wine stain from a carpet"),
    *("store potatoes", "defrost a freezer", "sharpen a kitchen knife", "clean windows without streaks"),
    *("iron a shirt", "descale a kettle", "organise a small pantry", "get rid of fruit flies"),
)
HELD_DISHES = ("bean chili", "lemon cake", "stuffed peppers", "carrot salad", "shepherd's pie")
HELD_TASKS = ("clean a microwave", "care for a cast-iron pan", "fold a fitted sheet")
OF_DISHES = (
    ("How do I make {}?", "Give me a recipe for {} for four people.", "I want to cook {} tonight. What do I need?"),
    ("What can I use instead of butter?", "How long does it keep in the fridge?", "Can I make it without an oven?"),
    ("What goes well with it?", "Write me a short shopping list for it.", "Sum up the steps in five short lines."),
)
OF_TASKS = (
    ("How do I {}?", "What is the best way to {}?", "I have to {} today. Where do I begin?"),
    ("How often should I do that?", "Can I do it with baking soda or vinegar?", "What should I avoid?"),
    ("Make a checklist of it.", "How long will it take?", "Sum up the steps in five short lines."),
)
SEED = 1


def talks(dishes: Sequence[str], tasks: Sequence[str]) -> list[list[str]]:
    """The questions of a dialogue about each; the wordings change from one to the next."""
    found = []
    for subjects, turns in ((dishes, OF_DISHES), (tasks, OF_TASKS)):
        for number, subject in enumerate(subjects):
            wordings = number, number // 3, number // 2  # which of them, by turn
            found.append([turn[n % len(turn)].format(subject) for turn, n in zip(turns, wordings, strict=True)])
    return found


def save_chats(arguments: argparse.Namespace, folder: Path, said: Sequence[Sequence[str]], first: int) -> None:
    """Hold and save the dialogues that are missing; their answers go into a file of answers beside the folder."""
    memory = folder.with_suffix(".answers")
    folder.mkdir(parents=True, exist_ok=True)
    with edgeinfer.load(arguments.model, n_ctx=4096, n_threads=arguments.threads, draft_memory=memory) as engine:
        for number, questions in enumerate(said):
            path = folder / f"{number:02}.jsonl"
            if path.exists():
                continue
            conversation = Conversation(engine)
            for turn, question in enumerate(questions):
                for _ in conversation.send(question, max_tokens=arguments.tokens, seed=first + 100 * number + turn):
                    pass
            conversation.save(path)
            print(f"{folder.name}: {number + 1} of {len(said)}", file=sys.stderr, flush=True)


def edgeinfer_(*words: object) -> str:
    """What the command says."""
    return subprocess.run(
        [sys.executable, "-m", "edgeinfer", *map(str, words)], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def trained(arguments: argparse.Namespace, work: Path) -> tuple[Path, dict[str, Any]]:
    """The head after training on the saved conversations, and the report on it."""
    head, config = work / "after.gguf", work / "config.toml"
    if not head.exists():
        with ModelFile.open(arguments.head) as file:
            n_vocab = len(read_head(file).draft_vocab)
        lines = [f"draft_vocab = {n_vocab}", 'gate_type = "q8_0"', f"learning_rate = {arguments.rate}"]
        lines += ["steps_from = 0.8", "evaluate_every = 20"]  # own drafts take three times as long
        config.write_text("\n".join(lines) + "\n")
        options = ["--epochs", arguments.epochs, "--type", "q4_0", "-c", 1536, "-t", arguments.threads]
        edgeinfer_(
            *("distill", arguments.model, "--chats", work / "train", "--init", arguments.head, "--out", head),
            *("--config", config, *options),
        )
    report = json.loads(head.with_suffix(".json").read_text())
    kept = ("answer_tokens", "texts", "tokens_trained", "seconds_trained", "torch_against_native", "trained_on")
    return head, {name: report[name] for name in kept} | {"curve": report["curve"]}


def measured(arguments: argparse.Namespace, options: dict[str, Any], params: SamplingParams | None) -> dict[str, Any]:
    """The figures of the drafts on the dialogues that were held out, and the answers. params: None for the chat's."""
    drafts, tokens = Drafts(), []
    with edgeinfer.load(arguments.model, n_ctx=4096, n_threads=arguments.threads, **options) as engine:
        if engine.speculator is not None:
            engine.speculator.costs = FixedCosts(lambda n: 1e4 + n if n <= arguments.nodes + 1 else 1e7)
        for number, said in enumerate(talks(HELD_DISHES, HELD_TASKS)):
            drawn = replace(params or engine.default_params, seed=SEED + 100 * number)
            for answer in held(engine, Dialogue(engine), said, arguments.measured_tokens, drawn):
                drafts.add(len(answer.tokens), answer.timings.speculation)
                tokens.append(list(answer.tokens))
    return {"figures": drafts.figures(), "answers": tokens}


def compared(arguments: argparse.Namespace, work: Path, after: Path) -> tuple[dict[str, Any], int]:
    """The figures by sampling and contender, and how many contenders wrote another text than without drafts."""
    remembered = work / "remembered"
    contenders: dict[str, dict[str, Any]] = {
        "plain": {"draft": "none"},
        "head before": {"draft": [str(arguments.head)]},
        "head after": {"draft": [str(after)]},
        "model-free": {},
        "model-free, answers remembered": {"draft_memory": remembered},
        "model-free and head before": {"draft": str(arguments.head)},
        "model-free and head after": {"draft": str(after)},
    }
    settings = {"model": arguments.model.name, "tokens": arguments.measured_tokens, "nodes": arguments.nodes}
    records = Records(work / "measured.jsonl", settings)
    figures: dict[str, Any] = {}
    different = 0
    for sampling, params in (("greedy", SamplingParams(temperature=0.0)), ("chat", None)):
        for name, options in contenders.items():
            key = f"{sampling}, {name}"
            if key not in records.rows:
                shutil.copy(work / "train.answers", remembered)  # the engine adds answers of its own
                with mock.patch.object(Payoff, "needs_plain_step", False):  # no time is measured
                    records.add(key, measured(arguments, options, params))
                print(key, json.dumps(records.rows[key]["figures"]), file=sys.stderr, flush=True)
            figures.setdefault(sampling, {})[name] = records.rows[key]["figures"]
            different += records.rows[key]["answers"] != records.rows[f"{sampling}, plain"]["answers"]
    return figures, different


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("head", type=Path, metavar="HEAD.gguf")
    parser.add_argument("--work", type=Path, help="folder for everything  [default: a temporary one]")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=5e-4, help="largest learning rate")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--measured-tokens", type=int, default=128, help="most tokens of an answer that is measured")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        save_chats(arguments, work / "train", talks(DISHES, TASKS), SEED)
        save_chats(arguments, work / "held", talks(HELD_DISHES, HELD_TASKS), SEED)
        after, training = trained(arguments, work)
        figures, different = compared(arguments, work, after)
        saved = {}
        for name, head in (("before", arguments.head), ("after", after)):
            chats = ["--chats", work / "held", "-c", 1536, "-t", arguments.threads, "--json"]
            report = json.loads(edgeinfer_("evaluate", arguments.model, head, *chats))
            saved[name] = {key: report[key] for key in ("held_out_texts", "match_by_depth", "tokens_per_step")}
    found = {"training": training, "different": different, "evaluated": saved, "figures": figures}
    finish("chats head", arguments.model, arguments.out, found)


if __name__ == "__main__":
    main()
