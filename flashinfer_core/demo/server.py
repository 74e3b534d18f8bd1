"""An engine's server as a subprocess: start, ask, stop."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flashinfer_core.demo import DemoError
from flashinfer_core.demo.engines import Engine
from flashinfer_core.demo.model import MODEL_NAME

HOST = "127.0.0.1"
START_SECONDS = 900.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """One chat answer: its text and tokens, the length of its prompt in tokens, and how long it took."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    seconds: float


class Server:
    """A server for one model, used as a context manager: it is healthy inside and gone after.

    Parameters
    ----------
    engine
        What serves.
    model
        Folder of the model.
    log
        File for everything the server prints.
    backend
        The engine's name of the attention backend; by default ours.
    port
        Port on the loopback interface; 0 chooses a free one.
    arguments
        More arguments for the server.
    progress
        Called with the newest line of the log while the server starts.

    Raises
    ------
    DemoError
        The engine is not installed, the port is taken, or the server ended before it was healthy.
    """

    def __init__(
        self,
        engine: Engine,
        model: Path,
        log: Path,
        *,
        backend: str | None = None,
        port: int = 0,
        arguments: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.log = log
        self.backend = backend or engine.backend
        self.port = port
        self._arguments = arguments
        self._progress = progress

    def __enter__(self) -> "Server":
        self.port = _usable_port(self.port)
        command = self.engine.command(self.model, MODEL_NAME, HOST, self.port, self.backend)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **self.engine.environment()}
        with self.log.open("w") as output:
            # A session of its own: Ctrl-C reaches only us, and we stop every process of the server together.
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def served_backend(self) -> str | None:
        """Return the attention backend that announced itself in the server's log, if one did.

        Ours says so when it serves; those of the engines on a CPU say nothing.
        """
        found = re.findall(r"Using (\w+) attention backend", self.log.read_text(errors="replace"))
        return found[-1] if found else None

    def confirm_backend(self) -> None:
        """Raise a `DemoError` unless the backend that was asked for is the one that announced itself."""
        served = self.served_backend()
        if served != self.backend:
            raise DemoError(
                f"{self.engine.title} serves with {served or 'a backend of its own'}, not with {self.backend}; "
                f"flashinfer-core check {self.engine.name} says why. The server's log is {self.log}"
            )

    def chat(self, prompt: str, max_tokens: int, **options: object) -> Answer:
        """Ask one question, greedily unless `options` (fields of the request) say otherwise."""
        request: dict[str, object] = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        start = time.monotonic()
        reply = json.loads(self.request("POST", "/v1/chat/completions", request | options))
        choice: dict[str, Any] = reply["choices"][0]
        return Answer(
            text=choice["message"]["content"],
            tokens=tuple(choice[self.engine.token_ids]),
            prompt_tokens=reply["usage"]["prompt_tokens"],
            seconds=time.monotonic() - start,
        )

    def request(self, method: str, path: str, body: dict[str, object] | None = None) -> str:
        """Send one HTTP request and return the body of the response; any status but 200 is a `DemoError`."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=600)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise DemoError(f"{method} {path}: status {response.status}: {text[:500]}")
        return text

    @property
    def pid(self) -> int:
        """The process that was started; the engine starts others."""
        return self._process.pid

    def wait(self) -> None:
        """Block until the server ends by itself, which is an error."""
        self._process.wait()
        raise self._ended()

    def stop(self) -> None:
        """End the server and every process it started; SIGKILL for those that do not end in time."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_SECONDS
        try:
            while _group_exists(self._process) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:  # also when a second Ctrl-C cuts the waiting short
            if _group_exists(self._process):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._ended()
            try:
                self.request("GET", "/health")
                return
            except (OSError, DemoError):
                time.sleep(0.5)
            self._progress(self._last_line())
        raise DemoError(f"the server was not ready after {START_SECONDS:.0f} s; its log is {self.log}")

    def _last_line(self) -> str:
        """Return the message of the newest line that the engine logged, without its prefix."""
        prefix = r"\[(?:\w+\.py:\d+|[\d-]+ [\d:]+(?: \w+)*)\]"  # of vLLM, of SGLang
        messages = re.findall(rf"{prefix} (.*\S)", self.log.read_text(errors="replace"))
        return messages[-1] if messages else ""

    def _ended(self) -> DemoError:
        log = self.log.read_text(errors="replace")
        # The engines log what failed first, then what failed because of it.
        causes = re.findall(r"^(?:\(.+?\) ERROR .+?\] )?([\w.]*Error: .+)", log, re.MULTILINE)
        cause = causes[0] if causes else "\n".join(log.splitlines()[-20:])
        return DemoError(f"the server ended with status {self._process.returncode}; its log is {self.log}\n{cause}")


def _usable_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise DemoError(f"port {port} cannot be used ({error.strerror}); choose another one") from error
        return int(probe.getsockname()[1])


def _group_exists(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()  # the leader must be waited for, or its entry keeps the group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
