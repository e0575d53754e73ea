"""What restarting the routers costs: requests, and cached tokens."""
