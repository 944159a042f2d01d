"""Answering: what becomes of a question that arrives while a node closes."""

from __future__ import annotations

import asyncio
import threading

from zbus.answering import Answers
from zbus.asking import Asked, encode_asked


class Asker:
    """A question as a fabric hands it over."""

    key = "prices/quote"

    def __init__(self, number: int) -> None:
        self.payload = encode_asked(Asked(number, b""))
        self.replies: list[bytes] = []
        self.closed = threading.Event()

    def reply(self, data: bytes) -> None:
        self.replies.append(data)

    def close(self) -> None:
        self.closed.set()


async def test_a_question_that_arrives_while_the_node_closes_starts_no_handler() -> None:
    started: list[bytes] = []

    async def answer(question: bytes) -> bytes:
        started.append(question)
        await asyncio.sleep(60)
        return b""

    answers = Answers(lambda name, number: None)
    answers.handle(Asker.key, answer)
    early, late, too_late = Asker(1), Asker(2), Asker(3)
    answers.asked(early)
    async with asyncio.timeout(10):
        while not started:
            await asyncio.sleep(0)

    answers.asked(late)  # on its way to the loop
    cancelled = answers.cancel_all()
    await asyncio.wait(cancelled, timeout=10)
    assert await asyncio.to_thread(late.closed.wait, 10)
    assert await asyncio.to_thread(early.closed.wait, 10)
    answers.asked(too_late)
    answers.close()
    await asyncio.sleep(0)

    assert (len(started), late.replies, too_late.replies) == (1, [], [])
    assert asyncio.all_tasks() == {asyncio.current_task()}
