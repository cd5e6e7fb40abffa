"""A service that others use, as a drill's runner speaks to it: one address, one key, HTTP alone.

`checked` says whether a drill may run there before anything is touched. What the service refuses
is raised in its own words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from engine.errors import ConfigError, MachineError, RoutingError
from workbench.remote import Remote, refusal

SCOPES = "infer, observe and operate"
OFTEN = 16
"""Calls at once at most: its traffic and its questions."""
ANSWER_S = 60.0
LONG_S = 130.0
"""Longest wait for ranks and tables to be put back."""
_SAMPLE = re.compile(r"(\S+?\{.*\}|\S+) (\S+)")


class Service:
    """One service by its address, with the key of an operator."""

    def __init__(self, url: str, key: str | None) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            ConfigError: the address is none, or holds a name and a password.
        """
        if urlsplit(url).username is not None:
            raise ConfigError("target must not hold a name or a password; keys go by --key-file.")
        self._remote = Remote(url, key, timeout_s=ANSWER_S, many=OFTEN)
        self._patient = Remote(url, key, timeout_s=LONG_S, many=2)
        self.url = self._remote.url
        self.model = ""
        """The name requests call its model by."""

    def close(self) -> None:
        """Let go of its connections."""
        self._remote.__exit__(None, None, None)
        self._patient.__exit__(None, None, None)

    def check(self, least_ranks: int) -> dict[str, Any]:
        """Refuse a service on which no drill may run; return its status. Touches nothing.

        Raises:
            MachineError: it does not answer, is no service of ours, the key does not reach, it is
                not ready, under a fault, in another drill, or has too few ranks.
        """
        status, content = self._remote.get("/healthz")
        if status != 200 or content != {"status": "alive"}:
            raise MachineError(
                f"{self.url} answers, but is no service of this workbench; name one that "
                "`workbench serve` runs."
            )
        state = self._asked("/v1/control/state", "operate")["state"]
        found = self._asked("/v1/status", "observe")
        self.model = str(found["model"])
        self._asked("/v1/models", "infer")
        if "drill" not in found:
            raise MachineError(f"{self.url} runs a version that knows no drills; update it.")
        if not found["ready"]:
            raise MachineError(f"{self.url} is not ready: {found['reason']}.")
        if under_way := found["drill"]:
            raise MachineError(
                f"the drill {under_way['drill']} is under way at {self.url}; its lease runs for "
                f"{under_way['left_s']:g} s more unless it is extended."
            )
        if state["faults"]:
            raise MachineError(
                f"{self.url} is under a fault already, at {state['faults'][0]}; wait for the end "
                "of its lease, or clear it."
            )
        if not found["model_shape"]["moe_layers"]:
            raise MachineError(f"{self.url} serves a dense model; a drill needs experts.")
        if (living := len(found["ranks"]["living"]) or 1) < least_ranks:
            raise MachineError(
                f"this drill needs a service with {least_ranks} ranks or more; {self.url} has "
                f"{living}: start it with --ranks {least_ranks}."
            )
        return found

    def status(self) -> dict[str, Any]:
        """Return what `/v1/status` says."""
        return self._asked("/v1/status", "observe")

    def state(self) -> dict[str, Any]:
        """Return what `/v1/control/state` says."""
        found: dict[str, Any] = self._asked("/v1/control/state", "operate")["state"]
        return found

    def metrics(self) -> dict[str, float]:
        """Return every sample of `/metrics` and its value.

        `tokenrouter_rows_total{cause="accepted"} 7.0` becomes its name with labels, and 7.
        """
        found = {}
        for line in self._remote.text("/metrics").splitlines():
            if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
                found[match[1]] = float(match[2])
        return found

    def complete(self, prompts: Sequence[str], **options: Any) -> list[str]:
        """Return the texts that go on from the prompts.

        Raises:
            MachineError: the service refused, or does not answer.
        """
        body = {"model": self.model, "prompt": list(prompts), "ignore_eos": True, **options}
        status, content = self._remote.post("/v1/completions", body)
        if status != 200:
            raise MachineError(f"{self.url} did not answer a question, {refusal(status, content)}")
        return [str(choice["text"]) for choice in content["choices"]]

    def order(self, act: str, **body: Any) -> dict[str, Any]:
        """Do one of the service's acts.

        Raises:
            RoutingError: the service refused; nothing has changed then.
            MachineError: it does not answer.
        """
        remote = self._patient if act in ("end_drill", "scale") else self._remote
        status, content = remote.post(f"/v1/control/{act}", body)
        if status != 200:
            raise RoutingError(f"the service refused {act}, {refusal(status, content)}")
        answer: dict[str, Any] = content
        return answer

    def _asked(self, path: str, scope: str) -> dict[str, Any]:
        status, content = self._remote.get(path)
        if status == 401:
            raise MachineError(
                f"{self.url} wants a key with the scopes {SCOPES}; give one by --key-file, in "
                "TOKENROUTER_KEY, or on the page Drills."
            )
        if status == 403:
            raise MachineError(
                f"{self.url} does not let you {scope}; a drill needs a key with the scopes "
                f"{SCOPES}, which only a service with --token-file has (`workbench serve --add-key "
                "NAME --scope …` makes one)."
            )
        if status != 200 or not isinstance(content, Mapping):
            raise MachineError(f"{self.url}{path} did not answer, {refusal(status, content)}")
        return dict(content)
