from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4lite.paging import PAGE_TOKENS
from dsv4lite.scheduling.pages import IdPool, Pools, first_window_page, pages_for
from dsv4lite.scheduling.prefix_cache import CachedPrefix, PrefixCache


def text(num_tokens: int, seed: int = 1) -> list[int]:
    return [(seed * i * i + i) % 1000 for i in range(num_tokens)]


def make_cache(*, grow: int = 16, window: int = 16, snapshots: int = 4) -> tuple[Pools, PrefixCache]:
    pools = Pools(grow=grow, window=window, slots=2, snapshots=snapshots)
    return pools, PrefixCache(pools)


def put(pools: Pools, cache: PrefixCache, tokens: list[int], salt: str | None = None) -> CachedPrefix | None:
    """Cache a prefix the way a sequence does that ends right after."""
    grow = cache.allocate(pools.grow, len(tokens) // PAGE_TOKENS)
    window = cache.allocate(pools.window, 2)
    assert grow is not None and window is not None
    checkpoint = cache.capture(num_tokens=len(tokens), grow=grow, window=window)
    if checkpoint is not None:
        cache.insert(cache.chain(tokens, salt), checkpoint)
    pools.grow.release(grow)
    pools.window.release(window)
    return checkpoint


def check(pools: Pools, cache: PrefixCache, held: Counter[int] | None = None) -> None:
    checkpoints = list(cache.prefixes())
    pools.grow.check(held or Counter(), Counter(i for c in checkpoints for i in c.grow))
    pools.window.check(Counter(), Counter(i for c in checkpoints for i in c.window))
    pools.snapshots.check(Counter(), Counter(i for c in checkpoints for i in c.snapshot))


def test_pages_for_counts_started_pages() -> None:
    assert [pages_for(n) for n in (0, 1, 255, 256, 257, 512)] == [0, 1, 1, 1, 2, 2]


def test_first_window_page_keeps_what_the_next_token_sees() -> None:
    # The token at 127 sees [0, 127]; the one at 191 sees [64, 191]: page 0 has slid away.
    assert [first_window_page(p, 128) for p in (0, 127, 190, 191, 256)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("misuse", ["share", "release", "pin", "unpin"])
def test_pool_refuses_ids_that_are_not_held(misuse: str) -> None:
    with pytest.raises(AssertionError, match="page 0"):
        getattr(IdPool("page", 1), misuse)([0])


def test_pool_check_names_a_leak() -> None:
    pool = IdPool("page", 4)
    ids = pool.allocate(2)
    assert ids is not None
    with pytest.raises(AssertionError, match=rf"wrong references .*\({ids[0]}, 1, 0\)"):
        pool.check(Counter(ids[1:]), Counter())
    pool._free.append(ids[0])
    with pytest.raises(AssertionError, match="free and held"):
        pool.check(Counter(ids), Counter())
    pool._free.remove(ids[0])
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="free twice"):
        pool.check(Counter(ids), Counter())
    pool._free[:] = pool._free[:1]
    with pytest.raises(AssertionError, match="lost"):
        pool.check(Counter(ids), Counter())


HELD_TWICE_AND_CACHED = [(call, 0) for call in ("share", "pin", "release", "release", "share", "unpin", "release")]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(("allocate", "share", "release", "pin", "unpin")), st.integers(0, 6)), max_size=60))
@example([("allocate", 4), ("allocate", 4), ("allocate", 0)])
@example([("allocate", 6), *HELD_TWICE_AND_CACHED])
def test_pool_counts_hold_after_any_calls(calls: list[tuple[str, int]]) -> None:
    """All ids of a call are allocated or none; an id is free once its last holder and the cache have given it up."""
    pool, refs, pins = IdPool("page", 6), Counter[int](), Counter[int]()
    for call, i in calls:
        if call == "allocate":
            ids = pool.allocate(i)
            assert (ids is None) == (i > 6 - len(refs.keys() | pins.keys()))
            assert ids is None or len(set(ids)) == len(ids) == i
            refs.update(ids or ())
        elif call == "share" and (refs[i] or pins[i]):
            pool.share([i])
            refs[i] += 1
        elif call == "release" and refs[i]:
            pool.release([i])
            refs[i] -= 1
        elif call == "pin" and refs[i]:
            pool.pin([i])
            pins[i] += 1
        elif call == "unpin" and pins[i]:
            pool.unpin([i])
            pins[i] -= 1
        refs, pins = +refs, +pins
        pool.check(refs, pins)
        assert (pool.num_free, pool.num_available) == (6 - len(refs.keys() | pins.keys()), 6 - len(refs))


