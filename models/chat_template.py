"""Chat templates: Jinja source from a model file, that is, a program written by a stranger.

It runs in this process, in jinja2's immutable sandbox, which keeps it away from Python's internals but limits neither
time nor memory. Added here are these limits, so that any thread may render without a signal or another process:

- Operations whose result is longer than their operands (* + ~ % **, join, replace, indent, format) are refused before
  they run if the result would be too long. All memory allocated is counted, also what bodies of loops and macros write.
- Loops, macros, calls, filters, tests and comparisons count as steps and check the clock.
- Values that Python would print, compare, sort or hash in one go are measured first: a list that contains one list many
  times, ten levels deep, is small in memory but endless in print.
- Only the filters, tests and methods named here exist.

Special tokens come from the template's own characters only: see edgeinfer.models.provenance. Its literals are trusted,
texts of messages are not, and each allowed operation either keeps the marks or gives an untrusted text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jinja2
from jinja2.exceptions import SecurityError

from edgeinfer.common.errors import TemplateError
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.known_templates import source_of
from edgeinfer.models.message_form import MessageForm, form_of, with_turns_joined
from edgeinfer.models.provenance import Text, joined, plain, trusted
from edgeinfer.models.template_sandbox.budget import BUDGET, MAX_DEPTH, MAX_LENGTH, STEPS_A_PAIR, Budget, check_length
from edgeinfer.models.template_sandbox.environment import ENVIRONMENT
from edgeinfer.models.template_sandbox.errors import is_of_template
from edgeinfer.models.tokenizer import Tokenizer

__all__ = ["CHATML", "MAX_LENGTH", "MAX_SOURCE_BYTES", "STEPS_A_PAIR", "ChatTemplate", "check_values"]

MAX_SOURCE_BYTES = 256 << 10

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
Values: TypeAlias = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# Roles that templates build control tokens of ("<|" + role + "|>"). Any other one is a text like the content.
_ROLES = frozenset(
    (
        "assistant available_tools bot context developer document documents environment function gpt human ipython "
        "model observation system thinking tool tool_call tool_response tools user"
    ).split()
)


def _copied(value: Any, depth: int = 0) -> Any:
    """The value in plain lists and dicts, texts as they are but known roles trusted. Raises TemplateError."""
    if isinstance(value, str):
        return value if type(value) is Text else plain(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth < MAX_DEPTH // 2:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            copy = {plain(key): _copied(part, depth + 1) for key, part in value.items()}
            role = copy.get("role")
            if isinstance(role, str) and role in _ROLES:
                copy["role"] = trusted(role)
            return copy
        if isinstance(value, (list, tuple)):
            return [_copied(part, depth + 1) for part in value]
    raise TemplateError(
        f"a message must be made of texts, numbers, lists and mappings by texts: found {type(value).__name__}"
    )


# What a template is given in any case, or has as a function; and what Jinja calls its own.
_OWN = frozenset(
    "messages add_generation_prompt tools documents bos_token eos_token raise_exception strftime_now self loop".split()
)


def check_values(given: Values) -> dict[str, Any]:
    """Further variables of a template, as it gets them. Raises TemplateError for names that are none of theirs."""
    for name in given:
        if not isinstance(name, str) or not name.isidentifier() or name in _OWN or name in ENVIRONMENT.globals:
            raise TemplateError(f"a chat template gets no value named {name!r:.60} from outside: leave it out")
    return {name: _copied(value) for name, value in given.items()}


class ChatTemplate:
    """Turns messages into the prompt that a model was trained on. Any number of threads may use one.

    source: Jinja, with what transformers gives to it: messages, add_generation_prompt, bos_token, eos_token, tools,
    documents (always none), raise_exception, strftime_now, tojson, and further values such as enable_thinking.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", *, form: MessageForm | None = None
    ) -> None:
        """form: how the template gets messages that it does not take as they are; None: as they are.

        Raises TemplateError if the source is too long or no Jinja.
        """
        if len(source.encode(errors="replace")) > MAX_SOURCE_BYTES:
            raise TemplateError(f"a chat template may have {MAX_SOURCE_BYTES >> 10} KiB: found {len(source) >> 10} KiB")
        self._source = source
        self._form = form
        self._tokens = {"bos_token": trusted(bos_token), "eos_token": trusted(eos_token)}
        try:
            self._template = ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
        except Exception as error:  # a limit of Python's: of recursion, nested blocks, digits of a number
            if not is_of_template(error):
                raise
            raise TemplateError(f"the chat template is broken: {type(error).__name__}: {error!s:.200}") from error

    @classmethod
    def from_file(cls, file: ModelFile, tokenizer: Tokenizer, given: str | None = None) -> ChatTemplate:
        """The template of a model file; ChatML where it has none but its vocabulary is made for that.

        given: used instead: Jinja, or the name of a known template.  Raises TemplateError, also for one whose prompts
        do not have the user's message in them.
        """
        source = source_of(tokenizer.chat_template if given is None else given)
        if source is None:
            if tokenizer.token_id("<|im_start|>") is None:
                raise TemplateError(
                    f"{file.path} has no chat template: complete plain text with it, or use an instruction-tuned model"
                )
            source = CHATML
        ids = (tokenizer.bos_id, tokenizer.eos_id)
        bos, eos = ("" if id is None else tokenizer.token_bytes(id).decode(errors="replace") for id in ids)
        template = cls(source, bos, eos)
        template._form = form_of(template.render)
        if template._form is None:
            place = f"{file.path}: the chat template" if given is None else "the chat template that was given"
            raise TemplateError(f"{place} leaves out what the user says: it is damaged")
        return template

    def __reduce__(self) -> tuple[object, ...]:
        made_again = partial(ChatTemplate, form=self._form)
        return made_again, (self._source, self._tokens["bos_token"], self._tokens["eos_token"])

    @property
    def merges_system(self) -> bool:
        """Whether a system message becomes the beginning of the first user message, where it has no other place."""
        return self._form is not None and self._form.merges_system

    @property
    def source(self) -> str:
        """The Jinja source."""
        return self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Tools = None,
        values: Values | None = None,
    ) -> str:
        """The prompt as text. Raises TemplateError: refused by the template, too slow, too long.

        messages: each with role and content.  add_generation_prompt: the answer of the assistant is begun.  tools: in
        OpenAI's form, None for none; a template may know nothing of them.  values: further variables of the template,
        such as enable_thinking, of which their texts are no more trusted than a message.
        """
        return plain(self._written(messages, add_generation_prompt, tools, values or {}))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Tools = None,
        values: Values | None = None,
        following: str = "",
    ) -> list[int]:
        """The prompt as token ids, with special tokens only where the template itself wrote them.

        Equal to tokenizer.encode(render(messages), parse_special=True) where no message has the text of a protected
        token (see Tokenizer.protected); there it stays text, whatever the template does with it. The texts of a message
        may be edgeinfer.models.provenance.Text: those of their characters that are trusted count as the template's own.
        following: comes after what the template wrote, as the beginning of an answer does.  Begins with one begin token
        if the file needs one. Raises TemplateError.
        """
        written = self._written(messages, add_generation_prompt, tools, values or {})
        ids = tokenizer.encode_rendered(joined([written, following]) if following else written, self._source)
        first = next((id for id in ids if tokenizer.token_bytes(id).strip()), None)  # some write a new line before it
        if tokenizer.add_bos and tokenizer.bos_id is not None and first != tokenizer.bos_id:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _written(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: Tools, values: Values
    ) -> str:
        """The prompt of messages in the form that the template takes."""
        if self._form is None:
            return self._render(messages, add_generation_prompt, tools, values)
        try:
            return self._render(self._form.applied(messages), add_generation_prompt, tools, values)
        except TemplateError:
            if len(joined_turns := with_turns_joined(messages)) == len(messages):
                raise
        return self._render(self._form.applied(joined_turns), add_generation_prompt, tools, values)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: Tools, values: Values
    ) -> str:
        copies = _copied(messages)
        variables = {
            **check_values(values),
            "messages": copies,
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else _copied(tools),
            "documents": None,
            **self._tokens,
        }
        before = BUDGET.set(Budget(len(copies) if isinstance(copies, list) else 0))
        try:
            return _collected(self._template.generate(variables))
        except TemplateError:
            raise
        except SecurityError as error:
            raise TemplateError(f"the chat template does what it must not: {error}") from error
        except Exception as error:
            if not is_of_template(error):
                raise
            raise TemplateError(f"the chat template fails: {type(error).__name__}: {error!s:.500}") from error
        finally:
            BUDGET.reset(before)


def _collected(pieces: Iterator[str]) -> str:
    found: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        check_length(length)
        found.append(piece)
    return joined(found)
