"""Requests in the lines of a file, outputs in the lines of another: OpenAI's batch format, and plain prompts.

An output line has the number of its request's line, ``"id": "row-7"``, and is written in one piece as soon as the request ends. So
a run that was interrupted at any moment can be resumed from what is there: an incomplete last line is removed, and rows that have
an output are skipped.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

from dsv4lite.api.prepare import Job, Options, chat_job, check_params, completion_job
from dsv4lite.checks import file_name, is_unicode, require
from dsv4lite.errors import ConfigError, EngineDeadError, EngineStateError, InvalidRequestError, shown
from dsv4lite.request import RequestOutput, SamplingParams, openai_settings

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from dsv4lite.engine.engine import EngineInfo
    from dsv4lite.text.tokenizer import Tokenizer

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_PROMPTS = ("messages", "prompt", "prompt_token_ids")
_CHAT_KEYS = ("tools", "tool_choice", "reasoning_effort")
_PLAIN_KEYS = frozenset((*_PROMPTS, *_CHAT_KEYS, *(f.name for f in fields(SamplingParams))))
_NO_PLACE = ("prompt_logprobs", "return_routed_experts", "return_replay")
_OUTPUT_PREFIX = b'{"id": "row-'  # of every output line
# Characters that JSON does not escape, and at which str.splitlines would break an output line in two.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """How far ``generate_file`` has come.

    Attributes:
        rows: In the file of requests.
        earlier: Of them, those that an earlier run has done.
        done: Those that this run has done, with an error or without. ``earlier + done`` is less than ``rows`` if rows were aborted.
        failed: Those that have an error, of this run and of earlier ones.
        prompt_tokens, completion_tokens: Of this run.
        seconds: Since this run began.
    """

    rows: int
    earlier: int
    done: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float

    @property
    def remaining_s(self) -> float | None:
        """Seconds that the other rows will take at the speed so far; ``None`` before the first one is done."""
        return self.seconds / self.done * (self.rows - self.earlier - self.done) if self.done else None

    def __str__(self) -> str:
        speed = self.completion_tokens / self.seconds if self.seconds else 0.0
        text = f"{self.earlier + self.done:,} of {self.rows:,} rows, {self.failed:,} failed, {speed:,.1f} tokens/s"
        left = self.remaining_s
        return text if not left else f"{text}, about {left:,.0f} s left"


FileProgress = Callable[[FileReport], None]


class _Row(NamedTuple):
    number: int
    custom_id: str | None
    body: Mapping[str, Any]
    problem: InvalidRequestError | None

    @property
    def chat(self) -> bool:
        return "messages" in self.body


class RowFiles:
    """A file of requests and one of outputs while they are open, and locked; mutable. ``read`` comes before all else.

    Arguments and errors are those of ``generate_file``.
    """

    def __init__(self, source: str | os.PathLike[str], target: str | os.PathLike[str], params: SamplingParams | None) -> None:
        check_params(params)
        _check_place(params)
        for name, path in (("source", source), ("target", target)):
            if problem := file_name(path):
                raise ConfigError(f"{name}={shown(path)} {problem}")
            if Path(path).is_fifo():
                raise ConfigError(f"{name}={shown(path)} is a pipe, and is read more than once; give a file")
        self._source, self._target, self._params = Path(source), Path(target), params
        if self._target.exists() and self._source.samefile(self._target):
            raise ConfigError(f"source and target are the same file, {self._source}")
        self._source.open("rb").close()  # without a source no target is made
        # The target if this run makes it, until a request has ended. Windows does not remove a file that is open.
        self._unused = None if self._target.exists() or sys.platform == "win32" else Path(os.path.realpath(self._target))
        self._out: BinaryIO = self._target.open("ab", buffering=0)
        self._process = os.getpid()
        try:
            _lock(self._out)
        except BaseException:
            self._out.close()
            raise
        self._rows = self._failed = 0  # ``read`` counts them, and those that failed in earlier runs
        self._earlier: Set[int] = frozenset()
        self._pulled: dict[int, _Row] = {}  # by the index that the batch gives
        self._tokenizer: Tokenizer | None = None  # once a row has been submitted
        self._done = self._prompt_tokens = self._completion_tokens = 0
        self._begun = time.monotonic()
        self._unread = self._read_rows()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._unread.close()
        if os.getpid() == self._process:  # a process that was forked meanwhile has the file open, too
            if self._unused is not None and self._rows:
                self._unused.unlink(missing_ok=True)
            _lock(self._out, release=True)
        self._out.close()

    def __iter__(self) -> Iterator[_Row]:
        """Iterate once over the rows that have no output yet; a malformed one comes with its problem."""
        return self._unread

    def __len__(self) -> int:
        return max(self._rows - len(self._earlier), 0)

    def read(self) -> None:
        """Find the rows that have an output. This takes seconds for files of many rows, and may be left: it ends with the block.

        Raises:
            ConfigError: The target holds other data than outputs of these requests.
            OSError: A file cannot be read or written.
        """
        earlier = self._read_target()
        self._earlier = frozenset(earlier)
        with self._source.open("rb") as lines:
            for number, line in enumerate(lines):
                self._rows += bool(line.strip())
                if line.strip() and number in earlier and earlier.pop(number) != _checksum(custom_id := _custom_id(line)):
                    here = f"row {number} of {self._source} is {shown(custom_id)}"
                    raise ConfigError(f"{self._target} holds outputs of other requests: {here}")
        if earlier:
            here = f"{self._source} has no row {min(earlier)}"
            raise ConfigError(f"{self._target} holds outputs of other requests: {here}")
        self._begun = time.monotonic()

    def _read_target(self) -> dict[int, int]:
        """Return the numbers of the rows that have an output, with the checksums of their ids; remove an incomplete last line."""
        found: dict[int, int] = {}
        if not self._target.is_file():  # not there yet, or a device
            return found
        whole = 0
        with self._target.open("rb") as lines:
            for line in lines:
                cut = not line.endswith(b"\n")
                if cut and _OUTPUT_PREFIX.startswith(line[: len(_OUTPUT_PREFIX)]):
                    break
                whole += len(line)
                try:
                    if cut:
                        raise ValueError("the last line is not complete, and is not the beginning of an output")
                    output = json.loads(line)
                    number, custom_id = int(output["id"].removeprefix("row-")), output["custom_id"]
                    found[number] = _checksum(custom_id)
                    self._failed += output.get("error") is not None
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    raise ConfigError(f"{self._target} holds other data than outputs of generate_file: {shown(line)}") from error
        self._out.truncate(whole)  # fails if the block was left, so that the file may be another run's by now
        return found

    def _read_rows(self) -> Generator[_Row, None, None]:
        count = seen = 0
        with self._source.open("rb") as lines:
            for number, line in enumerate(lines):
                seen += bool(line.strip())
                if seen > self._rows:  # appended since ``read``, and perhaps not whole yet
                    return
                if line.strip() and number not in self._earlier:
                    self._pulled[count] = row = _read(number, line)
                    count += 1
                    yield row

    def job(self, info: EngineInfo, row: _Row, params: object, index: int) -> Job:
        """Make the job of a row.

        Raises:
            InvalidRequestError: The row is malformed.
        """
        if row.problem is not None:
            raise row.problem
        body, options, self._tokenizer = row.body, Options(index=index), info.tokenizer
        base = info.default_params if self._params is None else self._params
        wanted = base.replace(**openai_settings(body))
        _check_place(wanted)
        if row.chat:
            choice = body.get("tool_choice") or "auto"
            tools, effort = body.get("tools"), body.get("reasoning_effort")
            return chat_job(info, body["messages"], wanted, options, tools, choice, effort, False)
        prompt = body["prompt"] if "prompt" in body else {"prompt_token_ids": body["prompt_token_ids"]}
        return completion_job(info, prompt, wanted, options)

    def write(self, output: RequestOutput) -> None:
        """Write the line of a request that has ended. One that was aborted, or that lost its engine, gets none: it is to run again.

        Raises:
            EngineDeadError: The engine has failed.
            EngineStateError: The engine was closed, or lost its weights.
        """
        row, error = self._pulled.pop(output.index), output.error
        if isinstance(error, (EngineDeadError, EngineStateError)):
            raise error
        self._unused = None
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            return
        line: dict[str, Any] = {
            "id": f"row-{row.number}",
            "custom_id": row.custom_id,
            "response": None,
            "error": None if error is None else {"code": type(error).__name__, "message": str(error)},
        }
        if error is None:
            body = output.to_openai(chat=row.chat, tokenizer=self._tokenizer)
            line["response"] = {"status_code": 200, "request_id": output.request_id, "body": body}
        data = (json.dumps(line, ensure_ascii=False).translate(_LINE_ENDS) + "\n").encode()
        try:
            while data:
                data = data[self._out.write(data) :]
        except OSError as problem:
            problem.filename = str(self._target)  # for its message
            raise
        self._done, self._failed = self._done + 1, self._failed + (error is not None)
        self._prompt_tokens += output.usage.prompt_tokens
        self._completion_tokens += output.usage.completion_tokens

    def report(self) -> FileReport:
        """Return how far it has come."""
        return FileReport(
            rows=self._rows,
            earlier=len(self._earlier),
            done=self._done,
            failed=self._failed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            seconds=time.monotonic() - self._begun,
        )


def _check_place(params: SamplingParams | None) -> None:
    """Refuse settings whose results have no place in a line of OpenAI's format."""
    for name in _NO_PLACE if params is not None else ():
        value = getattr(params, name)
        require(value is None or value is False, name, value, "is not written to a file; leave it out, or call generate_batch")


