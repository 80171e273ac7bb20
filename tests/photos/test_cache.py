"""Features on disk: found again, whole or not at all, and never in the way."""

import errno
import json
import os
import re
import time
import warnings
from pathlib import Path

import pytest
import torch

from opencon.photos import cache as feature_cache
from opencon.photos.cache import FeatureCache

IDENTITY = {"encoder": "tiny", "size": 8}


def key(i):
    return f"{i:064x}"


def rows(i, features=5, views=2):
    g = torch.Generator().manual_seed(i)
    return torch.randn(features, generator=g), torch.randn(views, features, generator=g).half()


def fill(root, numbers, identity=IDENTITY):
    cache = FeatureCache(root, "tiny", identity)
    for i in numbers:
        cache.put(key(i), *rows(i))
    cache.flush()
    return cache


def assert_holds(cache, numbers):
    for i in numbers:
        found = cache.get(key(i))
        assert found is not None, i
        assert all(torch.equal(a, b) for a, b in zip(found, rows(i), strict=True))


def shards(root):
    return sorted(root.rglob("*.safetensors"))


def test_what_was_put_is_found_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "SHARD", 4)
    monkeypatch.setattr(feature_cache, "LOADED", 1)
    fill(tmp_path, range(11))
    assert len(shards(tmp_path)) == 3
    again = FeatureCache(tmp_path, "tiny", IDENTITY)
    assert_holds(again, [*range(11), 3, 10, 0])
    assert again.get(key(11)) is None
    assert key(10) in again
    assert key(11) not in again


def test_a_full_shard_is_on_disk_without_a_flush(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "SHARD", 3)
    cache = FeatureCache(tmp_path, "tiny", IDENTITY)
    for i in range(5):
        cache.put(key(i), *rows(i))
    assert_holds(FeatureCache(tmp_path, "tiny", IDENTITY), range(3))


def test_no_views(tmp_path):
    cache = FeatureCache(tmp_path, "tiny", IDENTITY)
    cache.put(key(1), torch.ones(3), torch.empty(0, 3, dtype=torch.float16))
    cache.flush()
    plain, views = FeatureCache(tmp_path, "tiny", IDENTITY).get(key(1))
    assert plain.tolist() == [1, 1, 1]
    assert views.shape == (0, 3)


def test_another_way_of_computing_finds_nothing(tmp_path):
    fill(tmp_path, range(3))
    assert key(1) not in FeatureCache(tmp_path, "tiny", {**IDENTITY, "size": 9})
    assert_holds(FeatureCache(tmp_path, "tiny", dict(reversed(IDENTITY.items()))), range(3))


def test_the_folder_says_what_it_is(tmp_path):
    cache = FeatureCache(tmp_path, "timm:../ö x", IDENTITY)
    assert cache.folder.parent == tmp_path
    assert json.loads((cache.folder / "about.json").read_text()) == IDENTITY


def test_what_is_there_is_not_written_again(tmp_path):
    fill(tmp_path, range(3))
    fill(tmp_path, range(5))
    assert [len(feature_cache._load(path)[0]) for path in shards(tmp_path)].count(3) == 1
    assert sum(len(feature_cache._load(path)[0]) for path in shards(tmp_path)) == 5


def test_two_programs_fill_one_cache(tmp_path):
    one, two = (FeatureCache(tmp_path, "tiny", IDENTITY) for _ in range(2))
    for i in range(6):
        (one if i % 2 else two).put(key(i), *rows(i))
    one.flush()
    two.flush()
    assert_holds(FeatureCache(tmp_path, "tiny", IDENTITY), range(6))


# --- damage -----------------------------------------------------------------------------------------------------------


def found_nothing(root, numbers):
    cache = FeatureCache(root, "tiny", IDENTITY)
    assert [cache.get(key(i)) for i in numbers] == [None] * len(numbers)
    return cache


def truncated(data):
    return data[: len(data) // 2]


def flipped(data):
    return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]


def key_changed(data):
    return data.replace(key(1).encode(), key(7).encode())


def zeros(data):
    return bytes(len(data))


@pytest.mark.parametrize(
    "harm", [truncated, flipped, key_changed, zeros, lambda d: b"", lambda d: d[:5], lambda d: b"\xff" * 8 + d[8:]]
)
def test_a_damaged_shard_is_removed_and_rebuilt(tmp_path, harm):
    fill(tmp_path, range(3))
    (bad,) = shards(tmp_path)
    fill(tmp_path, range(3, 6))
    bad.write_bytes(harm(bad.read_bytes()))
    with pytest.warns(UserWarning, match=f"{bad.name} are damaged .* computed again"):
        cache = found_nothing(tmp_path, (0, 1, 2, 7))
    assert not bad.exists()
    assert_holds(cache, range(3, 6))
    for i in range(3):
        cache.put(key(i), *rows(i))
    cache.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_holds(FeatureCache(tmp_path, "tiny", IDENTITY), range(6))


def test_killed_while_writing_leaves_the_old_and_a_file_that_is_cleared_away_later(tmp_path, monkeypatch):
    fill(tmp_path, range(3))

    def killed(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda *a, **k: None)  # a kill -9 clears nothing
        with pytest.raises(KeyboardInterrupt):
            fill(tmp_path, range(3, 6))
    (left,) = tmp_path.rglob("*.partial")
    cache = FeatureCache(tmp_path, "tiny", IDENTITY)
    assert_holds(cache, range(3))
    assert cache.get(key(3)) is None
    assert left.exists()  # it may be another program's, still being written
    old = time.time() - feature_cache.STALE - 1
    os.utime(left, (old, old))
    FeatureCache(tmp_path, "tiny", IDENTITY)
    assert not left.exists()


# --- where nothing can be kept ----------------------------------------------------------------------------------------


def test_no_folder_is_no_cache():
    cache = FeatureCache(None, "tiny", IDENTITY)
    cache.put(key(1), *rows(1))
    cache.flush()
    assert cache.get(key(1)) is None


def test_a_full_disk_is_one_warning(tmp_path, monkeypatch):
    fill(tmp_path, range(3))
    monkeypatch.setattr(feature_cache, "SHARD", 2)

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = FeatureCache(tmp_path, "tiny", IDENTITY)
    monkeypatch.setattr(Path, "write_bytes", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(10, 20):
            cache.put(key(i), *rows(i))
        cache.flush()
    (only,) = caught
    assert re.search(
        r"cannot be kept in .*tiny-.* \(No space left on device\): they will be computed again", str(only.message)
    )
    assert_holds(cache, range(3))
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be kept"):
        cache = FeatureCache(tmp_path / "file" / "cache", "tiny", IDENTITY)
    cache.put(key(1), *rows(1))
    cache.flush()
    assert cache.get(key(1)) is None


def test_a_cache_that_may_only_be_read_is_read(tmp_path, monkeypatch):
    fill(tmp_path, range(3))

    def refused(self, data):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refused)
    cache = FeatureCache(tmp_path, "tiny", IDENTITY)
    assert_holds(cache, range(3))
    cache.put(key(5), *rows(5))
    with pytest.warns(UserWarning, match="Permission denied"):
        cache.flush()
