"""llama.cpp's built-in chat templates by name, for files that name one instead of its source."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from edgeinfer.common.errors import TemplateError


@dataclass(frozen=True)
class _Template:
    """Messages concatenated, each with the text around it for its role; {} is the content.

    prompt: the beginning of an answer.  begin: before all messages.  opens: before a user's message, or the system's
    that belongs to it.  trimmed: roles whose contents are stripped of white space.
    """

    system: str
    user: str
    assistant: str
    prompt: str = ""
    begin: str = ""
    opens: str = ""
    trimmed: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The same in Jinja."""
        opens = (
            f"{{% if not turn.is_open %}}{{{{ {_quoted(self.opens)} }}}}{{% endif %}}"
            "{% set turn.is_open = message['role'] == 'system' %}"
        )
        return (
            f"{{% set turn = namespace(is_open=false) %}}{{{{ {_quoted(self.begin)} }}}}"
            "{% for message in messages %}"
            f"{{% if message['role'] == 'assistant' %}}{self._written('assistant')}"
            f"{{% else %}}{opens if self.opens else ''}"
            f"{{% if message['role'] == 'system' %}}{self._written('system')}"
            f"{{% else %}}{self._written('user')}{{% endif %}}{{% endif %}}"
            "{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {_quoted(self.prompt)} }}}}{{% endif %}}"
        )

    def _written(self, role: str) -> str:
        before, after = getattr(self, role).split("{}")
        trim = " | trim" if role in self.trimmed else ""
        return f"{{{{ {_quoted(before)} }}}}{{{{ message['content']{trim} }}}}{{{{ {_quoted(after)} }}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _alike(
    form: str, roles: tuple[str, str, str], prompt: str, begin: str = "", trimmed: tuple[str, ...] = ()
) -> _Template:
    """Where roles differ by their names only; form: with ROLE and {}."""
    system, user, assistant = (form.replace("ROLE", role) for role in roles)
    return _Template(system, user, assistant, prompt, begin, trimmed=trimmed)


def _in_brackets(before: str, after: str, space: str) -> _Template:
    """Mistral's, up to the version without a system message of its own."""
    return _Template("{}\n\n", f"{{}}{before}[/INST]", f"{after}{{}}</s>", opens=f"{before}[INST]{space}")


