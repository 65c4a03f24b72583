"""Sources of chat templates: what those in use do, expressions at random, and sources with something wrong in them."""

from __future__ import annotations

import random
import re

# Seconds of the processor: twenty times and more what a template is allowed, so that whatever takes as long was not
# stopped, on however slow a machine.
MAX_SECONDS = 60.0

# The ways of templates in use, written for the tests: which models have them stands before each.
FEATURES = {
    # Llama 2, Mistral: the system message within the first question, roles that must take turns.
    "system in the first question": """{{ bos_token }}
{%- if messages and messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = none -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('take turns') }}{%- endif -%}
    {%- if m.role == 'user' -%}
        [Q] {% if loop.first and system is not none %}{{ '<<S>>\\n' ~ system ~ '\\n<</S>>\\n\\n' }}{% endif %}
        {{- m.content | trim }} [/Q]
    {%- else -%}
        {{ ' ' + m.content.strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}""",
    # Llama 3: headers made by ~, a begin token with the first message only, the date.
    "headers": """{% set year = strftime_now('%Y') if strftime_now is defined else '2024' %}
{% for m in messages %}
{% set text = '<|start|>' ~ m.role ~ '<|end|>\\n\\n' ~ (m.content | trim) ~ '<|over|>' %}
{% if loop.index0 == 0 %}{% set text = bos_token ~ text %}{% endif %}
{{ text }}
{% endfor %}
{{ year | int > 2000 }}{% if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}""",
    # Gemma: other names of the roles, and no system message.
    "other roles": """{% if messages | selectattr('role', 'equalto', 'system') | list | length %}
{{ raise_exception('no system message here') }}{% endif %}
{% for m in messages %}{% set role = {'assistant': 'model'}.get(m.role, m.role) %}<turn>{{ role }}
{{ m.content | trim }}<end>
{% endfor %}{{ '<turn>model\\n' if add_generation_prompt else '' }}""",
    # Qwen 3: reasoning is cut out of all answers before the last question, which a namespace finds from the end.
    "reasoning": """{%- set ns = namespace(last=messages | length - 1, found=false) -%}
{%- for m in messages[::-1] -%}
    {%- if not ns.found and m.role == 'user' and not (m.content is string and m.content.startswith('<tool')) -%}
        {%- set ns.found = true -%}{%- set ns.last = messages | length - loop.index -%}
    {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
    {%- set content = m.content if m.content is string else m.content | tojson -%}
    {%- if m.role == 'assistant' and '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- if loop.index0 > ns.last -%}{{ '<think>' + thought + '</think>' }}{%- endif -%}
    {%- endif -%}
    {{- m.role + '|' + content + '|' + ('L' if loop.last else loop.nextitem.role) + '\\n' -}}
{%- endfor -%}""",
    # Gemma 4: from each message it looks back at all others, and forward for the results of its calls.
    "looks at all others": """{{ bos_token }}{%- for m in messages -%}
    {%- if m['role'] != 'tool' -%}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
    {%- set before = namespace(role=none, found=false) -%}
    {%- if loop.index0 > 0 -%}{%- for j in range(loop.index0 - 1, -1, -1) -%}
        {%- if not before.found -%}{%- if messages[j]['role'] != 'tool' -%}
            {%- set before.role = messages[j]['role'] -%}{%- set before.found = true -%}
        {%- endif -%}{%- endif -%}
    {%- endfor -%}{%- endif -%}
    {%- if not (role == 'model' and before.role == 'assistant') -%}{{- '<|turn>' + role + '\\n' -}}{%- endif -%}
    {{- m['content'] | trim -}}
    {%- set results = namespace(over=false) -%}
    {%- if m.get('tool_calls') -%}{%- for k in range(loop.index0 + 1, messages | length) -%}
        {%- if results.over -%}{%- elif messages[k]['role'] != 'tool' -%}{%- set results.over = true -%}
        {%- else -%}{{- '[' + messages[k].get('name', '?') + ':' + messages[k]['content'] + ']' -}}{%- endif -%}
    {%- endfor -%}{%- endif -%}
    {{- '<turn|>\\n' -}}
    {%- endif -%}
{%- endfor -%}""",
    # Hermes, Llama 3.1: calls of tools as JSON, and their results, which come together.
    "tools": """{% macro call(of) %}<call>{"name": {{ of.name | tojson }}, "args": {{ of.arguments | tojson }}}</call>
{% endmacro %}
{% for m in messages %}
{% if m.role == 'tool' and (loop.first or loop.previtem.role != 'tool') %}<results>{% endif %}
{% if m.tool_calls is defined and m.tool_calls %}
{% for one in m.tool_calls %}{{ call(one.function) }}{{ one.id[:4] | upper }}{% endfor %}
{% elif m['role'] in ('tool', 'function') %}{{ m.name }}={{ m.content | indent(2) }}
{% else %}{{ m.content }}{% endif %}
{% if m.role == 'tool' and loop.last %}</results>{% endif %}
{% endfor %}{{ tools is none }}{{ (documents or []) | length }}""",
    # Command R, Granite: content that is a text or parts, filters over filters, text in blocks.
    "parts": """{% set head %}{{ '%s: %d' | format('n', messages | length) }}{% endset %}{{ head | capitalize }}
{% for role, n in {'user': 1, 'system': 2}.items() %}{{ role.title() }}:{{ n }}{{ ', ' if not loop.last }}{% endfor %}
{% for m in messages if m.content %}
{% if m.content is string %}{{ m.content | replace('a', 'AA') | upper }}
{% else %}{% for part in m.content %}{{ part.text | default('?') }}{% endfor %}{% endif %}
{% else %}nothing{% endfor %}
{{ messages | map(attribute='role') | unique | sort | join('/') }}{{ messages | groupby('role') if false }}""",
    # Zephyr, Phi 3, SmolLM: the shortest ones, in one line.
    "one line": "{% for m in messages %}{{'<|' + m['role'] + '|>\\n' + m['content'] + eos_token}}\n{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|assistant|>\\n' }}{% endif %}",
    # SmolLM3, DeepSeek: flags that a loop finds, continue and break, what is for training.
    "flags": """{% set ns = namespace(is_first=true, mode='/think') %}{% for m in messages %}
{% if m.role == 'system' %}{% if '/no_think' in m.content %}{% set ns.mode = '' %}{% endif %}{% continue %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ ns.mode if ns.is_first }}{{ m.content }}{% set ns.is_first = false %}{% endif %}
{% endfor %}{{ ns.is_first }}""",
}


