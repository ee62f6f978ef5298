"""Where a callback may go: the rules for URLs, and what an operator opened. Pure: nothing resolves.

    policy = GuardPolicy.from_settings(settings)
    target = parse_url(url, policy)            raises CallbackRejected(code, message)
    policy.check_address(address, target.host, target.port)

The URL rules run when a task is submitted and again before each try; the address rules run on every answer
of the resolver, where the socket is opened (`transport.py`).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

import httpx

from perdure.callback.addresses import NEVER, Address, Network, embedded, in_any, is_public, stands_for_v4
from perdure.settings import CallbackSettings

MAX_URL: Final = 2048
DEFAULT_PORTS: Final = {"https": 443, "http": 80}
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMERIC_LABEL: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?P<authority>[^/?#]*)")
_PORT: Final = re.compile(r"[0-9]{0,5}")
_LOOPBACK: Final = (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))


class CallbackRejected(ValueError):  # noqa: N818 - said of a URL, not of the program
    """The URL may not be called. `code` is a stable string; `message` names the remedy and no address that
    was looked up."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        return (CallbackRejected, (self.code, self.message))


@dataclass(frozen=True)
class Target:
    """A URL that passed the rules. `host` is lower case ASCII without a trailing dot (an IP literal without
    brackets); `url` is what is sent to, query included."""

    scheme: str
    host: str
    port: int
    url: httpx.URL


@dataclass(frozen=True)
class GuardPolicy:
    """What an operator opened.

    `hosts`: names and IP literals (`*.x.y` stands for one label) that may resolve to private addresses;
    `nets`: address ranges; both are open on every port. `ports`: those of public addresses, empty for all.
    `http`: plain http is allowed.
    """

    hosts: frozenset[str] = frozenset()
    nets: tuple[Network, ...] = ()
    http: bool = False
    ports: frozenset[int] = frozenset({443})

    @classmethod
    def from_settings(cls, settings: CallbackSettings) -> GuardPolicy:
        """Raises ValueError, naming the setting, for a range or a host that is none."""
        return cls(
            hosts=frozenset(_host_entry(text) for text in settings.callback_allow_hosts),
            nets=tuple(_net_entry(text) for text in settings.callback_allow_cidrs),
            http=settings.callback_allow_http,
            ports=frozenset(settings.callback_ports),
        )

    def opens_host(self, host: str) -> bool:
        """Whether the operator opened this name or IP literal."""
        _, _, parent = host.partition(".")
        return host in self.hosts or (bool(parent) and f"*.{parent}" in self.hosts)

    def check_address(self, address: Address, host: str, port: int) -> None:
        """Raises CallbackRejected unless a socket to `address` may be opened for `host`."""
        if self._opened(address, host):
            return
        if not is_public(address):
            raise CallbackRejected(
                "address-not-allowed",
                "the callback's host is not a public address; the operator can open it with "
                "PERDURE_CALLBACK_ALLOW_HOSTS or PERDURE_CALLBACK_ALLOW_CIDRS",
            )
        if not self.allows_port(port):
            raise _port_rejected(port)

    def allows_port(self, port: int) -> bool:
        """Whether a public address may be called on this port."""
        return not self.ports or port in self.ports

    def _opened(self, address: Address, host: str) -> bool:
        inner = embedded(address)
        if any(in_any(form, NEVER) for form in (address, *inner)):
            return False
        meant = inner[0] if stands_for_v4(address) else address
        return self.opens_host(host) or in_any(meant, self.nets)


def origin_of(url: str) -> str:
    """Scheme and authority as written, lower case: what names a receiver in rows, limits and logs. It holds
    no path and no query."""
    match = _AUTHORITY.match(url)
    return match[0].lower() if match else ""


def check_url(url: str, policy: GuardPolicy) -> None:
    """The rules for a callback URL at submit. Raises CallbackRejected(code, message)."""
    parse_url(url, policy)


