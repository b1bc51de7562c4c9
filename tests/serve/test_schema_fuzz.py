"""Requests that nobody would write, made from the server's own schema: never an error of the server's.

pytest tests/serve/test_schema_fuzz.py                                 some for each endpoint
pytest -sv tests/serve/test_schema_fuzz.py --hypothesis-profile=fuzz   a thousand for each, others every time
"""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from fakes import FakeDrawer, client
from hypothesis import strategies as st

from rocm_sd.serve import Limits

schemathesis = pytest.importorskip("schemathesis")

COUNTS: Counter[tuple[str, int]] = Counter()


@pytest.fixture(scope="module")
def fuzzed(request):
    """A server that draws nothing but colours."""
    with client(FakeDrawer(), limits=Limits(pictures=64, queue=500, steps=1000, seconds=20), raises=False) as made:
        yield made
    writer = request.config.get_terminal_writer()
    for (path, status), count in sorted(COUNTS.items()) if request.config.get_verbosity() > 0 else ():
        writer.line(f"{path}: {count} answered {status}")


def test_no_request_is_too_odd(fuzzed):
    schema = schemathesis.openapi.from_dict(fuzzed.get("/openapi.json").json())
    few = hypothesis.settings.default.derandomize
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:

        @hypothesis.settings(
            max_examples=15 if few else 1000,
            deadline=None,
            derandomize=few,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case):
            given = case.as_transport_kwargs(base_url="http://testserver")
            sent = {name: given.get(name) for name in ("headers", "params", "cookies", "json", "data", "files")}
            sent |= {"content": given["content"]} if given.get("content") is not None else {}
            # What HTTP itself cannot have in a header never reaches a server.
            headers = {name: value for name, value in (sent.pop("headers") or {}).items() if _can_be_sent(name, value)}
            sent = {name: value for name, value in sent.items() if value is not None}
            answer = fuzzed.request(given["method"], given["url"], headers=headers, **sent)
            COUNTS[case.path, answer.status_code] += 1
            assert answer.status_code < 500, (answer.status_code, answer.text[:500], given)
            assert answer.headers["x-request-id"]

        ask()


def _can_be_sent(name, value):
    try:
        name.encode("ascii"), str(value).encode("ascii")
    except UnicodeEncodeError:
        return False
    return not any(char in str(value) for char in "\r\n\0")


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    origin=st.one_of(st.text("htps:/[]@.%1a ", max_size=12), st.text(max_size=8)).filter(
        lambda text: _can_be_sent("o", text)
    ),
    host=st.one_of(st.none(), st.text("[]:.1a%@", max_size=8)),
)
@hypothesis.example(origin="http://[", host=None)
def test_no_origin_and_no_host_is_too_odd(fuzzed, origin, host):
    headers = {"origin": origin} | ({} if host is None else {"host": host})
    answer = fuzzed.post("/v1/images/generations", json={"prompt": ""}, headers=headers)
    assert answer.status_code in {400, 403}
    assert answer.headers["x-request-id"]


def test_most_were_refused_and_some_were_drawn():
    if not COUNTS:
        pytest.skip("the requests ran elsewhere")
    by_status = Counter()
    for (_, status), count in COUNTS.items():
        by_status[status] += count
    assert sum(count for (path, status), count in COUNTS.items() if status == 200 and "images" in path) > 0
    assert by_status[400] + by_status[422] > 20
