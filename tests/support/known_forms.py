"""Sources of chat templates by the form in which they take messages; which models have it stands before each."""

_GEMMA_TURNS = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
)
_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
_NO_TEXTS = "{% for m in messages if m.content is string %}{{ raise_exception('content must be a list') }}{% endfor %}"

TEMPLATES = {
    # Gemma, Gemma 2: refuses the role.
    "gemma 2": "{{ bos_token }}" + _NO_SYSTEM + _GEMMA_TURNS,
    # Mistral 7B Instruct 0.1 and 0.2: a system message is out of turn.
    "mistral 1": "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    # The same, found by an index that does not exist.
    "strict roles": "{% for m in messages %}{% if loop.index0 % 2 == 1 and m.role != 'assistant' or "
    "loop.index0 % 2 == 0 and m.role != 'user' %}{{ raise_exception('take turns') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}",
    # A table of roles without this one: an error of Jinja's, no refusal.
    "unknown role": "{% set names = {'user': 'Human', 'assistant': 'AI'} %}"
    "{% for m in messages %}{{ names[m.role] + ': ' + m.content + '\n' }}{% endfor %}AI:",
    # OpenChat, Falcon: other roles are left out in silence.
    "silent": "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n"
    "{% elif m.role == 'assistant' %}A: {{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}A:",
    # It is shown with the first question alone, and left out of a longer conversation.
    "silent later": "{% for m in messages %}{% if m.role != 'system' or messages | length == 2 %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}",
    # Gemma 3: the system message within the first question, contents of either kind.
    "gemma 3": "{{ bos_token }}" + _SYSTEM_FIRST + "{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    # Llama 2.
    "llama 2": _SYSTEM_FIRST + "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}"
    "{{ '[INST] ' + (first if loop.first else '') + m.content + ' [/INST]' if m.role == 'user' else m.content }}"
    "{% endfor %}",
    # Mistral 7B Instruct 0.3: the system message within the last question.
    "mistral 3": _SYSTEM_FIRST + "{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ first if loop.last }}{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    # SmolVLM, Idefics: parts of all roles.
    "smolvlm": _PARTS,
    "first part": "{% for m in messages %}{{ m.role }}: {{ m['content'][0]['text'] }}\n{% endfor %}",
    # LLaVA: parts but for answers.
    "llava": "{% for m in messages %}{{ m.role | upper }}: {% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{% for p in m.content if p.type == 'text' %}{{ p.text }} {% endfor %}{% endif %}{% endfor %}",
    "parts, no system": _NO_SYSTEM + _PARTS,
    "answers as texts": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | map(attribute='text') | join }}"
    "{% else %}{{ '|' + m.content + '|' }}{% endif %}{% endfor %}",
    "system in parts": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text }}"
    "{% else %}{{ '|' + m.content + '|' }}{% endif %}{% endfor %}",
    "refuses texts": _NO_TEXTS + _PARTS,
    "refuses texts, no system": _NO_TEXTS + _NO_SYSTEM + _PARTS,
    # Llama 3.2 Vision, Qwen 2.5 VL.
    "takes both": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}",
    "needs system": "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
}
