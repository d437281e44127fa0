"""A chat in the browser, the model in the web server's process. MODEL=path/to/checkpoint uvicorn examples.chat_app:app"""

import os
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Mount, Route

from dsv4lite import AsyncLLM, SamplingParams, tiny_model

PAGE = """<!doctype html><meta charset="utf-8"><title>Chat</title><pre id="log" style="white-space: pre-wrap"></pre>
<form><input name="say" autofocus> <button>Send</button> <button type="button" onclick="stop.abort()">Stop</button></form><script>
let messages = [], stop = new AbortController(), log = document.getElementById("log"), form = document.forms[0]
form.onsubmit = async event => {
  event.preventDefault(), stop.abort(), stop = new AbortController()
  messages.push({role: "user", content: form.say.value}), log.append("\\n> " + form.say.value + "\\n"), form.reset()
  let answer = {role: "assistant", content: ""}, write = part => { log.append(part), answer.content += part }
  await fetch("/chat/", {method: "POST", body: JSON.stringify(messages), signal: stop.signal})
    .then(response => response.body.pipeThrough(new TextDecoderStream()).pipeTo(new WritableStream({write})))
    .catch(error => log.append(" [" + error.name + "]")).then(() => messages.push(answer))
}</script>"""
llm = AsyncLLM(os.environ.get("MODEL", tiny_model()))  # describes an engine; the server starts and closes it


async def chat(scope, receive, send):
    messages = await Request(scope, receive).json()
    async with llm.chat_stream(messages, SamplingParams(max_tokens=4096)) as stream:  # the end of the block ends the request
        await StreamingResponse((delta.text async for delta in stream), media_type="text/plain")(scope, receive, send)


@asynccontextmanager
async def lifespan(app):
    async with llm:
        yield


app = Starlette(routes=[Route("/", lambda request: HTMLResponse(PAGE)), Mount("/chat", chat)], lifespan=lifespan)
