"""What /metrics says where other processes draw: their figures stand beside the server's own, and leave with them."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rocm_sd.engine.batching import BatchDone
from rocm_sd.serve import metrics as module
from rocm_sd.serve.metrics import Metrics


def replica(pictures):
    """The figures of one that ran a step of so many."""
    one = Metrics()
    one.watch_memory()
    one.batch(BatchDone("sdxl", pictures, 2 * pictures, 1, 0.1))
    return one.of_a_replica()


@pytest.fixture
def server():
    one = Metrics()
    one.watch_memory()
    return one


def samples(server, name):
    text = server.text().decode()
    families = list(text_string_to_metric_families(text))
    # A name that stood twice would be refused by who reads it.
    assert len(re.findall("^# TYPE (.+?) ", text, re.MULTILINE)) == len({family.name for family in families})
    return {tuple(sorted(s.labels.items())): s.value for family in families for s in family.samples if s.name == name}


def test_figures_of_replicas_have_their_names_and_are_not_added_up(server):
    server.replica("one", replica(3))
    server.replica("two", replica(5))
    server.replica("two", replica(7))
    found = samples(server, "rocm_sd_batch_pictures_sum")
    assert found == {
        (("model", "sdxl"), ("replica", "one")): 3.0,
        (("model", "sdxl"), ("replica", "two")): 7.0,
    }
    assert samples(server, "rocm_sd_padded_samples_total")[("model", "sdxl"), ("replica", "one")] == 1.0


def test_memory_is_that_of_each_process(server):
    server.replica("one", replica(1))
    found = samples(server, "rocm_sd_host_memory_bytes")
    assert found.keys() == {(), (("replica", "one"),)}
    assert min(found.values()) > 1e6


def test_what_the_queue_counts_is_the_servers_alone(server):
    server.requests.labels("page", "done").inc()
    server.replica("one", replica(1))
    assert samples(server, "rocm_sd_requests_total") == {(("api", "page"), ("state", "done")): 1.0}
    assert {metric.name for metric in replica(1)} == module._OF_A_REPLICA


def test_a_replica_that_is_not_heard_of_any_more_is_left_out(server, monkeypatch):
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    server.replica("one", replica(1))
    now += module._GONE_S / 2
    server.replica("two", replica(1))
    assert len(samples(server, "rocm_sd_step_seconds_count")) == 2
    now += module._GONE_S * 0.6
    assert samples(server, "rocm_sd_step_seconds_count").keys() == {(("model", "sdxl"), ("replica", "two"))}
