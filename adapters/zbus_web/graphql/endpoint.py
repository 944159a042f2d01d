"""`/graphql`: queries and mutations by POST, subscriptions over WebSocket (graphql-transport-ws).

Each request has one document, in JSON. An invalid request gets a 4xx response. There is no GraphQL IDE.
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
from zbus_web.access.admission import send_error
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
    """The body of a POST, as GraphQL over HTTP defines it."""

    query: str
    variables: dict[str, Any] | None = None
    operationName: str | None = None  # noqa: N815 - its name on the wire


def routes(bus: zbus.Bus, settings: WebSettings, access: Authenticator, live: LiveStatistics) -> list[BaseRoute]:
    """Return the routes for POST and WebSocket."""
    schema = make_schema()

    def context(connection: HTTPConnection) -> Context:
        return Context(bus, settings, live.views, live, access.permissions(connection))

    async def post(request: Request) -> Response:
        return await _execute(schema, await _read(request), context(request))

    return [
        Route("/graphql", post, methods=["POST"]),
        WebSocketRoute("/graphql", _Sockets(schema, context)),
    ]


class _Socket(ASGIWebSocketAdapter):
    """WebSocket with bounded close reasons: strawberry's reason may be as long as the document."""

    async def close(self, code: int, reason: str) -> None:
        """Close with as much of the reason as fits into a close frame."""
        await super().close(code, reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore"))


class _Sockets:
    """WebSocket endpoint. A client without permissions is rejected before the handshake."""

    def __init__(self, schema: GraphSchema, context: Any) -> None:
        class View(GraphQL[Context, None]):
            websocket_adapter_class = _Socket

            async def get_context(self, request: Any, response: Any) -> Context:
                found: Context = context(request)
                return found

            def is_websocket_origin_allowed(self, request: WebSocket, origin: str) -> bool:
                return True  # `Admission` has checked it.

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
        """Accept or reject a WebSocket."""
        try:
            self._context(HTTPConnection(scope))
            if GRAPHQL_TRANSPORT_WS_PROTOCOL not in scope["subprotocols"]:
                message = f"the subprotocol must be {GRAPHQL_TRANSPORT_WS_PROTOCOL}"
                raise HttpError(400, "unsupported_subprotocol", message, "Nothing was subscribed")
        except HttpError as error:
            await send_error(scope, send, error)
            return
        await self._view(scope, receive, send)


async def _read(request: Request) -> _GraphRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpError(
            415, "unsupported_content_type", f"the Content-Type must be application/json, not {kind[:80]!r}"
        )
    body = await request.body()
    if body.lstrip()[:1] == b"[":
        raise HttpError(400, "batch_rejected", "batches are not supported: send one document per request")
    try:
        return msgspec.json.decode(body, type=_GraphRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HttpError(
            400, "invalid_body", f'the body must look like {{"query": "{{ nodes {{ name }} }}"}}: {error}'
        ) from None


async def _execute(schema: GraphSchema, request: _GraphRequest, context: Context) -> Response:
    try:
        result = await schema.execute(
            request.query,
            variable_values=request.variables,
            operation_name=request.operationName,
            context_value=context,
            allowed_operation_types=BY_POST,
        )
    except MissingQueryError:
        raise HttpError(400, "invalid_document", "the document is empty") from None
    except (CannotGetOperationTypeError, InvalidOperationTypeError) as error:
        needed = "send subscriptions over WebSocket, and give operationName if the document has several operations"
        raise HttpError(400, "invalid_operation", str(error) or needed) from None
    body: dict[str, Any] = {"data": result.data}
    status = 200
    if result.errors:
        body["errors"] = [_shown(error) for error in result.errors]
        if result.data is None:
            status = _status(result.errors)
            body["error"] = _error_body(result.errors[0], status)
    return Response(_encode(body), status, {"Cache-Control": "no-store"}, "application/json")


def _status(errors: list[GraphQLError]) -> int:
    """Return the status of the first error: 500 for a bug, the status of an `HttpError`, otherwise 400."""
    first = errors[0]
    if is_bug(first):
        return 500
    return int((first.extensions or {}).get("status", 400))


def _shown(error: GraphQLError) -> dict[str, Any]:
    fields: dict[str, Any] = dict(error.formatted)
    if is_bug(error):
        fields["message"] = "this is a bug in zbus; the server's log has the traceback"
    return fields


def _error_body(error: GraphQLError, status: int) -> dict[str, Any]:
    """Return a GraphQL error in the form of every other HTTP error."""
    fields = error.extensions or {}
    code = "internal_error" if status == 500 else fields.get("code", "invalid_document")
    state = fields.get("state", "Nothing was changed. Fix the document and send it again")
    return {"code": code, "message": _shown(error)["message"], "state": state}
