from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.engine.capture.graph import GraphCache


@dataclass
class Item:
    memory: int


def cache_on_a_card_of(total):
    """As on a GPU: what the items hold is not free."""
    cache: GraphCache[Item] = GraphCache(lambda: (total - cache.memory) // 2)
    return cache


def test_items_hold_half_of_the_memory_at_most():
    cache = cache_on_a_card_of(100)
    for key in range(10):
        cache.put(key, Item(10))
    assert cache.memory == 50
    assert cache.dropped == 5


def test_the_least_recently_used_gives_way():
    cache = cache_on_a_card_of(60)
    for key in "abc":
        cache.put(key, Item(10))
    assert cache.get("a") is not None
    cache.put("d", Item(10))
    assert cache.get("b") is None
    assert all(cache.get(key) is not None for key in "acd")


def test_the_last_one_stays_whatever_it_holds():
    cache = cache_on_a_card_of(10)
    cache.put("small", Item(1))
    cache.put("large", Item(9))
    assert [item.memory for item in cache] == [9]


def test_there_are_never_more_than_32():
    cache = cache_on_a_card_of(10**9)
    for key in range(40):
        cache.put(key, Item(1))
    assert len(cache) == 32
    assert cache.get(7) is None
    assert cache.get(8) is not None


def test_an_item_that_is_put_again_is_not_counted_twice():
    cache = cache_on_a_card_of(100)
    item = Item(10)
    cache.put("a", item)
    item.memory = 30
    cache.put("a", item)
    assert (len(cache), cache.memory) == (1, 30)
    cache.drop("a")
    cache.drop("a")
    assert not len(cache)
