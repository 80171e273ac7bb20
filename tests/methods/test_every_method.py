"""What every registered method must do, on six made-up patterns: three seen classes, three novel ones.

The methods come from the registry. pytest --plugin FILE checks those of a file, too.
"""

import dataclasses
import importlib
import inspect
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import normalized_mutual_info_score

from opencon.config import AugmentConfig, DataConfig, EncoderConfig, RunConfig, SplitConfig, TrainConfig, ViewConfig
from opencon.data.benchmarks import DIGITS, Dataset
from opencon.data.sources import from_arrays
from opencon.experiments.workbench import assemble, build_loader
from opencon.methods import METHODS, Epoch, FeatureBank, Kind, Method, MethodEntry
from opencon.metrics import knn_accuracy, open_world_accuracy
from opencon.training.optimizer import build_optimizer, restore
from opencon.training.trainer import fit
from tests.methods.toys import Blobs

CPU = torch.device("cpu")
NUM_SEEN, NUM_CLASSES, PER_CLASS = 3, 6, 40
BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


# One pattern for each class, eight by eight, a row for each line of it.
PATTERNS = (
    (0, 0, 60, 60, 60, 60, 0, 0),  # square
    (0, 255, 0, 0, 255, 0, 0, 255),  # horizontal lines
    (73, 73, 73, 73, 73, 73, 73, 73),  # vertical lines
    (1, 2, 4, 8, 16, 32, 64, 128),  # diagonal
    (165, 90, 165, 90, 165, 90, 165, 90),  # checkers
    (195, 195, 0, 0, 0, 0, 195, 195),  # corners
)


def blobs():
    """8x8 images of six patterns, each moved, dimmed and noisy in its own way."""
    rng = np.random.default_rng(0)
    bits = np.unpackbits(np.array(PATTERNS, dtype=np.uint8)[:, :, None], axis=2)  # (6, 8, 8)
    classes = np.repeat(np.arange(NUM_CLASSES), PER_CLASS)
    images = np.stack([np.roll(bits[c], tuple(rng.integers(-1, 2, 2)), axis=(0, 1)) for c in classes]).astype(float)
    images = images * rng.uniform(0.3, 1.0, (len(classes), 1, 1)) + rng.normal(0, 0.1, images.shape)
    train = from_arrays(images.clip(0, 1), classes)
    return Dataset(replace(DIGITS, num_classes=NUM_CLASSES, num_train=len(train)), train, None)


DATA = blobs()


def expected(name):
    """What this method must reach: BLOBS in its own tests, where it needs longer or is not meant to do as well."""
    try:
        return getattr(importlib.import_module(f"tests.methods.test_{name}"), "BLOBS", Blobs())
    except ModuleNotFoundError:
        return Blobs()


VIEW = {"crop_scale": None, "flip_p": 0, "jitter": (0.6, 0.6, 0, 0), "jitter_p": 1, "gray_p": 0, "shift": 0.15}


def config(name, *, epochs=2, seed=0, **encoder):
    epochs = epochs if METHODS[name].config.trains else 0
    more = METHODS[name].config.views.least - 2  # views that the method cannot do without
    return RunConfig(
        data=DataConfig(name="blobs"),
        split=SplitConfig(num_seen=NUM_SEEN),
        encoder=EncoderConfig(name="convnet", head_dim=16, **encoder),
        method=METHODS[name].config(),
        train=TrainConfig(epochs=epochs, batch_size=48, lr=0.05, schedule="cosine", seed=seed),
        augment=AugmentConfig(**VIEW),
        views=(ViewConfig(**VIEW, count=more),) if more > 0 else (),
    )


def bench_of(name, **settings):
    return assemble(config(name, **settings), DATA, CPU)


def train(bench):
    """The bench, its method trained to the end."""
    settings = bench.config.train
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = build_optimizer(bench.method, settings)
    fit(bench.method, optimizer, build_loader(bench), settings, features=bench.bank, scaler=scaler)
    return bench


def batch_of(bench, epoch=0):
    loader = build_loader(bench)
    return loader.batch(loader.draw(epoch), torch.tensor([0]))