_KINDS = {"T": "text", "N": "number", "I": "index", "B": "truth", "L": "list", "D": "dict"}

# A capital letter alone stands for a text, a number, an index, a truth, a list, a dict, anything, or a statement (S).
# The first line of each has those without any.
_EXPRESSIONS = {
    "text": """''; 'a b'; 'Hi\\n there '; "it's"; 'x-y-z'; 'é<😀>'; bos_token; messages[0].role; '12'; missing
        (T ~ A); (T + T); (T * 2); T[I:]; T[:I]; T[::-1]; (T if B else T); (T or T); (T if B); (T).upper(); (T).strip()
        (T).strip('ax '); (T).replace('a', T); (T).title(); (T).lstrip(); (T | upper); (T | trim); (T | capitalize)
        (T | replace('a', 'bb')); (T | title); (A | string); (L | map('string') | join(T)); (L | join); (A | tojson)
        (D | tojson(indent=2)); (T | indent(2)); (T | first); (T | last); '%s|%5s' % (T, A); ('%d' % (T | length))
        ('{}-{:>9}'.format(A, T)); (T | default(T)); (A | default(T, true)); (T | truncate(5)); (T | lower)
        (T).join((T).split()); (T).capitalize()""",
    "number": """0; 1; -2; 3; 2.5; 17
        (N + N); (N - N); (N * N); (N / N); (N // I); (N % 3); (2 ** I); -N; (N | abs); (T | length); (L | length)
        (L | count); (T | int); (T | int(7)); (N | round(1)); (T | float); (T).find('a'); (T).count('a')
        (N if B else N); ([N, N] | sum); ([N, N, N] | max); ([N, N] | min); (N | round(0, 'floor') | int); (D | length)
        [1, 2].index(2)""",
    "index": "0; 1; -1; 2; 5\n(T | length); (L | length); (I - 1)",
    "truth": """true; false; none
        (N < N); (N <= N); (N < N < N); (T == T); (A == A); (A != A); (T in T); (A in L); (T in D); (A not in L)
        (B and B); (B or B); (not B); (A is string); (A is none); (A is number); (A is mapping); (A is iterable)
        (A is sequence); (A is boolean); (A is defined); (T is lower); (I is divisibleby 3); (I is odd); (A is eq A)
        (A is not none); (A is in L); (A is integer); (A is true); (A is undefined); (T).startswith(T)
        (T).endswith('a'); (T).isdigit(); (T).isalpha()""",
    "list": """[]; [1, 2, 3]; ['a', 'B', 'a']; [1, 'x']; messages; [none, true]
        [A, A]; (L + L); (L * 2); L[I:]; L[::-1]; (T).split('a'); (T).split(); (T).splitlines()
        (L | map('string') | list); (L | map('upper') | list); (L | select | list); (L | map('string') | unique | list)
        (L | reject('none') | list); (L | map('string') | sort)
        (L | map('length') | sort(reverse=true)); (L | reverse | list); (T | list)
        (L | map(attribute='role') | list); (L | selectattr('role') | list); ((D).items() | list); (range(4) | list)
        ((D).keys() | list); (D | dictsort); (L | select('string') | list); (L | list)
        (messages | selectattr('role', 'equalto', T) | list); (messages | rejectattr('role', 'eq', T) | list)""",
    "dict": "{}; {'a': 1, 'b': 'x'}; dict(a=1)\n{'k': A, 'b': A}; {'k': A, T: A}; dict(a=A, b=A); (D if B else D)",
}
_STATEMENTS = r"""{{ A }}
{{- A -}}
 text\n
{# a note #}
{% raw %}{{ x }}{% endraw %}
{{ (L)[I] }}{{ (D).k }}{{ (D)['b'] }}
{{ T | safe }}
{% if B %}S{% elif B %}S{% else %}S{% endif %}\n
{%- if A -%} S {%- endif -%}
{% for i in L %}S{{ i }}{{ loop.index }}{{ ',' if not loop.last }}{% else %}S{% endfor %}
{% for i in L if i %}{{ i }}{% if loop.index == 2 %}{% break %}{% endif %}S{% endfor %}
{% for k, v in (D).items() %}{{ k }}={{ v }};{{ loop.cycle('x', 'y') }}{% endfor %}
{% set x = A %}{{ x }}S
{% set x %}S{% endset %}{{ x | upper }}{{ x == A }}
{% set n = namespace(v=A) %}{% for i in L %}{% set n.v = [n.v, i] %}{% endfor %}{{ n.v }}
{% macro f(a, b=A) %}<{{ a }}|{{ b }}>S{% endmacro %}{{ f(A) }}{{ f(A, b=A) | trim }}
{% macro g() %}[{{ caller(A) }}]{% endmacro %}{% call(y) g() %}S{{ y }}{% endcall %}
{% with y = A %}{{ y }}S{% endwith %}
{% filter upper %}S{% endfilter %}"""