def _lock(file: BinaryIO, *, release: bool = False) -> None:
    """Keep a target for one run at a time, until it is released, or closed in every process that has it."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_UN if release else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not release and not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            raise BlockingIOError(f"another run has removed {file.name}")
    except BlockingIOError as error:
        raise ConfigError(f"{file.name} is being written by another run; wait for its end, or give another target") from error
    except OSError as error:  # file systems without locks
        if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
            raise


def _object(line: bytes) -> tuple[dict[str, Any], str | None]:
    """Return what a line has, and its ``custom_id``.

    Raises:
        InvalidRequestError: It is no object and no prompt, or its ``custom_id`` is malformed.
    """
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not JSON: {error}", parameter="line", value=line) from error
    row = {"prompt": given} if isinstance(given, str) else given
    require(isinstance(row, dict), "line", given, "must be an object, or a prompt as a string")
    custom_id = row.pop("custom_id", None)
    good = custom_id is None or (isinstance(custom_id, str) and is_unicode(custom_id))
    require(good, "custom_id", custom_id, "must be a string without lone surrogates")
    return row, custom_id


def _checksum(custom_id: str | None) -> int:
    return zlib.crc32((custom_id or "").encode())


def _custom_id(line: bytes) -> str | None:
    try:
        return _object(line)[1]
    except InvalidRequestError:
        return None


def _read(number: int, line: bytes) -> _Row:
    custom_id = None
    try:
        row, custom_id = _object(line)
        return _Row(number, custom_id, _openai_body(row) if "body" in row else _plain_body(row), None)
    except InvalidRequestError as error:
        return _Row(number, custom_id, {}, error)


def _openai_body(row: dict[str, Any]) -> Mapping[str, Any]:
    """Return the body of a line of OpenAI's batch format, without the prompts that its URL does not read."""
    body, url = row["body"], row.get("url")
    require(row.get("method", "POST") == "POST", "method", row.get("method"), "must be 'POST'")
    require(url in (_CHAT, _TEXT), "url", url, f"must be {_CHAT!r} or {_TEXT!r}")
    key = "messages" if url == _CHAT else "prompt"
    require(isinstance(body, dict) and key in body, "body", body, f"must be an object with {key!r}")
    require(not body.get("stream"), "stream", body.get("stream"), "must be false in a file")
    return {name: value for name, value in body.items() if name == key or name not in _PROMPTS}


def _plain_body(row: dict[str, Any]) -> Mapping[str, Any]:
    """Return a line that has a prompt and settings beside each other; ``null`` does not set one, and unknown keys are errors."""
    row = {key: value for key, value in row.items() if value is not None or key not in _PLAIN_KEYS}
    given = [key for key in _PROMPTS if key in row]
    require(len(given) == 1, "line", sorted(row), f"must have one of {', '.join(_PROMPTS)}")
    settings = {key: value for key, value in row.items() if key not in (*_PROMPTS, *_CHAT_KEYS)}
    # The keys of ``logit_bias`` are text, as all keys in JSON.
    SamplingParams.from_dict({**settings, "logit_bias": openai_settings(settings).get("logit_bias")})
    return row
