"""How fast the convolutions of ResNet-18 (32 pixels) can be: each alone, forward and both backward products, bfloat16.

python benchmarks/conv_floor.py [--views 1024] [--repeats 20]

Their sum is the floor of an epoch with this library of convolutions: nothing else (batch norm, views, losses) is counted.
Needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from measure import Benchmark
from opencon.runtime import pick_device

# channels in, channels out, side, stride, kernel, how many of them, in the stage (frozen: all but layer4)
LAYERS = [
    (3, 64, 32, 1, 3, 1, "stem"),
    (64, 64, 32, 1, 3, 4, "layer1"),
    (64, 128, 32, 2, 3, 1, "layer2"),
    (64, 128, 32, 2, 1, 1, "layer2"),
    (128, 128, 16, 1, 3, 3, "layer2"),
    (128, 256, 16, 2, 3, 1, "layer3"),
    (128, 256, 16, 2, 1, 1, "layer3"),
    (256, 256, 8, 1, 3, 3, "layer3"),
    (256, 512, 8, 2, 3, 1, "layer4"),
    (256, 512, 8, 2, 1, 1, "layer4"),
    (512, 512, 4, 1, 3, 3, "layer4"),
]
IMAGES = 50_000


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--views", type=int, default=1024, help="rows of a batch")
    benchmark.add_argument("--repeats", type=int, default=20)
    args = benchmark.begin()
    device = pick_device()
    if device.type != "cuda":
        benchmark.error("needs a GPU")
    torch.backends.cudnn.benchmark = True
    rows = []
    like = {"device": device, "dtype": torch.bfloat16}
    for c_in, c_out, side, stride, kernel, number, stage in LAYERS:
        x = torch.randn(args.views, c_in, side, side, **like).to(memory_format=torch.channels_last)
        w = torch.randn(c_out, c_in, kernel, kernel, **like).to(memory_format=torch.channels_last)
        settings = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1
        grad = torch.randn_like(F.conv2d(x, w, stride=stride, padding=kernel // 2))

        def backward(which: list[bool], grad=grad, x=x, w=w, settings=settings) -> object:
            return torch.ops.aten.convolution_backward(grad, x, w, None, *settings, which)

        repeats = 3 if args.quick else args.repeats
        row = {
            "layer": [c_in, c_out, side, stride, kernel],
            "stage": stage,
            "number": number,
            "tflop": 2 * args.views * c_out * c_in * kernel**2 * (side // stride) ** 2 / 1e12,
            "forward_ms": milliseconds(
                lambda x=x, w=w, s=stride, k=kernel: F.conv2d(x, w, stride=s, padding=k // 2), repeats
            ),
            "input_ms": milliseconds(lambda b=backward: b([True, False, False]), repeats) if c_in > 3 else 0.0,
            "weight_ms": milliseconds(lambda b=backward: b([False, True, False]), repeats),
        }
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    steps = 2 * IMAGES / args.views

    def seconds(kinds: list[str], stages: set[str] | None = None) -> float:
        return (
            steps / 1e3 * sum(r["number"] * r[k] for r in rows for k in kinds if stages is None or r["stage"] in stages)
        )

    result = {
        "views": args.views,
        "n": args.repeats,
        "layers": rows,
        "epoch_seconds_all_learn": seconds(["forward_ms", "input_ms", "weight_ms"]),
        "epoch_seconds_layer4_learns": seconds(["forward_ms"]) + seconds(["input_ms", "weight_ms"], {"layer4"}),
    }
    benchmark.save(result, device)
    print({k: v for k, v in result.items() if k.startswith("epoch")})


if __name__ == "__main__":
    main()
