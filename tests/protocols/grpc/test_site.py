"""Where clients are told to dial."""

from __future__ import annotations

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.protocols.grpc._generated.definition_pb2 import AddressScheme
from timeball.protocols.grpc.clients import Clients
from timeball.protocols.grpc.site import Site, endpoints

DIALLED = endpoints("10.1.2.3", 9999)


@pytest.mark.parametrize(
    ("host", "scheme"),
    [
        ("10.0.0.1", AddressScheme.IPv4),
        ("::1", AddressScheme.IPv6),
        ("broker.shop", AddressScheme.DOMAIN_NAME),
    ],
)
def test_a_name_is_told_with_its_kind(host: str, scheme: AddressScheme) -> None:
    found = endpoints(host, 8081)
    assert found.scheme == scheme
    assert [(each.host, each.port) for each in found.addresses] == [(host, 8081)]


@on_node()
async def test_without_a_name_of_ours_clients_go_on_with_what_they_have_dialled(world: World) -> None:
    site = Site(world.broker, Clients(), 8081)
    assert site.endpoints(DIALLED) == DIALLED
    assert site.endpoints(endpoints("", 0).__class__()) == endpoints("127.0.0.1", 8081)


@on_node(advertise="broker.shop:10911")
async def test_a_name_of_ours_counts_without_the_other_ports_number(world: World) -> None:
    assert Site(world.broker, Clients(), 8081).endpoints(DIALLED) == endpoints("broker.shop", 8081)


@on_node(advertise="[2001:db8::1]:10911")
async def test_an_ipv6_address_may_have_brackets(world: World) -> None:
    assert Site(world.broker, Clients(), 8081).endpoints(DIALLED) == endpoints("2001:db8::1", 8081)


@on_node(advertise="2001:db8::1")
async def test_an_ipv6_address_without_brackets_has_no_port(world: World) -> None:
    assert Site(world.broker, Clients(), 8081).endpoints(DIALLED) == endpoints("2001:db8::1", 8081)


@on_node()
async def test_silence_is_measured_by_a_clock_that_nobody_sets(world: World) -> None:
    site = Site(world.broker, Clients())
    before = site.monotonic_ms()
    world.clock.step_wall(1_000_000)
    assert site.monotonic_ms() == before
    world.clock.advance(5)
    assert site.monotonic_ms() == before + 5
