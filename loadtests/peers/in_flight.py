"""Requests a router has sent and not yet seen end, per worker: what peers call load, or running requests."""


class InFlight:
    """Counts of requests under way.

    Attributes:
        counts: by worker.
        processed: requests ever sent, by worker.
    """

    def __init__(self, replicas: int) -> None:
        self.counts = [0] * replicas
        self.processed = [0] * replicas
        self._where: dict[str, int] = {}

    def begin(self, request_id: str, worker: int) -> None:
        """A request was sent to `worker`."""
        self.counts[worker] += 1
        self.processed[worker] += 1
        self._where[request_id] = worker

    def end(self, request_id: str) -> int:
        """A request ended; returns where it was."""
        worker = self._where.pop(request_id)
        self.counts[worker] -= 1
        return worker
