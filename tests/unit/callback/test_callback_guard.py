"""The tables of addresses and URLs (`tests/support/addresses.py`), and what an operator may open."""

from __future__ import annotations

import copy
import ipaddress
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.callback.addresses import DENIED, embedded, in_any, is_public
from perdure.callback.addresses import NEVER as NEVER_NETS
from perdure.callback.guard import CallbackRejected, GuardPolicy, check_url, origin_of, parse_url
from perdure.settings import CallbackSettings
from tests.support.addresses import BAD_URLS, CLOSED, NEVER, OPEN

EVERYTHING = GuardPolicy(
    nets=(ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")), http=True, ports=frozenset()
)
LOOSE = GuardPolicy(http=True, ports=frozenset())
DEV = GuardPolicy(
    nets=(ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")), http=True, ports=frozenset()
)


def code(url: str, policy: GuardPolicy) -> str | None:
    try:
        check_url(url, policy)
    except CallbackRejected as rejected:
        return rejected.code
    return None


def literal(address: str) -> str:
    return f"https://[{address}]/" if ":" in address else f"https://{address}/"


@pytest.mark.parametrize(("address", "why"), CLOSED)
def test_closed_addresses(address: str, why: str) -> None:
    assert not is_public(ipaddress.ip_address(address)), why
    assert code(literal(address), GuardPolicy()) == "address-not-allowed"


@pytest.mark.parametrize("address", OPEN)
def test_open_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    assert code(literal(address), GuardPolicy()) is None


@pytest.mark.parametrize("address", NEVER)
def test_no_setting_opens_what_is_never_open(address: str) -> None:
    assert code(literal(address), EVERYTHING) == "address-not-allowed"
    by_name = GuardPolicy(hosts=frozenset({address, "metadata.example"}))
    with pytest.raises(CallbackRejected):
        by_name.check_address(ipaddress.ip_address(address), "metadata.example", 443)


@pytest.mark.parametrize(("url", "expected"), BAD_URLS)
def test_bad_urls_are_refused_even_where_http_and_ports_are_open(url: str, expected: str) -> None:
    assert code(url, LOOSE) == expected
    assert code(url, GuardPolicy()) is not None


@pytest.mark.parametrize(
    ("url", "host", "sent"),
    [
        ("https://receiver.example/a?b=c", "receiver.example", "https://receiver.example/a?b=c"),
        ("HTTPS://Receiver.Example", "receiver.example", "https://receiver.example"),
        ("https://receiver.example./x", "receiver.example", "https://receiver.example/x"),
        ("https://receiver.example:443/x", "receiver.example", "https://receiver.example/x"),
        ("https://bücher.example/ü", "xn--bcher-kva.example", "https://xn--bcher-kva.example/%C3%BC"),
        ("https://8.8.8.8/x", "8.8.8.8", "https://8.8.8.8/x"),
        ("https://[2606:4700::1111]/x", "2606:4700::1111", "https://[2606:4700::1111]/x"),
        ("https://a_b.example/@x?q=@", "a_b.example", "https://a_b.example/@x?q=@"),
    ],
)
def test_good_urls_and_how_they_are_sent(url: str, host: str, sent: str) -> None:
    target = parse_url(url, GuardPolicy())
    assert (target.scheme, target.host, target.port) == ("https", host, 443)
    assert target.url.raw_host.decode() == host
    assert str(target.url) == sent


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://Receiver.Example/Path?q=1", "https://receiver.example"),
        ("http://127.0.0.1:8000?q", "http://127.0.0.1:8000"),
        ("https://[2606::1]:8443", "https://[2606::1]:8443"),
        ("nothing", ""),
    ],
)
def test_the_origin_names_a_receiver_and_tells_no_path(url: str, origin: str) -> None:
    assert origin_of(url) == origin


def test_ports_and_http_are_closed_by_default_and_opened_by_settings() -> None:
    assert code("https://receiver.example:8443/", GuardPolicy()) == "port-not-allowed"
    assert code("https://receiver.example:22/", GuardPolicy()) == "port-not-allowed"
    assert code("https://receiver.example:8443/", GuardPolicy(ports=frozenset({443, 8443}))) is None
    assert code("http://receiver.example/", GuardPolicy()) == "scheme-not-allowed"
    assert code("http://receiver.example/", GuardPolicy(http=True)) == "port-not-allowed"
    assert code("http://receiver.example/", GuardPolicy(http=True, ports=frozenset({80, 443}))) is None


