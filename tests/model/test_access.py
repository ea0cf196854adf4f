"""Access: everything that is not granted is refused, in every form, and no secret is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.access import ANONYMOUS, DATE_DRIFT_MS_MAX, Access, Principal, Verb, parse
from timeball.model.errors import Forbidden, RequestError, SetupError, Unauthorized

SECRET = "shop secret 1"
FILE = f"""
[[accounts]]
access_key = "shop"
secret_key = "{SECRET}"
topics = {{ "orders" = "PUB|SUB", "sales" = "PUB", "news" = "SUB", "payroll" = "DENY", "both" = "ANY" }}
groups = {{ "workers" = "SUB" }}

[[accounts]]
access_key = "wide"
secret_key = "wide secret 2"
topics = {{ "*" = "ANY", "payroll" = "DENY" }}
groups = {{ "*" = "SUB", "bosses" = "DENY" }}

[[accounts]]
access_key = "root"
secret_key = "root secret 3"
admin = true
"""
DATE, DATE_MS = "20300131T090000Z", 1_896_080_400_000
# printf '20300131T090000Z' | openssl dgst -sha1 -hmac 'shop secret 1'
DATE_SIGNED = "470fcb2998a2e2583675a15d26fa242d5da196eb"


def access(text: str = FILE) -> Access:
    return Access(parse(text.encode(), "access.toml"))


def caller(name: str) -> Principal:
    secrets = {"shop": SECRET, "wide": "wide secret 2", "root": "root secret 3"}
    return access().authenticate({"authorization": f"Bearer {name}:{secrets[name]}"}, 0)


def test_a_signature_authenticates_the_caller_at_another_node() -> None:
    headers = caller("shop").signature(DATE_MS)
    assert access().authenticate(headers, DATE_MS).name == "shop"
    with pytest.raises(Unauthorized):
        access().authenticate(headers | {"x-mq-date-time": "20300131T090001Z"}, DATE_MS)
    assert ANONYMOUS.signature(DATE_MS) == {}


def signed_headers(
    credential: str = "shop", signature: str = DATE_SIGNED, date: str = DATE
) -> dict[str, str]:
    text = f"MQv2-HMAC-SHA1 Credential={credential}, SignedHeaders=x-mq-date-time, Signature={signature}"
    return {"authorization": text, "x-mq-date-time": date}


# ---- authentication --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        signed_headers(),
        signed_headers(signature=DATE_SIGNED.upper()),  # Java
        signed_headers("shop/cn/rmq"),
        {"authorization": f"Bearer shop:{SECRET}"},
        {"authorization": f"bearer  shop:{SECRET}"},
    ],
    ids=["signed", "capitals", "region", "bearer", "small"],
)
def test_valid_credentials_authenticate_their_account(headers: dict[str, str]) -> None:
    assert access().authenticate(headers, DATE_MS).name == "shop"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer shop"},
        {"authorization": "Bearer shop:"},
        {"authorization": "Bearer :"},
        {"authorization": "Bearer shop:wrong"},
        {"authorization": f"Bearer nobody:{SECRET}"},
        {"authorization": f"Basic shop:{SECRET}"},
        signed_headers("wide"),
        signed_headers("nobody"),
        signed_headers(""),
        signed_headers(signature="0" * 40),
        signed_headers(signature=""),
        signed_headers(date="20300131T090001Z"),  # another second than the one signed
        signed_headers(date=""),
        signed_headers(date="2030-01-31"),
        signed_headers(date="20301331T090000Z"),
        {"authorization": signed_headers()["authorization"]},
        {
            "authorization": signed_headers()["authorization"].replace("x-mq-date-time", "x-mq-nothing"),
            "x-mq-date-time": DATE,
        },
    ],
    ids=str,
)
def test_invalid_credentials_are_refused_without_the_secret(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as refusal:
        access().authenticate(headers, DATE_MS)
    assert SECRET not in str(refusal.value)


def test_a_date_is_accepted_within_15_hours_of_the_clock_only() -> None:
    for drift_ms in (-DATE_DRIFT_MS_MAX, DATE_DRIFT_MS_MAX):
        assert access().authenticate(signed_headers(), DATE_MS + drift_ms).name == "shop"
    for drift_ms in (-DATE_DRIFT_MS_MAX - 1, DATE_DRIFT_MS_MAX + 1):
        with pytest.raises(Unauthorized, match="15 h"):
            access().authenticate(signed_headers(), DATE_MS + drift_ms)


def test_an_unknown_account_and_a_wrong_secret_get_the_same_error() -> None:
    texts = set()
    for pair in ("shop:wrong", "stranger:wrong"):
        with pytest.raises(Unauthorized) as refusal:
            access().authenticate({"authorization": f"Bearer {pair}"}, 0)
        texts.add(str(refusal.value))
    assert len(texts) == 1


@given(st.dictionaries(st.sampled_from(["authorization", "x-mq-date-time"]), st.text()))
def test_arbitrary_headers_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        access().authenticate(headers, DATE_MS)


@given(
    st.sampled_from(["Bearer ", "MQv2-HMAC-SHA1 ", "MQv2-HMAC-SHA1 Credential="]),
    st.text(st.characters(exclude_categories=[])),
    st.text(),
)
def test_an_arbitrary_header_with_a_valid_scheme_is_refused(begin: str, rest: str, date: str) -> None:
    with pytest.raises(Unauthorized):
        access().authenticate({"authorization": begin + rest, "x-mq-date-time": date}, DATE_MS)


@given(st.text(), st.binary(), st.binary())
def test_an_arbitrary_signature_is_refused(key: str, content: bytes, signature: bytes) -> None:
    with pytest.raises(Unauthorized):
        access().verify(key, content, signature)


@pytest.mark.parametrize(
    ("grants", "may"),
    [
        ("admin = true", True),
        ('topics = { "orders" = "PUB" }', True),
        ('topics = { "*" = "ANY" }', True),
        ('groups = { "g" = "SUB" }', True),  # its retry topic
        ("", False),
        ('topics = { "orders" = "SUB", "news" = "DENY" }', False),
        ('groups = { "g" = "DENY" }', False),
    ],
)
def test_an_account_may_send_if_a_topic_or_group_grants_it(grants: str, may: bool) -> None:
    text = f'[[accounts]]\naccess_key = "one"\nsecret_key = "one secret"\n{grants}\n'
    caller = Access(parse(text.encode(), "access.toml")).named("one")
    if may:
        caller.check_on_any_topic(Verb.SEND)
        return
    with pytest.raises(Forbidden, match="'one' may not send to any topic: PUB on a topic would let it"):
        caller.check_on_any_topic(Verb.SEND)


# ---- permissions ---------------------------------------------------------------------------------------------

CASES: list[tuple[str, Verb, dict[str, str], bool]] = [
    ("shop", Verb.SEND, {"topic": "orders"}, True),
    ("shop", Verb.SEND, {"topic": "sales"}, True),
    ("shop", Verb.SEND, {"topic": "both"}, True),
    ("shop", Verb.SEND, {"topic": "news"}, False),
    ("shop", Verb.SEND, {"topic": "payroll"}, False),
    ("shop", Verb.SEND, {"topic": "unheard"}, False),
    ("shop", Verb.SEND, {"topic": "Orders"}, False),
    ("shop", Verb.SEND, {"topic": "*"}, False),
    ("shop", Verb.SEND, {}, False),
    ("shop", Verb.CANCEL, {"topic": "sales"}, True),
    ("shop", Verb.CANCEL, {"topic": "news"}, False),
    ("shop", Verb.RECEIVE, {"topic": "news", "group": "workers"}, True),
    ("shop", Verb.RECEIVE, {"topic": "news"}, True),
    ("shop", Verb.RECEIVE, {"topic": "news", "group": "bosses"}, False),
    ("shop", Verb.RECEIVE, {"topic": "sales", "group": "workers"}, False),
    ("shop", Verb.RECEIVE, {}, False),
    ("shop", Verb.LOOK, {}, True),
    ("shop", Verb.LOOK, {"topic": "sales"}, True),
    ("shop", Verb.LOOK, {"topic": "news"}, True),
    ("shop", Verb.LOOK, {"topic": "payroll"}, False),
    ("shop", Verb.ADMIN, {}, False),
    ("shop", Verb.ADMIN, {"topic": "orders"}, False),
    ("wide", Verb.SEND, {"topic": "unheard"}, True),
    ("wide", Verb.SEND, {"topic": "payroll"}, False),
    ("wide", Verb.RECEIVE, {"topic": "orders", "group": "bosses"}, False),
    ("wide", Verb.ADMIN, {}, False),
    ("root", Verb.ADMIN, {}, True),
    ("root", Verb.SEND, {"topic": "SCHEDULE_TOPIC_XXXX"}, True),
    # the broker's own topics
    ("wide", Verb.RECEIVE, {"topic": "SCHEDULE_TOPIC_XXXX", "group": "g"}, False),
    ("wide", Verb.RECEIVE, {"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, False),
    ("wide", Verb.LOOK, {"topic": "rmq_sys_wheel_timer"}, False),
    ("wide", Verb.RECEIVE, {"topic": "TRANS_CHECK_MAX_TIME_TOPIC"}, False),
    # what belongs to a group
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers", "group": "workers"}, True),
    ("shop", Verb.SEND, {"topic": "%RETRY%workers"}, True),
    ("shop", Verb.RECEIVE, {"topic": "%DLQ%workers"}, True),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%bosses"}, False),
    ("shop", Verb.RECEIVE, {"topic": "%DLQ%bosses"}, False),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers_news"}, True),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers+news"}, True),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers_sales"}, False),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers_payroll"}, False),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers_unheard"}, False),
    ("shop", Verb.RECEIVE, {"topic": "%EXPIRED%news"}, True),
    ("shop", Verb.RECEIVE, {"topic": "%EXPIRED%payroll"}, False),
    ("shop", Verb.RECEIVE, {"topic": "%RETRY%workers_%EXPIRED%news"}, True),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%anybody_%EXPIRED%orders"}, True),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%anybody_%EXPIRED%payroll"}, False),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%anybody"}, True),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%any_body"}, True),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%bosses"}, False),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%bosses_orders"}, False),
    ("wide", Verb.RECEIVE, {"topic": "%RETRY%anybody_payroll"}, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "verb", "target", "is_allowed"), CASES, ids=str)
def test_an_account_may_do_only_granted_actions(
    name: str, verb: Verb, target: dict[str, str], is_allowed: bool
) -> None:
    principal = caller(name)
    assert principal.may(verb, **target) is is_allowed
    if is_allowed:
        principal.check(verb, **target)
    else:
        with pytest.raises(Forbidden, match=name):
            principal.check(verb, **target)


@given(st.sampled_from(list(Verb)), st.text(), st.text())
def test_an_account_without_grants_may_only_look(verb: Verb, topic: str, group: str) -> None:
    principal = Access(
        parse(b'[[accounts]]\naccess_key = "bare"\nsecret_key = "12345678"', "f")
    ).authenticate({"authorization": "Bearer bare:12345678"}, 0)
    assert not principal.may(verb, topic=topic, group=group)
    assert principal.may(verb) is (verb is Verb.LOOK)


def test_changed_accounts_apply_to_authenticated_callers_at_once() -> None:
    accounts_in_force = access()
    principal = accounts_in_force.authenticate({"authorization": f"Bearer shop:{SECRET}"}, 0)
    accounts_in_force.replace(parse(FILE.replace('"sales" = "PUB"', '"sales" = "DENY"').encode(), "f"))
    with pytest.raises(Forbidden):
        principal.check(Verb.SEND, topic="sales")
    principal.check(Verb.SEND, topic="orders")
    accounts_in_force.replace(parse(FILE.replace(SECRET, "another one").encode(), "f"))
    with pytest.raises(Unauthorized):
        principal.check(Verb.SEND, topic="orders")
    accounts_in_force.replace({})
    assert not principal.may(Verb.LOOK)


# ---- the file -----------------------------------------------------------------------------------------------


def test_no_repr_contains_a_secret() -> None:
    accounts = parse(FILE.encode(), "f")
    shown = f"{accounts} {accounts['shop']!r} {access()!r} {caller('shop')!r}"
    assert "shop" in shown
    assert not [secret for secret in (SECRET, "wide secret 2", "root secret 3") if secret in shown]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "accounts"),
        ("accounts = 3", "accounts"),
        ("[[accounts]]\naccess_key = 'a'", "secret_key"),
        ("[[accounts]]\naccess_key = 'a'\nsecret_key = 'short'", "secret_key"),
        ("[[accounts]]\naccess_key = 'a/b'\nsecret_key = 'long enough'", "access_key"),
        ("[[accounts]]\naccess_key = ''\nsecret_key = 'long enough'", "access_key"),
        ("[[accounts]]\naccess_key = 'a'\nsecret_key = 'long enough'\nadmn = true", "admn"),
        ("[[accounts]]\naccess_key = 'a'\nsecret_key = 'long enough'\nadmin = 1", "admin"),
        ("[[accounts]]\naccess_key = 'a'\nsecret_key = 'long enough'\ntopics = { o = 'READ' }", "READ"),
        ("[[accounts]]\naccess_key = 'a'\nsecret_key = 'long enough'\ntopics = { 'o.*' = 'SUB' }", "topics"),
        ("[[accounts]]\naccess_key = 'a'\nsecret_key = 'long enough'\ntopics = { '%RETRY%g' = 'SUB' }", "%RETRY%g"),
        ("globalWhiteRemoteAddresses = []\n" + FILE, "globalWhiteRemoteAddresses"),
        (FILE + FILE, "twice"),
        ("[[accounts]\n", "line 1"),
        ("accounts = " + "[" * 5_000, "access.toml"),
        ("\x00", "access.toml"),
    ],
)  # fmt: skip
def test_an_invalid_access_file_is_refused_with_its_fault_and_without_secrets(text: str, fault: str) -> None:
    with pytest.raises(SetupError, match=r"--access-file access\.toml") as refusal:
        parse(text.encode(), "access.toml")
    assert fault in str(refusal.value)
    assert SECRET not in str(refusal.value) and "long enough" not in str(refusal.value)


@given(st.binary(max_size=200))
def test_an_arbitrary_access_file_is_refused(data: bytes) -> None:
    with pytest.raises(SetupError):
        parse(data, "f")


WORDS: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["topics", "access_key", "x"]), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["access_key", "secret_key", "admin", "topics", "groups", "x"]), WORDS)
)
def test_an_arbitrary_account_is_refused_or_read_as_written(account: dict[str, Any]) -> None:
    try:
        accounts = parse(_toml(account), "f")
    except SetupError:
        return
    for parsed_account in accounts.values():
        assert msgspec.structs.asdict(parsed_account).items() >= account.items()


def _toml(account: dict[str, Any]) -> bytes:
    """Write an access file with this account."""

    def toml_value(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(toml_value, value)) + "]"
        return json.dumps(value)

    lines = "".join(f"{name} = {toml_value(value)}\n" for name, value in account.items())
    return f"[[accounts]]\n{lines}".encode("utf-8", "surrogatepass")


def test_the_access_file_in_the_documentation_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs/security.md").read_text("utf-8")
    [file_text] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    accounts = parse(file_text.encode(), "security.md")
    assert [account.admin for account in accounts.values()] == [False, False, True]
    assert not Principal(Access(accounts), accounts["metrics"]).may(Verb.RECEIVE, topic="payroll")


def test_the_headers_in_the_documentation_authenticate() -> None:
    page = (Path(__file__).parents[2] / "docs/security.md").read_text("utf-8")
    lines = re.findall(r"^authorization: (.*)$", page, re.MULTILINE)
    for line in lines:
        line = (
            line.replace("<access key>", "shop").replace("<secret key>", SECRET).replace("<hex>", DATE_SIGNED)
        )
        assert access().authenticate({"authorization": line, "x-mq-date-time": DATE}, DATE_MS).name == "shop"
    assert len(lines) == 2 and f"x-mq-date-time: {DATE}" in page


def test_a_removed_account_is_no_caller_any_more() -> None:
    accounts = access()
    assert accounts.named("shop") == accounts.authenticate({"authorization": f"Bearer shop:{SECRET}"}, 0)
    accounts.replace({})
    with pytest.raises(Unauthorized, match="not in the access file any more"):
        accounts.named("shop")


def test_unauthorized_and_forbidden_are_request_errors() -> None:
    assert issubclass(Unauthorized, RequestError) and issubclass(Forbidden, RequestError)
