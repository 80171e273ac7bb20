"""On a GPU: a recorded step that is fed from files equals one that is fed from memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from opencon.config import AugmentConfig, DataConfig, EncoderConfig, RunConfig, SplitConfig, TrainConfig
from opencon.data.loader import TwoStreamLoader
from opencon.data.streaming import SLOTS, StreamedImages
from opencon.experiments.workbench import build_loader, prepare
from opencon.methods import Method, OpenConConfig, StepOutput
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import fit
from tests.methods.toys import TASK

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NUM_IMAGES, SIZE, SHARES = 2000, 32, (16, 48)


def pixels(i):
    """Image i: its number in base 251, in every pixel."""
    return np.broadcast_to(np.array([i % 251, i // 251, 7], dtype=np.uint8).reshape(3, 1, 1), (3, SIZE, SIZE))


class SlowViews:
    """Keeps the device busy before and after it reads the images, so that a copy at the wrong time is seen."""

    def draw(self, num_images, source_size, generator):
        return ()

    def apply(self, images, params):
        torch.cuda._sleep(1_000_000)  # about half a millisecond
        first = images.float()
        torch.cuda._sleep(1_000_000)
        return (first + images.float()) / 2


class WritesDown(Method):
    """Keeps which images each step got: the lowest and highest pixel of each channel."""

    def __init__(self, num_steps):
        super().__init__(None, TASK, nn.Identity())
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(num_steps, sum(SHARES), 6))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def step(self, batch):
        x = batch.views[0]
        extremes = torch.cat((x.amin(dim=(2, 3)), x.amax(dim=(2, 3))), dim=1)
        return StepOutput(self.weight * extremes.mean(), carry=(extremes,))

    def after_step(self, extremes):
        self.seen.index_copy_(0, self.at, extremes[None])
        self.at += 1

    def assign(self, bank):
        raise AssertionError


def seen_by_the_step(images, *, capture):
    labels = torch.where(torch.arange(NUM_IMAGES) % 4 == 0, 0, -1).to(CUDA)
    loader = TwoStreamLoader(images, labels, batch_shares=SHARES, augments=(SlowViews(),), seed=0)
    assert len(loader) > 5 * SLOTS
    config = TrainConfig(epochs=2, capture=capture, log_every=1000)
    method = WritesDown(2 * len(loader)).to(CUDA)
    optimizer = torch.optim.SGD([method.weight], lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    fit(method, optimizer, loader, config, features=lambda: None, scaler=scaler)
    return method.seen.cpu()


@pytest.mark.parametrize("capture", [True, False])
def test_every_step_reads_the_images_of_its_own_batch(capture):
    resident = torch.from_numpy(np.stack([pixels(i) for i in range(NUM_IMAGES)])).to(CUDA)
    streamed = StreamedImages(
        [Path(str(i)) for i in range(NUM_IMAGES)], SIZE, lambda path, size: pixels(int(str(path))), device=CUDA
    )
    want = seen_by_the_step(resident, capture=capture)
    got = seen_by_the_step(streamed, capture=capture)
    assert (want[..., 2] == 7).all()  # every step has written
    assert torch.equal(got, want)


def test_evaluation_streams_in_order():
    streamed = StreamedImages(
        [Path(str(i)) for i in range(NUM_IMAGES)], SIZE, lambda path, size: pixels(int(str(path))), device=CUDA
    )
    numbers = []
    for chunk in streamed.in_order(96):
        torch.cuda._sleep(1_000_000)
        numbers.append(chunk[:, 0, 5, 5].long() + 251 * chunk[:, 1, 9, 9].long())  # read late, after the sleep
    assert torch.cat(numbers).tolist() == list(range(NUM_IMAGES))


def trained(root, memory_gb):
    config = RunConfig(
        data=DataConfig(name="folder", root=str(root), image_size=40, memory_gb=memory_gb),
        split=SplitConfig(num_seen=2),
        encoder=EncoderConfig(name="convnet"),
        augment=AugmentConfig(size=32),
        method=OpenConConfig(ramp_epochs=2),
        train=TrainConfig(epochs=4, batch_size=32, lr=0.05),
    )
    bench = prepare(config, CUDA)
    assert isinstance(bench.images, torch.Tensor) == (memory_gb > 0)
    means = []
    fit(
        bench.method,
        build_optimizer(bench.method, config.train),
        build_loader(bench),
        config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        on_epoch=lambda epoch, m: means.append(m),
    )
    return means


def test_a_captured_run_from_files_equals_one_from_memory(tmp_path):
    rng = np.random.default_rng(0)
    for c in range(4):
        (tmp_path / f"class{c}").mkdir()
        for i in range(60):
            small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(small).resize((60, 50)).save(tmp_path / f"class{c}" / f"{i:02d}.jpg")
    a, b = trained(tmp_path, 1.0), trained(tmp_path, 0.0)
    # Sums on a GPU may add up in another order, and from step to step that grows: close at first, alike later.
    for x, y, tolerance in zip(a[:3], b[:3], (2e-3, 1e-2, 3e-2), strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=tolerance)
        assert y["loss_l"] == pytest.approx(x["loss_l"], rel=2 * tolerance)
