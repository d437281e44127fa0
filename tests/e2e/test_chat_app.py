"""``examples/chat_app.py`` and the endpoint of the guide: answers stream, and a client that disconnects ends its request."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dsv4lite import LLM, SamplingParams

starlette = pytest.importorskip("starlette")
ROOT = Path(__file__).resolve().parents[2]
SAY = [{"role": "user", "content": "abc"}]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(params=["2.3", "2.4"])
def spec(request: pytest.FixtureRequest) -> str:
    """Versions of ASGI: servers of the first say that the client is gone, those of the second raise from ``send``."""
    version: str = request.param
    return version


@pytest.fixture
def program(model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example's names. Its answers have ``tokens`` tokens: the model is random, so its own end would be anywhere."""
    monkeypatch.setenv("MODEL", str(model))
    names = runpy.run_path(str(ROOT / "examples/chat_app.py"))
    names["tokens"] = 400
    inner = names["chat"].__globals__
    inner["SamplingParams"] = lambda max_tokens: SamplingParams(max_tokens=names["tokens"], ignore_eos=True, seed=1)
    return names


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    """Start and end an ASGI application as a server does."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    served = asyncio.create_task(app({"type": "lifespan", "asgi": {}, "state": {}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    yield
    await inbox.put({"type": "lifespan.shutdown"})
    await served
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"


class Client:
    """One request to an ASGI application, read part by part."""

    def __init__(self, app: Any, spec: str, body: Any, path: str = "/chat/") -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.gone = asyncio.Event()
        self._body, self._spec = body if isinstance(body, bytes) else json.dumps(body).encode(), spec
        scope = {"type": "http", "asgi": {"spec_version": spec}, "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"headers": [], "query_string": b"", "root_path": ""}
        self.served = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.gone.is_set() and self._spec == "2.4":
            raise OSError("the client is gone")
        await self.sent.put(message)

    async def text(self, length: int | None = None) -> str:
        """Read so many characters, or all."""
        found = ""
        while length is None or len(found) < length:
            message = await self.sent.get()
            found += message.get("body", b"").decode()
            if message["type"] == "http.response.body" and not message.get("more_body"):
                break
        return found


async def idle(llm: Any) -> None:
    while llm.stats().num_running or llm.stats().num_waiting:
        await asyncio.sleep(0.01)


async def test_answer_streams_and_is_that_of_chat(program: dict[str, Any], model: Path, spec: str) -> None:
    program["tokens"] = 20
    async with lifespan(program["app"]):
        client = Client(program["app"], spec, SAY)
        start = await client.sent.get()
        assert start["status"] == 200
        first = await client.text(1)
        assert program["llm"].stats().num_running == 1
        text = first + await client.text()
        await client.served
    with LLM(str(model)) as llm:
        assert text == llm.chat(SAY, SamplingParams(max_tokens=20, ignore_eos=True, seed=1)).text


async def test_disconnect_ends_the_request(program: dict[str, Any], spec: str) -> None:
    async with lifespan(program["app"]):
        client = Client(program["app"], spec, SAY)
        await client.text(3)
        assert program["llm"].stats().num_running == 1
        client.gone.set()
        (error,) = await asyncio.gather(client.served, return_exceptions=True)
        assert error is None or type(error).__name__ == "ClientDisconnect"  # which servers expect
        await idle(program["llm"])
        assert 3 <= program["llm"].stats().generated_tokens < 400
        assert program["llm"].state == "ready"


@pytest.fixture
def endpoint(model: Path) -> dict[str, Any]:
    """The names of the guide's application."""
    page = (ROOT / "docs/guides/application.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1].replace("path/to/DeepSeek-V4-Flash", str(model)), "application.md", "exec"), names)
    return names


PATH = "/v1/chat/completions"
BODY = {"messages": SAY, "max_tokens": 12, "seed": 1, "ignore_eos": True}


async def test_guide_s_endpoint_answers_as_openai_does(endpoint: dict[str, Any], model: Path, spec: str) -> None:
    async with lifespan(endpoint["app"]):
        whole = json.loads(await Client(endpoint["app"], spec, BODY, PATH).text())
        events = (await Client(endpoint["app"], spec, {**BODY, "stream": True}, PATH).text()).split("\n\n")
        again = await endpoint["llm"].chat(SAY, SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    choice = whole["choices"][0]
    assert whole["object"] == "chat.completion" and whole["usage"]["completion_tokens"] == 12
    assert choice["message"]["content"] == again.text and choice["finish_reason"] == "length"
    assert events[-2:] == ["data: [DONE]", ""]
    changes = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert "".join(change["delta"].get("content", "") for change in changes) == again.text
    assert [change["finish_reason"] for change in changes] == [None] * (len(changes) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_guide_s_endpoint_says_what_is_wrong_before_it_answers(endpoint: dict[str, Any], spec: str, stream: bool) -> None:
    wrong = [({"temperature": -1}, 400, "InvalidRequestError"), ({"max_tokens": 10**9}, 400, "ContextLengthError")]
    async with lifespan(endpoint["app"]):
        for change, status, kind in [*wrong, ({"messages": None}, 400, "InvalidRequestError")]:
            client = Client(endpoint["app"], spec, {**BODY, **change, "stream": stream}, PATH)
            assert (await client.sent.get())["status"] == status
            assert json.loads(await client.text())["error"]["type"] == kind
        for body, kind in ((b"{", "JSONDecodeError"), (b"[1]", "InvalidRequestError")):
            client = Client(endpoint["app"], spec, body, PATH)
            assert (await client.sent.get())["status"] == 400
            assert json.loads(await client.text())["error"]["type"] == kind
        await endpoint["llm"].aclose()
        client = Client(endpoint["app"], spec, {**BODY, "stream": stream}, PATH)
        assert (await client.sent.get())["status"] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_guide_s_endpoint_ends_requests_of_clients_that_are_gone(endpoint: dict[str, Any], spec: str, stream: bool) -> None:
    async with lifespan(endpoint["app"]):
        client = Client(endpoint["app"], spec, {**BODY, "max_tokens": 400, "stream": stream}, PATH)
        while not endpoint["llm"].stats().num_running:
            await asyncio.sleep(0.01)
        client.gone.set()
        (error,) = await asyncio.gather(client.served, return_exceptions=True)
        assert error is None or type(error).__name__ in ("ClientDisconnect", "OSError")  # what send raised
        await idle(endpoint["llm"])
        assert endpoint["llm"].stats().generated_tokens < 400


@pytest.fixture
def browser() -> Iterator[Any]:
    """A page of headless Chromium."""
    sync = pytest.importorskip("playwright.sync_api")
    found = [path for name in ("chromium-headless-shell", "chromium", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("there is no Chromium")
    with sync.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield chromium.new_page()
        chromium.close()


@pytest.fixture
def address(program: dict[str, Any]) -> Iterator[str]:
    """Where the example is served."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(program["app"], port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_page_streams_stops_and_goes_on(program: dict[str, Any], address: str, browser: Any) -> None:
    llm = program["llm"]
    browser.goto(address)
    browser.fill("input", "abc")
    browser.click("text=Send")
    browser.wait_for_function("log.textContent.length > 20")
    assert llm.stats().num_running == 1
    assert browser.inner_text("#log").startswith("\n> abc\n")
    browser.click("text=Stop")
    browser.wait_for_function("log.textContent.endsWith(' [AbortError]')")
    while llm.stats().num_running:
        time.sleep(0.01)
    made = llm.stats().generated_tokens
    assert 0 < made < 400
    program["tokens"] = 8
    browser.fill("input", "d")
    browser.click("text=Send")
    browser.wait_for_function("messages.length == 4", timeout=120_000)
    assert llm.stats().generated_tokens == made + 8
    said = browser.evaluate("messages")
    assert [message["role"] for message in said] == ["user", "assistant"] * 2 and said[2]["content"] == "d"
    shown = browser.evaluate("log.textContent")
    assert shown == f"\n> abc\n{said[1]['content']} [AbortError]\n> d\n{said[3]['content']}"
