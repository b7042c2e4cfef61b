"""The page in a real Chromium: what it shows of jobs, live and frozen; keys, phones, colours; hostile texts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.dashboard import content
from dlrover.dashboard.inspect import goodput
from dlrover.errors import ExitCode
from dlrover.master.journal.history import History
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import JobDir
from tests.simulation.cluster import Cluster
from tests.support.accessibility import CHECK
from tests.support.browser import Browser, chromium
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frozen page of a simulated job with a hostile name that lost a worker and a node."""
    from dlrover.master.journal.file import FileJournal

    job = JobSpec(name=HOSTILE, min_nodes=2, max_nodes=3, managed_nodes=3)
    cluster = Cluster(job, steps=80, seed=3)
    cluster.program.checkpoint_every = 10
    cluster.run_until(lambda: cluster.program.steps_done == 26)
    cluster.kill_worker(cluster.nodes[2])
    cluster.run_until(lambda: cluster.program.steps_done == 47)
    cluster.kill_agent(cluster.nodes[1])
    cluster.finish()
    cluster.run(5.0)
    job_dir = JobDir(tmp_path_factory.mktemp("page"))
    journal, history = FileJournal(job_dir.journal), History(job_dir.events)
    for time, event in cluster.journal:
        journal.append(event, time)
    for event in cluster.events:
        history.add(event.body, event.time)
    journal.close()
    history.close()
    file = job_dir.path / "page.html"
    file.write_text(content.frozen(job_dir, goodput.report(job_dir)))
    return file


def check(browser: Browser) -> None:
    for scheme in ("light", "dark"):
        for width in (1280, 360):
            browser.look(width, 800, scheme)
            browser.until(
                f"innerWidth === {width} && document.querySelector('main').clientWidth <= {width}"
            )
            found = browser.run(CHECK)
            assert not found["problems"], f"{scheme}, {width}: " + "\n".join(found["problems"])
            assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.look(1280, 800)


def test_the_frozen_page_needs_nothing_and_shows_everything(browser: Browser, page: Path) -> None:
    browser.look(1280, 800)
    browser.open(page.as_uri())
    browser.until("document.querySelectorAll('dlrover-timeline .row').length === 4")
    assert not re.search(
        r"""(src|href)=["']?(?!#)[a-z/]""",
        page.read_text().split("<script>")[0].replace("src=x", ""),
    )
    text = browser.text()
    for words in (
        "succeeded", "Goodput", "productive", "recomputed steps", "rank 4 was killed by SIGKILL", "6 steps again",
        "The job ended with exit code 0", "Round 1 is complete",
    ):  # fmt: skip
        assert words in text, f"{words!r} is not in\n{text}"
    assert not browser.run("return document.querySelectorAll('button.danger, select').length"), (
        "it cannot act"
    )
    browser.run("document.querySelector('.mark').dispatchEvent(new MouseEvent('click'))")
    browser.until("document.querySelector('#incident-0').open")
    assert "Root cause" in browser.text()
    assert browser.run("return document.title") == f"{HOSTILE} · DLRover"
    assert not browser.run("return document.querySelectorAll('img').length")
    check(browser)
    assert browser.complaints() == []


def test_keys_reach_everything(browser: Browser, page: Path) -> None:
    browser.open("about:blank")
    browser.open(page.as_uri())
    browser.until("document.querySelector('dlrover-timeline .row')")
    browser.press("\ue004")
    assert browser.run("return document.activeElement.className") == "skip"
    browser.press("4")
    browser.until("document.activeElement.id === 'incidents'")
    browser.press("2")
    browser.until("document.activeElement.id === 'timeline'")
    browser.run("document.querySelector('.row').focus()")
    browser.press("\ue015")
    assert "node 1" in browser.run("return document.activeElement.getAttribute('aria-label')")
    browser.press("/")
    browser.until("document.activeElement.type === 'search'")
    browser.press("killed\ue00c")
    browser.until(
        "[...document.querySelectorAll('.events li')].every(e => e.textContent.includes('killed'))"
    )
    before = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.press("t")
    browser.until(f"getComputedStyle(document.body).backgroundColor !== '{before}'")
    browser.press("?")
    browser.until("document.querySelector('dialog[open] kbd')")
    browser.press("\ue00c")
    browser.until("!document.querySelector('dialog[open]')")


PROGRAM = """
import sys, time
print("<b>bold</b> \\x1b[31mred\\x1b[0m", flush=True)
time.sleep(120)
"""


def filter_jobs(browser: Browser) -> None:
    """Filter a list that has one job, which runs."""
    browser.press("/")
    browser.until("document.activeElement.id === 'jobs-filter'")
    browser.press("nosuch")
    browser.until("document.body.innerText.includes('No job in this list has that.')")
    assert not browser.run("return document.querySelector('.main-cell a')")
    browser.press("\ue003" * 6 + "RUNN")
    browser.until("document.querySelector('.main-cell a')")


