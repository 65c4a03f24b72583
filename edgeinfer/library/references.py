"""Names of models on the Hugging Face Hub as callers write them, and what to do about a URL."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from urllib.parse import unquote

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.library.gguf_names import is_gguf

PREFIX = "hf:"
_REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(rf"({_REPO})(?:/([^:\\]+\.gguf))?(?::([\w.-]+))?", re.ASCII | re.IGNORECASE)
_HUB_HOSTS = ("huggingface.co", "hf.co")
_OLLAMA_HOSTS = ("ollama.com", "ollama.ai", "registry.ollama.ai")
_VIEWS = ("resolve", "blob", "raw", "tree", "edit", "blame")  # of a file or a folder, in URLs of the hub
_URL = re.compile(r"(https?|hf|file|ftp|s3):/{1,2}(?=[^/]|/[^/])(.+)", re.IGNORECASE | re.DOTALL)
_EXAMPLE = "USER/REPO or USER/REPO:QUANT, such as Qwen/Qwen3-0.6B-GGUF:Q8_0"


@dataclass(frozen=True)
class HubReference:
    """A model of the hub.

    repo: USER/REPO.  quant: of the file that is meant, None for the default.  file: its name in the repository, where
    that was given; then the quantisation does not count.
    """

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}/{self.file}" if self.file else f"{self.repo}:{self.quant}" if self.quant else self.repo


def parse_reference(text: str, name: str, file: str | None = None) -> HubReference:
    """The model that USER/REPO[:QUANT] or USER/REPO/FILE.gguf is.  name: of the argument, for messages.

    file: in the repository, where it is given apart. Raises InvalidArgument.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None or ".." in text or text.endswith((".", "-")):
        advice = url_advice(text)
        raise InvalidArgument(advice or f"{name} must be {_EXAMPLE}: found {shown(text)}")
    quant = None if found[3] is None or found[3].lower() == "latest" else found[3]
    return HubReference(found[1], quant, file or found[2])


def is_reference(text: str) -> bool:
    """Whether a text has the form of USER/REPO[:QUANT]."""
    found = _REFERENCE.fullmatch(text)
    return found is not None and found[2] is None and not is_gguf(text)


def url_advice(text: str) -> str | None:
    """What to do with a URL that stands where a model is named, None for what is none.

    It may have one slash less, as paths have.
    """
    found = _URL.fullmatch(text)
    scheme, rest = (found[1].lower(), found[2]) if found else ("", text)
    host, _, path = rest.partition("/")
    host = host.lower().partition(":")[0].removeprefix("www.")
    if not scheme and not (path and host in (*_HUB_HOSTS, *_OLLAMA_HOSTS)):
        return None
    url = f"{scheme}://{rest} is a URL" if scheme else f"{text} is a URL"
    parts = [part for part in unquote(path.partition("?")[0].partition("#")[0]).split("/") if part]
    if scheme == "file":
        return f"{url}: name the file itself, /{unquote(rest).lstrip('/')}"
    if scheme == "hf":
        return f"{url}: {_hub_flags(rest.split('/'))}"
    if host in _HUB_HOSTS:
        return f"{url}: {_hub_flags(parts)}"
    if host in _OLLAMA_HOSTS:
        name = "/".join(parts[1:] if parts[:1] == ["library"] else parts) or "NAME"
        return f"{url}: `ollama pull {name}` fetches it, and then -m {name} runs it"
    return (
        f"{url}, and only models of Hugging Face are fetched by name (-hf USER/REPO[:QUANT]): download the file, and "
        "name that one"
    )


def _hub_flags(parts: list[str]) -> str:
    """The flags for a path at the hub, as far as it tells them."""
    if parts[:1] in (["datasets"], ["spaces"], ["collections"], ["papers"]) or len(parts) < 2:
        return f"-hf USER/REPO[:QUANT] fetches a model of Hugging Face: -hf {_EXAMPLE.rpartition(' ')[2]}"
    repo, _, quant = parts[1].partition(":")
    file = "/".join(parts[4:]) if len(parts) > 4 and parts[2] in _VIEWS else "/".join(parts[2:])
    flags = f"-hf {parts[0]}/{repo}" + (f":{quant}" if quant else "")
    if is_gguf(file):
        flags += f" -hff {shlex.quote(file)}"
    return f"{flags} fetches it from Hugging Face"