def begin(bench, epoch=0):
    """Training mode at the start of an epoch, as `fit` would have it."""
    bench.method.train()
    bench.method.before_epoch(Epoch(epoch, 1000, bench.bank))


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(a, b, besides=()):
    assert a.keys() == b.keys()
    for name in a:
        if not name.endswith(tuple(besides) or "\0"):
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", METHODS.names())
class TestEveryMethod:
    def test_has_one_name_everywhere(self, name):
        entry = METHODS[name]
        assert entry.config.name == name
        assert Path(inspect.getfile(entry.build)).stem == name
        assert inspect.getmodule(entry.config) is inspect.getmodule(entry.build)

    def test_docstring_names_the_paper(self, name):
        entry = METHODS[name]
        assert entry.paper.startswith(("arXiv:", "doi:", "PMLR ")) or entry.paper == "ours"
        heading = sys.modules[entry.build.__module__].__doc__.splitlines()[0]
        assert entry.paper in heading
        assert str(entry.year) in heading
        assert entry.title in heading

    def test_hidden_labels_cannot_matter(self, name):
        """They have no place in a batch, and other ones give the same weights and classes, bit for bit."""
        bench = train(bench_of(name))
        batch = batch_of(bench)
        assert {f.name for f in dataclasses.fields(batch)} == {"views", "labels", "num_labeled", "rows", "mixes"}
        assert (batch.labels[batch.num_labeled :] == -1).all()
        assert (batch.labels[: batch.num_labeled] < NUM_SEEN).all()
        assert (batch.num_labeled > 0) == bench.config.method.uses_labels

        classes = DATA.train.classes.clone()
        hidden = bench.split.unlabeled
        order = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(0))
        classes[hidden] = classes[hidden[order]]
        other = replace(DATA, train=replace(DATA.train, classes=classes))
        again = train(assemble(config(name), other, CPU, split=bench.split))
        assert_same(state(again.method), state(bench.method))
        assert torch.equal(*(b.method.assign(b.bank()).classes for b in (bench, again)))

    def test_assign_gives_every_image_a_class(self, name):
        bench = train(bench_of(name))
        bank = bench.bank()
        for labels in (bench.split.visible_labels(DATA.train.classes), torch.full((len(bank.z),), -1)):
            got = bench.method.assign(FeatureBank(bank.z, labels))
            assert got.classes.shape == (len(bank.z),)
            assert got.classes.dtype == torch.int64
            assert ((got.classes >= 0) & (got.classes < NUM_CLASSES)).all()
            if got.p is not None:
                assert got.p.shape == (len(bank.z), NUM_CLASSES)
                torch.testing.assert_close(got.p.sum(dim=1), torch.ones(len(bank.z)))
            if got.novelty is not None:
                assert got.novelty.shape == (len(bank.z),)

    def test_classes_to_start_from_do_no_harm(self, name):
        """A method takes them or leaves them: it keeps its encoder, trains on, and gives every image a class."""
        bench = bench_of(name)
        bank = bench.bank()
        before = {key: p.clone() for key, p in bench.method.embedder.named_parameters()}
        bench.method.start_from(FeatureBank(F.normalize(bank.z, dim=1), bank.labels), DATA.train.classes)
        assert all(torch.equal(p, before[key]) for key, p in bench.method.embedder.named_parameters())
        classes = train(bench).method.assign(bench.bank()).classes
        assert ((classes >= 0) & (classes < NUM_CLASSES)).all()
        assert all(torch.isfinite(p).all() for p in bench.method.parameters())

    def test_every_kind_of_images_has_a_schedule(self, name):
        for kind in get_args(Kind):
            schedule = METHODS[name].build.schedule(kind)
            assert isinstance(schedule.method, METHODS[name].config)
            assert (schedule.train.epochs > 0) == METHODS[name].config.trains
            assert (schedule.augment.size == 224) == (kind in ("imagenet", "fine_grained"))

    def test_beats_chance_on_six_blobs(self, name):
        enough = expected(name)
        bench = train(bench_of(name, epochs=enough.epochs))
        labels = bench.split.visible_labels(DATA.train.classes)
        bank = replace(bench.bank(), labels=labels)
        rows, truth = bench.split.unlabeled, DATA.train.classes
        predicted = bench.method.assign(bank).classes
        accuracy = open_world_accuracy(predicted[rows], truth[rows], num_seen=NUM_SEEN, protocol="orca")
        assert accuracy.seen > enough.seen  # chance: a sixth
        assert accuracy.all > enough.all  # by matching, chance is a little more; before training 0.5 at best
        assert normalized_mutual_info_score(truth, predicted) > enough.nmi  # before training: 0.3 at best
        assert knn_accuracy(F.normalize(bank.z, dim=1), truth, k=5) > enough.neighbors


