"""A server process: `python benchmarks/_web_child.py TASK [LOG]`. It prints its port, then reads commands from stdin.

`zbus`: a bus with its log, served as `zbus serve` does. `bare-feeds`: sse-starlette as its documents show it, a queue
in memory for each client. `bare-post`: a starlette handler that reads the body and answers at once. All run on uvicorn
with the same settings.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

ALL = "bench/all"
PADDING = "x" * 80
Publish = Callable[[str, bytes], Awaitable[Any]]


def own(client: int) -> str:
    return f"bench/client-{client}"


@asynccontextmanager
async def zbus_server(log: str) -> AsyncIterator[tuple[int, Publish]]:
    import zbus
    from zbus_web import WebSettings, serve

    async with zbus.open(log) as bus, serve(bus, WebSettings(port=0)) as server:
        publishers: dict[str, zbus.EventPublisher] = {}

        async def publish(key: str, payload: bytes) -> None:
            publisher = publishers.get(key)
            if publisher is None:
                publisher = publishers[key] = await bus.publisher(key)
            await publisher.publish(payload)

        yield server.port, publish


@asynccontextmanager
async def bare_server(routes: list[Any]) -> AsyncIterator[int]:
    import uvicorn
    from starlette.applications import Starlette

    from zbus_web.http.settings import WebSettings
    from zbus_web.server.running import listen, uvicorn_config

    settings = WebSettings(port=0)
    listener = listen(settings)
    server = uvicorn.Server(uvicorn_config(Starlette(routes=routes), settings))
    task = asyncio.create_task(server.serve([listener]))  # the socket already accepts connections
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await asyncio.wait((task,), timeout=5)


@asynccontextmanager
async def bare_feeds() -> AsyncIterator[tuple[int, Publish]]:
    from sse_starlette.sse import EventSourceResponse
    from starlette.requests import Request
    from starlette.routing import Route

    queues: dict[str, list[asyncio.Queue[str]]] = {}

    async def events(request: Request) -> EventSourceResponse:
        queue: asyncio.Queue[str] = asyncio.Queue(1000)
        for key in request.query_params.getlist("key"):
            queues.setdefault(key, []).append(queue)

        async def read() -> AsyncIterator[dict[str, Any]]:
            yield {"retry": 1000}
            number = 0
            while True:
                data = await queue.get()
                number += 1
                yield {"data": data, "id": str(number)}

        return EventSourceResponse(read(), sep="\n")

    async def publish(key: str, payload: bytes) -> None:
        data = json.dumps({"key": key, "published_ns": str(time.time_ns()), "payload": payload.decode()})
        for queue in queues.get(key, ()):
            queue.put_nowait(data)

    async with bare_server([Route("/events", events)]) as port:
        yield port, publish


@asynccontextmanager
async def bare_post() -> AsyncIterator[tuple[int, Publish]]:
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def post(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse({"offset": 1, "publisher_id": "1", "sequence": 0}, 201)

    async def nothing(key: str, payload: bytes) -> None:
        return None

    async with bare_server([Route("/events/{key:path}", post, methods=["POST"])]) as port:
        yield port, nothing


async def play(publish: Publish, clients: int, seconds: float, own_per_s: int, all_per_s: int) -> dict[str, Any]:
    """Publish evenly, in ticks of 10 ms, with events numbered per key. Returns the numbers of events."""
    loop = asyncio.get_running_loop()
    begin, sent_own, sent_all = loop.time(), 0, 0
    waiting: set[asyncio.Task[Any]] = set()
    late_s = 0.0
    while (passed := loop.time() - begin) < seconds:
        due_own, due_all = int(passed * own_per_s), int(passed * all_per_s)
        jobs = [(own(n % clients), n // clients) for n in range(sent_own, due_own)]
        jobs += [(ALL, n) for n in range(sent_all, due_all)]
        sent_own, sent_all = due_own, due_all
        for key, number in jobs:
            task = loop.create_task(publish(key, f"{number} {PADDING}".encode()))  # type: ignore[arg-type]
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        tick = loop.time()
        await asyncio.sleep(0.01)
        late_s = max(late_s, loop.time() - tick - 0.01)
    while waiting:
        await asyncio.wait(tuple(waiting))
    return {"own": sent_own, "all": sent_all, "late_ms": late_s * 1000, "seconds": loop.time() - begin}


async def main() -> None:
    task, *arguments = sys.argv[1:]
    servers: dict[str, Any] = {"zbus": zbus_server, "bare-feeds": bare_feeds, "bare-post": bare_post}
    async with servers[task](*arguments) as (port, publish):
        print(json.dumps({"port": port}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await play(publish, *json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
