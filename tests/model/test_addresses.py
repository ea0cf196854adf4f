"""Permitted addresses of a push: each kind of address that is not public, in each notation."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from timeball.model.addresses import Allowed, is_name, parse
from timeball.model.errors import InvalidMessage, SetupError

NOTHING = Allowed.parse("")

CLOSED = {
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12:3456::1"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1"],
    "link-local": ["169.254.1.1", "fe80::1"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "reserved": ["240.0.0.1", "255.255.255.255", "192.0.0.8", "fec0::1", "100::1", "2001:10::1"],
    "CGNAT": ["100.64.0.1", "100.127.255.255"],
    "cloud metadata": ["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"],
    "inside an IPv6": [
        "::ffff:127.0.0.1",
        "::ffff:93.184.216.34",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::5db8:d822",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::1",
        "2001:0:53aa:64c::1",
    ],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "2001:db8::1", "3fff::1"],
    "not of the open": ["4000::1", "5f00::1"],
}
OPEN = ["93.184.216.34", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700:4700::1111", "2a00:1450::1"]


@pytest.mark.parametrize(
    ("words", "text"), [(words, text) for words, texts in CLOSED.items() for text in texts]
)
def test_a_non_public_address_is_refused_with_its_kind(words: str, text: str) -> None:
    reason = NOTHING.refusal("receiver.example", ip_address(text))
    assert reason is not None and words in reason
    host = f"[{text}]" if ":" in text else text
    with pytest.raises(InvalidMessage, match="push-allow"):
        NOTHING.check_url(f"http://{host}/hook")


@pytest.mark.parametrize("text", OPEN)
def test_a_public_address_is_allowed(text: str) -> None:
    assert NOTHING.refusal("receiver.example", ip_address(text)) is None
    host = f"[{text}]" if ":" in text else text
    assert NOTHING.check_url(f"https://{host}/hook").address == ip_address(text)


def test_an_address_with_a_scope_is_refused_although_its_network_is_public() -> None:
    assert NOTHING.refusal("r", ip_address("2606:4700::1%eth0")) is not None


def test_a_listed_network_allows_only_its_addresses() -> None:
    allowed = Allowed.parse("10.1.0.0/16, 169.254.169.254 ,fd00::/8")
    for text in ("10.1.2.3", "169.254.169.254", "fd00::1"):
        assert allowed.refusal("any.example", ip_address(text)) is None
    for text in ("10.2.0.1", "169.254.169.253", "127.0.0.1", "::ffff:10.1.2.3"):
        assert allowed.refusal("any.example", ip_address(text)) is not None


def test_a_listed_name_allows_only_private_loopback_and_cgnat_addresses() -> None:
    allowed = Allowed.parse("hooks.internal,LOCALHOST")
    for text in ("10.0.0.1", "127.0.0.1", "::1", "fd00::1", "100.64.0.1"):
        assert allowed.refusal("hooks.internal", ip_address(text)) is None
        assert allowed.refusal("other.internal", ip_address(text)) is not None
    for text in ("169.254.169.254", "169.254.0.1", "fe80::1", "0.0.0.0", "224.0.0.1", "fd00:ec2::254", "::"):
        assert allowed.refusal("hooks.internal", ip_address(text)) is not None
    assert allowed.refusal("localhost", ip_address("127.0.0.1")) is None


@pytest.mark.parametrize("text", ["10.1.2.3/16", "a b", "http://a", "0x7f.1", "host:80", "127.1", "-a"])
def test_a_setting_with_an_invalid_host_or_network_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match="push-allow"):
        Allowed.parse(f"localhost,{text}")


@pytest.mark.parametrize(
    "host",
    [
        "2130706433", "0x7f000001", "017700000001", "127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "127.0.0.01",
        "127.0.0.0x1", "127.0.0.1.", "localhost.", "1.2.3.4.5", "256.0.0.1", "a.1", "a..b", "[::1", "::1",
        "[127.0.0.1]",
        "[fe80::1%25eth0]", "[fe80::1%eth0]", "-a.example", "a" * 64 + ".example", "a." * 130 + "b",
        "１２７.0.0.1", "ⓛocalhost", "bücher.example", "local%68ost", "a_b@c", "",
    ],
)  # fmt: skip
def test_a_host_in_an_unusual_form_is_refused(host: str) -> None:
    for allowed in (NOTHING, Allowed.parse("localhost,0.0.0.0/0,::/0")):
        with pytest.raises(InvalidMessage, match="url"):
            allowed.check_url(f"http://{host}/hook")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.example/", "file:///etc/passwd", "gopher://a.example/", "//a.example/", "a.example", "HTTP://a.example/",
        "http:/a.example", "http:a.example", "http://user@a.example/", "http://user:pass@a.example/",
        "http://a.example\\@b.example/", "http://a.example#@b.example/", "http://a.example/#x", "http://a.example /",
        "http://a.example/\r\nhost: b", "http://a.example/\x00", "http://a.example/ü", "http://a.example:/",
        "http://a.example:0/", "http://a.example:65536/", "http://a.example:80:80/", "http://a.example:+80/",
        " http://a.example/", "http://a.example/\n", "http://a.example/" + "a" * 2_048, "http://a.example/{x}", "",
    ],
)  # fmt: skip
def test_a_url_that_libraries_read_differently_is_refused(url: str) -> None:
    with pytest.raises(InvalidMessage, match="url"):
        NOTHING.check_url(url)


def test_low_ports_are_refused_unless_allowed() -> None:
    for port in (80, 443, 1024, 8443, 65_535):
        assert NOTHING.check_url(f"http://a.example:{port}/").port == port
    for port in (1, 22, 25, 53, 1023):
        with pytest.raises(InvalidMessage, match=f"port {port}"):
            NOTHING.check_url(f"http://a.example:{port}/")
    allowed = Allowed.parse("a.example,10.0.0.0/8")
    assert allowed.check_url("http://a.example:25/").port == 25
    assert allowed.check_url("http://10.0.0.1:25/").port == 25
    with pytest.raises(InvalidMessage):
        allowed.check_url("http://b.example:25/")


def test_a_url_is_parsed_into_scheme_host_port_and_address() -> None:
    assert parse("https://A.Example/hook?x=1&y=%20") == ("https", "a.example", 443, None)
    assert parse("http://a.example") == ("http", "a.example", 80, None)
    assert parse("http://[2606:4700::1]:8080?x") == (
        "http",
        "2606:4700::1",
        8080,
        ip_address("2606:4700::1"),
    )


def test_a_host_name_is_not_read_as_an_address() -> None:
    assert (
        is_name("localhost")
        and is_name("a-b_c.example")
        and is_name("xn--bcher-kva.example")
        and is_name("0x.a")
    )
    assert (
        not is_name("")
        and not is_name("1")
        and not is_name("a.0x1f")
        and not is_name("a.")
        and not is_name("A")
    )
