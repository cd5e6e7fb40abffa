"""Who may call: keys as salted hashes with scopes, and the networks callers come from.

A key reads `trw_ID_SECRET`. The file holds, per ID, a salt and the hash of salt and secret; the
secret is random and is shown once, when it is made. Comparison takes the same time for a wrong
secret and for an ID that does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import one_of
from engine.errors import ConfigError
from engine.serve.config import Network

SCOPES = ("infer", "observe", "operate")
PREFIX = "trw"
FORMAT = 1
_ID = re.compile(r"[a-z0-9-]{1,32}")
_SECRET_BYTES = 32
_NOBODY_SALT = b"\0" * 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever calls, once the key is known to be good."""

    key_id: str
    scopes: frozenset[str]


ANYBODY_HERE = Caller("-", frozenset({"infer", "observe"}))
"""A caller on this machine where there are no keys: may look, may not operate."""


@dataclass(frozen=True, slots=True)
class _Entry:
    salt: bytes
    digest: bytes
    scopes: frozenset[str]


class Keys:
    """The keys of one token file; None stands for a service without keys."""

    def __init__(self, entries: Mapping[str, _Entry]) -> None:
        self._entries = dict(entries)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a token file.

        Raises:
            ConfigError: it is missing, readable by others, damaged, or holds no key.
        """
        entries = {name: _entry(path, name, raw) for name, raw in _read(path).items()}
        if not entries:
            raise ConfigError(f"token_file ({path}) holds no key; make one with --add-key NAME.")
        return cls(entries)

    @contextmanager
    def lent(self, scopes: Iterable[str]) -> Iterator[str]:
        """Lend the service itself a key, good for as long as this lasts."""
        name, secret, salt = "self", secrets.token_urlsafe(_SECRET_BYTES), secrets.token_bytes(16)
        before = self._entries.get(name)
        self._entries[name] = _Entry(salt, _digest(salt, secret), frozenset(scopes))
        try:
            yield f"{PREFIX}_{name}_{secret}"
        finally:
            del self._entries[name]
            if before is not None:
                self._entries[name] = before

    def caller(self, authorization: str | None) -> Caller | None:
        """Return who shows this `Authorization` header, or None if the key is not good."""
        scheme, _, key = (authorization or "").partition(" ")
        prefix, _, rest = key.strip().partition("_")
        name, _, secret = rest.partition("_")
        entry = self._entries.get(name)
        salt = entry.salt if entry else _NOBODY_SALT
        expected = entry.digest if entry else _digest(_NOBODY_SALT, "")
        # Always hashed and compared, so that an unknown name takes as long as a wrong secret.
        same = hmac.compare_digest(_digest(salt, secret), expected)
        good = same and entry is not None and prefix == PREFIX and scheme.lower() == "bearer"
        return Caller(name, entry.scopes) if good and entry else None


def add_key(path: Path, name: str, scopes: Iterable[str]) -> str:
    """Make a key, add its hash to the file, and return the key, which is kept nowhere.

    Raises:
        ConfigError: the name is taken or not plain, a scope is unknown, or the file is damaged.
    """
    wanted = sorted(set(scopes))
    for scope in wanted:
        one_of("scope", scope, SCOPES)
    if not wanted:
        raise ConfigError(f"a key needs at least one scope of {', '.join(SCOPES)}.")
    if not _ID.fullmatch(name):
        raise ConfigError(
            f"key name ({name!r:.60}) must have 1 to 32 lower-case letters, digits or hyphens."
        )
    keys = _read(path) if path.exists() else {}
    if name in keys:
        raise ConfigError(f"key name ({name}) is taken in {path}; take another, or remove it.")
    secret, salt = secrets.token_urlsafe(_SECRET_BYTES), secrets.token_bytes(16)
    keys[name] = {"salt": salt.hex(), "sha256": _digest(salt, secret).hex(), "scopes": wanted}
    _write(path, keys)
    return f"{PREFIX}_{name}_{secret}"


def remove_key(path: Path, name: str) -> None:
    """Take a key out of the file; a running service goes on until it is started again.

    Raises:
        ConfigError: there is no such key, or the file is missing or damaged.
    """
    keys = _read(path)
    if name not in keys:
        raise ConfigError(f"key name ({name!r:.60}) is not in {path}.")
    del keys[name]
    _write(path, keys)


def within_networks(address: str, networks: Iterable[Network]) -> bool:
    """Say whether an address lies in one of the networks; an IPv4 one mapped into IPv6 counts."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return any((mapped or parsed) in network for network in networks)


def _digest(salt: bytes, secret: str) -> bytes:
    # The secret has 256 random bits, so a fast hash is as good as a slow one.
    return hashlib.sha256(salt + secret.encode("utf-8", "surrogatepass")).digest()


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"token_file ({path}) does not exist; make it with --add-key NAME."
        ) from None
    except (OSError, ValueError) as wrong:
        raise ConfigError(f"token_file ({path}) cannot be read: {wrong}.") from None
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"token_file ({path}) can be read by others; run chmod 600 on it.")
    keys = raw.get("keys") if isinstance(raw, dict) and raw.get("format") == FORMAT else None
    if not isinstance(keys, dict):
        raise ConfigError(f"token_file ({path}) is not a token file of format {FORMAT}.")
    return keys


def _write(path: Path, keys: Mapping[str, Any]) -> None:
    """Write aside and move, readable by the owner alone from the first byte."""
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as text:
        json.dump({"format": FORMAT, "keys": keys}, text, indent=2, sort_keys=True)
        text.write("\n")
    os.replace(aside, path)


def _entry(path: Path, name: str, raw: Any) -> _Entry:
    try:
        scopes = frozenset(raw["scopes"])
        entry = _Entry(bytes.fromhex(raw["salt"]), bytes.fromhex(raw["sha256"]), scopes)
    except (TypeError, KeyError, ValueError):
        raise ConfigError(f"token_file ({path}): the entry of {name!r:.60} is damaged.") from None
    if not scopes <= set(SCOPES) or len(entry.digest) != 32 or len(entry.salt) < 16:
        raise ConfigError(f"token_file ({path}): the entry of {name!r:.60} is damaged.")
    return entry
