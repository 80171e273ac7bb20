"""Triton kernels against their plain forms, on a GPU or, as a program of its own, on Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.kernel_check
"""

import torch
import torch.nn.functional as F

from opencon.config import AugmentConfig
from opencon.data.augment import Augment
from opencon.prototypes import ema_update
from tests.naive import norm_kernel as naive

# size of a view, of its source, settings that differ from the defaults
VIEWS = [
    (32, (32, 32), {}),
    (16, (64, 32), {"jitter": (0.0, 0.4, 0.0, 0.1)}),
    (64, (32, 64), {"jitter": (0.4, 0.0, 0.4, 0.0)}),
    (64, (64, 64), {"jitter": (0.0, 0.0, 0.0, 0.4), "jitter_p": 1.0}),
    (32, (32, 32), {"jitter_p": 0.0, "gray_p": 0.0, "flip_p": 0.0}),
    (20, (32, 32), {"crop_scale": (0.2, 0.6)}),  # no power of two
    (33, (64, 32), {"jitter_p": 1.0}),
]
PROTOTYPES = [(512, 100, 128), (0, 3, 16), (1, 1, 5), (300, 7, 100), (600, 2, 16)]  # rows, classes, dimensions

# images, channels, side; how many gradients come back; what is done with them
NORMS = [
    (4, 64, 5, 2, {"relu": True, "keep": True}),  # 100 rows: not a whole number of tiles
    (3, 128, 16, 1, {"relu": True, "keep": True}),
    (2, 192, 9, 1, {"relu": True, "keep": False}),
    (2, 64, 3, 1, {"relu": False, "keep": False}),  # fewer rows than a tile has
]


def check_views(size, source, settings, *, device, num_images):
    augment = Augment(AugmentConfig(**settings), image_size=size, channels=3)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * num_images, 3, *source), dtype=torch.uint8, generator=g)
    images[0], images[2], images[4] = 0, 255, images[4, :1]
    images = images.to(device)[::2]  # not contiguous, and so are the parameters
    drawn = augment.draw(2 * num_images, source, torch.Generator(device).manual_seed(1))
    params = type(drawn)(*(None if p is None else p[::2] for p in drawn))
    fast = augment.by_kernel(images, params)
    # Both round in float32: on a GPU two of 1.6 million pixels of 33 px views differ by 1.1e-5.
    torch.testing.assert_close(fast, augment.plain(images, params), atol=2e-5, rtol=0)
    assert fast.min() >= 0.0
    assert fast.max() <= 1.0
    return augment, images, params, fast


def check_prototypes(rows, classes, dim, *, device):
    from opencon.prototypes.kernel import ema_update_kernel

    g = torch.Generator().manual_seed(rows)
    prototypes = F.normalize(torch.randn(classes, dim, generator=g), dim=1).to(device)
    z = F.normalize(torch.randn(rows, dim, generator=g), dim=1).to(device)
    labels = torch.randint(-1, classes, (rows,), generator=g).to(device)
    before = prototypes.clone()
    fast = ema_update_kernel(prototypes, z, labels, 0.9)
    torch.testing.assert_close(fast, ema_update(prototypes, z, labels, momentum=0.9, kernel=False), atol=2e-6, rtol=0)
    assert torch.equal(prototypes, before)


def check_norm(images, channels, side, number, how, *, device, dtype=torch.float32):
    """Each kernel on the same numbers as its definition; and again, to the last bit, since none adds in a chance order."""
    from opencon.encoders import norm_kernel as kernel

    g = torch.Generator().manual_seed(channels)
    offset = 30.0 * torch.randn(1, channels, 1, 1, generator=g)  # far from zero: squares would cancel

    def some(offset=0.0):
        values = torch.randn(images, channels, side, side, generator=g) + offset
        return values.to(device, dtype).contiguous(memory_format=torch.channels_last)

    x, shortcut, grads = some(offset), some(), [some() for _ in range(number)]
    norms = [torch.nn.BatchNorm2d(channels).to(device) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.randn(channels, generator=g.manual_seed(1)))
            norm.bias.copy_(torch.randn(channels, generator=g))
            norm.running_mean.copy_(offset.flatten() + torch.randn(channels, generator=g))
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    stats = kernel.statistics(x, norms[0])
    torch.testing.assert_close(stats, naive.statistics(x, norms[1]), atol=1e-5, rtol=1e-5)
    for new, old in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5)
    known = stats, norms[0].weight.detach(), norms[0].bias.detach()
    relu, keep = how["relu"], how["keep"]
    added = shortcut if keep else None
    y = kernel.normalize(x, *known, added, relu=relu)
    torch.testing.assert_close(y, naive.normalize(x, *known, added, relu=relu), **close)
    of_norm, passed = kernel.gradient_sums(grads, x, y, *known, **how)
    for new, old in zip((of_norm, passed), naive.gradient_sums(grads, x, y, *known, **how), strict=True):
        torch.testing.assert_close(new, old, **close)
    asks = relu and not keep
    out = kernel.gradient(passed, x, *known, of_norm, relu=asks)
    torch.testing.assert_close(out, naive.gradient(passed, x, *known, of_norm, relu=asks), **close)
    for _ in range(20):
        assert torch.equal(kernel.gradient_sums(grads, x, y, *known, **how)[0], of_norm)


def check_not_a_number(*, device):
    """It stays one, and in its channel: a run that has diverged is to be noticed. The next batch is not touched."""
    from opencon.encoders import norm_kernel as kernel

    norm = torch.nn.BatchNorm2d(64).to(device)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 8, 8, generator=g).to(device).contiguous(memory_format=torch.channels_last)
    bad = x.clone()
    bad[1, 5, 3, 3] = float("inf")
    affine = norm.weight.detach(), norm.bias.detach()
    stats = kernel.statistics(bad, norm)
    y = kernel.normalize(bad, stats, *affine, None, relu=True)
    lost = y.isnan().flatten(2).any(2).any(0).nonzero().flatten().tolist()
    assert lost == [5]
    assert not norm.running_mean[5].isfinite()
    assert kernel.statistics(x, norm).isfinite().all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in VIEWS:
        check_views(*case, device="cpu", num_images=24)
    for case in PROTOTYPES:
        check_prototypes(*case, device="cpu")
    for case in NORMS:
        check_norm(*case, device="cpu")
    check_not_a_number(device="cpu")
    print("kernels equal their plain forms")
