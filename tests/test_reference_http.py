"""The reference engine as a process: SGLang's protocol, start, death and shutdown."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from reference_helpers import VOCAB, write_model

DEADLINE = 120.0


class Process:
    """A server process on a free port, with its log."""

    def __init__(self, folder: Path, *flags: str, **env: str) -> None:
        command = [sys.executable, "-m", "pytest_kvcheck.reference", "--model-path", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--enable-streaming-session", "--enable-metrics", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env},
        )
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.url = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert self.ready.wait(DEADLINE)
        assert self.url, self.lines

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("kvcheck reference engine ready on "):
                self.url = line.split()[-1]
                self.ready.set()
        self.ready.set()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(DEADLINE)
        self.reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=DEADLINE)

    def generate(self, ids: list[int], max_new: int = 4, n: int = 1, **more: Any) -> requests.Response:
        params = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": True, "n": n}
        return self.post("/generate", input_ids=ids, sampling_params=params, **more)

    def open(self, **more: Any) -> str:
        reply = self.post("/open_session", capacity_of_str_len=1000, streaming=True, **more)
        assert reply.status_code == 200
        return str(reply.json())

    def load(self) -> dict[str, Any]:
        reply = requests.get(self.url + "/v1/loads", timeout=DEADLINE).json()["loads"][0]
        return dict(reply)

    def until_idle(self) -> None:
        end = time.monotonic() + DEADLINE
        while self.load()["num_running_reqs"] or self.load()["num_waiting_reqs"]:
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    running = Process(
        folder,
        "--context-length=512",
        "--max-total-tokens=4096",
        SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="2",
        SGLANG_EXPOSE_OWN_ENV_VARS="1",
    )
    yield running
    assert running.stop() == 0
    assert not [line for line in running.lines if "eak" in line and "Detected" in line]
    assert any("[Mem Check (BUSY)] [full] total=4096, available=" in line for line in running.lines)


def test_generate_has_sglangs_shape(server: Process) -> None:
    reply = server.generate([5, 6, 7], return_logprob=True, logprob_start_len=0, top_logprobs_num=2).json()
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 4
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (3, 4, 0)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(entry[0] < 0 for entry in meta["input_token_logprobs"][1:])
    assert len(meta["input_top_logprobs"]) == 3
    best = meta["output_top_logprobs"][0]
    assert len(best) == 2
    assert best[0][0] == pytest.approx(meta["output_token_logprobs"][0][0])


def test_stream_is_cumulative_and_ends_with_done(server: Process) -> None:
    reply = server.generate([5, 6, 7], stream=True, rid="abc")
    events = [line[6:] for line in reply.text.split("\n\n") if line]
    assert reply.headers["Content-Type"] == "text/event-stream"
    assert events[-1] == "[DONE]"
    shown = [json.loads(event) for event in events[:-1]]
    assert [len(event["output_ids"]) for event in shown] == [1, 2, 3, 4]
    assert [bool(event["meta_info"]["finish_reason"]) for event in shown] == [False, False, False, True]
    assert {event["meta_info"]["id"] for event in shown} == {"abc"}


def test_session_inherits_and_returns_everything(server: Process) -> None:
    before = server.load()["num_used_tokens"]
    session = server.open()
    first = server.generate([9] * 20, 6, session_params={"id": session}).json()["meta_info"]
    second = server.generate([8] * 5, 6, session_params={"id": session}).json()["meta_info"]
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (20, 31)
    assert second["cached_tokens"] in (25, 26)
    assert server.load()["num_used_tokens"] > before
    assert server.post("/close_session", session_id=session).status_code == 200
    assert server.load()["num_used_tokens"] == before


def test_refusals(server: Process) -> None:
    session = server.open(session_id="mine")
    again = server.post("/open_session", capacity_of_str_len=10, streaming=True, session_id="mine")
    assert again.status_code == 400
    cases = [
        (server.generate([1] * 600), "longer than the model's context length (512 tokens)"),
        (server.generate([1] * 508), "exceeds the maximum allowed length (506 tokens)"),
        (server.generate([1], session_params={"id": "nope"}), "session id nope does not exist"),
        (server.generate([1], session_params={"id": session, "offset": 2}), "do not support offset"),
        (server.generate([VOCAB]), f"not in [0, {VOCAB})"),
        (server.generate([]), "non-empty list"),
        (server.post("/generate", input_ids=[1], sampling_params={"max_new_tokens": "x"}), "invalid literal"),
        (server.post("/generate", input_ids=[1], sampling_params={"n": 0}), "expected 1"),
        (
            server.generate([1], n=2, session_params={"id": session}),
            "expected 1, or more for a request without",
        ),
    ]
    for reply, text in cases:
        assert reply.status_code == 400
        assert text in reply.json()["error"]["message"]
    streamed = server.generate([1], session_params={"id": session, "replace": True}, stream=True)
    event = json.loads(streamed.text.split("\n\n")[0][6:])
    assert streamed.status_code == 200
    assert event["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.post("/close_session", session_id="mine").status_code == 200
    assert server.post("/close_session", session_id="unknown").status_code == 200


def test_several_answers_are_a_list_and_share_the_prompt(server: Process) -> None:
    prompt = [9, 8, 7, 6, 5, 4]
    alone = server.generate(prompt).json()
    group = server.generate(prompt, n=3).json()
    assert [answer["output_ids"] for answer in group] == [alone["output_ids"]] * 3
    assert [answer["meta_info"]["cached_tokens"] for answer in group] == [5, 5, 5]
    assert len({answer["meta_info"]["id"] for answer in group}) == 3
    with pytest.raises(requests.Timeout):
        params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, "n": 3}
        body = {"input_ids": prompt, "sampling_params": params}
        requests.post(server.url + "/generate", json=body, timeout=0.1)
    server.until_idle()
    assert server.load()["num_used_tokens"] == 0


def test_abort_and_disconnect_give_everything_back(server: Process) -> None:
    before = server.load()["num_used_tokens"]
    session = server.open()
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": [7] * 30, "sampling_params": params, "stream": True}
    with requests.post(
        server.url + "/generate",
        json={**body, "rid": "turn-000001", "session_params": {"id": session}},
        stream=True,
        timeout=DEADLINE,
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        busy = server.generate([1], session_params={"id": session})
        assert "already has an active request" in busy.json()["error"]["message"]
        assert server.post("/abort_request", rid="turn-0000").status_code == 200
        events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["meta_info"]["finish_reason"]["type"] == "abort"
    server.post("/close_session", session_id=session)
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=DEADLINE) as reply:
        next(reply.iter_lines())
    server.until_idle()
    assert server.load()["num_used_tokens"] == before


def test_what_it_tells_of_itself(server: Process) -> None:
    info = requests.get(server.url + "/server_info", timeout=DEADLINE).json()
    assert info["version"].startswith("reference-")
    assert info["context_length"] == 512
    state = info["internal_states"][0]
    assert state["memory_usage"]["token_capacity"] == 4096
    assert state["env_vars"]["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] == "2"
    text = requests.get(server.url + "/metrics", timeout=DEADLINE).text
    assert "sglang:max_total_num_tokens{" in text
    assert requests.get(server.url + "/health", timeout=DEADLINE).status_code == 200
    assert requests.get(server.url + "/health_generate", timeout=DEADLINE).status_code == 200
    assert server.post("/flush_cache").status_code == 200


def test_a_leak_ends_the_process_as_sglang_does(folder: Path) -> None:
    planted = Process(folder, "--plant=close-in-flight-leak")
    session = planted.open()
    planted.generate([5] * 30, session_params={"id": session})
    body = {
        "input_ids": [5] * 9,
        "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
        "stream": True,
        "session_params": {"id": session},
    }
    with requests.post(planted.url + "/generate", json=body, stream=True, timeout=DEADLINE) as reply:
        lines = reply.iter_lines()
        next(lines)
        planted.post("/close_session", session_id=session)
        # The check may end the process before the reply is out.
        with contextlib.suppress(requests.RequestException):
            list(lines)
    assert planted.ended() in (-signal.SIGKILL, 131)
    log = "\n".join(planted.lines)
    assert "Scheduler hit an exception: Traceback" in log
    assert "pool memory leak detected! [full] total=" in log
    assert "SIGQUIT received." in log


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--model-path: expected a folder"),
        (["--model-path", "/nowhere/at/all"], "found /nowhere/at/all/config.json"),
        (["--model-path", "MODEL", "--plant", "retract-tial"], "--plant: expected one of"),
        (["--model-path", "MODEL", "--page-size", "16", "--chunked-prefill-size", "100"], "give 96"),
        (["--model-path", "MODEL", "--device", "nope"], "nope"),
        (["--model-path", "MODEL", "--speculative-algorithm", "EAGLE"], "expected a draft's folder"),
        (["--model-path", "MODEL", "--pagesize", "16"], "unrecognized arguments: --pagesize"),
    ],
)
def test_bad_flags_are_one_paragraph_and_exit_2(flags: list[str], text: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pytest_kvcheck.reference"]
    given = [str(folder) if flag == "MODEL" else flag for flag in flags]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_list_faults_is_json() -> None:
    command = [sys.executable, "-m", "pytest_kvcheck.reference", "--list-faults"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    faults = json.loads(done.stdout)
    assert {"name": "retract-tail", "kind": "K05"}.items() <= faults[0].items()
