"""Every error AsyncFlow raises on purpose.

AsyncFlowError                      .code: a stable string   .retryable: bool
|- ConfigError(ValueError)          what a user wrote is wrong; carries every fault at once
|- DataError(ValueError)            a row, prompt or file does not follow the schema
|- ProtocolError                    a peer sent something we cannot take
|   |- WireDecodeError                a frame that does not decode, or is over a limit
|   '- WireVersionError               a peer speaks another wire version
|- PluginError                      about an installed plugin
|   |- PluginNotFoundError(LookupError)
|   |- PluginConflictError            two distributions offer one name
|   |- PluginLoadError                the plugin's module failed on import or registration
|   '- PluginIncompatibleError        another API version
|- ServiceError                     a running service; .service names it
|   |- ServiceClosedError             used before open() or after aclose()
|   |- ServiceTimeoutError(TimeoutError)
|   |- LeaseLostError                 the lease expired or was given away: nothing was written
|   |- PeerLostError(ConnectionError) the process behind a service is gone
|   |- BackpressureError              it does not fit, and waiting would not help
|   |- UnsupportedCapabilityError(NotImplementedError)
|   '- EngineError                    an engine's own exception, crossed once (`raise ... from exc`)
'- InvariantError                   a bug in us or in a plugin: never caught for a retry
    '- StalenessViolationError

Messages are one lower-case sentence: what failed, the value, what is allowed, the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AsyncFlowError",
    "BackpressureError",
    "ConfigError",
    "DataError",
    "EngineError",
    "InvariantError",
    "LeaseLostError",
    "PeerLostError",
    "PluginConflictError",
    "PluginError",
    "PluginIncompatibleError",
    "PluginLoadError",
    "PluginNotFoundError",
    "ProtocolError",
    "ServiceClosedError",
    "ServiceError",
    "ServiceTimeoutError",
    "StalenessViolationError",
    "UnsupportedCapabilityError",
    "WireDecodeError",
    "WireVersionError",
    "error_from_code",
]


class AsyncFlowError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        code: stable identifier, safe to match on and to send over a wire.
        retryable: whether the same call may succeed later without a change by the caller.
    """

    code = "asyncflow"
    retryable = False


class ConfigError(AsyncFlowError, ValueError):
    """What the user wrote is wrong. `faults` holds one message for each fault found."""

    code = "config"

    def __init__(self, faults: str | Sequence[str]) -> None:
        """Take one message, or all the faults of one check."""
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


class DataError(AsyncFlowError, ValueError):
    """A row, prompt or file does not follow the schema; the row and the column are named."""

    code = "data"


class ProtocolError(AsyncFlowError):
    """A peer sent something that cannot be taken."""

    code = "protocol"


class WireDecodeError(ProtocolError):
    """A frame does not decode or is over a limit."""

    code = "wire_decode"


class WireVersionError(ProtocolError):
    """A peer speaks another wire version."""

    code = "wire_version"


class PluginError(AsyncFlowError):
    """Something about an installed plugin."""

    code = "plugin"


class PluginNotFoundError(PluginError, LookupError):
    """No installed plugin has the name."""

    code = "plugin_not_found"


class PluginConflictError(PluginError):
    """Two distributions offer the same kind and name."""

    code = "plugin_conflict"


class PluginLoadError(PluginError):
    """A plugin's module failed on import or registration; the cause is chained."""

    code = "plugin_load"


class PluginIncompatibleError(PluginError):
    """A plugin was written for another API version."""

    code = "plugin_incompatible"


class ServiceError(AsyncFlowError):
    """A running service failed. `service` is its name in the run, empty when unknown."""

    code = "service"

    def __init__(self, message: str, *, service: str = "") -> None:
        """Keep the name of the service beside the message."""
        super().__init__(message)
        self.service = service


class ServiceClosedError(ServiceError):
    """Used before `open()` or after `aclose()`."""

    code = "service_closed"


class ServiceTimeoutError(ServiceError, TimeoutError):
    """A deadline passed."""

    code = "service_timeout"
    retryable = True


class LeaseLostError(ServiceError):
    """The lease expired or was given away; nothing was written."""

    code = "lease_lost"


class PeerLostError(ServiceError, ConnectionError):
    """The process behind a service is gone."""

    code = "peer_lost"


class BackpressureError(ServiceError):
    """It does not fit, and waiting would not help."""

    code = "backpressure"


class UnsupportedCapabilityError(ServiceError, NotImplementedError):
    """Something was asked for that the plugin does not declare."""

    code = "unsupported_capability"


class EngineError(ServiceError):
    """An engine's own exception; the original is chained as the cause."""

    code = "engine"


class InvariantError(AsyncFlowError):
    """A bug in AsyncFlow or a plugin."""

    code = "invariant"


class StalenessViolationError(InvariantError):
    """A row staler than `max_staleness` reached the trainer."""

    code = "staleness_violation"


def _subclasses(cls: type[AsyncFlowError]) -> list[type[AsyncFlowError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found.extend(_subclasses(child))
    return found


def error_from_code(code: str, message: str) -> AsyncFlowError:
    """Rebuild an error that crossed a process boundary; an unknown code gives `ServiceError`."""
    for cls in _subclasses(AsyncFlowError):
        if cls.__module__ == __name__ and cls.code == code:
            return cls(message)
    return ServiceError(f"{code}: {message}")
