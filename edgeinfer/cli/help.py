"""The options of a command in groups, for --help; colours on a terminal only.

A group lists options by the names of their parameters, most used first. Options without a group are in the last one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from edgeinfer.cli.terminal import has_colours

_LAST = "Options"
_METAVARS = {" INTEGER RANGE": " N", " INTEGER": " N", " FLOAT RANGE": " X", " FLOAT": " X", " PATH": " FILE"}
_ONE_RANGE = r"(?:-?[\d.]+<=?)?x[<>]=?-?[\d.]+"  # as click shows it; an error says it, too
_VARIABLE = re.compile(r"(?<=\[)env var: \w+; |  \[env var: \w+\]")  # which docs/environment.md lists
_RANGE = re.compile(rf"; {_ONE_RANGE}(?=\])|  \[{_ONE_RANGE}\]")
_MODEL = ("model", "hf_repo", "hf_file", "n_threads", "backend")
_MEMORY = (
    *("n_ctx", "parallel", "budget", "cache_type", "cache_type_k", "cache_type_v", "cache_ram", "n_batch"),
    *("cache_disk", "expert_cache", "ternary_bits"),
)
_EXPERTS = ("expert_device", "expert_device_bytes", "verify")
_SPECULATION = ("draft", "model_draft", "hf_repo_draft", "draft_max", "draft_device", "draft_memory")
_SAMPLING = (
    *("temperature", "seed", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty"),
    *("penalty_last_n", "presence_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "logit_bias", "loop_guard"),
)
_CONSTRAINTS = ("json_schema", "json_schema_file", "grammar", "grammar_file", "regex", "choices")
_TEMPLATE = ("chat_template", "chat_template_file", "reasoning")
_ASKED = {
    "Model": (*_MODEL, *_TEMPLATE, "tbt"),
    "Text": ("prompt", "file", "system", "escape", "session_name", "resume", "list_sessions", "no_history"),
    "Output": ("predict", "stop", "samples", "first", "as_json", "logprobs", "quiet", "plain", "show_reasoning"),
    "Sampling": _SAMPLING,
    "What an answer may be": _CONSTRAINTS,
    "Memory": (*_MEMORY, *_EXPERTS),
    "Speculation": _SPECULATION,
}
GROUPS: Mapping[str, Mapping[str, Sequence[str]]] = {  # of each command that has more than a few options
    "chat": _ASKED,
    "generate": _ASKED,
    "batch": {**_ASKED, "Output": ("out", "overwrite", "predict", "stop", "quiet")},
    "serve": {
        "Model": (*_MODEL, "others", "aliases", "tags", "any_model", *_TEMPLATE, "tbt"),
        "Server": ("host", "port", "api_key_file", "no_auth", "hosts", "origins", "page", "slots", "verbose", "quiet"),
        "Sampling, where a request says nothing": ("predict", *_SAMPLING, "escape"),
        "Memory": (*_MEMORY, *_EXPERTS),
        "Speculation": _SPECULATION,
    },
    "simulate": {"Simulation": ("fpga_folder", "completes"), **_ASKED},
    "profile": {
        "Model": _MODEL,
        "Memory": (*_MEMORY, "fit"),
        "Speculation": _SPECULATION,
        "Machine": ("memory", "bandwidth", "compute", "disk"),
        "Report": ("prompt_tokens", "check", "plot", "as_json"),
    },
    "bench": {
        "Model": (*_MODEL, "budget"),
        "Speed": ("rounds", "against", "as_json", "as_csv", "plot"),
        "Expert cache": ("expert_cache", "check_logits"),
        "Timeline of drafting": ("timeline", "model_draft", "hf_repo_draft", "draft_device"),
    },
    "export": {
        "Output": ("to", "out", "overwrite", "dry_run", "resume", "no_check"),
        "Weights": ("type", "imatrix", "calibration", "hf_repo", "hf_file"),
        "Types chosen by loss (--type auto)": ("size", "fit", "cost"),
        "Packages": ("n_ctx", "model_draft", "hf_repo_draft", "drafter"),
        "ONNX": ("operators", "external_data"),
        "Ternary": ("format", "head"),
        "Drafters": ("model", "draft_vocab"),
    },
    "distill": {
        "Texts": (
            "prompts",
            "chats",
            "own_prompts",
            "tasks",
            "tokens",
            "context",
            "max_tokens",
            "held_out",
            "texts_of",
        ),
        "Head": ("out", "type", "epochs", "init", "config"),
        "Run": ("device", "n_threads", "seed", "work", "disk_gib", "hf_repo", "hf_file"),
        "Report": ("plot", "as_json"),
    },
}


def write_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command, a section for each group."""
    records = {each.name or "": record for each in command.get_params(context) if (record := _record(each, context))}
    for title, names in _grouped(command.name or "", list(records)):
        with formatter.section(_styled(title, bold=True)):
            formatter.write_dl([records[name] for name in names])


def _grouped(command: str, names: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    groups = GROUPS.get(command, {})
    grouped: set[str] = set()
    for title, members in groups.items():
        found = [name for name in members if name in names and name not in grouped]
        grouped.update(found)
        if found:
            yield title, found
    if rest := [name for name in names if name not in grouped]:
        yield ("Others" if grouped else _LAST), rest


def _record(option: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """An option with its first short and its first long name, and its help."""
    record = option.get_help_record(context)
    if record is None or not isinstance(option, click.Option):
        return None
    names, text = record
    for long, short in _METAVARS.items():
        names = names.replace(long, short)
    text = _RANGE.sub("", _VARIABLE.sub("", text))
    joined = ", ".join(sorted(option.opts, key=_n_dashes))  # as click joins them
    return names.replace(joined, _styled(", ".join(main_names(option.opts)), fg="cyan"), 1), text


def main_names(names: Sequence[str]) -> Iterator[str]:
    """The first short and the first long name. docs/chat.md lists the others."""
    for n_dashes in (1, 2):
        yield from [name for name in names if _n_dashes(name) == n_dashes][:1]


def _n_dashes(name: str) -> int:
    return len(name) - len(name.lstrip("-"))


def _styled(text: str, **style: Any) -> str:
    return click.style(text, **style) if has_colours(sys.stdout) else text
