"""The table of addresses: which are public unicast, which an operator may open, which nobody may.

The standard library's `is_global` calls many internal addresses public (NAT64 and 6to4 forms of loopback,
multicast, cloud metadata), and its answers move between patch releases, so the table is our own.
"""

from __future__ import annotations

import ipaddress
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _nets(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


# Never open to anyone, whatever an operator allows: nothing that receives callbacks lives here, and what
# answers on some of them hands out the machine's credentials.
NEVER: Final = _nets(
    "0.0.0.0/8",  # this network
    "169.254.0.0/16",  # link-local: metadata services of most clouds
    "168.63.129.16/32",  # Azure's wire server
    "100.100.100.200/32",  # Alibaba's metadata service
    "192.0.0.192/32",  # Oracle's metadata service
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, and broadcast
    "::/128",  # unspecified
    "fe80::/10",  # link-local
    "fec0::/10",  # site-local, deprecated
    "ff00::/8",  # multicast
    "fd00:ec2::/32",  # AWS's metadata, DNS and time services
    "fd20:ce::254/128",  # Google's metadata service
)

# Closed unless an operator opens it.
DENIED: Final = _nets(
    "10.0.0.0/8",
    "100.64.0.0/10",  # carrier-grade NAT
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.0.0.0/24",  # protocol assignments
    "192.0.2.0/24",  # documentation
    "192.31.196.0/24",  # AS112
    "192.52.193.0/24",  # AMT
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",
    "192.175.48.0/24",  # AS112
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "::1/128",
    "64:ff9b:1::/48",  # NAT64 for local use
    "100::/64",  # discard
    "100:0:0:1::/64",  # dummy prefix
    "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
    "2001:db8::/32",  # documentation
    "2620:4f:8000::/48",  # AS112
    "3fff::/20",  # documentation
    "5f00::/16",  # segment routing
    "fc00::/7",  # private
)
_GLOBAL_V6: Final = ipaddress.ip_network("2000::/3")  # any IPv6 outside it is no public unicast
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE: Final = ipaddress.ip_network("::/96")


def is_public(address: Address) -> bool:
    """Whether `address`, and every IPv4 address inside it, is public unicast."""
    inner = embedded(address)
    if not all(is_public(one) for one in inner):
        return False
    if inner and stands_for_v4(address):
        return True
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_V6:
        return False
    return not any(address in net for net in NEVER + DENIED if net.version == address.version)


def embedded(address: Address) -> list[Address]:
    """The IPv4 addresses that an IPv6 address carries: mapped, compatible, NAT64, 6to4, Teredo, ISATAP."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return [low]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return list(address.teredo)
    if (int(address) >> 32) & 0xFDFFFFFF == 0x00005EFE:
        return [low]
    return []


def stands_for_v4(address: Address) -> bool:
    """Forms that stand for their IPv4 address and nothing else: mapped, and NAT64's well-known prefix."""
    return isinstance(address, ipaddress.IPv6Address) and (
        address.ipv4_mapped is not None or address in _NAT64
    )


def in_any(address: Address, nets: tuple[Network, ...]) -> bool:
    """Whether one of `nets` holds `address`."""
    return any(address in net for net in nets if net.version == address.version)
