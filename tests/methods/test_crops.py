"""Crops: SimCLR's loss over many small views, judged at full size."""

import torch

from opencon.config import with_settings
from opencon.data.benchmarks import CIFAR100, Dataset
from opencon.data.sources import from_arrays
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import assemble, build_loader
from opencon.methods import Crops, CropsConfig
from opencon.runtime import seeded
from tests.methods.toys import TASK, ExactEmbedder, toy_batch
from tests.naive.losses import naive_contrast


def test_all_views_of_an_image_are_positives_of_each_other():
    with seeded(0):
        method = Crops(CropsConfig(temperature=0.2), TASK, ExactEmbedder())
    batch = toy_batch(views=5)
    with torch.no_grad():
        z = method.embed(torch.cat(batch.views))
    image = list(range(len(batch.labels))) * 5
    want = naive_contrast(z, [True] * len(image), image, 0.2)
    assert abs(method.step(batch).loss.item() - want) < 1e-9 * want


def test_cifar_is_seen_small_and_judged_whole(monkeypatch):
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), generator=g, dtype=torch.uint8)
    train = from_arrays(images, torch.arange(64) % 2, [str(c) for c in range(100)])
    tiny = ["encoder.name=convnet", "train.batch_size=16", "split.num_seen=1", "split.num_classes=2"]
    config = with_settings(get_recipe("crops/cifar100"), tiny)
    bench = assemble(config, Dataset(CIFAR100, train, None), torch.device("cpu"))
    loader = build_loader(bench)
    batch = loader.batch(loader.draw(0), torch.tensor([0]))
    assert [view.shape[-1] for view in batch.views] == [20] * 5
    seen = []
    features = bench.method.embedder.features
    monkeypatch.setattr(bench.method.embedder, "features", lambda x: seen.append(x) or features(x))
    record, _, _ = bench.score("unlabeled", "orca")
    assert "knn20" in record
    assert {x.shape[-1] for x in seen} == {32}
    assert any(torch.equal(x, images.float() / 255) for x in seen)
