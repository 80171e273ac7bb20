"""On a GPU: every fast path equals its plain form."""

from dataclasses import replace

import pytest
import torch

from opencon.config import AugmentConfig, with_settings
from opencon.data.augment import Augment
from opencon.data.benchmarks import DATASETS, Dataset
from opencon.data.sources import ImageSet
from opencon.encoders import ENCODERS
from opencon.experiments import train as train_module
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import Callbacks, train
from opencon.experiments.workbench import assemble, build_loader, prepare
from opencon.runtime import seeded
from opencon.training import trainer
from opencon.training.optimizer import build_optimizer
from opencon.training.run_folder import RunFolder
from opencon.training.trainer import fit
from tests.kernel_check import (
    NORMS,
    PROTOTYPES,
    VIEWS,
    check_norm,
    check_not_a_number,
    check_prototypes,
    check_views,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("rows", "classes", "dim"), PROTOTYPES)
def test_prototype_kernel_equals_the_rounds(rows, classes, dim):
    check_prototypes(rows, classes, dim, device=CUDA)


def test_views_are_the_same_on_both_devices():
    augment = Augment(AugmentConfig(blur_p=0.5), image_size=32, channels=3)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    params = augment.draw(64, (32, 32), torch.Generator().manual_seed(1))
    on_gpu = type(params)(*(None if p is None else p.to(CUDA) for p in params))
    torch.testing.assert_close(
        augment.apply(images.to(CUDA), on_gpu).cpu(), augment.apply(images, params), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(("size", "source", "settings"), VIEWS)
def test_view_kernel_equals_the_plain_views(size, source, settings):
    augment, images, params, fast = check_views(size, source, settings, device=CUDA, num_images=500)
    assert augment.has_kernel(images, params)
    assert torch.equal(augment.apply(images, params), fast)


@pytest.mark.parametrize(("images", "channels", "side", "number", "how"), NORMS)
def test_norm_kernels_equal_their_definitions(images, channels, side, number, how):
    check_norm(images, channels, side, number, how, device=CUDA)


def test_norm_kernels_keep_what_is_not_a_number():
    check_not_a_number(device=CUDA)


@pytest.mark.parametrize("channels", [64, 512])
def test_norm_kernels_at_full_size(channels):
    """Every multiprocessor is busy, and many programs wait for each other's sums."""
    how = {"relu": True, "keep": True}
    check_norm(256, channels, 32 if channels == 64 else 8, 2, how, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet50"])
def test_fused_training_equals_the_plain_passes(name, monkeypatch):
    """As near as float32 allows: for a rounding, some ReLUs of a deep network fall the other way."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(64, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(CUDA)
    x = x.contiguous(memory_format=torch.channels_last)

    def passed(*, fuses):
        with seeded(0):
            encoder = ENCODERS[name].build(3, 64).to(CUDA, memory_format=torch.channels_last).train()
        if fuses:
            encoder.fuse()
        assert (encoder.fused is not None) == fuses
        features = encoder(x)
        (features * torch.randn(features.shape, generator=torch.Generator().manual_seed(1)).to(CUDA)).sum().backward()
        return [features.detach(), *encoder.buffers()], [p.grad for p in encoder.parameters()]

    def errors(results, truth):
        pairs = [(a.double(), b.double()) for a, b in zip(results, truth, strict=True)]
        return [float((a - b).norm() / b.norm()) for a, b in pairs]

    (values, grads), (fused_values, fused_grads) = passed(fuses=False), passed(fuses=True)
    assert max(errors(fused_values, values)) < 1e-3
    assert max(errors(fused_grads, grads)) < 0.1


def trained(*settings, bench=None):
    config = with_settings(get_recipe("digits"), ["train.epochs=8", "method.ramp_epochs=4", *settings])
    bench = bench or prepare(config, CUDA)
    config = bench.config
    optimizer = build_optimizer(bench.method, config.train)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    means = []
    fit(
        bench.method,
        optimizer,
        build_loader(bench),
        config.train,
        features=bench.bank,
        scaler=scaler,
        on_epoch=lambda epoch, m: means.append(m),
    )
    return means, bench.score("unlabeled", "orca")[0]


def test_captured_and_compiled_steps_equal_the_plain_one():
    """Same random numbers, same arithmetic. From the third epoch on, the plain step does not repeat itself either."""
    plain, plain_record = trained("train.capture=false", "train.kernels=false")
    for settings in (["train.capture=true"], ["train.compile=true"]):
        fast, record = trained(*settings)
        for epoch, tolerance in enumerate((5e-4, 3e-3)):
            for term in ("loss", "loss_l"):
                assert fast[epoch][term] == pytest.approx(plain[epoch][term], rel=tolerance)
        assert abs(record["all"] - plain_record["all"]) < 0.15


def test_a_captured_run_replays_a_graph(monkeypatch):
    """Equal results prove nothing if the graph is quietly never used."""
    made = []

    class Watched(trainer.Captured):
        def __init__(self, step):
            super().__init__(step)
            made.append(self)

    monkeypatch.setattr(trainer, "Captured", Watched)
    trained("train.epochs=2")
    (captured,) = made
    assert captured.graph is not None
    assert captured.calls > captured.WARM_UP
    trained("train.epochs=1", "train.capture=false")
    assert len(made) == 1


def cifar_like(*settings, recipe="cifar100"):
    """A recipe for CIFAR-100 on made-up images: the whole fast path of the real one, small."""
    g = torch.Generator().manual_seed(0)
    classes = torch.arange(2000) % 100
    paint = torch.randint(0, 200, (100, 3, 1, 1), generator=g)
    images = (paint[classes] + torch.randint(0, 56, (2000, 3, 32, 32), generator=g)).to(torch.uint8)
    dataset = Dataset(DATASETS["cifar100"].info, ImageSet(images, classes, tuple(map(str, range(100)))), None)
    size = ["train.epochs=4", "train.precision=fp32", "train.batch_size=256"]
    return assemble(with_settings(get_recipe(recipe), [*size, *settings]), dataset, CUDA)


def test_folded_captured_and_compiled_equals_plain():
    plain, _ = trained(
        bench=cifar_like(
            "train.compile=false",
            "train.capture=false",
            "train.kernels=false",
            "encoder.fold_frozen=false",
            "method.ramp_epochs=2",
        )
    )
    bench = cifar_like("method.ramp_epochs=2")
    assert bench.method.embedder.encoder.fused is None
    bench.method.embedder.fold_frozen()
    assert bench.method.embedder.encoder.folded is not None
    fast, _ = trained(bench=bench)
    for a, b in zip(plain[:2], fast[:2], strict=True):
        for term in ("loss", "loss_l", "loss_u", "loss_prior"):
            assert b[term] == pytest.approx(a[term], rel=1e-2), term


def test_fused_captured_and_compiled_equals_plain():
    off = ["train.compile=false", "train.capture=false", "train.kernels=false"]
    # At this rate rounding moves the losses by 2e-4 and 6e-4, an encoder that learns nothing by 1e-2 and 5e-2.
    slow = "train.lr=0.002"
    plain, _ = trained(bench=cifar_like(*off, slow, recipe="simclr/cifar100"))
    bench = cifar_like(slow, recipe="simclr/cifar100")
    assert bench.method.embedder.encoder.fused is not None
    fast, _ = trained(bench=bench)
    for a, b, tolerance in zip(plain[:2], fast[:2], (3e-3, 1e-2), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)


@pytest.mark.parametrize(
    ("method", "terms"),
    [
        ("concord", ("loss", "loss_swapped", "loss_crops", "loss_labels", "loss_contrast")),
        ("moco", ("loss", "loss_full", "loss_crops")),
        ("crops", ("loss",)),
    ],
)
def test_small_crops_fused_and_captured_equal_plain(method, terms):
    """Two sizes in one step: view kernels, passes with hand-written gradients, a teacher's pass, one graph."""
    off, slow = ["train.capture=false", "train.kernels=false"], "train.lr=0.002"
    plain, _ = trained(bench=cifar_like(*off, slow, recipe=f"{method}/cifar100"))
    bench = cifar_like(slow, recipe=f"{method}/cifar100")
    assert bench.method.embedder.encoder.fused is not None
    fast, _ = trained(bench=bench)
    for a, b, tolerance in zip(plain[:2], fast[:2], (1e-2, 3e-2), strict=True):
        for term in terms:
            assert b[term] == pytest.approx(a[term], rel=tolerance), term


def test_a_resumed_run_obeys_the_milestone_in_its_graph(tmp_path, monkeypatch):
    """The rate lives on the device, where the recorded step reads it; a restored one must not replace it."""
    made = []
    monkeypatch.setattr(train_module, "build_optimizer", lambda *args: made.append(build_optimizer(*args)) or made[-1])
    settings = ["train.epochs=6", "train.schedule=step", "train.milestones=[4]", "train.lr=0.1", "method.ramp_epochs=2"]
    config = with_settings(get_recipe("digits"), settings)

    def stop(record):
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", CUDA, callbacks=Callbacks(epoch_done=stop))
    train(config, tmp_path / "run", CUDA)
    rate = made[-1].param_groups[0]["lr"]
    assert rate.is_cuda
    assert rate.item() == pytest.approx(0.01)
    whole = train(config, tmp_path / "whole", CUDA)
    resumed = RunFolder.open_for_reading(tmp_path / "run").read_metrics()[-1]
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=3e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_folded_stages_equal_the_plain_ones(monkeypatch, dtype, tolerance):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding is what the tolerance is to exclude
    with seeded(0):
        encoder = ENCODERS["resnet18_cifar"].build(3, 32).to(CUDA, memory_format=torch.channels_last)
        x = torch.randn(64, 3, 32, 32).to(CUDA)
        encoder(x)  # running statistics that are not 0 and 1
    encoder.freeze("layer4", "running")
    encoder.eval()
    with torch.no_grad(), torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        plain = encoder(x).float()
        encoder.fold(dtype)
        folded = encoder(x).float()
    assert (folded - plain).norm() / plain.norm() < tolerance


def test_bf16_stays_close_to_fp32():
    full, _ = trained("train.precision=fp32")
    half, _ = trained("train.precision=bf16")
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], rel=2e-2)


def test_fp16_trains():
    means, _ = trained("train.precision=fp16")
    assert means[-1]["loss"] < means[0]["loss"]


def test_step_on_the_gpu_equals_the_cpu():
    config = with_settings(get_recipe("digits"), [])
    results = []
    for device in (torch.device("cpu"), CUDA):
        bench = prepare(config, device)
        loader = build_loader(replace(bench, images=bench.images.cpu(), labels=bench.labels.cpu()))
        batch = loader.batch(loader.draw(0), torch.tensor([0]))
        views, (labels, rows) = (v.to(device) for v in batch.views), (t.to(device) for t in (batch.labels, batch.rows))
        moved = type(batch)(tuple(views), labels, batch.num_labeled, rows)
        out = bench.method.step(moved)
        bench.method.after_step(*out.carry)
        results.append((out.loss.item(), bench.method.prototypes.cpu()))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4, rtol=0)
