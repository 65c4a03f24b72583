"""Who may ask: keys, and on which name and from which pages."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from edgeinfer.common.errors import InvalidArgument
from edgeinfer.server.problem import Problem

_OPEN_PATHS = frozenset({"/health", "/v1/health", "/"})  # without a key: the state, and the page, which asks for one


@dataclass(frozen=True)
class Access:
    """Rules of a server.

    keys: one of which a request must have; none where there is no key.  is_local: whether it is bound to a loopback
    address.  hosts: further names that it may be called by.  origins: pages of other sites that may use it.
    """

    keys: Sequence[str] = ()
    is_local: bool = True
    hosts: Collection[str] = ()
    origins: Collection[str] = ()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> int | None:
        """The number of the request's key, None without one. Raises Problem."""
        self._check_host(headers)
        self._check_origin(headers)
        if not self.keys or path in _OPEN_PATHS or method == "OPTIONS":
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = None
        for number, key in enumerate(self.keys):  # all of them, so that the time tells nothing
            if hmac.compare_digest(key.encode(), given.encode(errors="replace")):
                found = number
        if found is None:
            raise Problem(
                401,
                "a key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
                if not given
                else "this key is none of the server's",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found

    def allowed_origin(self, headers: Mapping[str, str]) -> str | None:
        """The page of another site that asks, if it may."""
        origin = headers.get("origin")
        return origin if origin in self.origins else None

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """A page of the internet may lead its own name to this machine; no key protects it from that here."""
        if self.keys and not self.is_local:
            return
        name = _name_of(headers.get("host", ""))
        if name in self.hosts or is_loopback(name):
            return
        if not self.is_local and (_address(name) is not None or name == socket.gethostname().lower()):
            return
        raise Problem(
            403,
            f"this server does not answer by the name {name or 'of nobody'!r}: call it localhost, "
            "or name it with --allow-host",
            code="host_not_allowed",
        )

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self.origins:
            return
        if origin.lower() != "null" and urlsplit(origin).netloc.lower() == headers.get("host", "").lower():
            return
        raise Problem(
            403, "pages of other sites may not use this server: allow one with --cors-origin", code="origin_not_allowed"
        )


def is_loopback(name: str) -> bool:
    """Whether a name or an address is always that of this machine."""
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def read_keys(lines: Sequence[str]) -> tuple[str, ...]:
    """Keys, one a line; empty lines and those with # are none. Raises InvalidArgument."""
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidArgument("a key must be printable ASCII without spaces, one a line")
    if not keys:
        raise InvalidArgument("there is no key: write one a line")
    return tuple(dict.fromkeys(keys))


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
