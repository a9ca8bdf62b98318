"""Caches that share a cluster: hits, a node that dies, and a server that is no cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import pagedkv as pk
from tests.remote.servers import Server, cluster, server
from tests.remote.test_sharing import open_cache, prompt_of, remote_stats, run
from tests.slices import one_in

CLUSTER = {"cluster": True, "insecure": True}
TENANT = pk.Namespace(tenant="a")


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    pytest.importorskip("glide_sync", reason="valkey-glide-sync is not installed: pip install '.[test]'")


@pytest.fixture
def nodes() -> Iterator[list[Server]]:
    with cluster() as found:
        yield found


@pytest.mark.parametrize("seal", one_in(2, [True, False]))
def test_a_second_cache_finds_all_blocks_in_a_cluster(nodes: list[Server], seal: bool) -> None:
    prompts = [prompt_of(number) for number in range(3)]
    with open_cache(nodes[0].tcp, **CLUSTER, required=True, seal=seal) as first:
        for prompt in prompts:
            run(first, prompt)
            assert first.publish(prompt) == 20
    assert all(node.client().dbsize() for node in nodes), "the blocks must lie on all nodes"
    with open_cache(nodes[1].tcp, **CLUSTER, required=True, seal=seal) as second:
        for prompt in prompts:
            assert run(second, prompt) == {"device": 0, "remote": 320, "partial": 0}
        second.check_integrity()


@pytest.mark.slow
def test_a_purge_deletes_a_namespace_on_all_nodes_and_no_other(nodes: list[Server]) -> None:
    with open_cache(nodes[2].tcp, **CLUSTER, required=True) as cache:
        for namespace in (None, TENANT):
            run(cache, prompt_of(1), namespace)
            assert cache.publish(prompt_of(1), namespace) == 20
        cache.purge(TENANT)
        assert sum(node.client().dbsize() for node in nodes) == 20
        assert run(cache, prompt_of(1), TENANT)["remote"] == 0
    with open_cache(nodes[0].tcp, **CLUSTER, required=True) as other:
        assert run(other, prompt_of(1))["remote"] == 320


def test_a_node_that_dies_costs_nothing_but_hits(nodes: list[Server]) -> None:
    prompts = [prompt_of(number) for number in range(4)]
    limits = {"lookup_s": 2.0, "read_s": 2.0, "write_s": 2.0}
    with open_cache(nodes[0].tcp, **CLUSTER, required=True) as first:
        for prompt in prompts:
            run(first, prompt)
            assert first.publish(prompt) == 20
    with open_cache(nodes[0].tcp, **CLUSTER, required=True, **limits) as second:
        assert run(second, prompts[0])["remote"] == 320
        nodes[1].process.kill()
        for prompt in prompts[1:]:
            run(second, prompt)  # compares every byte
        assert run(second, prompts[0])["device"] == 320
        second.check_integrity()


@pytest.mark.slow
def test_a_single_server_as_a_cluster_costs_nothing_but_hits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pagedkv")
    with server() as running:
        with open_cache(running.tcp, **CLUSTER, connect_s=2.0) as cache:
            run(cache, prompt_of(1))
            assert remote_stats(cache)["state"] == "off"
        assert "cluster" in caplog.text
        with pytest.raises(pk.TierError, match="cluster"):
            open_cache(running.tcp, **CLUSTER, required=True, connect_s=2.0)
