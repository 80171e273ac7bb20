"""Photos on disk to features, once."""

import dataclasses
import hashlib
import importlib.util
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from opencon.data.augment import Augment
from opencon.data.color import to_gray
from opencon.data.sources import read_images
from opencon.encoders import ENCODERS
from opencon.encoders.efficientnet_lite import PACKAGE, EfficientNetLite0
from opencon.encoders.pretrained import open_encoder
from opencon.errors import ConfigError
from opencon.photos import features
from opencon.photos.features import Extractor, FeatureSettings, photo_features
from opencon.runtime import generator, seeded

CPU = torch.device("cpu")
SMALL = FeatureSettings(image_size=32, num_views=2)


def save_photo(path, seed, size=(48, 40), **options):
    noise = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).resize(size).save(path, **options)
    return path


def compute(paths, settings=SMALL, cache=None, device=CPU, **more):
    extractor = Extractor(open_encoder(settings.encoder, settings.image_size), settings, device)
    return photo_features(paths, extractor, cache=cache, **more)


@pytest.fixture
def photos(tmp_path):
    return [save_photo(tmp_path / f"photos/{i}.jpg", i) for i in range(7)]


@pytest.fixture
def passes(monkeypatch):
    """The keys of every pass through the network."""
    passes = []
    real = features.Extractor.__call__

    def spy(self, images, keys):
        passes.append(list(keys))
        return real(self, images, keys)

    monkeypatch.setattr(features.Extractor, "__call__", spy)
    return passes


def same(a, b, rows_a=slice(None), rows_b=slice(None)):
    torch.testing.assert_close(a.plain[rows_a], b.plain[rows_b], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.views[rows_a], b.views[rows_b], rtol=1e-2, atol=1e-2)


@pytest.fixture
def in_float32(monkeypatch):
    """Some processors would compute in bfloat16, whose rounding hides what is compared."""
    monkeypatch.setattr(features, "fast_dtype", lambda device: torch.float32)


@pytest.mark.usefixtures("in_float32")
def test_features_are_the_encoders_of_the_photo_and_of_its_views(photos):
    got = compute(photos)
    assert got.plain.shape == (7, 1280)
    assert got.plain.dtype == torch.float32
    assert got.views.shape == (7, 2, 1280)
    assert got.views.dtype == torch.float16
    assert (got.kept, got.problems) == (list(range(7)), {})

    encoder = open_encoder("efficientnet_lite0", 32)
    images, _, _ = read_images(photos, 32)
    augment = Augment(features.VIEWS, image_size=32, channels=3)
    for i, (path, image) in enumerate(zip(photos, images, strict=True)):
        words = [int(hashlib.sha256(path.read_bytes()).hexdigest()[at : at + 16], 16) for at in (0, 16, 32, 48)]
        views = augment(image.repeat(2, 1, 1, 1), generator(CPU, 0, *words))
        x = torch.cat([image[None].float() / 255, views])
        with torch.no_grad():
            want = encoder.net((x - 127 / 255) / (128 / 255))
        torch.testing.assert_close(got.plain[i], want[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(got.views[i].float(), want[1:], rtol=1e-2, atol=1e-2)


def test_neighbors_names_and_order_change_nothing(photos, tmp_path):
    all_of_them = compute(photos)
    same(compute(photos[::-1]), all_of_them, rows_b=[6, 5, 4, 3, 2, 1, 0])
    renamed = tmp_path / "elsewhere.png"
    renamed.write_bytes(photos[3].read_bytes())
    same(compute([renamed]), all_of_them, rows_b=[3])


def test_views_differ_by_photo_view_and_seed(photos):
    first = compute(photos[:2]).views.float()
    other = compute(photos[:2], FeatureSettings(image_size=32, num_views=2, seed=1)).views.float()
    assert (first[:, 0] - first[:, 1]).abs().max() > 0.1
    assert (first - other).abs().amax(dim=(1, 2)).min() > 0.1


def test_without_views_the_photo_is_the_same(photos):
    without = compute(photos, FeatureSettings(image_size=32, num_views=0))
    assert without.views.shape == (7, 0, 1280)
    torch.testing.assert_close(without.plain, compute(photos).plain, rtol=1e-4, atol=1e-4)


def test_files_of_the_same_bytes_are_computed_once(photos, tmp_path, passes):
    twin = tmp_path / "twin.jpg"
    twin.write_bytes(photos[2].read_bytes())
    got = compute([*photos, twin, photos[0]])
    keys = [key for keys in passes for key in keys]
    assert len(keys) == len(set(keys)) == 7
    assert torch.equal(got.plain[7], got.plain[2])
    assert torch.equal(got.views[8], got.views[0])


def test_what_cannot_be_read_is_named_and_left_out(photos, tmp_path):
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "cut.jpg").write_bytes(photos[0].read_bytes()[:300])
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "again.jpg").write_text("not an image")
    bad = [tmp_path / f"{name}.jpg" for name in ("text", "empty", "cut", "gone", "pipe", "again")]
    paths = [bad[0], photos[0], *bad[1:4], photos[1], bad[4], bad[5]]
    got = compute(paths)
    assert got.kept == [1, 5]
    assert list(got.problems) == [0, 2, 3, 4, 6, 7]
    assert got.problems[0] == got.problems[7] == "is not an image, whatever its name says"
    assert got.problems[2] == "is empty"
    assert "cannot be decoded (OSError: " in got.problems[3]
    assert "not a file" in got.problems[4]
    assert "not a file" in got.problems[6]
    same(got, compute(photos[:2]))
    nothing = compute(bad)
    assert nothing.plain.shape == (0, 1280)
    assert nothing.views.shape == (0, 2, 1280)
    assert compute([]).kept == []


