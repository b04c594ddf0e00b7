"""The wire: msgpack headers and raw frames, ZeroMQ calls and streams, services across processes.

`encode` and `decode` are the codec. `Server` and `Client` carry calls; `serve_service` and
`remote` put a service interface on both ends. Nothing here pickles.
"""

from asyncflow_core.wire._calls import Method, Peer
from asyncflow_core.wire._protocol import WIRE_VERSION
from asyncflow_core.wire._socket import Heartbeat
from asyncflow_core.wire.addresses import check_reach, is_ipv6, is_local, split_key, with_key
from asyncflow_core.wire.blocking import BlockingClient
from asyncflow_core.wire.client import DEFAULT_TIMEOUT, Client
from asyncflow_core.wire.codec import Buffer, Encoder, decode, encode
from asyncflow_core.wire.keys import KEY_BYTES, KeyPair, load_allowed
from asyncflow_core.wire.limits import Limits
from asyncflow_core.wire.server import Server
from asyncflow_core.wire.service import remote, serve_object, serve_service

__all__ = [
    "DEFAULT_TIMEOUT",
    "KEY_BYTES",
    "WIRE_VERSION",
    "BlockingClient",
    "Buffer",
    "Client",
    "Encoder",
    "Heartbeat",
    "KeyPair",
    "Limits",
    "Method",
    "Peer",
    "Server",
    "check_reach",
    "decode",
    "encode",
    "is_ipv6",
    "is_local",
    "load_allowed",
    "remote",
    "serve_object",
    "serve_service",
    "split_key",
    "with_key",
]
