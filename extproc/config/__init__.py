"""Configuration: one YAML (or JSON) file, read once, validated with errors that name line and fix."""

from extproc.config.base import ConfigError
from extproc.config.cost import Cost
from extproc.config.loading import load, parse
from extproc.config.pools import Discovery, Dns, KvEvents, Model, Pool, StaticWorker
from extproc.config.root import Config
from extproc.config.service import DecisionLog, Envoy, Limits, Scrape

__all__ = [
    "Config",
    "ConfigError",
    "Cost",
    "DecisionLog",
    "Discovery",
    "Dns",
    "Envoy",
    "KvEvents",
    "Limits",
    "Model",
    "Pool",
    "Scrape",
    "StaticWorker",
    "load",
    "parse",
]
