"""Talks JSON to a server: time-outs, retries that help, and errors that say what to do."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from glm5.errors import EngineError

if TYPE_CHECKING:
    import httpx2

_TOO_MANY_REQUESTS = 429
# Of an answer's text, which is shown and searched: a record of choices would be there twice.
_MAX_TEXT_BYTES = 10_000
# What a server knows, and what it is told at the end, takes no computation.
_QUICK_S = 30.0
# of its own, so that waiting for a server changes nobody's random numbers
_JITTER = random.SystemRandom()


@dataclass(frozen=True)
class HttpOptions:
    """How a server is asked.

    connect_timeout_s, read_timeout_s: seconds until a connection stands, and without a byte of the
    answer; a completion is sent when it is done, so the second one bounds its generation. What
    needs no computation must come within 30 s in any case.
    max_attempts: of one request, where the connection fails or the server says 429 or 5xx. Between
    them backoff_s, doubled each time up to max_backoff_s, less a random part of up to a half.
    num_in_flight: requests that the server has at a time. api_key: sent as a bearer token.
    """

    connect_timeout_s: float = 10.0
    read_timeout_s: float = 1800.0
    max_attempts: int = 8
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    num_in_flight: int = 64
    api_key: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a server said: HTTP status below 500 and the body, None where it is no JSON.

    text: the body's beginning.
    """

    status: int
    json: Any
    text: str

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def said(self) -> str:
        """For an error message."""
        return f"HTTP {self.status}: {' '.join(self.text.split())[:300]}"


class Server:
    """A server at a URL; may be used from several threads."""

    def __init__(self, url: str, options: HttpOptions) -> None:
        """Raises EngineError: httpx2 is not installed, or the URL is none. Connects to nothing."""
        self.url = url.rstrip("/")
        self._options = options
        self._client = _new_client(self.url, options)

    def get(self, path: str) -> Answer:
        """Raises EngineError: no answer after all attempts, or none within the time-out."""
        return self._ask("GET", path, None, self._options.max_attempts, self._quick_s)

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Raises EngineError: no answer after all attempts, or none within the time-out."""
        options = self._options
        return self._ask("POST", path, body, options.max_attempts, options.read_timeout_s)

    def post_once(self, path: str, body: dict[str, Any]) -> Answer:
        """As `post`, but for what is not worth waiting for: tried once, for at most 30 s."""
        return self._ask("POST", path, body, 1, self._quick_s)

    def map(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """work(item) of every item, in order, num_in_flight at a time; the first error is raised.

        What has not begun by then never begins; what has is waited for, but not by a process that
        is interrupted.
        """
        waiting = deque(enumerate(items))
        results: dict[int, Any] = {}
        errors: dict[int, Exception] = {}

        def serve() -> None:
            # the items are taken by several threads
            while True:
                try:
                    place, item = waiting.popleft()
                except IndexError:
                    return
                try:
                    results[place] = work(item)
                except Exception as error:
                    errors[place] = error
                    waiting.clear()

        # those of a pool would keep the process from ending until a hung server answers
        count = min(self._options.num_in_flight, len(items))
        threads = [Thread(target=serve, daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            waiting.clear()
        if errors:
            raise errors[min(errors)]
        return [results[place] for place in range(len(items))]

    def close(self) -> None:
        self._client.close()

    @property
    def _quick_s(self) -> float:
        return min(_QUICK_S, self._options.read_timeout_s)

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        max_attempts: int,
        timeout_s: float,
    ) -> Answer:
        problem = ""
        for attempt in range(max_attempts):
            if attempt:
                time.sleep(self._pause(attempt))
            outcome = self._try(method, path, body, timeout_s)
            if isinstance(outcome, Answer):
                return outcome
            problem = outcome
        raise EngineError(
            f"{self.url} does not answer",
            got=f"{problem}, after {max_attempts} attempts at {path}",
            expected="a server that answers",
            remedy="look at the server's log, start it again, and resume the run",
        )

    def _try(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> Answer | str:
        """The answer, or what went wrong where trying again may help."""
        import httpx2

        try:
            timeout = httpx2.Timeout(timeout_s, connect=self._options.connect_timeout_s)
            response = self._client.request(method, path, json=body, timeout=timeout)
        except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            raise self._too_slow(path, timeout_s) from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            return f"{type(error).__name__}: {error}"
        except UnicodeError as error:  # the resolver's, of a name that none can have
            raise _no_url(self.url, error) from error
        answer = _answer(response)
        if answer.status >= 500 or answer.status == _TOO_MANY_REQUESTS:
            return answer.said()
        return answer

    def _too_slow(self, path: str, timeout_s: float) -> EngineError:
        """Not tried again: the server would compute the same for as long."""
        return EngineError(
            f"{self.url}{path} did not answer in time",
            got=f"nothing within {timeout_s:g} s",
            remedy="see whether the server hangs; else a longer read time-out, fewer requests in "
            "flight, or fewer new tokens",
        )

    def _pause(self, attempt: int) -> float:
        """Seconds before the attempt, counted from 0; clients that failed together part."""
        longest = min(self._options.backoff_s * 2 ** (attempt - 1), self._options.max_backoff_s)
        return longest * _JITTER.uniform(0.5, 1.0)


def _new_client(url: str, options: HttpOptions) -> httpx2.Client:
    try:
        import httpx2
    except ImportError as error:
        raise EngineError(
            "a rollout server needs httpx2", got=error, remedy="pip install httpx2"
        ) from error
    if not url.startswith(("http://", "https://")):
        raise _no_url(url, "no scheme")
    limits = httpx2.Limits(
        max_connections=options.num_in_flight, max_keepalive_connections=options.num_in_flight
    )
    key = options.api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        return httpx2.Client(base_url=url, limits=limits, headers=headers)
    except httpx2.InvalidURL as error:
        raise _no_url(url, error) from error


def _no_url(url: str, reason: object) -> EngineError:
    return EngineError(
        "no URL of a server",
        got=f"{url!r}: {reason}",
        expected="http://HOST:PORT, or https",
        remedy="see rollout.url",
    )


def _answer(response: httpx2.Response) -> Answer:
    try:
        content = response.json()
    except (ValueError, RecursionError):
        content = None
    text = response.content[:_MAX_TEXT_BYTES].decode(errors="replace")
    return Answer(response.status_code, content, text)
