"""Seeds from names: what is drawn does not depend on what else is drawn."""

import hashlib


def seed_of(*parts: object) -> int:
    """A number below 2^56 from the texts of the parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
