from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcheck.client.sse import SseDecoder

line_ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
texts = st.text(st.sampled_from("ab:é \u2028\x85{}"), max_size=6).map(str.encode)
lines = st.one_of(
    texts.map(lambda text: b"data: " + text),
    texts.map(lambda text: b"data:" + text),
    texts.map(lambda text: b": " + text),
    st.sampled_from([b"data", b"", b"", b"", b":", b"unknown: x"]),
)
streams = st.lists(st.tuples(lines, line_ends).map(b"".join), max_size=30).map(b"".join)


def cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(raw), *(place % (len(raw) + 1) for place in cuts)})
    return [raw[a:b] for a, b in itertools.pairwise(places)]


def by_httpx_sse(raw: bytes) -> list[bytes]:
    oracle = pytest.importorskip("httpx_sse._decoders", reason="httpx-sse needs httpx")
    split, decode = oracle.SSELineDecoder(), oracle.SSEDecoder()
    every = [*split.decode(raw.decode()), *split.flush()]
    return [event.data.encode() for line in every if (event := decode.decode(line)) is not None]


@given(streams, st.lists(st.integers(0, 10_000), max_size=12))
def test_any_chunking_gives_what_httpx_sse_gives(raw: bytes, cuts: list[int]) -> None:
    raw += b"\n\n"
    decoder = SseDecoder()
    found = [data for chunk in cut(raw, cuts) for data in decoder.feed(chunk)]
    assert found == by_httpx_sse(raw)
    assert decoder.pending == 0


@given(streams, st.integers(0, 10_000))
def test_bytes_one_by_one_give_what_the_whole_gives(raw: bytes, at: int) -> None:
    whole, single = SseDecoder(), SseDecoder()
    assert whole.feed(raw) == [data for byte in raw for data in single.feed(bytes([byte]))]
    assert whole.pending == single.pending


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_byte_order_mark_is_dropped_however_it_is_cut(size: int) -> None:
    raw = b"\xef\xbb\xbfdata: x\n\ndata: \xef\xbb\xbfy\n\n"
    decoder = SseDecoder()
    found = [data for at in range(0, len(raw), size) for data in decoder.feed(raw[at : at + size])]
    assert found == [b"x", b"\xef\xbb\xbfy"]


def test_an_event_ends_with_its_empty_line_and_not_a_byte_later() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: x\r\n\r") == [b"x"]
    assert decoder.feed(b"\ndata: y\n\n") == [b"y"]


@pytest.mark.parametrize("raw", [b"data: x", b"data: x\n", b"data: x\n\nda", b"data: x\r\n: note\r\n"])
def test_a_stream_that_is_cut_leaves_something_pending(raw: bytes) -> None:
    decoder = SseDecoder()
    decoder.feed(raw)
    assert decoder.pending > 0


def test_invalid_utf8_passes_through() -> None:
    assert SseDecoder().feed(b"data: \xff\xfe\n\n") == [b"\xff\xfe"]
