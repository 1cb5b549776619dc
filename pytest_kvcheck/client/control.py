"""Control calls: short, blocking, one at a time, apart from the load that is being measured."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_url(url: str) -> str:
    """The root URL of a server on this machine. Raises ``ValueError`` where it is none, with what to give."""
    parts = urlsplit(url)
    example = "for example http://127.0.0.1:30000"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http://127.0.0.1:PORT, found {url!r}; {example}")
    if parts.hostname not in LOOPBACK:
        raise ValueError(
            f"expected a server on this machine (one of {', '.join(LOOPBACK)}), found host "
            f"{parts.hostname!r}; forward a local port to it and give http://127.0.0.1:PORT"
        )
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"expected a port of 1 to 65535, found {url!r}; {example}")
    if parts.path.strip("/") or parts.query:
        raise ValueError(
            f"expected the root URL of the server, found {url!r}; leave out {url.partition(parts.netloc)[2]!r}"
        )
    return url.rstrip("/")


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
        self.base_url = check_url(base_url)
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
            return Answer(None, error=self._words(error, timeout or self.timeout))

    def _words(self, error: requests.RequestException, timeout: float) -> str:
        """What went wrong for a person; the libraries' own texts name their classes and retries."""
        where = urlsplit(self.base_url).netloc
        text = str(error)
        if isinstance(error, requests.exceptions.SSLError):
            trust = "a certificate that is not trusted" if "CERTIFICATE" in text else "no TLS"
            return f"{trust} at {where}"
        if isinstance(error, requests.Timeout):
            return f"no answer from {where} within {timeout:g} s"
        if isinstance(error, requests.ConnectionError):
            if "refused" in text:
                return f"connection refused: nothing listens at {where}"
            if isinstance(error, requests.exceptions.ChunkedEncodingError) or "broken" in text:
                return f"{where} broke off in the middle of its answer"
            if any(word in text for word in ("reset", "RemoteDisconnected", "BadStatusLine", "aborted")):
                return f"{where} closed the connection without an HTTP answer"
        return f"{type(error).__name__}: {text[:300]}"

    def close(self) -> None:
        self._session.close()
