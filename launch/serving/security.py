"""Access to a server: API keys and their owners."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from helix.config import ServeConfig
from helix.files import read_text
from launch.client.errors import ApiError


class ApiKeys:
    """The keys of a file: lines of OWNER KEY, and comments that begin with #.

    Args:
        path: of the file; None: there is none.
        key: one that is taken beside them.

    Raises:
        ValueError: the file cannot be read, or a line has another form.
    """

    def __init__(self, path: str | None, key: str | None = None) -> None:
        self._digests: list[tuple[str, bytes]] = [] if not key else [("key", _digest(key.encode()))]
        if path is None:
            return
        for number, line in enumerate(read_text(Path(path)).splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise ValueError(f"serve.api_keys={path}, line {number}: a line is OWNER KEY, two words")
            self._digests.append((words[0], _digest(words[1].encode())))
        if len(self._digests) == bool(key):
            raise ValueError(f"serve.api_keys={path} holds no key: a line is OWNER KEY")

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def owner(self, headers: Mapping[str, str]) -> str | None:
        """Returns the owner of the key in a request's headers; None if no key is needed.

        Clients may send both headers, with an empty key or a proxy's credentials in one: a right key in either will do.

        Raises:
            ApiError: 401.
        """
        if not self._digests:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        found = None
        for one in (headers.get("x-api-key", ""), key if scheme.lower() == "bearer" else ""):
            given = _digest(one.strip(" \t").encode("latin-1"))  # as the client has sent it
            for owner, digest in self._digests:  # all of them, so that timing reveals nothing
                if hmac.compare_digest(given, digest):
                    found = owner
        if found is None:
            raise ApiError(401, "a key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY", code="invalid_api_key")
        return found


def check_exposure(serve: ServeConfig, key: str | None = None) -> None:
    """Raises ValueError if other hosts could use the server without a key, unless serve.open allows it."""
    if serve.api_keys is not None or key or serve.open:
        return
    try:
        local = serve.host == "localhost" or ipaddress.ip_address(serve.host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError(
            f"serve.host={serve.host} is reached from other hosts: set --api-key KEY, serve.api_keys=FILE, "
            "or serve.open=true for everybody"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
