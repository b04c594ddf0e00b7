"""HTTP to one SGLang server or router: JSON calls and the token stream. Thin."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp

__all__ = ["Http", "RefusedError", "UnreachableError"]

_MAX_LINE_BYTES = 1 << 26


class UnreachableError(Exception):
    """Nobody answered, or not in time; `refused`: nobody listens there."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class RefusedError(Exception):
    """The server answered that it will not, or cannot."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path} answered {status}: {message}")
        self.status = status
        self.message = message


class Http:
    """A server's address and the session that talks to it."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        """Keep the address; `open` makes the session."""
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the session. One connection a request: the server queues, not the client."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            read_bufsize=1 << 20,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The JSON answer."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The JSON answer, None where there is none."""
        return await self._call("POST", path, body, timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Any:
        with _crossing(self.url, path, timeout_s):
            async with asyncio.timeout(timeout_s):
                async with self._opened().request(method, self.url + path, json=body) as reply:
                    text = await reply.text()
            if reply.status >= 400:
                raise RefusedError(path, reply.status, _message(text))
            if not text or reply.content_type != "application/json":
                return None
            return json.loads(text)

    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """What the server sends, event by event, to its end.

        Closing the iterator closes the connection, which ends the request on the server.

        Raises:
            RefusedError: the server will not, before or after it began.
            UnreachableError: the connection broke, or ended without an end.
        """
        with _crossing(self.url, path, None):
            async with self._opened().post(self.url + path, json=body) as reply:
                if reply.status >= 400:
                    raise RefusedError(path, reply.status, _message(await reply.text()))
                async for event in _events(reply.content):
                    if event == b"[DONE]":
                        return
                    found = json.loads(event)
                    if "error" in found:
                        raise RefusedError(path, _code(found["error"]), _message(event.decode()))
                    yield found
        raise UnreachableError(f"{self.url}{path} ended without an end")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise UnreachableError(f"the connection to {self.url} is closed", refused=True)
        return self._session


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Payloads of server-sent events. Lines may be longer than the reader's buffer."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise ValueError(f"an event of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@contextlib.contextmanager
def _crossing(url: str, path: str, timeout_s: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        limit = "in time" if timeout_s is None else f"in {timeout_s:g} s"
        raise UnreachableError(f"{url}{path} did not answer {limit}") from error
    except aiohttp.ClientConnectorError as error:
        raise UnreachableError(f"{url} cannot be reached: {error}", refused=True) from error
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        raise UnreachableError(f"{url}{path} broke off: {error!r}") from error


def _code(error: object) -> int:
    """Status of an error within a stream; 500 if it does not say."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _message(text: str) -> str:
    """What an error answer says: {"error": {"message"}}, {"message"} or plain text."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(text)
        error = found.get("error", found)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return text[:500]
