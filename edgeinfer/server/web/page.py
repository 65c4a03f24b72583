"""The page at /."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from edgeinfer.server.exchange import Exchange
from edgeinfer.server.problem import Problem
from edgeinfer.server.server import Server


@functools.cache
def _page() -> tuple[bytes, str]:
    """(the page, its content security policy): its own script and style, and this server, are all that it may use."""
    text = files("edgeinfer.server.web").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {name: _hash(text, name) for name in ("script", "style")}
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _hash(text: str, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


async def page(server: Server, exchange: Exchange) -> None:
    """The page. Raises Problem where the server has none."""
    if not server.shown.page:
        raise Problem(404, "this server has no page: it was started with --no-ui", code="not_found")
    content, policy = _page()
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    await exchange.reply(200, content, "text/html; charset=utf-8", headers)
