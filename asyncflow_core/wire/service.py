"""Services and plain objects over the wire: the server introspects, the client gets a proxy.

What crosses is what the interface says: its public coroutine methods, and methods that return an
`AsyncIterator`. Arguments and results are checked against the annotations. A method that takes or
returns an async iterator inside something else (`WeightSync.publish`, `Rollout.stage_weights`)
cannot cross; its proxy raises `UnsupportedCapabilityError`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import secrets
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncflow_core.errors import (
    ConfigError,
    PeerLostError,
    PluginIncompatibleError,
    ServiceClosedError,
    UnsupportedCapabilityError,
    WireDecodeError,
)
from asyncflow_core.services.base import Service
from asyncflow_core.services.data_store import Registration, TaskSpec
from asyncflow_core.wire._calls import Method, Peer
from asyncflow_core.wire._typed import CannotCrossError, builder, is_stream
from asyncflow_core.wire.client import DEFAULT_TIMEOUT, Client
from asyncflow_core.wire.server import Server

__all__ = ["remote", "serve_object", "serve_service"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_END_REGISTRATION = "end_registration"
_MISSING: Any = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class _Spec:
    """One method of an interface.

    Attributes:
        names: its parameters. positional: those that may be given by position.
        required: those without a default. hints: their types. returns: of the result or an item.
        wait_s: default of a parameter of that name, which lengthens the deadline.
        obstacle: why it cannot cross, empty when it can.
    """

    name: str
    names: frozenset[str]
    positional: tuple[str, ...]
    required: frozenset[str]
    hints: Mapping[str, Any]
    returns: Any
    streams: bool
    wait_s: Any
    obstacle: str

    def bind(self, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, those that were given; `TypeError` as a real method would raise."""
        arguments = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        known = self.required <= arguments.keys() <= self.names
        if not known or len(arguments) != len(args) + len(kwargs):
            raise TypeError(
                f"{owner}.{self.name}() takes {sorted(self.names)} (required: "
                f"{sorted(self.required)}), got {len(args)} by position and {sorted(kwargs)}"
            )
        return arguments

    def arguments(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a peer, checked. None is ever ignored.

        Raises:
            WireDecodeError: one is unknown, missing or of another type.
        """
        if not self.required <= plain.keys() <= self.names:
            raise WireDecodeError(
                f"arguments {sorted(map(str, plain))} were given, allowed are "
                f"{sorted(self.names)}, required {sorted(self.required)}"
            )
        build = builder(strict=True).build
        return {key: build(self.hints[key], value, key) for key, value in plain.items()}


@functools.cache
def _specs(interface: type) -> dict[str, _Spec]:
    """Every method of an interface that a peer could call."""
    skipped = ("open", "aclose") if issubclass(interface, Service) else ()
    found = {}
    for name, function in inspect.getmembers(interface, inspect.isfunction):
        if name.startswith("_") or name in skipped:
            continue
        try:
            hints = typing.get_type_hints(function)
        except NameError as error:
            raise ConfigError(
                f"{interface.__name__}.{name} cannot be served: an annotation is not importable "
                f"at run time ({error})"
            ) from error
        streams = is_stream(hints.get("return"))
        if streams or inspect.iscoroutinefunction(function):
            found[name] = _spec(interface, name, function, hints, streams=streams)
    return found


def _spec(
    interface: type, name: str, function: Any, hints: dict[str, Any], *, streams: bool
) -> _Spec:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    returns = hints.pop("return", Any)
    if streams:
        returns = (typing.get_args(returns) or (Any,))[0]
    for parameter in parameters:
        if parameter.name not in hints or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ConfigError(
                f"{interface.__name__}.{name} cannot be served: its parameter {parameter.name!r} "
                "has no type, or stands for any number of arguments"
            )
    obstacle = ""
    try:
        for hint in hints.values():
            builder(strict=True).converter(hint)
        if returns is not Registration:
            builder(strict=False).converter(returns)
    except CannotCrossError as error:
        obstacle = str(error)
    return _Spec(
        name=name,
        names=frozenset(parameter.name for parameter in parameters),
        positional=tuple(q.name for q in parameters if q.kind is not q.KEYWORD_ONLY),
        required=frozenset(q.name for q in parameters if q.default is _MISSING),
        hints=hints,
        returns=returns,
        streams=streams,
        wait_s=next((q.default for q in parameters if q.name == "wait_s"), _MISSING),
        obstacle=obstacle,
    )


def serve_service(
    server: Server,
    name: str,
    service: T,
    interface: Callable[..., T],
    *,
    supports: Sequence[type] = (),
) -> None:
    """Offer a service under a name; call it before `server.open()`.

    The server neither opens nor closes the service: who started it does.

    A `Registration` that a client got lives until the client closes it, not until the client dies:
    its worker will be restarted and go on with the task. A new connection that registers an equal
    task under the client name of a dead one takes over the dead one's registration.

    Args:
        server: where.
        name: of the service in the run.
        service: what answers.
        interface: the ABC whose methods are offered.
        supports: `Supports*` protocols; the methods of those the service satisfies are offered.

    Raises:
        ConfigError: the service is not of the interface, or the name is taken.
    """
    kind = _class(interface)
    if not isinstance(service, kind):
        raise ConfigError(f"{name!r} is a {type(service).__name__}, not a {kind.__name__}")
    specs = dict(_specs(kind))
    for protocol in supports:
        if isinstance(service, protocol):
            specs.update(_specs(protocol))
    methods = _methods(service, specs)
    registrations = _Registrations(service)
    for spec in specs.values():
        if spec.returns is Registration:
            methods[spec.name] = Method(registrations.register, spec.arguments, takes_peer=True)
            end = _specs(_Registrations)["end"]
            methods[_END_REGISTRATION] = Method(registrations.end, end.arguments)
    version = int(getattr(kind, "API_VERSION", 0))
    server.expose(name, methods, interface=kind.__name__, api_version=version)


def serve_object(
    server: Server, name: str, obj: T, *, interface: Callable[..., T] | None = None
) -> None:
    """Offer the annotated async methods of any object, as `serve_service` does of a service.

    Args:
        server: where.
        name: under which name.
        obj: what answers.
        interface: the class whose methods are offered; the object's own without it.

    Raises:
        ConfigError: a method has a parameter without a type, or the name is taken.
    """
    kind = type(obj) if interface is None else _class(interface)
    methods = _methods(obj, _specs(kind))
    version = int(getattr(kind, "API_VERSION", 0))
    server.expose(name, methods, interface=kind.__name__, api_version=version)


def remote(
    interface: Callable[..., T],
    client: Client,
    name: str,
    *,
    supports: Sequence[type] = (),
    timeout_s: float | None = DEFAULT_TIMEOUT,
    timeouts: Mapping[str, float | None] | None = None,
) -> T:
    """An instance of the interface whose methods call the server.

    The proxy of a `Service` is used as one: its `open()` and `aclose()` begin and end the use here
    and reach neither the service nor the client. A parameter `wait_s` lengthens the deadline of
    its call by that much, and None lifts it.

    Args:
        interface: the ABC, or a plain class for `serve_object`.
        client: an open client; several proxies may share it.
        name: under which the server offers it.
        supports: `Supports*` protocols the proxy has to satisfy as well.
        timeout_s: deadline of a call, and of each item of a stream; the client's without it.
        timeouts: by method, in the place of `timeout_s`.

    Raises:
        ConfigError: the server offers no such name, or another interface under it.
        PluginIncompatibleError: the other side's API version is too far from ours.
        UnsupportedCapabilityError: the service does not satisfy one of `supports`.
    """
    kind = _class(interface)
    offered = _check_offer(kind, client, name)
    specs = dict(_specs(kind))
    for protocol in supports:
        missing = sorted(_specs(protocol).keys() - offered)
        if missing:
            raise UnsupportedCapabilityError(
                f"{name!r} of {client.service!r} is no {protocol.__name__}: it has not {missing}",
                service=client.service,
            )
        specs.update(_specs(protocol))
    base = _RemoteService if issubclass(kind, Service) else _Remote
    namespace: dict[str, Any] = {"__module__": __name__}
    for key, spec in specs.items():
        source = next(c for c in (kind, *supports) if hasattr(c, key))
        namespace[key] = _proxy_method(spec, getattr(source, key), offered=key in offered)
    made: Any = type(f"Remote{kind.__name__}", (base, kind), namespace)
    proxy = object.__new__(made)
    _Remote.__init__(proxy, client, name, timeout_s, dict(timeouts or {}))
    return typing.cast("T", proxy)


def _class(interface: Any) -> type:
    if not isinstance(interface, type):
        raise ConfigError(f"an interface is a class, got {interface!r}")
    return interface


def _check_offer(kind: type, client: Client, name: str) -> frozenset[str]:
    """The methods the server offers under the name."""
    if not client.catalogue:
        raise ServiceClosedError(
            f"the client of {client.service!r} is not open, or nothing is served"
        )
    if name not in client.catalogue:
        raise ConfigError(
            f"{client.service!r} serves no {name!r} (there are: {sorted(client.catalogue)})"
        )
    interface, version, methods = client.catalogue[name]
    if interface != kind.__name__:
        raise ConfigError(f"{name!r} of {client.service!r} is a {interface}, not a {kind.__name__}")
    ours = int(getattr(kind, "API_VERSION", 0))
    if abs(ours - version) > 1:
        older = "here" if ours < version else f"at {client.service!r}"
        raise PluginIncompatibleError(
            f"{interface} {name!r} has API version {version} at {client.service!r} and {ours} "
            f"here, at most 1 apart is allowed; upgrade asyncflow-core {older}"
        )
    return frozenset(methods)


def _methods(obj: Any, specs: Mapping[str, _Spec]) -> dict[str, Method]:
    return {
        key: Method(getattr(obj, key), spec.arguments, streams=spec.streams)
        for key, spec in specs.items()
        if not spec.obstacle
    }


class _Registrations:
    """What clients have registered, by handle; see `serve_service` for their life."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._held: dict[str, tuple[Registration, Peer]] = {}

    async def register(self, task: TaskSpec, peer: Peer) -> str:
        for handle, (registration, owner) in self._held.items():
            if owner.name == peer.name and not owner.alive and registration.task == task:
                self._held[handle] = (registration, peer)
                return handle
        registration = await self._service.register(task)
        handle = secrets.token_hex(8)
        self._held[handle] = (registration, peer)
        return handle

    async def end(self, handle: str) -> None:
        held = self._held.pop(handle, None)
        if held is not None:
            await held[0].aclose()


class _Remote:
    """The calls of a proxy."""

    def __init__(
        self,
        client: Client,
        name: str,
        timeout_s: float | None,
        timeouts: dict[str, float | None],
    ) -> None:
        self._client = client
        self._name = name
        self._timeout_s = client.timeout_s if timeout_s == DEFAULT_TIMEOUT else timeout_s
        self._timeouts = timeouts

    def _check_open(self) -> None:
        """A plain object is always open."""

    def _deadline(self, spec: _Spec, arguments: Mapping[str, Any]) -> float | None:
        timeout_s = self._timeouts.get(spec.name, self._timeout_s)
        if spec.wait_s is _MISSING or timeout_s is None:
            return timeout_s
        wait_s = arguments.get("wait_s", spec.wait_s)
        return None if wait_s is None else max(0.0, float(wait_s)) + timeout_s

    async def _call(self, spec: _Spec, arguments: dict[str, Any]) -> Any:
        self._check_open()
        returns = str if spec.returns is Registration else spec.returns
        result = await self._client.call(
            f"{self._name}.{spec.name}",
            arguments,
            returns=returns,
            timeout_s=self._deadline(spec, arguments),
        )
        if spec.returns is Registration:
            return Registration(arguments["task"], functools.partial(self._end, result))
        return result

    async def _stream(self, spec: _Spec, arguments: dict[str, Any]) -> AsyncIterator[Any]:
        self._check_open()
        stream = self._client.stream(
            f"{self._name}.{spec.name}",
            arguments,
            items=spec.returns,
            timeout_s=self._deadline(spec, arguments),
        )
        try:
            async for item in stream:
                yield item
        finally:
            await stream.aclose()

    async def _end(self, handle: str) -> None:
        try:
            await self._client.call(f"{self._name}.{_END_REGISTRATION}", {"handle": handle})
        except (PeerLostError, ServiceClosedError) as error:
            logger.info("a registration was not ended, its server is gone: %s", error)


class _RemoteService(_Remote):
    """A proxy with the life cycle of a service."""

    _open = False

    def _check_open(self) -> None:
        if not self._open:
            raise ServiceClosedError(
                f"the proxy of {self._name!r} is not open", service=self._client.service
            )

    async def open(self) -> None:
        """Begin the use here."""
        self._open = True

    async def aclose(self) -> None:
        """End the use here."""
        self._open = False


def _proxy_method(spec: _Spec, original: Any, *, offered: bool) -> Any:
    method: Any
    if spec.obstacle or not offered:
        reason = spec.obstacle or "the server does not offer it"

        def refuse(self: _Remote) -> UnsupportedCapabilityError:
            return UnsupportedCapabilityError(
                f"{self._name}.{spec.name} cannot be called over the wire ({reason}); "
                "it is called by a worker in the service's own process",
                service=self._client.service,
            )

        if spec.streams:

            def method(self: _Remote, *_args: Any, **_kwargs: Any) -> Any:
                raise refuse(self)

        else:

            async def method(self: _Remote, *_args: Any, **_kwargs: Any) -> Any:
                raise refuse(self)

    elif spec.streams:

        def method(self: _Remote, *args: Any, **kwargs: Any) -> Any:
            return self._stream(spec, spec.bind(self._name, args, kwargs))

    else:

        async def method(self: _Remote, *args: Any, **kwargs: Any) -> Any:
            return await self._call(spec, spec.bind(self._name, args, kwargs))

    functools.update_wrapper(method, original)
    method.__isabstractmethod__ = False
    return method