def parse_url(url: str, policy: GuardPolicy) -> Target:
    """A URL as the sender will use it. Raises CallbackRejected(code, message)."""
    if len(url) > MAX_URL:
        raise CallbackRejected("url-too-long", f"the callback URL is longer than {MAX_URL} characters")
    if any(char == "\\" or char.isspace() or not char.isprintable() for char in url):
        raise CallbackRejected(
            "url-characters", "the callback URL holds a space, a backslash or a control character; encode it"
        )
    try:
        parsed = httpx.URL(url)  # the sender's own parser, so that no two readings differ
    except (httpx.InvalidURL, ValueError):
        raise CallbackRejected("url-invalid", "the callback URL cannot be read as a URL") from None
    _check_scheme(parsed.scheme, policy)
    _check_authority(url, parsed)
    host = parsed.raw_host.decode("ascii").removesuffix(".")
    port = parsed.port or DEFAULT_PORTS[parsed.scheme]
    _check_host(host, port, policy)
    sent = parsed if parsed.raw_host.decode("ascii") == host else parsed.copy_with(host=host)
    return Target(parsed.scheme, host, port, sent)


def _check_scheme(scheme: str, policy: GuardPolicy) -> None:
    if scheme == "https" or (scheme == "http" and policy.http):
        return
    hint = "; the operator can allow http with PERDURE_CALLBACK_ALLOW_HTTP" if scheme == "http" else ""
    raise CallbackRejected("scheme-not-allowed", f"a callback URL starts with https://{hint}")


def _check_authority(url: str, parsed: httpx.URL) -> None:
    """What stands between // and the path, as it was written."""
    match = _AUTHORITY.match(url)
    authority = match["authority"] if match else ""
    if "@" in authority or parsed.userinfo:
        raise CallbackRejected(
            "userinfo-not-allowed",
            "a callback URL holds no user name or password; the signature proves the sender",
        )
    if "#" in url:
        raise CallbackRejected("fragment-not-allowed", "a callback URL holds no fragment (#…)")
    _, _, digits = authority.rpartition("]")[2].partition(":")
    if not _PORT.fullmatch(digits) or int(digits or "1") not in range(1, 65536):
        raise CallbackRejected("port-not-allowed", "the port of the callback URL is not a number of 1-65535")


def _check_host(host: str, port: int, policy: GuardPolicy) -> None:
    literal = _literal(host)
    if literal is not None:
        policy.check_address(literal, host, port)
        return
    numeric = _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2])  # 127.1, 2130706433, 0x7f.1
    if len(host) > 253 or numeric or not _HOST.fullmatch(host):
        raise CallbackRejected(
            "host-invalid", "the host of the callback URL is neither a name nor an address in its usual form"
        )
    if policy.opens_host(host):
        return
    if "." not in host and not (host == "localhost" and _loopback_open(policy)):
        raise CallbackRejected(
            "host-not-allowed",
            "the host of the callback URL has no domain; the operator can open it with "
            "PERDURE_CALLBACK_ALLOW_HOSTS",
        )
    if not policy.allows_port(port) and not policy.nets:  # with ranges open, its address decides later
        raise _port_rejected(port)


def _literal(host: str) -> Address | None:
    """The address that a host spells, None for a name. Zone ids are none."""
    try:
        return None if "%" in host else ipaddress.ip_address(host)
    except ValueError:
        return None


def _loopback_open(policy: GuardPolicy) -> bool:
    return any(in_any(one, policy.nets) for one in _LOOPBACK)


def _port_rejected(port: int) -> CallbackRejected:
    return CallbackRejected(
        "port-not-allowed",
        f"callbacks do not go to port {port}; the operator can open it with PERDURE_CALLBACK_PORTS",
    )


def _host_entry(text: str) -> str:
    """One entry of the setting as it is compared. Raises ValueError."""
    star, name = ("*.", text[2:]) if text.startswith("*.") else ("", text)
    try:
        host = httpx.URL(scheme="https", host=name).raw_host.decode("ascii").removesuffix(".")
    except (httpx.InvalidURL, ValueError):
        host = ""
    if not _HOST.fullmatch(host) and _literal(host) is None:
        raise ValueError(f"PERDURE_CALLBACK_ALLOW_HOSTS: {text!r} is no host name, *.domain or IP address")
    return star + host


def _net_entry(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"PERDURE_CALLBACK_ALLOW_CIDRS: {error}; write it like 10.20.0.0/16") from None
