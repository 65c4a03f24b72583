"""Chat templates of models against the descriptions of their calls: does a template write a call as its format says?

FOLDER has Jinja sources, such as models/templates of llama.cpp. For each: the format that its marks say, whether it
tells of tools, and whether the call that it writes is spelled as in the description, but for white space. One that is
not is named, and the exit code is 1.

Run: python tests/benchmarks/check_call_formats.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.call_formats import ATEM, HARMONY, CallFormat, call_format_of
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.message_form import form_of
from edgeinfer.models.provenance import plain
from edgeinfer.models.tool_calls import calls_for_template
from edgeinfer.tools.reading import spelled
from edgeinfer.tools.template import TemplateTools

CALLS = [{"name": "look_at", "arguments": {"place": "the sky", "times": 2}, "id": "abcdefgh1"}]
# What a template may write between the parts of a call that the model need not.
_LEFT_OUT = ("[CALL_ID]abcdefgh1", ', "id": "abcdefgh1"')


def main() -> None:
    """Print a line for each template, and a JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    paths = sorted(parser.parse_args().folder.glob("*.jinja"))
    if not paths:
        raise SystemExit("there are no *.jinja files")
    found = {path.stem: checked(path.read_text(encoding="utf-8")) for path in paths}
    for name, (format, verdict) in found.items():
        print(f"{verdict:28} {format:18} {name}")
    print(json.dumps({"templates": len(found), "verdicts": Counter(verdict for _, verdict in found.values())}))
    sys.exit(any(verdict.startswith("other") for _, verdict in found.values()))


def checked(source: str) -> tuple[str, str]:
    """(name of the format, what the template makes of a call)."""
    format = format_of(source)
    try:
        template = ChatTemplate(source)
        template._form = form_of(template.render)
    except TemplateError:
        return "-", "the template is refused"
    tools = TemplateTools(template, format)
    if not tools.is_native:
        return tools.format.name, "tells of no tools" if format is None else "tells of no tools (?)"
    form = tools.call_forms[0]
    if form == "text":
        return tools.format.name, "takes calls as text"
    asked = {"role": "user", "content": "How is it?"}
    answer = {"role": "assistant", "content": "", "tool_calls": calls_for_template(CALLS, form == "json")}
    result = {"role": "tool", "content": "blue", "name": "look_at", "tool_call_id": "abcdefgh1"}
    for messages in ([asked, answer, result], [asked, answer]):
        try:
            prompt = template.render(messages)
            break
        except TemplateError:
            continue
    for part in _LEFT_OUT:
        prompt = prompt.replace(part, "")
    if format is HARMONY:
        is_same = "to=functions.look_at<|channel|>commentary json<|message|>" in prompt
    else:
        is_same = _bare(plain(spelled(tools.format, CALLS))) in _bare(prompt)
    return tools.format.name, "as described" if is_same else f"other: {prompt[prompt.find('look_at') - 40 :][:90]!r}"


def format_of(source: str) -> CallFormat | None:
    """The format that the marks of a template say."""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY
    if ATEM.opening in source:
        return ATEM
    return call_format_of(source, {"<|tool_call_start|>"} if "<|tool_list_start|>" in source else ())


def _bare(text: str) -> str:
    """Without white space, and quotes alike."""
    return "".join(text.split()).replace('"', "'")


if __name__ == "__main__":
    main()
