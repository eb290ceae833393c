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
    """API keys from a file with lines of OWNER KEY; lines that start with # are comments.

    Args:
        path: the file; None: no file.
        key: another valid key.

    Raises:
        ValueError: the file cannot be read, or a line is malformed.
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
                raise ValueError(f"serve.api_keys={path}, line {number}: must be two words, OWNER KEY")
            self._digests.append((words[0], _digest(words[1].encode())))
        if len(self._digests) == bool(key):
            raise ValueError(f"serve.api_keys={path} has no keys: add lines of OWNER KEY")

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: Mapping[str, str]) -> str | None:
        """Returns the owner of the key in a request's headers; None if no key is needed.

        A valid key in either header is enough: clients may also send an empty key or a proxy's credentials.

        Raises:
            ApiError: 401, there is no valid key.
        """
        if not self._digests:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        found = None
        for one in (headers.get("x-api-key", ""), key if scheme.lower() == "bearer" else ""):
            given = _digest(one.strip(" \t").encode("latin-1"))  # the bytes that the client sent
            for owner, digest in self._digests:  # compare with all, so that timing reveals nothing
                if hmac.compare_digest(given, digest):
                    found = owner
        if found is None:
            raise ApiError(401, "send an API key: Authorization: Bearer KEY, or X-Api-Key: KEY", code="invalid_api_key")
        return found


def check_exposure(serve: ServeConfig, key: str | None = None) -> None:
    """Raises ValueError if other hosts could use the server without a key, unless `serve.open` allows that."""
    if serve.api_keys is not None or key or serve.open:
        return
    try:
        local = serve.host == "localhost" or ipaddress.ip_address(serve.host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError(
            f"serve.host={serve.host} is reachable from other hosts: set --api-key KEY or serve.api_keys=FILE, "
            "or serve.open=true to serve anyone"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
