"""All-reduce over the ranks of one service on one host, for the tabular trainer.

A star of ZeroMQ ipc sockets in the run's directory: every rank sends its array to rank 0, which
adds them in rank order and sends the sum back, so all ranks get the same bits. Every wait has a
deadline, and the error names who did not come.

A message is [header (sequence, bytes), raw float64]. The directory is private to the run, so the
peers are ours; a message that does not fit is still refused by its sender's number.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from asyncflow_core.errors import (
    ConfigError,
    PeerLostError,
    ProtocolError,
    ServiceClosedError,
    ServiceTimeoutError,
)

__all__ = ["Collective"]

Floats = NDArray[np.float64]
_HEADER = struct.Struct("<QQ")
_LONGEST_IPC_PATH = 107  # of sockaddr_un, the closing zero byte aside


class Collective:
    """One rank's end; alone in the world it needs no socket. It owns one socket and its context."""

    def __init__(
        self, *, name: str, rank: int, world_size: int, run_dir: Path | None, timeout_s: float
    ) -> None:
        """Keep the arguments; `name` is equal on all ranks, and theirs alone in `run_dir`."""
        self._name, self._rank, self._world = name, rank, world_size
        self._timeout_s = timeout_s
        self._sequence = 0
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        if not 0 <= rank < world_size:
            raise ConfigError(f"{name} has the rank {rank} in a world of {world_size}")
        if world_size > 1 and run_dir is None:
            raise ConfigError(f"{name} has {world_size} ranks, which need a run directory to meet")
        self._path = str((run_dir or Path()) / f"{name}.ipc")
        if world_size > 1 and len(self._path.encode()) > _LONGEST_IPC_PATH:
            raise ConfigError(
                f"the socket path {self._path} is longer than the {_LONGEST_IPC_PATH} bytes the "
                f"system takes; choose a shorter run directory"
            )

    async def open(self) -> None:
        """Bind or connect; nobody is waited for yet."""
        if self._world == 1 or self._socket is not None:
            return
        self._context = zmq.asyncio.Context()
        kind = zmq.DEALER if self._rank else zmq.ROUTER
        self._socket = self._context.socket(kind)
        # Rank 0 may close right after its last answer, which must still go out; the others close
        # with unsent bytes only where rank 0 never came.
        self._socket.linger = 0 if self._rank else 1000
        if self._rank:
            self._socket.setsockopt(zmq.IDENTITY, self._rank.to_bytes(4, "little"))
            self._socket.connect(f"ipc://{self._path}")
        else:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.bind(f"ipc://{self._path}")

    async def aclose(self) -> None:
        """Close the socket; idempotent."""
        socket, context = self._socket, self._context
        self._socket = self._context = None
        if socket is not None and context is not None:
            socket.close()
            context.term()

    async def all_reduce(self, array: Floats) -> Floats:
        """The sum over all ranks, in rank order; bit-equal on all.

        Raises:
            ServiceTimeoutError: naming the ranks that did not come in time.
            ProtocolError: ranks disagree on the array's size or on how often they were called.
        """
        if self._world == 1:
            return array.copy()
        if self._socket is None:
            raise ServiceClosedError(f"the collective of {self._name} is not open")
        self._sequence += 1
        deadline = time.monotonic() + self._timeout_s
        if self._rank == 0:
            return await self._sum(self._socket, array, deadline)
        await self._socket.send_multipart(self._message(array))
        return await self._answer(self._socket, array, deadline)

    def _message(self, array: Floats) -> list[bytes]:
        return [_HEADER.pack(self._sequence, array.nbytes), array.tobytes()]

    async def _sum(self, socket: zmq.asyncio.Socket, array: Floats, deadline: float) -> Floats:
        parts: dict[int, Floats] = {0: array}
        while len(parts) < self._world:
            missing = sorted(set(range(self._world)) - parts.keys())
            sender, *frames = await self._receive(socket, missing, deadline)
            rank = int.from_bytes(sender, "little")
            part = self._decode(frames, array, rank)
            if part is not None:
                parts[rank] = part
        total = np.zeros_like(array)
        for rank in range(self._world):
            total += parts[rank]
        for rank in range(1, self._world):
            try:
                message = [rank.to_bytes(4, "little"), *self._message(total)]
                await socket.send_multipart(message)
            except zmq.ZMQError as error:
                raise PeerLostError(f"rank {rank} of {self._name} is gone: {error}") from error
        return total

    async def _answer(self, socket: zmq.asyncio.Socket, array: Floats, deadline: float) -> Floats:
        while True:
            total = self._decode(await self._receive(socket, [0], deadline), array, 0)
            if total is not None:
                return total

    async def _receive(
        self, socket: zmq.asyncio.Socket, missing: list[int], deadline: float
    ) -> list[bytes]:
        left_ms = max(0, round(1000 * (deadline - time.monotonic())))
        if not await socket.poll(left_ms):
            raise ServiceTimeoutError(
                f"rank {self._rank} of {self._name} waited {self._timeout_s:g} s for rank "
                f"{', '.join(map(str, missing))} in all-reduce {self._sequence}"
            )
        frames: list[bytes] = await socket.recv_multipart()
        return frames

    def _decode(self, frames: list[bytes], like: Floats, rank: int) -> Floats | None:
        """The array; None for one left over from a call that failed."""
        if len(frames) != 2 or len(frames[0]) != _HEADER.size or not 0 <= rank < self._world:
            raise ProtocolError(f"{self._name}: rank {rank} sent a message that does not decode")
        sequence, nbytes = _HEADER.unpack(frames[0])
        if sequence < self._sequence:
            return None
        if sequence != self._sequence or nbytes != len(frames[1]) or nbytes != like.nbytes:
            raise ProtocolError(
                f"{self._name}: rank {rank} is at all-reduce {sequence} with {nbytes} bytes, "
                f"rank {self._rank} at {self._sequence} with {like.nbytes}"
            )
        return np.frombuffer(frames[1], np.float64).reshape(like.shape)
