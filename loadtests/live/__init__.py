"""The whole stack under load, against plain proxies and other routers on the same engines."""
