"""Who may ask: this machine's own browser, with the token that the terminal showed.

A page elsewhere in the same browser could send requests to this address, so each is checked: the Host it was sent to, the
Origin it comes from, the cookie, and its size. A refusal says why in one line, and nothing else.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opencon.review.state import RefusedError

MOST_BYTES = 4 << 20  # of a request, ours: every photo of half a million selected
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Stands before the application."""

    def __init__(self, app: ASGIApp, *, hosts: set[str], say: Callable[[str], None]) -> None:
        """Let requests through that may pass.

        Args:
            app: the application.
            hosts: values of Host that are this server, such as 127.0.0.1:8765.
            say: told of the next link whenever one was used.
        """
        self.app, self.hosts, self.say = app, hosts, say
        self.cookie = f"opencon-{sorted(hosts)[0].rpartition(':')[2]}"
        self.secret = secrets.token_urlsafe(32)
        self.token = secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on with headers that keep the page to itself."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._answer(request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        if answer is not None:
            await answer(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)

    def _answer(self, request: Request) -> Response | None:
        """A refusal or a redirect; None: let it through."""
        headers = request.headers
        if headers.getlist("host") == [] or any(host not in self.hosts for host in headers.getlist("host")):
            return refusal(403, "This address is not the one that the program listens to.")
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.hosts}:
            return refusal(403, "Another page asked for this.")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return refusal(403, "Another page asked for this.")
        if request.method not in ("GET", "HEAD", "POST"):
            return refusal(405, "The program does not do that.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return refusal(413, "Too much at once.")
        token = request.query_params.get("token")
        if token is not None and request.url.path == "/" and request.method == "GET":
            return self._entered(token)
        if not secrets.compare_digest(self._cookie_of(request).encode(), self.secret.encode()):
            return refusal(401, "Open the link that the terminal shows: it lets this browser in.")
        if request.method == "POST":
            if origin is None:
                return refusal(403, "A request without an origin.")
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return refusal(415, "The program reads JSON.")
        return None

    def _entered(self, token: str) -> Response:
        """A link was used: it opens once, and the next one is shown."""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return refusal(401, "This link was used before. The terminal shows the one that opens now.")
        self.token = secrets.token_urlsafe(24)
        self.say(self.token)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self.cookie, self.secret, httponly=True, samesite="strict", path="/")
        return answer

    def _cookie_of(self, request: Request) -> str:
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(request.headers.get("cookie", ""))
        except CookieError:
            return ""
        found = jar.get(self.cookie)
        return found.value if found else ""


def refusal(status: int, why: str) -> Response:
    """One line."""
    return PlainTextResponse(why + "\n", status_code=status, headers={"cache-control": "no-store"})


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object of a request; refuses others, and more bytes than a request may have."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise RefusedError("Too much at once.")
    try:
        data = json.loads(bytes(body))
    except (ValueError, RecursionError) as err:
        raise RefusedError("The request is not JSON.") from err
    if not isinstance(data, dict):
        raise RefusedError("The request is not a JSON object.")
    return data