def test_a_running_job_is_live_and_its_buttons_act(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "dlrover.cli.run.run", "--local-nodes", "2", "--nnodes", "1:2",
               "--job-dir", str(tmp_path / "job"), "--dashboard", "0", str(program)]  # fmt: skip
    env = os.environ | {"DLROVER_STATE_DIR": str(tmp_path / "state")}
    log = tmp_path / "out"
    with log.open("wb") as out, subprocess.Popen(command, stderr=out, stdout=out, env=env) as job:
        try:
            link = until(lambda: re.search(r"http://\S+token=\S+", log.read_text()), 60)[0]
            browser.open(link)
            browser.until("document.querySelector('.main-cell a')")
            assert "token" not in browser.run("return location.href")
            browser.until("document.body.innerText.includes('running')", timeout=60)
            check(browser)
            filter_jobs(browser)
            browser.click("train")
            browser.until("document.querySelectorAll('#nodes tbody tr').length >= 2", timeout=60)
            browser.until("document.getElementById('link').innerText.includes('live')")
            browser.run(
                "const s = document.querySelector('#logs select');"
                "s.value = [...s.options].find(o => o.value.endsWith('stdout.log')).value; s.onchange({target: s})"
            )
            browser.until("document.querySelector('.tail')?.innerText.includes('<b>bold</b> red')")
            browser.click("Save")
            browser.until(
                "document.getElementById('say').innerText.includes('No node holds a checkpoint in memory')"
            )
            browser.click("Drain node 0")
            browser.click("Drain the node")
            browser.until("document.getElementById('say').innerText.includes('Node 0')")
            browser.click("Scale …")
            browser.run("document.getElementById('wanted').value = '1'")
            browser.click("Scale")
            browser.until(
                "document.querySelector('#events')?.innerText.includes('asked for on the dashboard')"
            )
            check(browser)
            browser.click("Stop …")
            browser.click("Stop the job")
            browser.until("document.body.innerText.includes('stopped on the dashboard')")
            assert job.wait(60) == ExitCode.STOPPED
            assert [c for c in browser.complaints() if "ERR_" not in c] == []
        finally:
            job.terminate()


ROLES = {
    "job.py": """
from dlrover.roles import Job
job = Job("pair").role("echo", "echo:Echo", instances=2).role("main", "main.py", kind="driver")
""",
    "echo.py": """
class Echo:
    def __init__(self, settings):
        pass

    def say(self):
        pass
""",
    "main.py": """
import time
from dlrover.roles import Queue
samples = Queue("samples", size=4)
samples.put("one", "two", "three")
samples.ack(samples.get(1))
samples.get(1)
time.sleep(120)
""",
}


def test_a_job_of_several_roles_shows_its_instances_and_queues(
    browser: Browser, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn")
    for name, text in ROLES.items():
        (tmp_path / name).write_text(text)
    dlrover = [sys.executable, "-m", "dlrover.cli.main"]
    env = os.environ | {"DLROVER_STATE_DIR": str(tmp_path / "state")}
    log = tmp_path / "out"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [*dlrover, "roles", "job.py"], stderr=out, stdout=out, env=env, cwd=tmp_path
        ) as job,
        subprocess.Popen([*dlrover, "dashboard", "--port", "0"], stdout=out, env=env) as server,
    ):
        try:
            browser.open(until(lambda: re.search(r"http://\S+token=\S+", log.read_text()), 60)[0])
            browser.until("document.querySelector('.main-cell a')", timeout=60)
            browser.click("pair")
            waits = "1 waiting, 1 leased of 4; 1 of 3 items done"
            browser.until(
                f"document.querySelector('#roles')?.innerText.includes('{waits}')", timeout=90
            )
            browser.until(
                "[...document.querySelectorAll('#roles .badge')].filter(b => b.innerText === 'serving').length === 3"
            )
            check(browser)
            browser.click("echo")
            browser.until("document.querySelectorAll('#nodes tbody tr').length >= 2", timeout=60)
            browser.run("location.hash = '#/job/nosuch'")
            browser.until(
                "document.querySelector('.banner')?.innerText === 'There is no such job; it may have been deleted.'"
            )
            assert not browser.run("return document.querySelectorAll('section').length")
            browser.run("history.go(-2)")
            browser.until("document.querySelector('#roles')")
            assert browser.run("return document.activeElement.id") == "main"
            browser.click("Stop …")
            browser.click("Stop the job")
            browser.until(
                "document.body.innerText.includes('stopped on the dashboard')", timeout=60
            )
            assert job.wait(60) == ExitCode.STOPPED
            assert [c for c in browser.complaints() if "ERR_" not in c and "404" not in c] == []
            server.terminate()
            browser.until(
                "document.querySelector('.banner')?.innerText.includes('server does not answer')"
            )
        finally:
            job.terminate()
            server.terminate()
