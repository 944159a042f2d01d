"""Bad input from below: what follows still arrives, and the fabric stays as it was."""

from __future__ import annotations

import time

from contract_hostile import INJECTED
from contract_node import WAIT_S
from contract_support import Attack, Mesh

GOOD = [b"good %d" % number for number in range(300)]


def test_what_follows_bad_input_arrives_and_requests_are_still_answered(transport: Mesh) -> None:
    near = transport.open()
    far = transport.spawn()
    near.listen(["hostile/**"])
    near.answer({"ask/near": {"echo": True}})
    far.wanted(["hostile/key"])
    far.send([("hostile/key", frame) for frame in GOOD[:100]])
    near.received(100)

    transport.inject(
        Attack(
            key="hostile/key",
            answered="ask/near",
            send=lambda: _send(transport),
            reached=lambda: near.received_frame(INJECTED, 0.2),
        )
    )
    far.send([("hostile/key", frame) for frame in GOOD[100:]])

    assert near.received_frame(GOOD[-1])
    assert [frame for frame in near.received(0) if frame.startswith(b"good ")] == GOOD
    assert near.strange_keys == []
    deadline = time.monotonic() + WAIT_S
    while far.ask("ask/near", b"still there", timeout_s=2.0)["replies"] != [b"still there"]:
        assert time.monotonic() < deadline


def _send(transport: Mesh) -> None:
    transport.far[0].send([("hostile/key", b"watched")])
