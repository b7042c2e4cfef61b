"""Who may see the page: token, cookie, host, origin; and what each answer forbids the browser."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from dlrover.dashboard import guard, page, server
from dlrover.dashboard.cluster import JobSources
from dlrover.dashboard.listing import JobList, job_id

TOKEN, HOST = "a-secret-of-the-test", "127.0.0.1:8650"


class Client:
    """Requests to the application, as a browser would send them."""

    def __init__(self, state: Path) -> None:
        self._app = server.application(
            JobList([state]), JobSources({}), TOKEN, guard.hosts("127.0.0.1", 8650)
        )
        self.cookie = ""

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        sent = {"host": HOST} | ({"cookie": self.cookie} if self.cookie else {})
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        where, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": where, "raw_path": where.encode(), "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in sent.items() if v], "scheme": "http",
            "server": ("127.0.0.1", 8650), "client": ("127.0.0.1", 1), "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        got: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            got.append(message)

        asyncio.run(self._app(scope, receive, send))  # type: ignore[arg-type]
        answered = {k.decode().lower(): v.decode() for k, v in got[0]["headers"]}
        text = b"".join(m.get("body", b"") for m in got[1:]).decode()
        return got[0]["status"], answered, text


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


@pytest.fixture
def known(client: Client) -> Client:
    status, headers, _ = client.ask(f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    assert TOKEN not in headers["set-cookie"]
    assert "HttpOnly" in headers["set-cookie"]
    client.cookie = headers["set-cookie"].partition(";")[0]
    return client


def test_without_the_token_there_is_nothing_to_see(client: Client) -> None:
    for path in ("/", "/?token=wrong", f"/?token={TOKEN}x"):
        status, headers, text = client.ask(path)
        assert status == 401
        assert "set-cookie" not in headers
        assert "needs its link" in text
    for path in ("/api/jobs", "/api/jobs/live", "/api/jobs/x/live", f"/api/jobs?token={TOKEN}"):
        assert client.ask(path)[0] == 401
    client.cookie = f"{guard.COOKIE}_8650={TOKEN}"
    assert client.ask("/api/jobs")[0] == 401, "the link's secret is not the cookie's"


def test_with_the_link_there_is(known: Client) -> None:
    assert known.ask("/")[0] == 200
    assert '"jobs":[]' in known.ask("/api/jobs")[2]
    assert known.ask("/api/jobs/none/live")[0] == 404


def test_other_names_of_this_address_are_not_answered(known: Client) -> None:
    for host in ("evil.example:8650", "127.0.0.1:1", "", "localhost"):
        assert known.ask("/api/jobs", host=host)[0] == 421
    known.cookie = known.cookie  # the same cookie under a name that is this machine's
    assert known.ask("/api/jobs", host="localhost:8650")[0] == 200


def test_only_the_page_itself_may_press_buttons(known: Client) -> None:
    url, body = "/api/jobs/none/actions", b'{"action":"stop"}'
    own = {"origin": f"http://{HOST}", "content_type": "application/json"}
    assert known.ask(url, "POST", body, **own)[0] == 404
    for origin in (
        "",
        "null",
        "http://evil.example",
        "http://127.0.0.1:1",
        f"file://{HOST}",
        "http://[",
    ):
        assert known.ask(url, "POST", body, **own | {"origin": origin})[0] == 403
    assert known.ask(url, "POST", body, **own, sec_fetch_site="same-site")[0] == 403


def test_each_answer_forbids_the_browser_all_but_the_pages_own_files(known: Client) -> None:
    for path in ("/", "/assets/app.js", "/api/jobs", "/nothing"):
        headers = known.ask(path)[1]
        assert guard.HEADERS.items() <= {k.title(): v for k, v in headers.items()}.items() | {
            (name, headers[name.lower()]) for name in guard.HEADERS
        }
    policy = guard.POLICY
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_only_the_pages_own_files_are_given_out(client: Client) -> None:
    for name in page.ASSETS:
        assert client.ask(f"/assets/{name}")[0] == 200
    for name in ("page.html", "__init__.py", "..%2Fserver.py", "../server.py"):
        assert client.ask(f"/assets/{name}")[0] in (401, 404)


def test_the_page_writes_no_markup_and_loads_nothing_from_elsewhere() -> None:
    code = "".join(page.ASSETS[name].read_text() for name in page.SCRIPTS)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", code
    )
    text = (
        page.document() + page.style() + code.replace(page_svg := "http://www.w3.org/2000/svg", "")
    )
    assert not re.search(r"https?://|@import|url\(", text), page_svg


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_beyond_this_machine_a_token_has_to_be_chosen(host: str) -> None:
    from dlrover.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="DLROVER_DASHBOARD_TOKEN"):
        server.check_host(host, given_token=False)
    server.check_host(host, given_token=True)
    server.check_host("127.0.0.1", given_token=False)


def test_the_printed_link_opens_the_page_whatever_the_token(tmp_path: Path) -> None:
    token = "a b&c#d+%41"
    printed = server.link("::1", 8650, token)
    assert printed == "http://[::1]:8650/?token=a%20b%26c%23d%2B%2541"
    listing, hosts = JobList([tmp_path]), guard.hosts("127.0.0.1", 8650)
    client = Client(tmp_path)
    client._app = server.application(listing, JobSources({}), token, hosts)
    assert client.ask(printed.removeprefix("http://[::1]:8650"))[0] == 303


def test_a_port_that_is_taken_is_named_in_one_sentence() -> None:
    from dlrover.errors import InfrastructureError

    with server.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InfrastructureError) as caught:
            server.listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"The dashboard cannot listen on 127.0.0.1:{port}: Address already in use; choose another port or address."
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"action":"none"}',
        b'{"action":"scale","nodes":1,"role":"\xff"}',
        b'{"x":' + b"[" * 4000,
    ],
)
def test_a_damaged_request_of_a_button_is_refused(
    known: Client, tmp_path: Path, body: bytes
) -> None:
    job = tmp_path / "jobs" / "job"
    job.mkdir(parents=True)
    (job / "job.json").write_text("{}")
    own = {"origin": f"http://{HOST}", "content_type": "application/json"}
    status, _, text = known.ask(f"/api/jobs/{job_id(job)}/actions", "POST", body, **own)
    assert (status, "is no action" in text) == (400, True)
