"""What Istio does with an EnvoyFilter, for the few kinds of patches that ours has.

Patches are merged as protobuf messages are: mappings key by key, lists by appending, the rest replaced.
"""

import copy
from collections.abc import Mapping
from typing import Any

MANAGER = "envoy.filters.network.http_connection_manager"


def merge(into: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        known = into.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            merge(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            known.extend(copy.deepcopy(value))
        else:
            into[key] = copy.deepcopy(value)


def apply(envoy_filter: Mapping[str, Any], bootstrap: Mapping[str, Any]) -> dict[str, Any]:
    """`bootstrap` (one listener with one HTTP connection manager) with all patches in it.

    Raises:
        AssertionError: a patch matches nothing, or is of a kind that is not known here.
    """
    config = copy.deepcopy(dict(bootstrap))
    (listener,) = config["static_resources"]["listeners"]
    (network_filter,) = listener["filter_chains"][0]["filters"]
    assert network_filter["name"] == MANAGER
    manager = network_filter["typed_config"]
    for entry in envoy_filter["spec"]["configPatches"]:
        match, patch = entry["match"], entry["patch"]
        value, operation = patch["value"], patch["operation"]
        assert match["context"] == "GATEWAY"
        match (entry["applyTo"], operation):
            case ("HTTP_FILTER", "INSERT_BEFORE"):
                wanted = match["listener"]["filterChain"]["filter"]["subFilter"]["name"]
                names = [one["name"] for one in manager["http_filters"]]
                manager["http_filters"].insert(names.index(wanted), copy.deepcopy(value))
            case ("NETWORK_FILTER", "MERGE"):
                assert match["listener"]["filterChain"]["filter"]["name"] == MANAGER
                merge(network_filter, value)
            case ("HTTP_ROUTE", "MERGE"):
                wanted = match["routeConfiguration"]["vhost"]["route"]["name"]
                routes = [r for host in manager["route_config"]["virtual_hosts"] for r in host["routes"]]
                fit = [route for route in routes if route.get("name") == wanted]
                assert fit, f"no route {wanted}"
                for route in fit:
                    merge(route, value)
            case ("LISTENER", "MERGE"):
                merge(listener, value)
            case ("CLUSTER", "MERGE"):
                about = match["cluster"]
                name = f"outbound|{about['portNumber']}||{about['service']}"
                fit = [one for one in config["static_resources"]["clusters"] if one["name"] == name]
                assert fit, f"no cluster {name}"
                for cluster in fit:
                    merge(cluster, value)
            case other:
                raise AssertionError(f"not known here: {other}")
    return config