def test_chain_keys_cover_all_tokens_before() -> None:
    _, cache = make_cache()
    tokens = text(768)
    chain = cache.chain(tokens, None)
    same = cache.chain(list(tokens), None)
    assert [chain.key(k) for k in range(4)] == [same.key(k) for k in range(4)]
    tokens[0] += 1
    other = cache.chain(tokens, None)
    assert all(chain.key(k) != other.key(k) for k in range(1, 4))
    assert len({chain.key(k) for k in range(4)}) == 4


def test_chain_keys_differ_by_salt_and_epoch() -> None:
    _, cache = make_cache()
    keys = {cache.chain(text(256), salt).key(1) for salt in (None, "", "a", "b")}
    cache.bump_epoch()
    keys |= {cache.chain(text(256), salt).key(1) for salt in (None, "", "a", "b")}
    assert len(keys) == 8


def test_chain_follows_a_growing_list_and_refuses_unknown_tokens() -> None:
    _, cache = make_cache()
    tokens = text(300)
    chain = cache.chain(tokens, None)
    with pytest.raises(AssertionError, match="before 512"):
        chain.key(2)
    tokens += text(512)[300:]
    assert chain.key(2) == cache.chain(text(512), None).key(2)


def test_chain_fork_goes_its_own_way() -> None:
    _, cache = make_cache()
    tokens, twin_tokens = text(300), text(300)
    chain = cache.chain(tokens, None)
    chain.key(1)
    twin = chain.fork(twin_tokens)
    tokens += [1] * 212
    twin_tokens += [2] * 212
    assert chain.key(1) == twin.key(1) and chain.key(2) != twin.key(2)
    assert twin.key(2) == cache.chain(twin_tokens, None).key(2)


def test_cache_finds_the_longest_prefix() -> None:
    pools, cache = make_cache()
    short, long = put(pools, cache, text(256)), put(pools, cache, text(768))
    chain = cache.chain(text(1024), None)
    assert cache.lookup(chain, 1024) is long
    assert cache.lookup(chain, 767) is short
    assert cache.lookup(chain, 255) is None
    assert cache.lookup(cache.chain(text(1024), "a"), 1024) is None
    assert cache.lookup(cache.chain(text(1024, seed=2), None), 1024) is None
    check(pools, cache)


