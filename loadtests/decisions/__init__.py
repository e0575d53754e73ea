"""The router's own service under an open loop of requests, without a gateway and without engines."""
