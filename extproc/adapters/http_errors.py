"""Errors of HTTP clients in the words of people."""

import os
import ssl

import aiohttp


def in_words(error: Exception) -> str:
    """`Connection refused` where aiohttp names sockets and TLS settings; else what the error says."""
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ssl.SSLError):  # its numbers are not the system's
            return str(error.os_error)
        number = error.os_error.errno
        # A positive one is the system's; those of name resolution are negative and have words of their own.
        return os.strerror(number) if number and number > 0 else error.os_error.strerror or str(error)
    return str(error) or type(error).__name__
