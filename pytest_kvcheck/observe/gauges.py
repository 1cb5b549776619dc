"""Samples the server's own account all along, without perturbing what it measures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from pytest_kvcheck.trace import GaugeSample

# The share of time that the server may spend on answering us, and the longest pause that this leads to.
SHARE = 0.1
LONGEST_PAUSE = 5.0


class Sampler:
    """A thread that calls ``sample(clock())`` every ``interval`` seconds, more seldom where answers are slow.

    ``sample`` must use a control client of its own: requests sessions are not shared between threads. Every
    sample is appended to ``path`` (JSON Lines) as it arrives. Nothing here raises: a sample that failed has its
    ``error`` set, and where the file cannot be written :attr:`write_error` says why.
    """

    def __init__(
        self,
        sample: Callable[[float], GaugeSample],
        clock: Callable[[], float],
        path: Path | None = None,
        interval: float = 0.2,
    ) -> None:
        self.write_error = ""
        self._sample = sample
        self._clock = clock
        self._interval = interval
        self._path = path
        self._samples: list[GaugeSample] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcheck-gauges", daemon=True)

    def start(self) -> Sampler:
        self._thread.start()
        return self

    def stop(self, timeout: float = 15.0) -> list[GaugeSample]:
        """End the thread, waiting at most ``timeout`` for a call that is in flight; returns all samples."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return self.samples

    @property
    def samples(self) -> list[GaugeSample]:
        """All samples so far, in order of time (a copy)."""
        return list(self._samples)

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        while not self._stopping.is_set():
            started = time.monotonic()
            sample = self._take()
            took = time.monotonic() - started
            self._samples.append(sample)
            if self._path is not None and not self.write_error:
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    with self._path.open("ab") as file:
                        file.write(encoder.encode(sample) + b"\n")
                except OSError as error:
                    self.write_error = f"{self._path}: {error}"
            pause = max(self._interval - took, took / SHARE - took)
            self._stopping.wait(min(pause, max(LONGEST_PAUSE, self._interval)))

    def _take(self) -> GaugeSample:
        t = self._clock()
        try:
            return self._sample(t)
        except Exception as error:  # an adapter's mistake must not end the series
            return GaugeSample(t=t, source="sampler", error=f"{type(error).__name__}: {error}")
