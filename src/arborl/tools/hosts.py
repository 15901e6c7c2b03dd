"""Whose computer a host's name means."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, is this machine's own, which nobody else can have."""
    host = host.removeprefix("[").removesuffix("]").removesuffix(".").lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
