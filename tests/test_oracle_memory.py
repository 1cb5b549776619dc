"""Conservation, rows, the engine's log, residue: each fault with kind, amount and owner; clean ones quiet."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace as changed
from oracle_helpers import (
    account,
    event,
    facts_of,
    gauges,
    make_cell,
    op_record,
    promises,
    sample,
    session_line,
)

from pytest_kvcheck.oracles import judge
from pytest_kvcheck.oracles.base import ServerFacts
from pytest_kvcheck.oracles.conservation import judge_conservation
from pytest_kvcheck.oracles.engine_log import judge_engine_log
from pytest_kvcheck.oracles.residue import judge_residue
from pytest_kvcheck.oracles.rows import judge_rows, read_probe
from pytest_kvcheck.oracles.soak import judge_soak
from pytest_kvcheck.trace import GaugeSample, OpRecord, PoolGauge, Reply

ABORTED = op_record("turn", 7, session="s1", input_ids=tuple(range(20)), label="s1 turn 2", at=5.0,
                    history=30, expect="either", reply=Reply(finish="abort", output_ids=[1, 2, 3]))  # fmt: skip
FINISHED = op_record("turn", 6, session="s1", input_ids=tuple(range(20)), label="s1 turn 1", at=1.0,
                     max_new_tokens=10, reply=Reply(finish="length", output_ids=[1] * 10))  # fmt: skip
RETRACTED = op_record("generate", 8, input_ids=(1, 2, 3), label="plain", at=5.0,
                      reply=Reply(finish="length", output_ids=[1], retractions=2))  # fmt: skip


def leaky(*records: OpRecord, page: int = 1, **parts: int) -> Any:
    return facts_of(records, make_cell(page_size=page), idle=sample(gauges(**parts), t=100.0))


# --- conservation --------------------------------------------------------------------------------------
def test_a_pool_that_is_whole_is_silent() -> None:
    assert judge_conservation(facts_of([FINISHED])) == []
    assert judge_conservation(leaky(FINISHED, evictable=700)) == []


@pytest.mark.parametrize(
    ("parts", "records", "kind", "tokens"),
    [
        ({"used": 53}, [FINISHED, ABORTED], "K03", 53),
        ({"used": 9}, [FINISHED, RETRACTED], "K05", 9),
        ({"used": 9}, [FINISHED], "K01", 9),
        ({"used": 9}, [FINISHED, ABORTED, RETRACTED], "K01", 9),
        ({"used": 40, "protected": 40}, [FINISHED, ABORTED], "K10", 40),
        ({"used": 40, "session_held": 40}, [FINISHED], "K09", 40),
        ({"used": 40, "uncached": 40}, [FINISHED], "K01", 40),
    ],
)
def test_what_is_used_at_rest_is_a_leak_of_its_kind(
    parts: dict[str, int], records: list[OpRecord], kind: str, tokens: int
) -> None:
    (finding,) = judge_conservation(leaky(*records, **parts))
    assert (finding.kind, finding.status, finding.tokens, finding.pool) == (kind, "leak", tokens, "full")
    assert f"{tokens} tokens" in finding.headline
    assert "expected 0" in finding.headline
    assert finding.next_step


def test_parts_are_told_apart_in_one_account() -> None:
    found = judge_conservation(leaky(FINISHED, used=100, protected=60, session_held=30))
    assert [(f.kind, f.tokens) for f in found] == [("K10", 60), ("K09", 30), ("K01", 10)]


def test_the_only_odd_request_owns_the_loss_and_the_evidence_says_why() -> None:
    (finding,) = judge_conservation(leaky(FINISHED, ABORTED, used=53))
    assert finding.owner == "s1 turn 2"
    assert any("By the amount" in line for line in finding.evidence)
    (finding,) = judge_conservation(leaky(FINISHED, ABORTED, used=17))
    assert any("By elimination" in line for line in finding.evidence)
    (finding,) = judge_conservation(leaky(FINISHED, ABORTED, RETRACTED, used=17))
    assert finding.owner is None
    assert any("Owner not known" in line and "1 aborted (s1 turn 2)" in line for line in finding.evidence)


def test_the_engines_series_names_the_owner_where_there_is_one() -> None:
    other = op_record("turn", 9, session="s2", label="s2 turn 1", at=7.0, reply=Reply(finish="abort"))
    log = [account(1, 1.0), account(2, 5.5), account(3, 6.1, lost=17), account(4, 7.0, lost=17)]
    facts = leaky(FINISHED, ABORTED, other, RETRACTED, used=17)
    facts.log = log
    (finding,) = judge_conservation(facts)
    # At 6.0 the aborted and the retracted request ended; both are odd, so neither is named alone.
    assert finding.owner is None
    assert any("log line 3" in line for line in finding.evidence)
    facts.records.remove(RETRACTED)
    (finding,) = judge_conservation(facts)
    assert (finding.owner, finding.kind) == ("s1 turn 2", "K03")


def test_the_one_session_without_a_release_line_owns_the_loss() -> None:
    records = []
    for at, name in enumerate(("a", "b", "c")):
        records.append(op_record("open", at, session=name, reply=Reply(finish="stop", session_id=f"id-{name}")))
        records.append(
            op_record("turn", 10 + at, session=name, at=1.0, reply=Reply(finish="length", output_ids=[1] * 12))
        )
    facts = leaky(*records, used=12)
    facts.log = [event("session", "released", session=f"id-{name}", tokens=12) for name in "ac"]
    (finding,) = judge_conservation(facts)
    assert finding.owner == "session b"
    # More than it ever held is not its loss: a line may also be missing because it was not read yet.
    facts.idle = sample(gauges(used=500), t=100.0)
    (finding,) = judge_conservation(facts)
    assert finding.owner is None


@pytest.mark.parametrize("put_off", [True, False])
def test_a_session_that_the_log_never_calls_closed_owns_what_is_held(put_off: bool) -> None:
    records = []
    for at, name in enumerate(("a", "b", "c")):
        records.append(op_record("open", at, session=name, reply=Reply(finish="stop", session_id=f"id-{name}")))
        records.append(op_record("turn", 10 + at, session=name, at=1.0, reply=Reply(finish="abort")))
        records.append(op_record("close", 20 + at, session=name, at=8.0, reply=Reply(finish="stop")))
    facts = leaky(*records, used=12, session_held=12)
    facts.log = [session_line("opened", f"id-{name}") for name in "abc"]
    facts.log += [session_line("closed", f"id-{name}") for name in "ac"]
    if put_off:
        facts.log.append(session_line("deferred", "id-b"))
    (finding,) = judge_conservation(facts)
    assert (finding.kind, finding.operations) == ("K09", (11,))
    assert finding.owner is not None
    assert "session b" in finding.owner
    (text,) = [line for line in finding.evidence if "1 of 3 closed sessions never closed" in line]
    assert ("waited for a request to end" in text) is put_off
    assert "Their last turns ended as: abort" in text
    # Where every session closed, the lines say nothing of who it was.
    facts.log.append(session_line("closed", "id-b"))
    (finding,) = judge_conservation(facts)
    assert not any("never closed" in line for line in finding.evidence)


def test_pages_are_counted_and_a_part_of_a_page_is_pointed_at() -> None:
    (finding,) = judge_conservation(leaky(FINISHED, page=16, used=48))
    assert (finding.tokens, finding.pages) == (48, 3)
    assert "K15" not in finding.also
    (finding,) = judge_conservation(leaky(FINISHED, page=16, used=50))
    assert finding.pages is None
    assert "K15" in finding.also


def test_more_free_than_there_is_was_freed_twice() -> None:
    facts = facts_of([FINISHED], idle=sample(PoolGauge(total=1000, used=-16, available=1016, evictable=0)))
    (finding,) = judge_conservation(facts)
    assert (finding.kind, finding.tokens, finding.status) == ("K12", 16, "leak")


def test_each_pool_is_judged_by_itself() -> None:
    facts = facts_of([FINISHED], idle=sample(gauges(), gauges(used=64, pool="swa")))
    (finding,) = judge_conservation(facts)
    assert (finding.kind, finding.pool, finding.tokens) == ("K14", "swa", 64)


def test_what_an_earlier_case_lost_is_not_charged_to_this_one() -> None:
    facts = leaky(ABORTED, used=30)
    facts.baseline = sample(gauges(used=30))
    (finding,) = judge_conservation(facts)
    assert finding.owner is None
    assert any("before this case's first operation" in line for line in finding.evidence)
    facts.baseline = sample(gauges(used=20))
    assert [f.tokens for f in judge_conservation(facts)] == [10]


def test_a_missing_gauge_is_a_finding_that_names_it_unless_the_version_lacks_it() -> None:
    idle = GaugeSample(t=1.0, source="s", pools=[gauges()], missing=["sglang:kv_evictable_tokens"])
    (finding,) = judge_conservation(facts_of([FINISHED], idle=idle))
    assert finding.status == "inconclusive"
    assert "kv_evictable_tokens" in finding.headline
    known = promises(lacks={"kv_evictable_tokens": "before 0.5.11"})
    assert judge_conservation(facts_of([FINISHED], idle=idle, promises=known)) == []
    blind = facts_of([FINISHED], idle=sample(PoolGauge(total=1000)))
    assert [f.status for f in judge_conservation(blind)] == ["inconclusive"]
    failed = facts_of([FINISHED], idle=GaugeSample(t=1.0, source="s", error="HTTP 500"))
    assert [f.status for f in judge_conservation(failed)] == ["inconclusive"]
    assert [f.status for f in judge_conservation(facts_of([FINISHED], idle=None))] == ["inconclusive"]


def test_stale_gauges_are_no_leak() -> None:
    # Session gauges that lag behind a close, beside a fresh used count of 0.
    assert judge_conservation(facts_of([FINISHED], idle=sample(gauges(session_held=30), sessions=2))) == []
    # Two sources that contradict each other.
    stale = PoolGauge(total=1000, used=58, available=900, evictable=100)
    assert [f.status for f in judge_conservation(facts_of([FINISHED], idle=sample(stale)))] == ["inconclusive"]


def test_a_dead_or_busy_server_has_no_account() -> None:
    for fields in ({"server": ServerFacts(alive=False)}, {"idle_reached": False}):
        facts = leaky(FINISHED, used=9)
        for name, value in fields.items():
            setattr(facts, name, value)
        assert judge_conservation(facts) == []


def test_an_attached_server_is_judged_against_its_baseline() -> None:
    attached = ServerFacts(attached=True)

    def case(before: GaugeSample, after: GaugeSample) -> list[str]:
        facts = facts_of([FINISHED, ABORTED], baseline=before, idle=after, server=attached)
        return [f.status for f in judge_conservation(facts)]

    held = {"used": 200, "session_held": 200}
    assert case(sample(gauges(**held), sessions=3), sample(gauges(**held), sessions=3)) == []
    assert case(sample(gauges(**held), sessions=3), sample(gauges(), sessions=2)) == ["inconclusive"]
    assert case(sample(gauges(used=5)), sample(gauges(used=5))) == []
    assert case(sample(gauges(used=5)), sample(gauges(used=4))) == []
    assert case(sample(gauges(used=5)), sample(gauges(used=25))) == ["leak"]
    assert case(sample(gauges(used=5), running=1), sample(gauges(used=25))) == ["inconclusive"]


# --- rows ----------------------------------------------------------------------------------------------
def probe(
    attempt: int, rows: int, sent: int, lasts: float = 10.0, when: str = "after", stagger: float = 0.1
) -> list[OpRecord]:
    """``sent`` requests of which ``rows`` run at once; the rest start as places get free."""
    records, ends = [], [0.0] * rows
    for number in range(sent):
        place = min(range(rows), key=lambda at: ends[at])
        first = max(ends[place], 0.0) + 0.1 + stagger * (number % rows)
        ends[place] = first + lasts
        records.append(
            op_record(
                "generate",
                100 * attempt + number,
                phase="probe",
                label=f"rows {when} {attempt} {number}",
                at=0.0,
                lasts=ends[place],
                first=first,
                reply=Reply(finish="length"),
            )
        )
    return records


def paced(rows: int, sent: int, lasts: float = 90.0, pace: float = 1.0) -> list[OpRecord]:
    """The third probe: each is sent when the one before it has shown a token."""
    records = probe(3, rows, sent, lasts, stagger=pace)
    for before, record in pairwise(records):
        record.started = before.first_token or 0.0
    return records


def three(rows: int, sent: int, stagger: float = 0.1) -> list[OpRecord]:
    short = probe(1, rows, sent, lasts=10.0, stagger=stagger)
    return [*short, *probe(2, rows, sent, lasts=30.0, stagger=stagger), *paced(rows, sent)]


def test_a_missing_row_shows_in_three_probes() -> None:
    facts = facts_of([*three(6, 8), ABORTED])
    (finding,) = judge_rows(facts)
    assert (finding.kind, finding.status, finding.owner) == ("K11", "leak", "s1 turn 2")
    assert finding.headline.startswith("2 of 8 request rows are gone")


def test_a_missing_row_shows_where_the_shorter_probe_is_over_at_once() -> None:
    # Seen on an H200: 43 ms until everyone was in, 85 ms until the first was done.
    assert [finding.kind for finding in judge_rows(facts_of(three(6, 8, stagger=1.0)))] == ["K11"]


def test_a_batch_that_was_called_full_too_early_is_no_missing_row() -> None:
    """As seen on a clean SGLang 0.5.12, mixed chunks of 32: 15 of 16 of a burst, its own idle check content."""
    burst = [*probe(1, 15, 16), *probe(2, 15, 16, lasts=30.0)]
    assert judge_rows(facts_of(burst)) == []
    assert judge_rows(facts_of([*burst, *paced(16, 16)])) == []
    assert len(judge_rows(facts_of([*burst, *paced(15, 16)]))) == 1
    # Those that come one by one prove nothing where the first has ended before the last was let in.
    assert judge_rows(facts_of([*burst, *paced(15, 16, lasts=20.0)])) == []


def test_all_rows_or_slow_admission_is_no_leak() -> None:
    assert judge_rows(facts_of(three(8, 8))) == []
    assert judge_rows(facts_of(probe(1, 6, 8))) == []
    # One prompt takes longer than a whole answer: few overlap, more of them with longer answers.
    slow = [*three(8, 8, stagger=4.0)[:16], *paced(8, 8, lasts=20.0, pace=4.0)]
    assert judge_rows(facts_of(slow)) == []


def test_requests_that_are_held_up_on_their_way_are_no_missing_rows() -> None:
    late = three(8, 8)
    for record in (late[0], late[8], late[16]):
        record.first_token, record.ended = record.ended + 5.0, record.ended + 15.0
    for record in (late[1], late[9], late[17]):
        record.first_token = record.ended - 1.0
    assert judge_rows(facts_of(late)) == []


def test_answers_that_a_starved_front_end_hands_out_whole_are_no_missing_rows() -> None:
    """As seen on a clean vLLM whose front end had no core: all in one burst behind the first end."""
    burst = []
    for number, record in enumerate([*probe(1, 8, 8), *probe(2, 8, 8)]):
        end = 10.0 + number
        first = 5.0 if number == 8 else end - 0.5
        burst.append(changed(record, first_token=first / 100, ended=end / 100))
    for number in range(8):
        burst[number] = changed(burst[number], first_token=0.1 + number / 50, ended=0.11 + number / 50)
    assert [p.peak for p in map(read_probe, (burst[:8], burst[8:])) if p] == [1, 1]
    assert judge_rows(facts_of([*burst, *paced(7, 8)])) == []


def test_rows_that_an_engine_keeps_for_itself_are_not_missing() -> None:
    own = probe(9, 7, 8, when="before")
    assert judge_rows(facts_of([*own, *three(7, 8)])) == []
    assert len(judge_rows(facts_of([*own, *three(6, 8)]))) == 1


def test_a_lagging_client_says_nothing_about_rows() -> None:
    facts = facts_of([*probe(1, 6, 8), *probe(2, 6, 8, lasts=30.0)], client_lag=3.0)
    assert judge_rows(facts) == []


# --- soak ----------------------------------------------------------------------------------------------
def soak(*used: int) -> list[Any]:
    rests = [
        op_record("wait", n, label=f"batch {n + 1} at rest", at=10.0 * n, lasts=1.0) for n in range(len(used))
    ]
    samples = [sample(gauges(used=count), t=10.0 * n + 0.5) for n, count in enumerate(used)]
    busy = [sample(gauges(used=900), t=10.0 * n + 0.7, running=1) for n in range(len(used))]
    return judge_soak(facts_of(rests, samples=sorted([*samples, *busy], key=lambda s: s.t)))


def test_what_grows_from_batch_to_batch_is_a_leak() -> None:
    (finding,) = soak(0, 14, 28, 42, 56)
    assert (finding.status, finding.tokens, finding.kind) == ("leak", 42, "K01")
    assert "0, 14, 28, 42, 56" in finding.paragraph()


@pytest.mark.parametrize(
    "used", [(0, 0, 0, 0, 0), (0, 64, 64, 64, 64), (0, 5, 0, 7, 0), (9, 9, 9), (0, 0, 4, 4, 4, 4)]
)
def test_what_fills_once_or_comes_back_is_none(used: tuple[int, ...]) -> None:
    assert soak(*used) == []


# --- the engine's log ----------------------------------------------------------------------------------
def leak_line(**found: Any) -> Any:
    parts = {"total": 1000, "available": 900, "evictable": 0, "protected": 0, "session_held": 0, "uncached": 0}
    return event(
        "leak", "Full Pool Mem Leak Detected!", kind="K01", t=6.1, line=9, **{**parts, "pool": "full", **found}
    )


def test_the_engines_own_leak_is_the_news_even_when_it_died_of_it() -> None:
    facts = facts_of(
        [FINISHED, ABORTED],
        log=[leak_line(available=983), event("fatal", "Scheduler hit an exception", t=6.2)],
        server=ServerFacts(alive=False, exit_code=-9),
        idle=None,
    )
    (finding,) = judge(facts)
    assert (finding.kind, finding.status, finding.tokens, finding.owner) == ("K03", "leak", 17, "s1 turn 2")
    assert any("exit status -9" in line for line in finding.evidence)


def test_the_message_counts_and_not_the_source_that_a_traceback_quotes() -> None:
    quoted = event("leak", 'raise Fault(f"pool memory leak detected! {account}")', kind="K01", line=3)
    (finding,) = judge_engine_log(facts_of([FINISHED], log=[quoted, leak_line(available=1128)]))
    assert (finding.kind, finding.tokens) == ("K12", 128)
    assert finding.evidence[0].startswith("Log line 9:")


def test_a_sum_above_its_total_may_be_a_page_freed_with_live_tokens() -> None:
    for page, also in ((1, ("K16",)), (16, ("K16", "K15"))):
        facts = facts_of([FINISHED], log=[leak_line(available=1128)], cell=make_cell(page_size=page))
        (finding,) = judge_engine_log(facts)
        assert finding.also[: len(also)] == also
        assert ("K15" in finding.also) == (page > 1)


def test_requests_that_a_check_cut_off_went_the_way_they_were_on() -> None:
    cut = Reply(finish="error", message="server died")
    dead = ServerFacts(alive=False, exit_code=-9)
    running = op_record("turn", 7, at=5, session="s7", reply=cut, max_new_tokens=40, input_ids=(1,) * 9)
    abort = op_record("abort", 8, at=5.5, target=7)
    for others, kind in (([abort], "K03"), ([], "K01")):
        facts = facts_of([FINISHED, running, *others], log=[leak_line(available=983)], server=dead, idle=None)
        assert judge_engine_log(facts)[0].kind == kind
    retracting = event("retract", "Testing retraction. #retracted_reqs: 1", count=1, line=2)
    facts = facts_of([FINISHED, running], log=[retracting, leak_line(available=983)], server=dead, idle=None)
    assert judge_engine_log(facts)[0].kind == "K05"


def test_a_row_leak_line_counts_rows() -> None:
    line = event(
        "leak", "req_to_token_pool memory leak detected!", kind="K11", total=16, available=14, session_held=1
    )
    (finding,) = judge_engine_log(facts_of([FINISHED], log=[line]))
    assert (finding.kind, finding.tokens) == ("K11", None)
    assert "1 rows missing" in finding.headline


def test_a_crash_without_a_leak_is_a_crash_with_its_last_lines() -> None:
    facts = facts_of(
        [FINISHED],
        log=[event("fatal", "Scheduler hit an exception: boom", line=4)],
        log_tail=["one", "IndexError: boom"],
        server=ServerFacts(alive=False, exit_code=1),
        idle=None,
    )
    (finding,) = judge_engine_log(facts)
    assert finding.status == "crash"
    assert "exit status 1" in finding.headline
    assert "IndexError: boom" in finding.paragraph()
    facts.log = [event("fatal", "[10:37] Scheduler hit an exception: Traceback (most recent call last):")]
    (finding,) = judge_engine_log(facts)
    assert finding.headline.endswith("Scheduler hit an exception: IndexError: boom")


def test_what_an_engine_says_while_it_is_stopped_is_no_crash() -> None:
    line = event("fatal", "SIGQUIT received.", t=99.0)
    assert (
        judge_engine_log(facts_of([FINISHED], log=[line], server=ServerFacts(stopped=True, exit_code=-9))) == []
    )


def test_a_series_that_breaks_and_stays_broken_is_a_leak_without_a_leak_line() -> None:
    log = [account(1, 1.0), account(2, 6.0, lost=8), account(3, 7.0, lost=8)]
    (finding,) = judge_engine_log(facts_of([FINISHED, ABORTED], log=log))
    assert (finding.status, finding.tokens, finding.owner) == ("leak", 8, "s1 turn 2")
    mended = [*log[:2], account(3, 7.0), account(4, 8.0, held=30)]
    assert judge_engine_log(facts_of([FINISHED, ABORTED], log=mended)) == []


def test_a_check_that_counts_too_much_with_nothing_else_wrong_is_a_false_alarm() -> None:
    over = leak_line(available=1016)
    (finding,) = judge(facts_of([FINISHED], log=[over]))
    assert (finding.kind, finding.status) == ("K16", "mismatch")
    # With a gauge that agrees it is no false alarm, and neither finding is lost.
    idle = sample(PoolGauge(total=1000, used=-16, available=1016, evictable=0), t=100.0)
    found = judge(facts_of([FINISHED], log=[over], idle=idle))
    assert [(f.kind, f.oracle) for f in found] == [("K12", "conservation"), ("K12", "engine_log")]
    # Where it killed the server nobody can tell.
    dead = ServerFacts(alive=False, exit_code=-9)
    (finding,) = judge(facts_of([FINISHED], log=[over], server=dead, idle=None))
    assert finding.kind == "K12"
    assert "K16" in finding.also


# --- residue -------------------------------------------------------------------------------------------
def test_what_is_left_behind_is_named() -> None:
    server = ServerFacts(
        stopped=True, leftover_processes=("pid 7 (python)",), port_still_open=True, gpu_memory_left=3 << 30
    )
    found = judge_residue(facts_of([FINISHED], server=server))
    assert [f.kind for f in found] == ["K22"] * 3
    assert "pid 7" in found[0].paragraph()
    assert "3072 MiB" in found[2].headline


def test_a_tidy_server_and_a_few_descriptors_are_no_residue() -> None:
    server = ServerFacts(stopped=True, gpu_memory_left=1 << 20, fds_before=40, fds_after=60)
    assert judge_residue(facts_of([FINISHED], server=server)) == []


def test_descriptors_that_grow_with_the_requests_are_residue() -> None:
    many = [op_record("generate", n, at=float(2 * n), reply=Reply(finish="length")) for n in range(100)]
    (finding,) = judge_residue(facts_of(many, server=ServerFacts(fds_before=40, fds_after=140)))
    assert (finding.kind, finding.status) == ("K22", "residue")
    assert "100 descriptors more" in finding.headline


# --- locked or lost, where the account does not say ------------------------------------------------------
def pin(number: int, ids: tuple[int, ...], cached: int) -> OpRecord:
    return op_record(
        "generate", 7_000_000 + number, phase="probe", input_ids=ids, max_new_tokens=1, label=f"pin {number}",
        at=200.0 + number, reply=Reply(finish="length", http_status=200, output_ids=[1], cached_tokens=cached),
    )  # fmt: skip


SHARED = tuple(range(100))


@pytest.mark.parametrize(
    ("pins", "kind"),
    [
        ([pin(0, SHARED, 100), pin(1, (*SHARED, 7), 100)], "K10"),  # one prefix, counted once: still all of it
        ([pin(0, SHARED, 10)], "K01"),  # hits that eviction could have kept
        ([pin(0, SHARED, 0)], "K01"),
        ([], "K01"),
    ],
)
def test_tokens_that_are_hit_but_not_evictable_are_locked_and_not_lost(pins: list[OpRecord], kind: str) -> None:
    idle = sample(PoolGauge(total=1000, used=100, available=880, evictable=20, session_held=0), t=100.0)
    found = judge_conservation(facts_of([FINISHED, *pins], make_cell(), idle=idle))
    assert [(finding.kind, finding.tokens) for finding in found] == [(kind, 100)]
