"""Keys, origins, certificates, cache namespaces: who may ask, and what a request can learn of others."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from core.frontends.access import Keys, salted
from core.frontends.http import HttpFrontend
from core.types import ConfigError
from plugins.allocators.prefix import PrefixAllocator
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, Reply, own_certificate, post

ALICE, BOB = "alice-secret-key", "bob-secret-key"
ORIGIN = "https://example.org"
HEALTH = ("/health", "/health/live", "/health/ready")
GUARDED = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/toy"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("GET", "/healthy"),
    ("GET", "//health"),
    ("GET", "/HEALTH"),
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """Alice's key as it is sent, Bob's as its hash; a prefix cache; one origin."""
    keys = [ALICE, "sha256:" + hashlib.sha256(BOB.encode()).hexdigest()]
    with serving(toy_engine(allocator=PrefixAllocator()), api_keys=keys, cors_origins=[ORIGIN]) as server:
        yield server


def ask(server: Server, key: str | None, method: str = "POST", path: str = "/v1/completions", **fields: Any) -> Reply:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = key if " " in key else f"Bearer {key}"
    return Reply(server, method, path, {**COMPLETION, **fields} if method == "POST" else None, headers)


# ------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_every_route_needs_a_key(guarded: Server, method: str, path: str) -> None:
    """Also those that do not exist: nobody learns which do."""
    reply = ask(guarded, None, method, path)
    assert (reply.status, reply.error()["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"]
    assert ask(guarded, ALICE, method, path).status != 401


@pytest.mark.parametrize("path", HEALTH)
def test_health_needs_none(guarded: Server, path: str) -> None:
    assert ask(guarded, None, "GET", path).status == 200


@pytest.mark.parametrize(
    "key",
    ["", "nobody's", ALICE[:-1], ALICE + "x", ALICE.upper(), f"Basic {ALICE}", f"Bearer {ALICE} {BOB}", "Bearer ",
     hashlib.sha256(BOB.encode()).hexdigest(), "sha256:" + hashlib.sha256(BOB.encode()).hexdigest(), "Bearer \xe4\xff"],
)  # fmt: skip
def test_what_is_no_key(guarded: Server, key: str) -> None:
    """Neither parts of one nor a hash, which somebody may have read."""
    reply = ask(guarded, key)
    assert reply.status == 401
    assert ALICE not in reply.error()["message"]


@pytest.mark.parametrize("key", [ALICE, BOB, f"bearer {BOB}"])
def test_good_keys(guarded: Server, key: str) -> None:
    assert ask(guarded, key, max_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_openais_client_with_and_without_the_key(guarded: Server) -> None:
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=BOB, max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).usage.completion_tokens == 5
    client = openai.OpenAI(base_url=guarded.url + "/v1", api_key="wrong-key", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_without_keys_everybody_is_let_in() -> None:
    with serving(toy_engine()) as server:
        assert ask(server, None).status == ask(server, "any-key").status == 200


def test_keys_of_a_file(tmp_path: Path) -> None:
    """Comments and empty lines are none; keys of the list stay good."""
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{ALICE}\n  sha256:{hashlib.sha256(BOB.encode()).hexdigest().upper()}  \n")
    keys = Keys(["another-one"], str(file))
    assert all(keys.accepts(key) for key in (ALICE, BOB, "another-one"))
    assert not any(keys.accepts(key) for key in ("# of the team", "", "of the team"))
    assert ALICE not in repr(vars(keys)), "kept as hashes"


@pytest.mark.parametrize(
    ("text", "said"),
    [("short\n", "line 1: a key has 8"), (f"{ALICE}\ntwo words\n", "line 2"), ("sha256:abc\n", "64 hexadecimal"),
     ("# none\n", "has no keys"), (None, "cannot be read: No such file"), (b"\xff\xfe\x00", "not UTF-8")],
)  # fmt: skip
def test_a_bad_file_of_keys_stops_the_start(tmp_path: Path, text: Any, said: str) -> None:
    """The line is named, the key is not."""
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said) as error:
        HttpFrontend(port=0, api_keys_file=str(file)).check()
    assert "two words" not in str(error.value)


# ------------------------------------------------------------------------------------------------ the cache


def cached(server: Server, key: str, prompt: str, **fields: Any) -> int:
    reply = ask(server, key, prompt=prompt, max_tokens=1, **fields).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_key_finds_what_it_cached_itself_and_nothing_else(guarded: Server) -> None:
    """Also by salt within a key; no salt of one key names what belongs to another."""
    prompt = "the same long prompt of two people " * 4
    assert cached(guarded, ALICE, prompt) == 0
    assert cached(guarded, ALICE, prompt) > 100
    assert cached(guarded, BOB, prompt) == 0
    assert cached(guarded, BOB, prompt) > 100
    assert cached(guarded, ALICE, prompt, cache_salt="a") == 0
    assert cached(guarded, ALICE, prompt, cache_salt="a") > 100
    owner = hashlib.sha256(ALICE.encode()).hexdigest()[:32]
    salt = hashlib.sha256(b"a").hexdigest()
    for guess in ("a", owner, f"{owner}:{salt}", f"{owner}:a"):
        assert cached(guarded, BOB, prompt, cache_salt=guess) == 0


def test_a_salt_is_the_clients_own_without_keys() -> None:
    assert salted({}, "mine") == "mine"
    assert salted({}, "") == ""


@pytest.mark.parametrize("stream", [False, True])
def test_counts_of_cached_tokens_can_be_hidden(stream: bool) -> None:
    """The cache works all the same."""
    with serving(toy_engine(allocator=PrefixAllocator()), hide_cached_tokens=True) as server:
        body = {**COMPLETION, "prompt": "x" * 200, "max_tokens": 2, "stream": stream}
        for _ in range(2):
            reply = post(
                server, "/v1/completions", {**body, **({"stream_options": {"include_usage": True}} if stream else {})}
            )
            usage = (reply.events()[-1] if stream else reply.json())["usage"]
            assert usage == {
                "prompt_tokens": 200,
                "completion_tokens": 2,
                "total_tokens": 202,
                "prompt_tokens_details": None,
            }
        hits = [
            line for line in Reply(server, "GET", "/metrics").data.decode().splitlines() if "cache_hits_total{" in line
        ]
        assert float(hits[0].rsplit(" ", 1)[1]) > 100


# ------------------------------------------------------------------------------------------------ browsers


def from_page(server: Server, origin: str, method: str = "GET", path: str = "/v1/models", **headers: str) -> Reply:
    return Reply(
        server, method, path, headers={"origin": origin, **{k.replace("_", "-"): v for k, v in headers.items()}}
    )


def test_an_allowed_page_may_read_answers(guarded: Server) -> None:
    """The preflight needs no key, the request does, and the page can also read why it was refused."""
    before = from_page(guarded, ORIGIN, "OPTIONS", access_control_request_method="POST")
    assert before.status == 200
    assert "authorization" in before.headers["access-control-allow-headers"]
    good = from_page(guarded, ORIGIN, authorization=f"Bearer {ALICE}")
    assert good.status == 200
    bad = from_page(guarded, ORIGIN)
    assert bad.status == 401
    for reply in (before, good, bad):
        assert reply.headers["access-control-allow-origin"] == ORIGIN
        assert reply.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in reply.headers
    assert "retry-after" in good.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["https://example.org.evil.net", "http://example.org", "https://example.org:444", "null", "*"]
)
def test_other_pages_may_not(guarded: Server, origin: str) -> None:
    """Origins are compared whole."""
    reply = from_page(guarded, origin, authorization=f"Bearer {ALICE}")
    assert "access-control-allow-origin" not in reply.headers
    assert from_page(guarded, origin, "OPTIONS", access_control_request_method="POST").status == 403


def test_without_origins_no_page_may() -> None:
    with serving(toy_engine()) as server:
        assert "access-control-allow-origin" not in from_page(server, ORIGIN).headers
        assert from_page(server, ORIGIN, "OPTIONS", access_control_request_method="POST").status == 405


@pytest.mark.parametrize("origin", ["*", "example.org", "https://example.org/", "https://*.example.org", "", 5])
def test_origins_that_are_none(origin: Any) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        HttpFrontend(port=0, cors_origins=[origin])


# ------------------------------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of its own for 127.0.0.1, and its key."""
    return own_certificate(tmp_path_factory.mktemp("tls"))


def test_https(certificate: tuple[str, str]) -> None:
    """A client that checks the certificate is answered, one that speaks HTTP is not."""
    with serving(toy_engine(), tls_certfile=certificate[0], tls_keyfile=certificate[1]) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate[0])
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=context)
        connection.request("POST", "/v1/completions", json.dumps(COMPLETION), {"content-type": "application/json"})
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 16
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            Reply(server, "GET", "/health")


def test_bad_certificates_stop_the_start(certificate: tuple[str, str], tmp_path: Path) -> None:
    """One without the other, a file that is not there, one that is none."""
    cert, key = certificate
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ConfigError, match="together or not at all"):
        HttpFrontend(port=0, tls_certfile=cert).check()
    for pair in ((cert, str(tmp_path / "none")), (str(tmp_path / "text"), key), (key, cert)):
        with pytest.raises(ConfigError, match="cannot be used"):
            HttpFrontend(port=0, tls_certfile=pair[0], tls_keyfile=pair[1]).check()