def test_unusual_photos_are_read(tmp_path):
    paths = [
        save_photo(tmp_path / "dot.png", 0, size=(1, 1)),
        save_photo(tmp_path / "line.png", 1, size=(300, 1)),
        save_photo(tmp_path / "large.jpg", 2, size=(900, 700)),
    ]
    Image.open(paths[2]).convert("CMYK").save(tmp_path / "cmyk.jpg")
    Image.open(paths[2]).convert("P").save(tmp_path / "palette.gif")
    got = compute([*paths, tmp_path / "cmyk.jpg", tmp_path / "palette.gif"])
    assert got.problems == {}
    assert torch.isfinite(got.plain).all()
    assert F.cosine_similarity(got.plain[2:3], got.plain[3:]).min() > 0.9  # the same picture, three formats


def test_progress_counts_every_path_to_the_end(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "READ_AT_ONCE", 3)
    (tmp_path / "bad.jpg").write_bytes(b"")
    seen = []
    compute([*photos, photos[0], tmp_path / "bad.jpg"], progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) > 4


@pytest.mark.parametrize(("at_once", "threads"), [(1, 3), (2, 1), (5, 3)])
def test_cutting_into_pieces_and_threads_changes_nothing(photos, monkeypatch, at_once, threads):
    want = compute(photos)
    monkeypatch.setattr(features, "READ_AT_ONCE", at_once)
    monkeypatch.setattr(features, "ROWS_CPU", 4 * threads)
    torch.set_num_threads(threads)
    try:
        same(compute(photos), want)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


def test_threads_are_put_back_after_a_failure(photos):
    def fail(done, total):
        if done:
            raise ValueError("stop")

    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="stop"):
            compute(photos, progress=fail)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_second_time_nothing_is_computed(photos, tmp_path, passes):
    want = compute(photos[:5], cache=tmp_path / "cache")
    passes.clear()
    got = compute([*photos[1:], photos[0]], cache=tmp_path / "cache")
    assert len([key for keys in passes for key in keys]) == 2  # photos 5 and 6
    same(got, want, rows_a=[0, 1, 2, 3, 6], rows_b=[1, 2, 3, 4, 0])
    passes.clear()
    assert torch.equal(compute(photos, cache=tmp_path / "cache").plain[:5], want.plain)
    assert passes == []


@pytest.mark.parametrize("change", [{"image_size": 40}, {"num_views": 1}, {"seed": 1}])
def test_other_settings_are_computed_anew(photos, tmp_path, passes, change):
    compute(photos[:2], cache=tmp_path / "cache")
    passes.clear()
    compute(photos[:2], dataclasses.replace(SMALL, **change), cache=tmp_path / "cache")
    assert passes


