"""Errors the core and the protocol layer raise. Each says what happened and what to do about it."""


class WarmrouteError(Exception):
    """Base of every error that is ours."""


class ProtocolError(WarmrouteError):
    """A peer sent something that is not legal at this point; the message names the state and the event."""


class NoEndpointError(WarmrouteError):
    """No ready worker may serve this request."""
