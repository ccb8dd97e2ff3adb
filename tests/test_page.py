"""The page at ``/`` in a headless Chromium, over a server in this process."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.request import urlopen

import pytest
import uvicorn
from checkpoints import tiny_tokenizer, write_tiny
from conftest import THREADS
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright
from tokenizers import Tokenizer

from outrider.export import ExportOptions, export_bundle
from outrider.runtime.batch import Batch, Job
from outrider.runtime.generation import GenerationResult
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.service import Service
from outrider.serve.app import Settings, create_app

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the PATH")

HTML = "<img/src=/{}.png/onerror=document.title='broken'>"  # without a space, which a byte-level token cannot have
QUESTION = "one <b>two</b> three"


@pytest.fixture(scope="module")
def service(workdir: Path) -> Iterator[Service]:
    """Of a tiny pair, a tenth of whose tokens are HTML; at most 512 tokens."""
    files = tiny_tokenizer(288)
    tokenizer = Tokenizer.from_str(files.json)
    tokenizer.add_tokens([HTML.format(number) for number in range(32)])
    files = replace(files, json=tokenizer.to_str())
    target = write_tiny(workdir / "page-target", seed=1, files=files)
    draft = write_tiny(workdir / "page-draft", seed=2, layers=1, files=files)
    out = workdir / "page-bundle"
    export_bundle(str(target), str(draft), out, ExportOptions(tiers=(4,), max_length=512), threads=THREADS)
    service = Service(Batch.load(out, lanes=2, threads=THREADS), max_waiting=4)
    yield service
    service.close()


@contextmanager
def listening(service: Service, api_key: str | None = None) -> Iterator[str]:
    """The address of a server over the service."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(service, Settings("tiny", api_key))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with listening(service) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that was opened, and what it did: the requests it sent, and what its console said."""

    page: Page
    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies of the generations asked for."""
        return [request.post_data_json for request in self.requests if request.method == "POST"]

    def write(self, message: str, button: str, **settings: Any) -> None:
        """Fill in settings by their labels, and send a message."""
        for name, value in settings.items():
            label = name.replace("_", " ").capitalize()
            control = self.page.get_by_label(label)
            if name == "speculation":
                control.select_option(value)
            else:
                control.fill(str(value))
        self.page.get_by_label("Message").fill(message)
        self.page.get_by_role("button", name=button).click()

    def finish(self) -> None:
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()

    def tokens(self, answer: int = 0) -> list[tuple[int, str]]:
        """Ids and origins of an answer, as shown."""
        spans = self.page.locator(".text").nth(answer).locator("[data-origin]")
        pairs = spans.evaluate_all("spans => spans.map(span => [Number(span.dataset.id), span.dataset.origin])")
        return [(number, origin) for number, origin in pairs]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[[str], Visit]]:
    """Opens pages; behind the test, none may have asked anything of another server."""
    visits: list[tuple[str, Visit]] = []

    def open_at(address: str) -> Visit:
        page = browser.new_page()
        page.set_default_timeout(20_000)
        visit = Visit(page)
        page.on("request", lambda request: visit.requests.append(request))
        page.on("console", lambda message: visit.complaints.append(message.text))
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.goto(address)
        expect(page.get_by_text("tiny")).to_be_visible()
        visits.append((address, visit))
        return visit

    yield open_at
    for address, visit in visits:
        urls = [request.url for request in visit.requests]
        visit.page.close()
        assert [url for url in urls if not url.startswith((f"{address}/", "data:"))] == []


@pytest.fixture
def visit(open_page: Callable[[str], Visit], address: str) -> Iterator[Visit]:
    """The page, in which nothing may go wrong."""
    visit = open_page(address)
    yield visit
    assert visit.complaints == []


def generate(service: Service, messages: list[dict[str, str]], k: int, **options: Any) -> GenerationResult:
    """The same without the page and its HTTP."""
    ends: SimpleQueue[None] = SimpleQueue()
    job = service.submit(messages, SamplingOptions.parse(options), lambda job, _: job.done and ends.put(None), k=k)
    ends.get(timeout=30)
    return service.result(job)


def test_a_conversation(visit: Visit, service: Service) -> None:
    """Tokens have the origins that the service gives them, each origin its own colour; the figures are the service's;
    what looks like HTML is text; the second question brings the whole conversation.
    """
    page = visit.page
    expect(page.get_by_label("API key")).to_be_hidden()
    visit.write(QUESTION, "Send", speculation="2", temperature=1, seed=7, max_tokens=60)
    visit.finish()
    question = {"role": "user", "content": QUESTION}
    expected = generate(service, [question], 2, temperature=1.0, seed=7, max_new_tokens=60)
    shown = visit.tokens()
    assert shown == list(zip(expected.token_ids, [origin.value for origin in expected.origins], strict=True))
    origins = Counter(origin for _, origin in shown)
    assert set(origins) == {"plain", "accepted", "correction", "bonus"}

    line = "node => getComputedStyle(node).backgroundImage"
    legend = {origin: page.locator(f".legend [data-origin={origin}]").evaluate(line) for origin in origins}
    assert len(set(legend.values())) == 4
    for origin in origins:
        assert page.locator(f".text [data-origin={origin}]").first.evaluate(line) == legend[origin]
    token = page.locator(".text [data-origin]").filter(visible=True).last  # some have no text of their own
    token.hover()
    place = token.evaluate("node => [...node.parentNode.children].indexOf(node)")
    number, origin = shown[place]
    rounds = [origin for _, origin in shown[:place]]
    tip = f"{origin} · id {number} · round {len(rounds) - rounds.count('accepted')}"  # the prefill's token ends none
    expect(page.get_by_role("tooltip")).to_have_text(tip)

    stats = expected.stats
    figures = page.locator(".figures")
    expect(figures).to_contain_text(f"{stats.mean_acceptance_length:.2f}")
    expect(figures).to_contain_text(f"{100 * stats.draft_acceptance_rate:.0f} %")
    histogram = [f"{accepted} accepted in {rounds}" for accepted, rounds in enumerate(stats.acceptance_histogram)]
    expect(page.get_by_role("img")).to_have_attribute("aria-label", ", ".join(histogram))

    text = page.locator(".text")
    assert HTML[:10] in expected.text
    assert text.evaluate("node => node.textContent") == expected.text
    assert text.locator("*:not(span)").count() == page.locator("img, b").count() == 0
    assert page.locator("h2").text_content() == QUESTION
    assert page.title() == "Outrider"

    visit.write("four", "Send")
    visit.finish()
    answer = {"role": "assistant", "content": expected.text}
    assert visit.asked[1]["messages"] == [question, answer, {"role": "user", "content": "four"}]
    page.get_by_role("button", name="Clear").click()
    expect(text).to_have_count(0)


def test_a_comparison(visit: Visit, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    new_job = service.batch.new_job

    def counted(*args: Any, **options: Any) -> Job:
        running.append(service.batch.running)
        return new_job(*args, **options)

    monkeypatch.setattr(service.batch, "new_job", counted)
    visit.page.evaluate("Math.random = () => 0.25")  # some seeds end the text at once
    visit.write(QUESTION, "Compare", speculation="4", temperature=1, max_tokens=60)
    visit.finish()
    ours, plain = visit.tokens(0), visit.tokens(1)
    expect(visit.page.locator(".verdict")).to_contain_text(f"Identical: all {len(ours)} token ids are equal.")
    assert [number for number, _ in ours] == [number for number, _ in plain]
    assert "accepted" in {origin for _, origin in ours}
    assert {origin for _, origin in plain} == {"plain"}
    seed = int(visit.page.get_by_label("Seed").input_value())
    assert [(body["num_draft_tokens"], body["seed"]) for body in visit.asked] == [(4, seed), (0, seed)]
    assert running == [0, 0]  # neither while the other runs


def test_a_difference_is_shown(visit: Visit) -> None:
    """The second answer is generated with another seed, behind the page's back."""

    def other_seed(route: Route) -> None:
        body = route.request.post_data_json
        route.continue_(post_data=json.dumps(body | {"seed": body["seed"] + (body["num_draft_tokens"] == 0)}))

    visit.page.route("**/v1/chat/completions", other_seed)
    visit.write(QUESTION, "Compare", speculation="4", temperature=1, seed=7, max_tokens=60)
    visit.finish()
    ours, plain = ([number for number, _ in visit.tokens(answer)] for answer in (0, 1))
    place = next(i for i, (mine, its) in enumerate(zip(ours, plain, strict=False)) if mine != its)
    verdict = re.compile(rf"^Different from token {place + 1} on: {ours[place]} .*, {plain[place]} ", re.DOTALL)
    expect(visit.page.locator(".verdict")).to_contain_text(verdict)


