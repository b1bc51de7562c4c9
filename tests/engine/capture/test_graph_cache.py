from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.engine.capture.cache import Shelf


@dataclass
class Item:
    memory: int


def shelf_on_a_card_of(total):
    """As on a GPU: what the items hold is not free."""
    shelf: Shelf[Item] = Shelf(lambda: (total - shelf.memory) // 2)
    return shelf


def test_items_hold_half_of_the_memory_at_most():
    shelf = shelf_on_a_card_of(100)
    for key in range(10):
        shelf.put(key, Item(10))
    assert shelf.memory == 50
    assert shelf.dropped == 5


def test_the_least_recently_used_gives_way():
    shelf = shelf_on_a_card_of(60)
    for key in "abc":
        shelf.put(key, Item(10))
    assert shelf.get("a") is not None
    shelf.put("d", Item(10))
    assert shelf.get("b") is None
    assert all(shelf.get(key) is not None for key in "acd")


def test_the_last_one_stays_whatever_it_holds():
    shelf = shelf_on_a_card_of(10)
    shelf.put("small", Item(1))
    shelf.put("large", Item(9))
    assert [item.memory for item in shelf] == [9]


def test_there_are_never_more_than_32():
    shelf = shelf_on_a_card_of(10**9)
    for key in range(40):
        shelf.put(key, Item(1))
    assert len(shelf) == 32
    assert shelf.get(7) is None
    assert shelf.get(8) is not None


def test_an_item_that_is_put_again_is_not_counted_twice():
    shelf = shelf_on_a_card_of(100)
    item = Item(10)
    shelf.put("a", item)
    item.memory = 30
    shelf.put("a", item)
    assert (len(shelf), shelf.memory) == (1, 30)
    shelf.drop("a")
    shelf.drop("a")
    assert not len(shelf)
