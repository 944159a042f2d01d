"""`zbus demo` shows that nothing is lost, and would notice if something were."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from zbus.cli.demo import command
from zbus.cli.demo.ledger import Ledger, Watch

WAIT_S = 280.0  # for a machine that has nothing better to do, ten seconds; the demo itself gives up before
COMMAND = [sys.executable, "-m", "zbus", "demo"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ZBUS_")}
ROW = re.compile(r"│ (.+?) +│ +([\d,]+) │")


def rows(output: str) -> dict[str, int]:
    return {name: int(events.replace(",", "")) for name, events in ROW.findall(output)}


def processes_with(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass  # it ended just now
    return found


def test_the_demo_loses_nothing_and_shows_the_rate_at_full_speed() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=WAIT_S, env=ENVIRONMENT, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    table = rows(done.stdout)
    said = re.search(r"full speed: ([\d,]+) events/s of 100 bytes .* on disk \(fsync\)", done.stdout)
    assert said is not None
    assert f" {said[1]} │" in next(line for line in done.stdout.splitlines() if "published at full speed" in line)
    assert table["published at full speed, in batches of 1,000"] >= 1000
    assert table["published"] == table["acknowledged (on disk)"] > 1000
    assert table["handled by the durable subscriber, killed once"] == table["published"]
    assert table["acknowledged by the durable subscriber"] == table["published"]
    assert 0 < table["replayed from the time of the kill"] < table["published"]
    assert table["delivered to 4 subscribers in this process"] > table["published"]
    assert table["redelivered to it although acknowledged"] == table["lost"] == 0
    assert "SIGKILL" in done.stdout
    assert "\x1b" not in done.stdout
    log = re.search(r"on (\S+/demo\.db)", done.stdout)
    assert log is not None
    assert not Path(log[1]).parent.exists()


def test_the_demo_fails_when_a_subscriber_passes_over_an_event_and_shows_it_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    call = [*COMMAND, "--seconds", "1", "--fault", "skip"]
    with subprocess.Popen(call, stdout=theirs, stderr=subprocess.PIPE, env=ENVIRONMENT) as demo:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:
            pass  # the other end is closed
        os.close(ours)
        _, errors = demo.communicate(timeout=WAIT_S)

    assert demo.returncode == 1
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    assert rows(text)["lost"] >= 1
    assert b"lost" in errors
    assert b"Traceback" not in errors


def test_the_demo_fails_when_an_event_is_seen_again_after_its_acknowledgement() -> None:
    call = [*COMMAND, "--seconds", "1", "--fault", "forget"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=WAIT_S, env=ENVIRONMENT, check=False)

    assert done.returncode == 1
    table = rows(done.stdout)
    assert table["redelivered to it although acknowledged"] > 0
    assert table["lost"] == 0
    assert "redelivered although their acknowledgement" in done.stderr


def test_ctrl_c_ends_the_demo_quietly_and_its_child_with_it() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(COMMAND, text=True, env=ENVIRONMENT, **pipes) as demo:
        assert demo.stdout is not None
        said = iter(demo.stdout.readline, "")
        log = next(found for line in said if (found := re.search(r"on (\S+/demo\.db)", line)))
        assert any("publishers" in line for line in said)
        assert processes_with(log[1])

        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=WAIT_S)

    assert (demo.returncode, errors) == (130, "")
    assert processes_with(log[1]) == []
    assert not Path(log[1]).parent.exists()


class Slow:
    """A play that takes some time, and makes progress or does not."""

    def __init__(self, seconds: float, progresses: bool) -> None:
        self._seconds, self._progresses = seconds, progresses
        self.steps = 0
        self.ended = False

    @property
    def progress(self) -> int:
        self.steps += self._progresses
        return self.steps

    async def run(self) -> None:
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.ended = True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"STALL_S": 0.2, "LIMIT_S": 1.0, "TICK_S": 0.01}.items():
        monkeypatch.setattr(command, name, seconds)


@pytest.mark.parametrize(
    ("seconds", "progresses", "reported"),
    [(0.5, True, None), (60, False, "made no progress for 0.2 s"), (60, True, "did not end within 1 s")],
    ids=["slow", "stuck", "endless"],
)
async def test_a_slow_demo_goes_on_and_one_that_is_stuck_or_endless_gives_up(
    seconds: float, progresses: bool, reported: str | None, impatient: None
) -> None:
    play = Slow(seconds, progresses)

    with nullcontext() if reported is None else pytest.raises(TimeoutError, match=reported):
        await command._while_it_progresses(cast("Any", play))

    assert play.ended


def test_a_demo_that_is_stopped_for_a_while_loses_nothing() -> None:
    call = [*COMMAND, "--seconds", "1"]
    with subprocess.Popen(call, text=True, env=ENVIRONMENT, stdout=subprocess.PIPE) as demo:
        assert demo.stdout is not None
        assert any("publishers" in line for line in iter(demo.stdout.readline, ""))
        demo.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # as long as a machine that is busy with something else may keep it waiting
        demo.send_signal(signal.SIGCONT)
        output, _ = demo.communicate(timeout=WAIT_S)

    assert demo.returncode == 0
    assert rows(output)["lost"] == 0


def whole() -> Ledger:
    """Three events, of which each part saw what it should."""
    events = {(1, 0): "shop/a", (1, 1): "shop/a", (2, 0): "fleet/b"}
    everybody = set(events)
    return Ledger(
        published=dict(events),
        acknowledged=set(everybody),
        heads={"shop/a": 2, "fleet/b": 3},
        flood={(9, 0)},
        watches=[Watch("shop/**", frozenset({"shop/a"}), Counter([(1, 0), (1, 1)]))],
        handled=Counter([*everybody, (1, 0)]),
        stored={*everybody, (9, 0)},
        replayed={(2, 0)},
        replay_expected={(2, 0)},
    )


def test_a_whole_ledger_has_no_loss_and_counts_what_came_twice() -> None:
    ledger = whole()

    assert (ledger.lost, ledger.wrong) == (set(), [])
    assert (ledger.delivered, ledger.redelivered) == (2, 1)


def test_a_subscriber_has_everything_once_it_is_past_the_last_event_of_its_keys() -> None:
    ledger = whole()

    assert [ledger.arrived(position) for position in (2, 3, 4)] == [False, True, True]
    assert [ledger.arrived(position, {"shop/a", "shop/never"}) for position in (1, 2)] == [False, True]


@pytest.mark.parametrize("part", ["stored", "handled", "replayed", "watched", "flood"])
def test_an_event_that_is_missing_anywhere_is_lost(part: str) -> None:
    ledger = whole()
    if part == "watched":
        del ledger.watches[0].seen[1, 1]
    elif part == "flood":
        ledger.stored.discard((9, 0))
    elif part == "handled":
        del ledger.handled[1, 1]
    else:
        getattr(ledger, part).discard((2, 0))

    assert ledger.lost == {{"stored": (2, 0), "replayed": (2, 0), "flood": (9, 0)}.get(part, (1, 1))}


def test_an_event_that_was_never_acknowledged_is_not_lost() -> None:
    ledger = whole()
    ledger.published[3, 0] = "shop/a"

    assert ledger.lost == set()


def test_a_run_that_published_nothing_shows_nothing() -> None:
    assert Ledger().wrong == ["too few events were published to prove anything"]


def test_broken_promises_other_than_losses_are_named() -> None:
    ledger = whole()
    ledger.watches[0].seen[1, 0] += 1
    ledger.watches[0].seen[2, 0] += 1
    ledger.seen_again.add((1, 0))
    ledger.replayed.add((1, 0))

    assert ledger.lost == set()
    assert len(ledger.wrong) == 4
    for named in ("delivered twice", "of other keys", "redelivered although", "older than the start time"):
        assert any(named in promise for promise in ledger.wrong)