def test_a_changed_photo_is_computed_anew(photos, tmp_path, passes):
    before = compute(photos[:1], cache=tmp_path / "cache")
    save_photo(photos[0], 99)
    after = compute(photos[:1], cache=tmp_path / "cache")
    assert (before.plain - after.plain).abs().max() > 0.1


def test_what_was_done_before_an_interruption_is_kept(photos, tmp_path, passes):
    def interrupt(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute(photos, FeatureSettings(image_size=32, num_views=8), cache=tmp_path / "cache", progress=interrupt)
    passes.clear()
    compute(photos, FeatureSettings(image_size=32, num_views=8), cache=tmp_path / "cache")
    assert len([key for keys in passes for key in keys]) == 4


@pytest.mark.usefixtures("in_float32")
def test_an_encoder_of_ones_own_also_for_gray_images(photos, tmp_path):
    with seeded(0):
        net = ENCODERS["convnet"].build(1, 8).eval()
    save_file(net.state_dict(), tmp_path / "encoder.safetensors", metadata={"encoder": "convnet"})
    (tmp_path / "config.json").write_text('{"encoder": {"mean": [0.2], "std": [0.7]}}')
    got = compute(photos, FeatureSettings(encoder=str(tmp_path), num_views=1))
    x = to_gray(read_images(photos, 8)[0].float() / 255)
    with torch.no_grad():
        torch.testing.assert_close(got.plain, net((x - 0.2) / 0.7), rtol=1e-3, atol=1e-4)
    assert got.views.shape == (7, 1, 128)


def test_large_features_stay_finite_in_half_precision(photos, monkeypatch):
    monkeypatch.setattr(EfficientNetLite0, "pool", lambda self, x: 1e5 * (1 + x.float().mean(dim=(2, 3))))
    assert torch.isfinite(compute(photos[:1]).views).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 7}, "features.image_size = 7 must be at least 8"),
        ({"num_views": -1}, "features.num_views = -1 must not be negative"),
        ({"seed": -1}, r"features.seed = -1 must be a whole number from 0 to 2\^63 - 1"),
    ],
)
def test_settings_check_themselves(settings, message):
    with pytest.raises(ConfigError, match=message):
        FeatureSettings(**settings)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="the package with the encoder's weights is missing"
)
def test_a_gpu_gives_the_same_features(photos):
    got = compute(photos, device=torch.device("cuda"))
    want = compute(photos)
    assert F.cosine_similarity(got.plain, want.plain).min() > 0.99
    assert F.cosine_similarity(got.views.float(), want.views.float(), dim=2).min() > 0.99


# --- how long it will take --------------------------------------------------------------------------------------------


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only the network moves: half a second for each photo."""
    now = [100.0]
    real = features.Extractor.__call__

    def slow(self, images, keys):
        now[0] += 0.5 * len(images)
        return real(self, images, keys)

    monkeypatch.setattr(features.Extractor, "__call__", slow)
    monkeypatch.setattr(features.time, "perf_counter", lambda: now[0])
    torch.set_num_threads(1)  # photos one after the other


def test_the_time_is_told_from_two_seconds_of_work(tmp_path, ticking):
    photos = [save_photo(tmp_path / f"photos/{i}.jpg", i) for i in range(40)]
    extractor = Extractor(open_encoder(SMALL.encoder, SMALL.image_size), SMALL, CPU)
    assert 10 <= features.seconds_for(photos, extractor, cache=None) <= 40  # 20 s
    assert features.seconds_for(photos[:2], extractor, cache=None) == pytest.approx(1)


def test_what_is_cached_takes_no_time_and_the_probe_is_kept(tmp_path, passes):
    photos = [save_photo(tmp_path / f"photos/{i}.jpg", i) for i in range(6)]
    extractor = Extractor(open_encoder(SMALL.encoder, SMALL.image_size), SMALL, CPU)
    cache = tmp_path / "cache"
    assert features.seconds_for(photos, extractor, cache=cache) > 0
    assert features.seconds_for(photos, extractor, cache=cache) == 0
    done = sorted(key for keys in passes for key in keys)
    assert len(done) == len(set(done)) == 6
    photo_features(photos, extractor, cache=cache)
    assert sum(map(len, passes)) == 6
    assert features.seconds_for([tmp_path / "none.jpg"], extractor, cache=cache) == 0