@pytest.mark.parametrize("name", [name for name in METHODS.names() if METHODS[name].config.trains])
class TestEveryMethodThatTrains:
    def test_step_changes_no_state(self, name):
        bench = bench_of(name)
        begin(bench)
        before = state(bench.method)
        random = torch.random.get_rng_state()
        out = bench.method.step(batch_of(bench))
        out.loss.backward()
        assert_same(state(bench.method), before, besides=BATCH_NORM)
        assert torch.equal(torch.random.get_rng_state(), random)

    def test_step_gives_a_loss_and_detached_logs(self, name):
        bench = bench_of(name)
        begin(bench, epoch=500)
        out = bench.method.step(batch_of(bench))
        assert out.loss.shape == ()
        assert out.loss.requires_grad
        assert out.loss.isfinite()
        for key, value in out.logs.items():
            assert value.shape == (), key
            assert not value.requires_grad, key
            assert key != "loss"
        assert not any(tensor.requires_grad for tensor in out.carry)

    @pytest.mark.parametrize("train_from", ["all", "conv3", "head"])
    def test_gradient_reaches_every_trainable_parameter(self, name, train_from):
        bench = bench_of(name, train_from=train_from)
        begin(bench, epoch=500)  # late: every ramp is over
        bench.method.step(batch_of(bench)).loss.backward()
        learning = {key for key, p in bench.method.named_parameters() if p.requires_grad}
        for key, p in bench.method.named_parameters():
            if key in learning:
                assert p.grad is not None, key
                assert p.grad.abs().sum() > 0, key
            else:
                assert p.grad is None, key
        frozen = {"all": (), "conv3": ("conv1", "conv2"), "head": ("conv1", "conv2", "conv3")}[train_from]
        want = {key for key, _ in bench.method.named_parameters() if not any(f".{stage}." in key for stage in frozen)}
        assert learning == want

    def test_same_seed_gives_the_same_two_epochs(self, name):
        first = state(train(bench_of(name)).method)
        torch.rand(3)  # whatever else has drawn random numbers
        assert_same(state(train(bench_of(name)).method), first)
        other = state(train(bench_of(name, seed=1)).method)
        assert any(not torch.equal(other[key], first[key]) for key in first)

    def test_a_resumed_run_is_the_uninterrupted_one(self, name):
        """Through files: what a method remembers outside its state would be lost, and its weights would differ."""
        settings = config(name, epochs=3)
        # Batches of 44: with 48, an epoch fills PCL's queue twice, and where the next row goes would not matter.
        settings = replace(settings, train=replace(settings.train, batch_size=44))
        whole = assemble(settings, DATA, CPU)
        optimizer, scaler = (
            build_optimizer(whole.method, whole.config.train),
            torch.amp.GradScaler("cpu", enabled=False),
        )
        file = io.BytesIO()

        def keep(epoch, means):
            if epoch == 0:
                torch.save({"method": whole.method.state_dict(), "optimizer": optimizer.state_dict()}, file)

        parts = build_loader(whole), whole.config.train
        fit(whole.method, optimizer, *parts, features=whole.bank, scaler=scaler, on_epoch=keep)

        again = assemble(settings, DATA, CPU)
        optimizer = build_optimizer(again.method, again.config.train)
        file.seek(0)
        kept = torch.load(file, weights_only=True)
        again.method.load_state_dict(kept["method"])
        restore(optimizer, kept["optimizer"])
        parts = build_loader(again), again.config.train
        fit(again.method, optimizer, *parts, features=again.bank, scaler=scaler, first_epoch=1)
        assert_same(state(again.method), state(whole.method))
        assert torch.equal(again.method.assign(again.bank()).classes, whole.method.assign(whole.bank()).classes)

    def test_saved_and_loaded_gives_the_same_next_loss(self, name):
        bench, other = train(bench_of(name)), bench_of(name, seed=7)
        file = io.BytesIO()
        torch.save(bench.method.state_dict(), file)
        file.seek(0)
        other.method.load_state_dict(torch.load(file, weights_only=True))
        outs = []
        for b in (bench, other):
            begin(b, epoch=2)
            outs.append(b.method.step(batch_of(bench, epoch=2)))
        assert torch.equal(outs[0].loss, outs[1].loss)
        assert all(torch.equal(outs[0].logs[key], outs[1].logs[key]) for key in outs[0].logs)


