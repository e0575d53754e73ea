r"""Cache salts that keep tenants apart in the engine itself.

    salt = HMAC-SHA256(key, length of tenant, tenant, and, marked, the salt the client sent or none), in hex

vLLM mixes the salt into the hash of a prompt's first block, so prompts under different salts share no block.
Nobody without the key can produce another tenant's salt, whatever salt of their own they send. 64 hexadecimal
digits meet vLLM's rules for salts (at most 128 characters, none of `@`, `/`, `\` or NUL).
"""

import hashlib
import hmac
from dataclasses import dataclass, field

MIN_KEY_BYTES = 32
"""As long as the digest: a shorter key is easier to guess than the salt."""


@dataclass(frozen=True, slots=True)
class Salter:
    """Makes salts with one secret key, which appears nowhere else.

    Raises:
        ValueError: the key is too short; the message never shows it.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_BYTES:
            raise ValueError(f"the key has {len(self.key)} bytes; at least {MIN_KEY_BYTES} are needed")

    def salt(self, tenant: str, client_salt: str | None = None) -> str:
        """The salt of a tenant's prompts; a salt the client sent keeps its own prompts apart within that."""
        name = tenant.encode("utf-8", "surrogatepass")
        own = b"-" if client_salt is None else b"+" + client_salt.encode("utf-8", "surrogatepass")
        return hmac.new(self.key, b"%d:%b%b" % (len(name), name, own), hashlib.sha256).hexdigest()
