"""Why a prompt could not be turned into the engine's token ids here."""

from extproc.core.errors import WarmrouteError


class Unsupported(WarmrouteError):  # noqa: N818  # not a failure: the request is routed by load
    """The engine may well serve this request, but its token ids cannot be computed here.

    `reason` is one of a few fixed words (it labels metrics); `detail` is for people.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(reason if detail is None else f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
