"""Warmroute: an Envoy external processor that prices every vLLM replica for every request."""

__version__ = "0.1.0"
