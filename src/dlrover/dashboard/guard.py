"""Who may see the page and press its buttons: token, cookie, host and origin; and the headers of each answer."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The page loads only this server's own files, runs no text as a script and no markup from data."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""
COOKIE = "dlrover_dashboard"
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine by which a browser on it may call the server."""
_LOCKED = """<!doctype html><html lang="en"><meta charset="utf-8"><title>DLRover: locked</title>
<link rel="stylesheet" href="/assets/page.css"><main class="locked"><h1>This page needs its link</h1>
<p>Open the address that <code>dlrover dashboard</code> printed; it ends in <code>?token=…</code>.
The token changes each time the command starts, unless <code>DLROVER_DASHBOARD_TOKEN</code> sets it.</p></main></html>"""


class AccessGuard:
    """ASGI middleware in front of everything that the server answers.

    Args:
        app: The application.
        token: The secret of the printed link. Its cookie is derived from it: it opens the page, not the link.
        hosts: ``host:port`` and ``host`` values of the header Host that are answered.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = hmac.new(self._token, b"cookie", hashlib.sha256).hexdigest()
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with one sentence."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(HTTPConnection(scope)) or self._app
        await answer(scope, receive, with_headers)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """Return the answer to a request that must not reach the application; None if it may."""
        # A page of another site may resolve its own name to this address: its Host tells.
        if request.headers.get("host", "") not in self._hosts:
            return refused(421, "This server does not answer for that host: see --allow-host.")
        if request.scope["method"] not in ("GET", "HEAD") and not self._from_here(request.headers):
            return refused(403, "Only the page itself may send this request.")
        given = request.query_params.get("token", "")
        if given and request.url.path == "/":
            return self._opened(request) if _same(given.encode(), self._token) else _locked()
        return None if request.url.path.startswith("/assets/") else self._locked_out(request)

    def _locked_out(self, request: HTTPConnection) -> Response | None:
        """Return the answer to a request without the cookie; None for one with it."""
        if _same(request.cookies.get(cookie_name(request), "").encode(), self._cookie.encode()):
            return None
        if request.url.path == "/":
            return _locked()
        return refused(
            401, "This page needs its link again: open the one that dlrover dashboard printed."
        )

    def _from_here(self, headers: Headers) -> bool:
        """Return whether a request that changes something comes from this server's own page."""
        host = headers.get("host", "")
        own = headers.get("origin", "") in (f"http://{host}", f"https://{host}")
        return own and headers.get("sec-fetch-site", "same-origin") == "same-origin"

    def _opened(self, request: HTTPConnection) -> Response:
        """Return the redirect to the page without the token in its address, with the cookie that replaces it."""
        answer = RedirectResponse("/", status_code=303)
        secure = request.url.scheme == "https"
        name = cookie_name(request)
        answer.set_cookie(name, self._cookie, httponly=True, samesite="lax", secure=secure)
        return answer


def cookie_name(request: HTTPConnection) -> str:
    """Return the cookie's name: browsers do not tell ports apart, so the name has to."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isdecimal() else COOKIE


def hosts(bound: str, port: int, allowed: Collection[str] = ()) -> set[str]:
    """Return the values of the header Host to answer: this machine's own names, the bound one, and ``allowed``."""
    names = {*LOCAL, f"[{bound}]" if ":" in bound else bound}
    return {f"{name}:{port}" for name in names} | set(allowed)


def _same(given: bytes, secret: bytes) -> bool:
    return hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(secret).digest())


def _locked() -> Response:
    return HTMLResponse(_LOCKED, 401)


def refused(status: int, sentence: str) -> Response:
    """Return the answer that refuses a request."""
    return JSONResponse({"error": sentence}, status)