class Expressions:
    """Templates of the subset that is supported, of small values, at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._patterns = {
            kind: [re.split(r"[;\n] *", part) for part in patterns.split("\n", 1)]
            for kind, patterns in _EXPRESSIONS.items()
        }

    def template(self) -> str:
        """A template of a few statements."""
        return "".join(self._statement(3) for _ in range(self._rng.randint(1, 4)))

    def _statement(self, depth: int) -> str:
        patterns = _STATEMENTS.splitlines()
        return self._filled(self._rng.choice(patterns if depth > 0 else patterns[:7]), depth - 1, 2)

    def _expression(self, kind: str, depth: int) -> str:
        short, long = self._patterns[kind]
        return self._filled(self._rng.choice(short if depth <= 0 else short + long), 0, depth - 1)

    def _filled(self, pattern: str, statement_depth: int, depth: int) -> str:
        """The pattern with something in the place of each capital letter that stands alone."""

        def fill(letter: re.Match[str]) -> str:
            if letter[0] == "S":
                return self._statement(statement_depth)
            return self._expression(_KINDS.get(letter[0]) or self._rng.choice(list(_EXPRESSIONS)), depth)

        return re.sub(r"\b[TNIBLDAS]\b", fill, pattern)


_PIECES = (
    "{{ }} {% %} {# #} {%- -%} {{- -}} ( ) [ ] { } | ~ . , : = == ** * // % + - < 'a' \"b\" 0 1 99999 1e9 ' \" \\ \n "
    "for in if else elif endif endfor set endset macro endmacro call endcall filter endfilter with endwith raw endraw "
    "generation endgeneration continue break recursive is not and or none true import include extends block do print "
    "messages loop loop.index namespace range(99999) cycler joiner dict raise_exception strftime_now tojson list join "
    "replace indent format map select sum sort unique length __class__ __globals__ mro attr self super caller varargs "
    "\0 \u200b \ud800 😀 "
).split(" ") + [" "]


def mutated(source: str, rng: random.Random) -> str:
    """The source with one or two things changed: words that change places, are dropped or doubled, or come in."""
    words = re.findall(r"\w+|\s+|\{[{%#]-?|-?[}%#]\}|.", source)
    for _ in range(rng.randint(1, 2)):
        place, other = rng.randrange(len(words)), rng.randrange(len(words))
        kind = rng.randrange(6)
        if kind == 0:
            words[place], words[other] = words[other], words[place]
        elif kind == 1:
            words[place] = words[other]
        elif kind == 2:
            words[place] *= rng.choice([0, 2, 1000])
        elif kind == 3:
            words[place] += words[other]
        else:
            words[place] = rng.choice(_PIECES) + (words[place] if kind == 4 else "")
    return "".join(words[: rng.randrange(len(words))] if rng.random() < 0.05 else words)
