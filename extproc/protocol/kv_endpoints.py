"""ZMQ addresses of an engine's KV events, as its configuration writes them: one text for all its ranks."""


def resolve_kv_endpoint(template: str, endpoint_host: str, dp_rank: int) -> str:
    """The ZMQ address of one rank, from the address in the engine's configuration.

    A wildcard host (`tcp://*:5557`) means the worker's own host (to listen, give "*" as host); rank r uses
    port + r, as in vLLM.

    Raises:
        ValueError: the address has no usable port, or its transport cannot have ranks.
    """
    scheme, _, rest = template.partition("://")
    if scheme == "inproc":
        return template if dp_rank == 0 else f"{template}_dp{dp_rank}"
    if scheme == "ipc":
        if dp_rank:
            raise ValueError(f"{template}: an ipc address cannot serve several ranks; use tcp://")
        return template
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{template!r} is not a ZMQ address like tcp://*:5557")
    if int(port) == 0:
        raise ValueError(
            f"{template}: port 0 is chosen by the engine; give the real one (GET /kv_event_sources)"
        )
    number = int(port) + dp_rank
    if number > 65_535:
        raise ValueError(f"{template}: rank {dp_rank} would have port {number}; ports end at 65535")
    if host in {"*", "0.0.0.0", "::", "[::]"}:
        host = endpoint_host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"tcp://{host}:{number}"