_ROLES = ("system", "user", "assistant")
_CHATML = _alike("<|im_start|>ROLE\n{}<|im_end|>\n", _ROLES, "<|im_start|>assistant\n")
_GRANITE = _alike(
    "<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>\n", _ROLES, "<|start_of_role|>assistant<|end_of_role|>"
)
_LLAMA2 = _Template("{}\n", "{} [/INST]", "{}</s>", opens="[INST] ")
_LLAMA2_SYS = replace(_LLAMA2, system="<<SYS>>\n{}\n<</SYS>>\n\n")
_EXAONE = _Template(
    "[|system|]{}[|endofturn|]\n", "[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", "[|assistant|]", trimmed=_ROLES
)
_BAILING = _alike("<role>ROLE</role>{}", ("SYSTEM", "HUMAN", "ASSISTANT"), "<role>ASSISTANT</role>")
_TEMPLATES = {
    "bailing": _BAILING,
    "bailing-think": replace(_BAILING, prompt=_BAILING.prompt + "<think>"),
    "chatglm3": _alike("<|ROLE|>\n {}", _ROLES, "<|assistant|>", "[gMASK]sop"),
    "chatglm4": _alike("<|ROLE|>\n{}", _ROLES, "<|assistant|>\n", "[gMASK]<sop>"),
    "chatml": _CHATML,
    "command-r": _alike(
        "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        ("SYSTEM", "USER", "CHATBOT"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        trimmed=_ROLES,
    ),
    "deepseek": _Template("{}", "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n", "### Response:\n"),
    "deepseek2": _Template("{}\n\n", "User: {}\n\n", "Assistant: {}<｜end▁of▁sentence｜>", "Assistant:"),
    "deepseek3": _Template("{}\n\n", "<｜User｜>{}", "<｜Assistant｜>{}<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
    "exaone-moe": _alike("<|ROLE|>\n{}<|endofturn|>\n", _ROLES, "<|assistant|>\n", trimmed=_ROLES),
    "exaone3": _EXAONE,
    "exaone4": _EXAONE,
    "falcon3": _alike("<|ROLE|>\n{}\n", _ROLES, "<|assistant|>\n"),
    "gemma": _Template(
        "{}\n\n",
        "{}<end_of_turn>\n",
        "<start_of_turn>model\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        opens="<start_of_turn>user\n",
        trimmed=_ROLES,
    ),
    "glmedge": _alike("<|ROLE|>\n{}", _ROLES, "<|assistant|>"),
    "gpt-oss": _Template(
        "<|start|>system<|message|>{}<|end|>",
        "<|start|>user<|message|>{}<|end|>",
        "<|start|>assistant<|message|>{}<|return|>",
        "<|start|>assistant",
    ),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "grok-2": _alike(
        "ROLE: {}<|separator|>\n\n", ("System", "Human", "Assistant"), "Assistant:", trimmed=("system", "user")
    ),
    "hunyuan-moe": _Template("<|startoftext|>{}<|extra_4|>", "<|startoftext|>{}<|extra_0|>", "{}<|eos|>"),
    "kimi-k2": _alike("<|im_ROLE|>ROLE<|im_middle|>{}<|im_end|>", _ROLES, "<|im_assistant|>assistant<|im_middle|>"),
    "llama2": _LLAMA2,
    "llama2-sys": _LLAMA2_SYS,
    "llama2-sys-strip": replace(_LLAMA2_SYS, trimmed=_ROLES),
    "llama3": _alike(
        "<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>",
        _ROLES,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        trimmed=_ROLES,
    ),
    "llama4": _alike(
        "<|header_start|>ROLE<|header_end|>\n\n{}<|eot|>",
        _ROLES,
        "<|header_start|>assistant<|header_end|>\n\n",
        trimmed=_ROLES,
    ),
    "megrez": _alike("<|role_start|>ROLE<|role_end|>{}<|turn_end|>", _ROLES, "<|role_start|>assistant<|role_end|>"),
    "minicpm": _Template("{}", "<用户>{}<AI>", "{}", trimmed=_ROLES),
    "mistral-v1": _in_brackets(" ", " ", " "),
    "mistral-v3": replace(_in_brackets("", " ", " "), trimmed=("assistant",)),
    "mistral-v3-tekken": _in_brackets("", "", ""),
    "mistral-v7": _Template("[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {}[/INST]", " {}</s>"),
    "mistral-v7-tekken": _Template("[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}</s>"),
    "openchat": _Template(
        "{}<|end_of_turn|>",
        "GPT4 Correct User: {}<|end_of_turn|>",
        "GPT4 Correct Assistant: {}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "orion": _Template("{}\n\n", "{}\n\nAssistant: </s>", "{}</s>", opens="Human: "),
    "phi3": _alike("<|ROLE|>\n{}<|end|>\n", _ROLES, "<|assistant|>\n"),
    "phi4": _alike("<|im_start|>ROLE<|im_sep|>{}<|im_end|>", _ROLES, "<|im_start|>assistant<|im_sep|>"),
    "rwkv-world": _Template("System: {}\n\n", "User: {}\n\nAssistant:", " {}\n\n", trimmed=_ROLES),
    "seed_oss": _alike("<seed:bos>ROLE\n{}<seed:eos>", _ROLES, "<seed:bos>assistant\n", trimmed=("assistant",)),
    "solar-open": _alike("<|begin|>ROLE<|content|>{}<|end|>", _ROLES, "<|begin|>assistant"),
    "vicuna": _Template("{}\n\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:"),
    "vicuna-orca": _Template("SYSTEM: {}\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:"),
    "zephyr": _alike("<|ROLE|>\n{}<|endoftext|>\n", _ROLES, "<|assistant|>\n"),
}
KNOWN_TEMPLATES = tuple(_TEMPLATES)


def named_source(name: str) -> str:
    """Jinja source of the template of that name, one of KNOWN_TEMPLATES."""
    return _TEMPLATES[name].source


def source_of(stored: str | None) -> str | None:
    """Source of the template that a file has: what it holds, or the template that it names, or None.

    Raises TemplateError for a text that is neither Jinja nor a name: each prompt would be that text.
    """
    text = (stored or "").strip()
    if not text:
        return None
    if text in _TEMPLATES:
        return named_source(text)
    if "{{" not in text and "{%" not in text:
        raise TemplateError(
            f"the chat template must be Jinja, or the name of a known one ({', '.join(_TEMPLATES)}): found {text!r:.80}"
        )
    return stored
