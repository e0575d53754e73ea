"""Label values that stay few, whatever clients send."""

from collections.abc import Callable

MAX_VALUES = 64
OTHER = "other"


class FewValues:
    """The first `limit` values as they are, all others as `other`."""

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int = MAX_VALUES) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def of(self, value: str) -> str:
        """The label for `value`."""
        if value not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(value)
        return value


class ServedModels:
    """Names of models as labels: those the pools serve, and those that an engine has answered for.

    A name alone proves nothing: anyone can ask for any model.

    Args:
        is_base: whether a pool is known to serve a model of this name.
    """

    def __init__(self, is_base: Callable[[str], bool]) -> None:
        self._is_base = is_base
        self._served: set[str] = set()

    def served(self, model: str) -> None:
        """An engine has answered a request for `model`."""
        if len(self._served) < MAX_VALUES:
            self._served.add(model)

    def label(self, model: str) -> str:
        """The label for `model`."""
        return model if model in self._served or self._is_base(model) else OTHER
