"""Small programs that must take the same steps on the simulated event loop as on the standard one.

None depends on how fast the machine is: timers that could overtake something else are long, and otherwise turns of the
loop are counted.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

Say = Callable[[object], None]
Program = Callable[[Say], Coroutine[Any, Any, object]]

NEVER_S = 60.0


async def turns(number: int) -> None:
    """Let others run."""
    for _ in range(number):
        await asyncio.sleep(0)


async def tasks_take_turns(say: Say) -> None:
    async def count(name: str, steps: int) -> None:
        for number in range(steps):
            say(f"{name}{number}")
            await asyncio.sleep(0)

    first = asyncio.create_task(count("a", 4))
    say("created")
    await asyncio.gather(count("b", 2), first, count("c", 3))


async def callbacks_and_timers(say: Say) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    when = loop.time() + 0.02
    loop.call_at(when, done.set)
    loop.call_at(when, say, "second of equal times")
    loop.call_later(0.01, say, "earlier")
    loop.call_later(0, say, "due at once")
    cancelled = loop.call_later(0.005, say, "never")
    loop.call_soon(say, "soon")
    loop.call_soon_threadsafe(say, "from any thread")
    cancelled.cancel()
    say(cancelled.cancelled())
    await done.wait()
    await asyncio.sleep(0)


async def results_and_exceptions(say: Say) -> None:
    async def give(value: int, delay_s: float) -> int:
        await asyncio.sleep(delay_s)
        say(f"gives {value}")
        if value % 2:
            raise ValueError(value)
        return value

    async def go_on() -> None:
        await event.wait()
        say("goes on")

    event = asyncio.Event()
    found = await asyncio.gather(*[give(n, 0.04 - n / 100) for n in range(4)], return_exceptions=True)
    say([repr(each) for each in found])
    try:
        await asyncio.gather(give(5, 0.01), go_on())
    except ValueError as error:
        say(repr(error))
    event.set()
    await turns(5)


async def waiting_for_some(say: Say) -> None:
    async def give(value: int) -> int:
        await turns(10 * value)
        return value

    pending = {asyncio.create_task(give(n)) for n in (3, 1, 2)}
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        say(sorted(task.result() for task in done))
    for each in asyncio.as_completed([give(2), give(1)]):
        say(await each)
    done, pending = await asyncio.wait([asyncio.create_task(asyncio.sleep(NEVER_S, 0))], timeout=0.01)
    say((len(done), len(pending)))
    pending.pop().cancel()


async def events_and_conditions(say: Say) -> None:
    event, condition = asyncio.Event(), asyncio.Condition()

    async def wait(name: str) -> None:
        await event.wait()
        say(f"{name} saw the event")
        async with condition:
            say(f"{name} is in")
            await condition.wait()
            say(f"{name} was notified")

    tasks = [asyncio.create_task(wait(name)) for name in "abc"]
    await asyncio.sleep(0)
    event.set()
    say("set")
    await turns(30)
    async with condition:
        condition.notify(2)
    await turns(30)
    async with condition:
        condition.notify_all()
    await asyncio.gather(*tasks)


async def queues(say: Say) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(2)

    async def put() -> None:
        for number in range(6):
            await queue.put(number)
            say(f"put {number}")

    async def get(name: str) -> None:
        while True:
            say(f"{name} got {await queue.get()}")
            await turns(3 if name == "a" else 7)
            queue.task_done()

    readers = [asyncio.create_task(get(name)) for name in "ab"]
    await put()
    await queue.join()
    for reader in readers:
        reader.cancel()
    say([type(each).__name__ for each in await asyncio.gather(*readers, return_exceptions=True)])


async def task_groups(say: Say) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        say("fails")
        raise ValueError("bad")

    async def wait() -> None:
        try:
            await asyncio.sleep(NEVER_S)
        except asyncio.CancelledError:
            say("cancelled")
            raise
        finally:
            say("finally")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(fail())
            group.create_task(wait())
    except* ValueError as errors:
        say([str(each) for each in errors.exceptions])
    async with asyncio.TaskGroup() as group:
        good = group.create_task(asyncio.sleep(0.01, "good"))
    say(good.result())


async def timeouts(say: Say) -> None:
    try:
        async with asyncio.timeout(0.01):
            try:
                await asyncio.sleep(NEVER_S)
            finally:
                say("cleaned up")
    except TimeoutError:
        say("timeout")
    async with asyncio.timeout(NEVER_S) as outer:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(NEVER_S)
        except TimeoutError:
            say(("inner", outer.expired()))
        await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(0):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    except TimeoutError:
        say("at once")
    for delay_s, limit_s in ((0.001, NEVER_S), (NEVER_S, 0.01)):
        try:
            say(await asyncio.wait_for(asyncio.sleep(delay_s, "in time"), limit_s))
        except TimeoutError:
            say("too late")


async def cancellation(say: Say) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(NEVER_S)
        except asyncio.CancelledError:
            say("refuses")
        await asyncio.sleep(0.01)
        return "ended in its own time"

    async def outer() -> None:
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError:
            say("outer cancelled")

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel()
    say(await task)
    event = asyncio.Event()
    inner = asyncio.ensure_future(event.wait())
    waits = asyncio.create_task(outer())
    await asyncio.sleep(0)
    waits.cancel()
    await waits
    event.set()
    say(await inner)
    never = asyncio.create_task(stubborn())
    never.cancel()
    say((await asyncio.gather(never, return_exceptions=True))[0].__class__.__name__)


async def asynchronous_generators(say: Say) -> None:
    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
                await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0)
            say(f"{name} closed")

    async for number in numbers("complete"):
        if number == 9:
            say("last")
    async for number in numbers("dropped"):
        if number == 2:
            break
    await turns(20)
    explicit = numbers("explicit")
    say(await anext(explicit))
    await explicit.aclose()  # type: ignore[attr-defined]
    kept.append(numbers("left open"))
    say(await anext(kept[-1]))


kept: list[Any] = []  # generators that are open when a program ends


async def tasks_that_are_left(say: Say) -> None:
    async def background(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            say(f"{name} ends")
            await asyncio.sleep(0.001)
            say(f"{name} has ended")

    task = asyncio.create_task(background("a task"))
    await asyncio.sleep(0.01)
    say(("the end", task.done()))


async def locks_are_fair(say: Say) -> None:
    lock, places = asyncio.Lock(), asyncio.Semaphore(2)

    async def work(name: str) -> None:
        async with lock:
            say(f"{name} has the lock")
            await asyncio.sleep(0)
        async with places:
            say(f"{name} has a place")
            await turns(5)

    await asyncio.gather(*[work(name) for name in "abcd"])


async def contexts(say: Say) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    loop = asyncio.get_running_loop()

    async def ask(other: str) -> None:
        name.set(other)
        loop.call_soon(lambda: say(name.get()))
        loop.call_later(0.001, lambda: say(f"later {name.get()}"))
        await asyncio.sleep(0.01)
        say(name.get())

    await asyncio.gather(ask("a"), ask("b"))
    say(name.get())
    task = loop.create_task(asyncio.sleep(0, name.get()), name="a name", context=contextvars.copy_context())
    say((task.get_name(), await task))


async def futures_and_their_callbacks(say: Say) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    for number in range(3):
        future.add_done_callback(lambda done, number=number: say((number, done.result())))  # type: ignore[misc]
    loop.call_soon(future.set_result, "result")
    say(await future)
    failed: asyncio.Future[str] = loop.create_future()
    loop.call_later(0.001, failed.set_exception, KeyError("x"))
    try:
        await failed
    except KeyError as error:
        say(repr(error))


PROGRAMS: list[Program] = [
    tasks_take_turns,
    callbacks_and_timers,
    results_and_exceptions,
    waiting_for_some,
    events_and_conditions,
    queues,
    task_groups,
    timeouts,
    cancellation,
    asynchronous_generators,
    tasks_that_are_left,
    locks_are_fair,
    contexts,
    futures_and_their_callbacks,
]