def test_stop_frees_the_lane(visit: Visit, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch goes slowly, so that there is something to stop."""
    step = service.batch.step
    monkeypatch.setattr(service.batch, "step", lambda: time.sleep(0.02) or step())
    visit.write(QUESTION, "Send", speculation="0", temperature=1, seed=1, max_tokens=400)
    expect(visit.page.locator(".text [data-origin]").nth(5)).to_be_attached()
    assert service.batch.running == 1
    visit.page.get_by_role("button", name="Stop").click()
    visit.finish()
    deadline = time.monotonic() + 10
    while service.batch.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.batch.running == 0
    assert 5 < len(visit.tokens()) < 200
    expect(visit.page.locator(".note")).to_have_text("stopped")


def test_where_k_is_chosen_the_answer_says_what_was(
    visit: Visit, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    submit = service.submit
    monkeypatch.setattr(service, "submit", lambda *args, **options: jobs.append(submit(*args, **options)) or jobs[-1])
    visit.write(QUESTION, "Send", temperature=0, max_tokens=200)
    visit.finish()
    assert "num_draft_tokens" not in visit.asked[0]
    chosen: Counter[int] = Counter()
    for source in service.result(jobs[0]).stats.sources.values():
        chosen.update(source.rounds_by_k)
    assert chosen
    rounds = ", ".join(f"{k} \u00d7 {chosen[k]}" for k in sorted(chosen))
    expect(visit.page.locator(".note")).to_contain_text(f"K chosen: {rounds}")


def test_a_refused_request_is_explained(open_page: Callable[[str], Visit], address: str) -> None:
    visit = open_page(address)
    visit.write("one two " * 400, "Send")
    expect(visit.page.get_by_role("alert")).to_contain_text("takes at most 511")
    expect(visit.page.get_by_label("Message")).to_have_value(re.compile("^one two one"))
    visit.write("one", "Send", max_tokens=4)
    expect(visit.page.get_by_role("alert")).to_be_hidden()
    visit.finish()
    assert len(visit.tokens()) == 4


def test_the_key_is_asked_for_where_there_is_one(browser: Browser, service: Service) -> None:
    page = browser.new_page()
    with listening(service, api_key="s3cret") as address:
        page.goto(address)
        for key, message in {"wrong": "the API key is missing or wrong", "s3cret": None}.items():
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use").click()
            if message:
                expect(page.get_by_role("alert")).to_contain_text(message)
        expect(page.get_by_text("tiny")).to_be_visible()
        expect(page.get_by_label("API key")).to_be_hidden()
        kept = page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert kept == [["s3cret"], 0, ""]
        page.close()


def test_the_policy(open_page: Callable[[str], Visit], address: str) -> None:
    """No text becomes HTML, and nothing goes to another origin."""
    page = open_page(address).page
    attempt = "(html) => { try { document.body.innerHTML = html; return html; } catch (error) { return error.name; } }"
    assert page.evaluate(attempt, "<b>x</b>") == "TypeError"
    attempt = "(url) => fetch(url, { mode: 'no-cors' }).then(() => 'fetched', (error) => error.name)"
    assert page.evaluate(attempt, f"{address}/health") == "fetched"
    assert page.evaluate(attempt, f"{address.replace('127.0.0.1', 'localhost')}/health") == "TypeError"
    policy = urlopen(address).headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
