"""Control calls: short, blocking, one at a time, apart from the load that is being measured."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ``status`` None: nothing did, and ``error`` says why."""

    status: int | None
    text: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON. Raises ``ValueError`` with the first bytes where it is none."""
        try:
            return json_format.loads(self.text)
        except ValueError as error:
            raise ValueError(f"expected JSON, found {self.text[:200]!r}") from error


class Control:
    """A blocking HTTP client for one server; calls never raise for what the server or network does."""

    def __init__(self, base_url: str, timeout: float = 10.0) -> None:
        host = urlsplit(base_url).hostname
        if host not in LOOPBACK:
            raise ValueError(
                f"--kvcheck-url: expected a server on this machine (one of {', '.join(LOOPBACK)}), found host "
                f"{host!r}; forward a local port to it and give http://127.0.0.1:PORT"
            )
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy from the environment must never see loopback traffic

    def get(self, path: str, timeout: float | None = None) -> Answer:
        return self.call("GET", path, timeout=timeout)

    def post(self, path: str, json: Any = None, timeout: float | None = None) -> Answer:
        return self.call("POST", path, json=json, timeout=timeout)

    def call(self, method: str, path: str, json: Any = None, timeout: float | None = None) -> Answer:
        try:
            reply = self._session.request(
                method,
                self.base_url + path,
                json=json,
                timeout=timeout or self.timeout,
                allow_redirects=False,
            )
            return Answer(reply.status_code, reply.text)
        except requests.RequestException as error:
            return Answer(None, error=f"{type(error).__name__}: {str(error)[:300]}")

    def close(self) -> None:
        self._session.close()