def test_dev_opens_loopback_on_every_port_but_nothing_else() -> None:
    for url in (
        "http://127.0.0.1:9/",
        "http://localhost:9/",
        "http://[::1]:9/",
        "http://[::ffff:127.0.0.1]/",
    ):
        assert code(url, DEV) is None
    for url in ("http://169.254.169.254/", "http://10.0.0.1/", "http://[fe80::1]/", "http://0.0.0.0/"):
        assert code(url, DEV) == "address-not-allowed"


def test_an_opened_host_may_be_private_and_on_any_port() -> None:
    policy = GuardPolicy(hosts=frozenset({"receiver", "*.corp.example", "10.1.2.3"}), http=True)
    private = ipaddress.ip_address("10.9.9.9")
    for host in ("receiver", "a.corp.example"):
        assert code(f"http://{host}:8080/", policy) is None
        policy.check_address(private, host, 8080)
    for host in ("corp.example", "a.b.corp.example", "evilcorp.example", "xreceiver", "receiver.example"):
        with pytest.raises(CallbackRejected):
            policy.check_address(private, host, 443)
    assert code("http://10.1.2.3:99/", policy) is None
    assert code("http://10.1.2.4:99/", policy) == "address-not-allowed"


def test_an_opened_range_is_open_on_every_port_and_the_internet_is_not() -> None:
    policy = GuardPolicy(nets=(ipaddress.ip_network("10.20.0.0/16"),))
    assert code("https://10.20.1.1:9000/", policy) is None
    assert code("https://10.21.1.1:9000/", policy) == "address-not-allowed"
    assert code("https://8.8.8.8:9000/", policy) == "port-not-allowed"
    policy.check_address(ipaddress.ip_address("10.20.1.1"), "receiver.example", 9000)
    policy.check_address(ipaddress.ip_address("::ffff:10.20.1.1"), "receiver.example", 9000)
    with pytest.raises(CallbackRejected):  # the name passed at submit; the socket decides
        policy.check_address(ipaddress.ip_address("8.8.8.8"), "receiver.example", 9000)


def test_settings_become_a_policy() -> None:
    settings = CallbackSettings.model_validate(
        {
            "database_url": "postgresql://h/d",
            "callback_allow_hosts": "Receiver.Corp.Example, *.x.example,10.0.0.7",
            "callback_allow_cidrs": "10.20.0.0/16,fd12::/16",
            "callback_allow_http": "true",
            "callback_ports": "443,8443",
        }
    )
    assert GuardPolicy.from_settings(settings) == GuardPolicy(
        hosts=frozenset({"receiver.corp.example", "*.x.example", "10.0.0.7"}),
        nets=(ipaddress.ip_network("10.20.0.0/16"), ipaddress.ip_network("fd12::/16")),
        http=True,
        ports=frozenset({443, 8443}),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("callback_allow_hosts", "bad host"),
        ("callback_allow_hosts", "*"),
        ("callback_allow_hosts", "https://receiver.example"),
        ("callback_allow_cidrs", "10.20.0.1/16"),
        ("callback_allow_cidrs", "ten"),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: str) -> None:
    settings = CallbackSettings.model_validate({"database_url": "postgresql://h/d", field: value})
    with pytest.raises(ValueError, match="PERDURE_" + field.upper()):
        GuardPolicy.from_settings(settings)


def test_a_refusal_survives_copy_and_pickle_and_names_no_address() -> None:
    with pytest.raises(CallbackRejected) as caught:
        check_url("https://10.1.2.3/", GuardPolicy())
    again = pickle.loads(pickle.dumps(copy.copy(caught.value)))
    assert (again.code, again.message) == (caught.value.code, caught.value.message)
    assert "10.1.2.3" not in again.message


@given(st.ip_addresses())
def test_no_address_is_public_while_a_closed_one_is_inside(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(address):
        assert not in_any(address, DENIED + NEVER_NETS)
        assert all(is_public(inner) for inner in embedded(address))


@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:{}", "64:ff9b::{}"]))
def test_forms_that_stand_for_an_ipv4_address_are_judged_like_it(address: object, form: str) -> None:
    assert isinstance(address, ipaddress.IPv4Address)
    assert is_public(ipaddress.ip_address(form.format(address))) == is_public(address)


@given(st.text(max_size=60))
def test_any_text_is_a_target_or_a_refusal(text: str) -> None:
    for url in (text, f"https://{text}", f"https://{text}/", f"http://a.example:{text}/"):
        try:
            target = parse_url(url, LOOSE)
        except CallbackRejected:
            continue
        assert target.url.host
        assert not target.url.userinfo