def test_a_method_without_settings_is_refused_when_it_is_registered():
    class Forgetful(Method):
        """Has no settings."""

    with pytest.raises(TypeError, match=r"Forgetful does not say which settings it has: settings = \.\.\.Config"):
        MethodEntry(Forgetful, "Forgetful", "arXiv:0000.00000", 2026, "nothing")


def test_the_first_view_is_the_weak_one_and_the_second_the_strong_one():
    plain = AugmentConfig(crop_scale=None, flip_p=0, jitter_p=0, gray_p=0)
    settings = replace(config("fixmatch"), augment=plain, strong=replace(plain, rotate=30))
    bench = assemble(settings, DATA, CPU)
    batch = batch_of(bench)
    untouched = bench.images[batch.rows].float() / 255
    assert torch.equal(batch.views[0], untouched)
    assert not torch.allclose(batch.views[1], untouched, atol=0.05)
    both = batch_of(assemble(replace(settings, strong=None), DATA, CPU))
    assert torch.equal(both.views[0], both.views[1])


def test_further_views_follow_the_two_in_their_sizes():
    small = ViewConfig(size=10, crop_scale=(0.2, 0.6), jitter_p=0, gray_p=0, count=2)
    same = ViewConfig(crop_scale=None, flip_p=0, jitter_p=0, gray_p=0)
    settings = replace(config("concord"), views=(small, same))
    bench = assemble(settings, DATA, CPU)
    batch, two = batch_of(bench), batch_of(bench_of("concord"))
    assert [view.shape[-1] for view in batch.views] == [8, 8, 10, 10, 8]
    assert torch.equal(batch.rows, two.rows)
    assert all(torch.equal(*pair) for pair in zip(batch.views[:2], two.views, strict=True))  # they change nothing
    assert not torch.equal(batch.views[2], batch.views[3])
    assert torch.equal(batch.views[4], bench.images[batch.rows].float() / 255)
    measured = list(build_loader(bench).first_views(1))
    assert [view.shape[-1] for view in measured] == [8, 8]


def test_held_out_images_are_judged_by_their_own_rows():
    """They follow the training images in the bank; their classes are known to nobody."""
    held_out = replace(DATA.train, images=DATA.train.images[30:75], classes=DATA.train.classes[30:75])
    data = replace(DATA, info=replace(DATA.info, num_test=len(held_out)), test=held_out)
    bench = train(assemble(config("opencon", epochs=4), data, CPU))
    seen = []
    assign = bench.method.assign
    bench.method.assign = lambda bank: seen.append(bank) or assign(bank)
    record, _, _ = bench.score("test", "orca")
    (bank,) = seen
    assert torch.equal(bank.labels[: len(DATA.train)], bench.labels)
    assert (bank.labels[len(DATA.train) :] == -1).all()
    alone = assign(FeatureBank(bench.embed(held_out.images), torch.full((45,), -1))).classes
    want = open_world_accuracy(alone, held_out.classes, num_seen=NUM_SEEN, protocol="orca")
    assert (record["num_images"], record["all"], record["seen"]) == (45, want.all, want.seen)
