"""The status page in a real browser."""

import math
import random
import threading
import time

import pytest
from browser import Browser, chromium
from sessions import batch, make

from metaleader.live.serve.app import make_app
from metaleader.live.serve.guard import read_tokens
from metaleader.live.serve.history import History
from metaleader.live.serve.server import bound_socket, configured
from metaleader.live.serve.service import Limits, Service
from metaleader.live.session import Session

HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("chromium is missing")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Running:
    """A service on a port of its own, in a thread."""

    def __init__(self, folder, tokens=()):
        self.session = Session(folder, make)
        self.service = Service(self.session, Limits())
        bound = bound_socket("127.0.0.1", 0)
        bound.listen(16)
        self.address = f"http://127.0.0.1:{bound.getsockname()[1]}/"
        self._server = configured(make_app(self.service, tokens=tokens))
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[bound]))
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(60)


def fill(history: History, tasks=200, observations=30):
    """The errors of a stream whose later tasks need less data."""
    draw = random.Random(0)
    for number in range(tasks):
        for i in range(observations):
            noise = math.exp(draw.gauss(0, 0.3))
            unadapted = 0.9 * noise
            needed = 2 + 10 * math.exp(-number / 60)
            loss = (0.05 + 0.85 * math.exp(-i / needed)) * noise
            history.add(f"customer {number}", 1, loss, unadapted, i, number)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Running(tmp_path_factory.mktemp("customers")) as running:
        session = running.session
        fill(running.service.history)
        for i in range(3):
            session.observe(*batch(i), task=f"customer {197 + i}")
        session.observe(*batch(9), task=HOSTILE)
        running.service.history.add(HOSTILE, 1, 0.5, 0.7, 0, 200)
        session.wait()
        yield running


def ready(browser, condition="!document.getElementById('main').hidden"):
    deadline = time.monotonic() + 30
    while not browser.run(condition):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (375, False), (1280, True)])
def test_the_page_shows_the_service(width, dark, browser, running, tmp_path):
    browser.messages.clear()
    browser.requests.clear()
    browser.open(running.address, width, dark=dark)
    ready(browser)
    assert browser.messages == []
    assert set(browser.requests) <= {running.address, f"{running.address}status"}
    assert browser.run("document.documentElement.scrollWidth") <= width
    boxes = "[...document.querySelectorAll('.scroll')].filter((box) => box.clientWidth)"
    assert browser.run(f"{boxes}.map((box) => box.scrollWidth - box.clientWidth)") == [0, 0]
    numbers = browser.run("[...document.querySelectorAll('dl div')].map((box) => box.innerText)")
    assert any(text.startswith("tasks\n4") for text in numbers)
    assert any(text.startswith("behind\n0") for text in numbers)
    legends = browser.run("[...document.querySelectorAll('.legend')].map((list) => list.innerText)")
    assert legends[0].split("\n") == ["adapted", "without adaptation"]
    assert legends[1].split("\n") == ["0 earlier datapoints", "1 to 4", "5 to 19", "20 or more"]
    lines = browser.run("[...document.querySelectorAll('.plot path.line')].map((line) => line.getAttribute('d'))")
    assert len(lines) == 6
    assert all(line.count("L") >= 40 and "NaN" not in line for line in lines)
    first = browser.run("document.querySelector('#recent tbody th').textContent")
    assert first == HOSTILE
    assert browser.run("document.title") != "1"
    # The caption states the latest values that the service reports.
    latest = running.service.history.curves()["observations"][-1][1]
    assert f"adapted {float(f'{latest:.3g}')}" in browser.run(
        "document.getElementById('over-time-caption').textContent"
    )
    assert browser.screenshot(tmp_path / "page.png", whole=True).stat().st_size > 10_000


def test_it_changes_with_the_service(browser, running):
    browser.open(running.address)
    ready(browser)
    running.service.errors.append({"time": time.time(), "status": 413, "request": "POST /tasks/a", "message": "x"})
    ready(browser, "document.querySelector('#errors tbody td').textContent === '413'")
    assert browser.messages == []


def test_a_new_service(browser, tmp_path):
    with Running(tmp_path) as running:
        browser.open(running.address, 375)
        ready(browser)
        text = browser.run("document.body.innerText")
        assert text.count("No observations yet.") == 2
        assert text.count("None since the server started.") == 2
        running.service.history.add("a", 2, 0.5, 0.5, 0, 0)  # a single point
        ready(browser, "document.querySelectorAll('.plot circle').length === 3")
        assert "NaN" not in browser.run("document.querySelector('main').innerHTML")


def test_a_token_is_asked_for(browser, tmp_path):
    (tmp_path / "tokens").write_text("0123456789abcdef\n")
    with Running(tmp_path / "a", read_tokens(tmp_path / "tokens")) as running:
        browser.open(running.address)
        ready(browser, "!document.getElementById('login').hidden")
        for token, shown in (("wrong", "!document.getElementById('refused').hidden"), ("0123456789abcdef", None)):
            browser.run(f"document.getElementById('token').value = {token!r}")
            browser.run("document.getElementById('enter').click()")
            ready(browser, *([shown] if shown else []))
        assert browser.run("document.getElementById('login').hidden")
