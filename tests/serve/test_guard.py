"""Who may call, how much may be sent, and what every answer has on it."""

from __future__ import annotations

import base64

import pytest
from fakes import FakeDrawer, client

from rocm_sd.errors import InvalidOption, RocmSdError, Unsupported
from rocm_sd.serve import Limits, ServeConfig
from rocm_sd.serve.config import is_loopback
from rocm_sd.serve.keys import Keys, add_key

BODY = {"prompt": "a frog", "steps": 1, "size": "64x64"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys = {name: add_key(file, name) for name in ("alice", "bob")}
    with client(keys=file, host="0.0.0.0", origins=("https://friend.example",)) as api:
        api.keys, api.file = keys, file
        yield api


def test_only_hashes_are_kept_and_nobody_else_reads_them(keyed):
    text = keyed.file.read_text()
    assert all(key not in text for key in keyed.keys.values())
    assert keyed.file.stat().st_mode & 0o077 == 0
    found = Keys(keyed.file)
    assert found.name_of(keyed.keys["bob"]) == "bob"
    assert found.name_of("") is None
    assert found.name_of("rsd-wrong") is None


@pytest.mark.parametrize("how", ["bearer", "x-api-key", "basic"])
def test_a_key_opens(keyed, how):
    key = keyed.keys["alice"]
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    headers = {
        "bearer": {"authorization": f"Bearer {key}"},
        "x-api-key": {"x-api-key": key},
        "basic": {"authorization": f"Basic {basic}"},
    }[how]
    assert keyed.post("/v1/images/generations", json=BODY, headers=headers).status_code == 200
    assert keyed.server.service.jobs.popitem()[1].client == "alice"


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer rsd-wrong"}, {"authorization": "Basic %%%"}])
@pytest.mark.parametrize("path", ["/v1/images/generations", "/api/info", "/metrics", "/sdapi/v1/progress", "/nosuch"])
def test_without_one_nothing_but_the_page_is_shown(keyed, header, path):
    answer = keyed.get(path, headers=header)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    for shown in ("/", "/healthz", "/readyz", "/openapi.json"):
        assert keyed.get(shown).status_code == 200


def test_jobs_are_their_owners(keyed):
    mine, other = ({"x-api-key": keyed.keys[name]} for name in ("alice", "bob"))
    job = keyed.post("/api/jobs", json={"prompt": "x", "steps": 1}, headers=mine).json()["id"]
    assert keyed.get(f"/api/jobs/{job}", headers=mine).status_code == 200
    assert keyed.get(f"/api/jobs/{job}", headers=other).status_code == 404
    assert keyed.delete(f"/api/jobs/{job}", headers=other).status_code == 404


def test_a_server_without_keys_listens_to_this_machine_alone():
    with pytest.raises(Unsupported, match="no API key"):
        ServeConfig(host="0.0.0.0")
    for host, local in (("127.0.0.1", True), ("::1", True), ("localhost", True), ("", False), ("10.0.0.1", False)):
        assert is_loopback(host) is local


@pytest.fixture(scope="module")
def open_here():
    with client(origins=("https://friend.example",), limits=Limits(body_bytes=4096)) as api:
        yield api


def test_another_name_is_refused_as_a_rebound_one_would_be(open_here):
    answer = open_here.get("/api/info", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert "--allow-host" in answer.json()["detail"]
    for name in ("127.0.0.1:7860", "localhost", "[::1]:7860", "testserver"):
        assert open_here.get("/api/info", headers={"host": name}).status_code == 200


def test_without_keys_a_call_of_another_machine_is_refused_by_whatever_name():
    with client(FakeDrawer(), peer="10.0.0.7", loaded=False) as api:
        for path in ("/api/info", "/", "/readyz"):
            answer = api.get(path, headers={"host": "localhost"})
            assert answer.status_code == 403
            assert "--keys" in answer.json()["detail"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://testserver.evil.example", "http://["])
def test_pages_of_other_sites_cannot_draw(open_here, origin):
    answer = open_here.post("/v1/images/generations", json=BODY, headers={"origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in open_here.get("/api/info", headers={"origin": origin}).headers


def test_the_own_page_and_friends_can(open_here):
    for origin in ("http://testserver", "https://friend.example"):
        answer = open_here.post("/v1/images/generations", json=BODY, headers={"origin": origin})
        assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"


def test_a_friends_browser_may_ask_first_where_a_key_is_needed(keyed):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = keyed.options("/v1/images/generations", headers=asks | {"origin": "https://friend.example"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert keyed.options("/v1/images/generations", headers=asks | {"origin": "https://evil.example"}).status_code == 400
    for headers in ({}, {"authorization": f"Bearer {keyed.keys['alice']}"}):
        answer = keyed.post(
            "/v1/images/generations", json=BODY, headers={"origin": "https://friend.example", **headers}
        )
        assert answer.status_code == (200 if headers else 401)
        assert answer.headers["access-control-allow-origin"] == "https://friend.example", "or nobody reads why"


def test_what_is_too_large_is_refused_with_and_without_its_length(open_here):
    large = {"prompt": "x" * 5000}
    assert open_here.post("/v1/images/generations", json=large).status_code == 413

    def chunks():
        for _ in range(10):
            yield b"x" * 1000

    answer = open_here.post("/v1/images/generations", content=chunks())
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/", "/api/info", "/nosuch", "/v1/images/generations"])
def test_every_answer_has_its_headers(open_here, path):
    headers = open_here.get(path, headers={"x-request-id": "my-id"}).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-request-id"] == "my-id"
    assert headers["cache-control"]
    assert open_here.get(path, headers={"x-request-id": "a b\tc"}).headers["x-request-id"] != "a b\tc"


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/..%2fapp.py", "/page/nosuch.js", "/pictures/../keys.txt"])
def test_nothing_else_is_served(open_here, path):
    assert open_here.get(path).status_code == 404


def test_a_file_of_keys_that_is_none(tmp_path):
    file = tmp_path / "keys.txt"
    for text in ("", "alice", "alice:123", "alice:" + "g" * 64):
        file.write_text(text)
        with pytest.raises(RocmSdError, match="no file of keys"):
            Keys(file)
    with pytest.raises(RocmSdError, match="cannot be read"):
        Keys(tmp_path / "nosuch")
    with pytest.raises(InvalidOption):
        add_key(tmp_path / "new.txt", "a b")
    add_key(tmp_path / "new.txt", "ann")
    with pytest.raises(InvalidOption, match="remove its line"):
        add_key(tmp_path / "new.txt", "ann")
