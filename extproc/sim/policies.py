"""Policies the simulator knows by itself: our router's, and a bound."""

from extproc.sim.holding_router import HOLDING
from extproc.sim.hosted_router import OURS
from extproc.sim.oracle import Oracle
from extproc.sim.routing import RouterMaker

POLICIES: dict[str, RouterMaker] = {**OURS, **HOLDING, "oracle": Oracle}
"""By name. Peers register elsewhere: see `extproc.sim.routing.RouterMaker`."""
