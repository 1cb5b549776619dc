"""vLLM's KV events: a socket that takes them, and what they say of the blocks of the prefix cache.

We bind and vLLM connects (an endpoint without ``*`` is one that it connects to), so nothing leaves 127.0.0.1,
and no port can be taken in between. pyzmq is optional: without it there are no events, and a launch's notes say
so.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec

from pytest_kvcheck.observe.blocks import BlockBook, StoredBlock

# Events leave vLLM through a thread of their own: no more come once none came for so long.
QUIET, QUIET_BOUND = 0.4, 5.0
POLL_MS = 100
# Up to 0.3x events are arrays in this order, their type first; later ones are maps.
FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
# Other media are copies that a connector keeps elsewhere.
OWN_MEDIA = (None, "GPU")


class BlockEvents:
    """What one server has published so far. ``complete`` is False once a batch was missed or not understood."""

    def __init__(self) -> None:
        self.book = BlockBook()
        self.complete = True
        self.batches = 0

    def take(self, number: int, payload: bytes) -> None:
        """One batch: its number, which counts from 0, and its msgpack. Never raises for what a server sends."""
        self.complete = self.complete and number == self.batches
        self.batches = number + 1
        try:
            batch = msgspec.msgpack.decode(payload)
            for event in batch[1]:
                self._apply(_named(event))
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
            self.complete = False

    def _apply(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.book.clear()
        elif kind in FIELDS and event.get("medium") in OWN_MEDIA:
            group = event.get("group_idx")
            keys: list[Hashable] = [(group, one) for one in event["block_hashes"]]
            if kind == "BlockRemoved":
                self.book.remove(keys)
            else:
                parent = event["parent_block_hash"]
                self.book.store(
                    keys,
                    None if parent is None else (group, parent),
                    event["token_ids"],
                    event["block_size"],
                    event.get("session_id") or "",
                )


def _named(event: Any) -> Mapping[str, Any]:
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(FIELDS[kind], values, strict=False))}


class Listener:
    """A bound socket and the thread that reads it, until :meth:`close`. ``ImportError`` without pyzmq."""

    def __init__(self) -> None:
        zmq: Any = importlib.import_module("zmq")

        self.events = BlockEvents()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # a slow reader must not lose events
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="kvcheck-vllm-events", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            if self._socket.poll(POLL_MS):
                frames = self._socket.recv_multipart()
                if len(frames) == 3:  # topic, number, batch
                    self.events.take(int.from_bytes(frames[1], "big"), frames[2])
                else:
                    self.events.complete = False
                self._last = time.monotonic()

    def blocks(self) -> dict[Hashable, StoredBlock] | None:
        """The blocks that are stored, once no more events come; None where some were missed, or none came."""
        deadline = time.monotonic() + QUIET_BOUND
        while time.monotonic() < min(self._last + QUIET, deadline):
            time.sleep(POLL_MS / 1000)
        return self.events.book.snapshot() if self.events.complete and self.events.batches else None

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()
        self._context.term()


def listen() -> Listener | None:
    """A listener, or None where pyzmq is not installed beside us."""
    with contextlib.suppress(ImportError):
        return Listener()
    return None
