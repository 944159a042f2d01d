"""`/graphql`: questions and changes by POST, subscriptions over WebSocket (graphql-transport-ws).

One document a request, in JSON; a request that is bad is answered 4xx. There is no page for people: the console is one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
from graphql import GraphQLError
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from strawberry.asgi import ASGIWebSocketAdapter, GraphQL
from strawberry.exceptions import MissingQueryError
from strawberry.schema.exceptions import CannotGetOperationTypeError, InvalidOperationTypeError
from strawberry.subscriptions import GRAPHQL_TRANSPORT_WS_PROTOCOL
from strawberry.types.graphql import OperationType

import zbus
from zbus_web.access.admission import send_refusal
from zbus_web.access.authenticator import Authenticator
from zbus_web.http.http_errors import HttpError
from zbus_web.http.settings import WebSettings
from zbus_web.introspect.live import LiveStatistics

from .schema import Context, GraphSchema, is_bug, make_schema

INIT_TIMEOUT_S = 10
SUBSCRIPTIONS_MAX = 20  # of one connection
REASON_BYTES_MAX = 123
BY_POST = frozenset((OperationType.QUERY, OperationType.MUTATION))
_encode = msgspec.json.Encoder().encode


class _GraphRequest(msgspec.Struct):
    """The body of a POST, as GraphQL over HTTP has it."""

    query: str
    variables: dict[str, Any] | None = None
    operationName: str | None = None  # noqa: N815 - its name on the wire


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator, live: LiveStatistics) -> list[BaseRoute]:
    """The path, for both ways to come."""
    schema = make_schema()

    def context(connection: HTTPConnection) -> Context:
        return Context(bus, settings, live.views, live, access.grant(connection))

    async def post(request: Request) -> Response:
        return await _execute(schema, await _read(request), context(request))

    return [
        Route("/graphql", post, methods=["POST"]),
        WebSocketRoute("/graphql", _Sockets(schema, context)),
    ]


class _Socket(ASGIWebSocketAdapter):
    """What strawberry says at the end may be as long as the document was; a close frame is not."""

    async def close(self, code: int, reason: str) -> None:
        """Close with as much of the reason as fits."""
        await super().close(code, reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore"))


class _Sockets:
    """WebSockets: whoever has no grant is told so before there is one."""

    def __init__(self, schema: GraphSchema, context: Any) -> None:
        class View(GraphQL[Context, None]):
            websocket_adapter_class = _Socket

            async def get_context(self, request: Any, response: Any) -> Context:
                found: Context = context(request)
                return found

            def is_websocket_origin_allowed(self, request: WebSocket, origin: str) -> bool:
                return True  # the guard has looked at it

        self._context = context
        self._view = View(
            schema,
            graphql_ide=None,
            allow_queries_via_get=False,
            subscription_protocols=(GRAPHQL_TRANSPORT_WS_PROTOCOL,),
            connection_init_wait_timeout=timedelta(seconds=INIT_TIMEOUT_S),
            max_subscriptions_per_connection=SUBSCRIPTIONS_MAX,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it in, or not."""
        try:
            self._context(HTTPConnection(scope))
            if GRAPHQL_TRANSPORT_WS_PROTOCOL not in scope["subprotocols"]:
                reason = f"the subprotocol is {GRAPHQL_TRANSPORT_WS_PROTOCOL}"
                raise HttpError(400, "subprotocol_invalid", reason, "Nothing was subscribed")
        except HttpError as refusal:
            await send_refusal(scope, send, refusal)
            return
        await self._view(scope, receive, send)


async def _read(request: Request) -> _GraphRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(415, "content_type_invalid", f"a question is application/json, not {kind[:80]!r}")
    body = await request.body()
    if body.lstrip()[:1] == b"[":
        raise HttpError(400, "batch_refused", "one question a request: send several requests")
    try:
        return msgspec.json.decode(body, type=_GraphRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HttpError(
            400, "body_invalid", f'the body is like {{"query": "{{ nodes {{ name }} }}"}}: {error}'
        ) from None


async def _execute(schema: GraphSchema, asked: _GraphRequest, context: Context) -> Response:
    try:
        result = await schema.execute(
            asked.query,
            variable_values=asked.variables,
            operation_name=asked.operationName,
            context_value=context,
            allowed_operation_types=BY_POST,
        )
    except MissingQueryError:
        raise HttpError(400, "document_invalid", "the document is empty") from None
    except (CannotGetOperationTypeError, InvalidOperationTypeError) as error:
        reason = str(error) or "subscriptions come over WebSocket, and a document with several operations names one"
        raise HttpError(400, "operation_invalid", reason) from None
    answer: dict[str, Any] = {"data": result.data}
    status = 200
    if result.errors:
        answer["errors"] = [_shown(error) for error in result.errors]
        if result.data is None:
            status = _status(result.errors)
            answer["error"] = _summed_up(result.errors[0], status)
    return Response(_encode(answer), status, {"Cache-Control": "no-store"}, "application/json")


def _status(errors: list[GraphQLError]) -> int:
    """That of the first error: a refusal has its own, a bug is one of ours, and the rest is the document's."""
    first = errors[0]
    if is_bug(first):
        return 500
    return int((first.extensions or {}).get("status", 400))


def _shown(error: GraphQLError) -> dict[str, Any]:
    told: dict[str, Any] = dict(error.formatted)
    if is_bug(error):
        told["message"] = "this is a bug of zbus; the server's log has its trace"
    return told


def _summed_up(error: GraphQLError, status: int) -> dict[str, Any]:
    """The same in the form of every other refusal."""
    fields = error.extensions or {}
    code = "internal_error" if status == 500 else fields.get("code", "document_invalid")
    now = fields.get("now", "Nothing was changed. Fix the document and send it again")
    return {"code": code, "reason": _shown(error)["message"], "now": now}
