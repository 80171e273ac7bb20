"""Triton kernels against their plain forms, on a GPU or, as a program of its own, on Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.kernel_check
"""

import torch
import torch.nn.functional as F

from opencon.config import AugmentConfig
from opencon.data.augment import Augment
from opencon.prototypes import ema_update

# size of a view, of its source, settings that differ from the defaults
VIEWS = [
    (32, (32, 32), {}),
    (16, (64, 32), {"jitter": (0.0, 0.4, 0.0, 0.1)}),
    (64, (32, 64), {"jitter": (0.4, 0.0, 0.4, 0.0)}),
    (64, (64, 64), {"jitter": (0.0, 0.0, 0.0, 0.4), "jitter_p": 1.0}),
    (32, (32, 32), {"jitter_p": 0.0, "gray_p": 0.0, "flip_p": 0.0}),
]
PROTOTYPES = [(512, 100, 128), (0, 3, 16), (1, 1, 5), (300, 7, 100), (600, 2, 16)]  # rows, classes, dimensions


def check_views(size, source, settings, *, device, num_images):
    from opencon.data.view_kernel import views_kernel

    augment = Augment(AugmentConfig(**settings), image_size=size, channels=3)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * num_images, 3, *source), dtype=torch.uint8, generator=g)
    images[0], images[2], images[4] = 0, 255, images[4, :1]
    images = images.to(device)[::2]  # not contiguous, and so are the parameters
    drawn = augment.draw(2 * num_images, source, torch.Generator(device).manual_seed(1))
    params = type(drawn)(*(None if p is None else p[::2] for p in drawn))
    fast = views_kernel(images, params, augment.operations, size)
    torch.testing.assert_close(fast, augment.plain(images, params), atol=1e-5, rtol=0)
    assert fast.min() >= 0.0
    assert fast.max() <= 1.0
    return augment, images, params, fast


def check_prototypes(rows, classes, dim, *, device):
    from opencon.prototype_kernel import ema_update_kernel

    g = torch.Generator().manual_seed(rows)
    prototypes = F.normalize(torch.randn(classes, dim, generator=g), dim=1).to(device)
    z = F.normalize(torch.randn(rows, dim, generator=g), dim=1).to(device)
    labels = torch.randint(-1, classes, (rows,), generator=g).to(device)
    before = prototypes.clone()
    fast = ema_update_kernel(prototypes, z, labels, 0.9)
    torch.testing.assert_close(fast, ema_update(prototypes, z, labels, momentum=0.9, kernel=False), atol=2e-6, rtol=0)
    assert torch.equal(prototypes, before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in VIEWS:
        check_views(*case, device="cpu", num_images=24)
    for case in PROTOTYPES:
        check_prototypes(*case, device="cpu")
    print("kernels equal their plain forms")