def test_cache_pins_shared_pages_once_per_checkpoint() -> None:
    pools, cache = make_cache()
    grow, window = pools.grow.allocate(2), pools.window.allocate(2)
    assert grow is not None and window is not None
    tokens = text(512)
    chain = cache.chain(tokens, None)
    for border in (256, 512):
        checkpoint = cache.capture(num_tokens=border, grow=grow[: border // 256], window=window)
        assert checkpoint is not None and cache.insert(chain, checkpoint)
    pools.grow.release(grow)
    pools.window.release(window)
    check(pools, cache)
    assert pools.grow.num_available - pools.grow.num_free == 2
    assert cache.evict_one() and pools.grow.num_available - pools.grow.num_free == 2, "the longer prefix needs both pages"
    assert cache.evict_one() and pools.grow.num_free == 16 and not cache.evict_one()


def test_cache_drops_a_second_checkpoint_of_a_prefix() -> None:
    pools, cache = make_cache()
    first = put(pools, cache, text(256))
    put(pools, cache, text(256))
    assert list(cache.prefixes()) == [first]
    check(pools, cache)


def test_cache_evicts_the_least_recently_used() -> None:
    pools, cache = make_cache(snapshots=2)
    put(pools, cache, text(256, seed=1))
    put(pools, cache, text(256, seed=2))
    assert cache.lookup(cache.chain(text(256, seed=1), None), 256) is not None
    put(pools, cache, text(256, seed=3))
    assert [cache.contains(cache.chain(text(256, seed=s), None), 256) for s in (1, 2, 3)] == [True, False, True]
    check(pools, cache)


def test_cache_allocation_evicts_just_enough() -> None:
    pools, cache = make_cache(grow=4)
    for seed in (1, 2, 3):
        put(pools, cache, text(256, seed=seed))
    ids = cache.allocate(pools.grow, 2)
    assert ids is not None and len(cache) == 2
    check(pools, cache, Counter(ids))


def test_cache_allocation_that_cannot_succeed_evicts_nothing() -> None:
    pools, cache = make_cache(grow=4)
    put(pools, cache, text(256))
    ids = pools.grow.allocate(1)
    assert ids is not None
    assert cache.allocate(pools.grow, 4) is None and len(cache) == 1
    check(pools, cache, Counter(ids))


def test_cache_without_snapshots_captures_nothing() -> None:
    pools, cache = make_cache(snapshots=0)
    assert put(pools, cache, text(256)) is None
    check(pools, cache)


def test_cache_does_not_evict_what_is_captured_but_not_inserted() -> None:
    pools, cache = make_cache(snapshots=1)
    grow = pools.grow.allocate(1)
    assert grow is not None
    checkpoint = cache.capture(num_tokens=256, grow=grow, window=())
    assert checkpoint is not None
    assert cache.capture(num_tokens=256, grow=grow, window=()) is None
    cache.drop(checkpoint)
    pools.grow.release(grow)
    check(pools, cache)


def test_cache_epoch_hides_old_checkpoints_and_gives_their_ids_back() -> None:
    pools, cache = make_cache(grow=2, snapshots=1)
    old = cache.chain(text(256), None)
    put(pools, cache, text(256))
    cache.bump_epoch()
    assert cache.lookup(cache.chain(text(256), None), 256) is None
    new = put(pools, cache, text(512))
    assert list(cache.prefixes()) == [new], "the old one was evicted first"
    grow = cache.allocate(pools.grow, 1)
    assert grow is not None
    late = cache.capture(num_tokens=256, grow=grow, window=())
    assert late is not None and not cache.insert(old, late), "state of old weights is not cached"
    pools.grow.release(grow)
    check(pools, cache)
    assert pools.snapshots.num_free == 1


def test_cache_discard_removes_only_the_very_checkpoint() -> None:
    pools, cache = make_cache()
    chain = cache.chain(text(256), None)
    mine = put(pools, cache, text(256))
    assert mine is not None
    cache.discard(chain, mine)
    assert len(cache) == 0
    put(pools, cache, text(256))
    cache.discard(chain, mine)
    assert len(cache) == 1, "another sequence's checkpoint of the same prefix"
    check(pools, cache)


def test_cache_forgets_a_whole_chain() -> None:
    pools, cache = make_cache()
    for length in (256, 768):
        put(pools, cache, text(length))
    other = put(pools, cache, text(256, seed=2))
    chain = cache.chain(text(1000), None)
    chain.key(3)
    cache.forget(chain)
    assert list(cache.prefixes()) == [other]
    check(pools, cache)


def test_ids_that_a_sequence_still_holds_are_found_by_their_count() -> None:
    pools = Pools(grow=8, window=8, slots=2, snapshots=2)
    pools.check_released()
    ids = pools.grow.allocate(3)
    assert ids is not None
    with pytest.raises(AssertionError, match="grow page: 3 ids are lost"):
        pools.check_released()
    pools.grow.pin(ids[:1])
    pools.grow.release(ids)
    pools.check_released()  # the prefix cache may hold ids
