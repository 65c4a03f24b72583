"""The tests and the processes that they start see no proxies, no accounts of Hugging Face and no choices of terminals.

Servers of the tests are on this machine, where a proxy does not find them, and what is printed has the colours and the
width that a test asks for. To be imported before the libraries that read these variables.
"""

import os

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_TERMINALS = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
_ACCOUNTS = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")

for _name in list(os.environ):
    if _name.upper() in _PROXIES or _name in _TERMINALS or _name.startswith(_ACCOUNTS):
        del os.environ[_name]
