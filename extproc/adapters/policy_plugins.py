"""Policies by name: ours, and those that other packages offer.

A package offers a policy by an entry point in the group `warmroute.policies`:

    [project.entry-points."warmroute.policies"]
    my-policy = "my_package.policies:MyPolicy"

The class derives from `extproc.core.policies.Policy`; its contract is in that module.
"""

from functools import cache
from importlib.metadata import entry_points

from extproc.core.errors import WarmrouteError
from extproc.core.policies import POLICIES, Policy

GROUP = "warmroute.policies"


@cache
def available_policies() -> dict[str, type[Policy]]:
    """Every policy that can be named in a configuration.

    Raises:
        WarmrouteError: an installed policy cannot be loaded, or is none; the message names it.
    """
    found = dict(POLICIES)
    for point in entry_points(group=GROUP):
        try:
            policy = point.load()
        except Exception as error:
            raise WarmrouteError(
                f"policy {point.name!r} ({point.value}) cannot be loaded: {error}; "
                "repair or uninstall the package that offers it"
            ) from error
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise WarmrouteError(f"policy {point.name!r} ({point.value}) is not a subclass of Policy")
        found[point.name] = policy
    return found
