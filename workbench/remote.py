"""A running service as commands see it: its address, a key, and answers or one sentence why not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from engine.errors import ConfigError, MachineError

KEY_VARIABLE = "TOKENROUTER_KEY"
TIMEOUT_S = 60.0
CONNECT_S = 10.0
"""Longest wait for a machine that says nothing at all."""


class Remote:
    """One service by its address; safe for use by many threads."""

    def __init__(
        self, url: str, key: str | None = None, *, timeout_s: float = TIMEOUT_S, many: int = 8
    ) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            ConfigError: the address is none, or the key is of another kind than any key.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url ({url}) must be like http://127.0.0.1:8000.")
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            # Refused here, because HTTP would show the key when it refuses it.
            raise ConfigError("the key must be one word of ASCII characters, as it was given out.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
            limits=httpx.Limits(max_connections=many, max_keepalive_connections=many),
            # What is asked about is the service itself, not what a proxy says of it.
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and content of an address; content is None when it is no JSON."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Return status and content of an answer; content is None when it is no JSON."""
        return self._ask("POST", path, body)

    def text(self, path: str) -> str:
        """Return what an address holds, as text.

        Raises:
            MachineError: the service cannot be reached, or answers with an error.
        """
        try:
            response = self._client.get(path)
        except httpx.HTTPError as wrong:
            raise self._unreachable(wrong) from None
        if response.status_code != 200:
            raise MachineError(f"{self.url}{path} answered {response.status_code}.")
        return response.text

    def lines(self, path: str, body: Mapping[str, Any]) -> list[str]:
        """Return the lines of a streamed answer that are not empty.

        Raises:
            MachineError: the service cannot be reached, or answers with an error.
        """
        try:
            with self._client.stream("POST", path, json=dict(body)) as response:
                found = [line for line in response.iter_lines() if line]
        except httpx.HTTPError as wrong:
            raise self._unreachable(wrong) from None
        if response.status_code != 200:
            raise MachineError(f"{self.url}{path} answered {response.status_code}.")
        return found

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as wrong:
            raise self._unreachable(wrong) from None
        try:
            return response.status_code, response.json()
        except ValueError:
            return response.status_code, None

    def _unreachable(self, wrong: httpx.HTTPError) -> MachineError:
        reason = " ".join(str(wrong).split()) or type(wrong).__name__
        return MachineError(f"{self.url} does not answer: {reason.rstrip('.')}.")


def refusal(status: int, content: Any) -> str:
    """Return what an error answer says, in a few words."""
    error = content.get("error") if isinstance(content, dict) else None
    said = error.get("message") if isinstance(error, dict) else None
    return f"{status}: {str(said)[:300]}" if said else f"status {status}."


def read_key(file: Path | None) -> str | None:
    """Return the key from a file, or from the environment, or None.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE)
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"key_file ({file}) cannot be read: {wrong}.") from None
