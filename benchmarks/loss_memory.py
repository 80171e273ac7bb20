"""Time and memory of InfoNCE, forward and backward: the plain form against the blocked one.

python benchmarks/loss_memory.py [--quick] [--dim 128] [--repeats 5]

Memory is the most held at any moment beyond the embeddings: from CUDA's allocator, on a CPU from the profiler's allocation
events. Times of the two forms are taken in turn, so that a busy machine slows both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from measure import Benchmark
from opencon.losses.blocked import info_nce_within, rows_of_a_block
from opencon.losses.contrastive import info_nce, masks_within
from opencon.runtime import pick_device

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
QUICK_SIZES = SIZES[:3]
TEMPERATURE = 0.4  # OpenCon's L_u
PLAIN_BYTES = 21  # per pair, measured; where all pairs together exceed the room, the plain form is left out
CPU_ROOM, GPU_ROOM = 6e9, 60e9


def plain(z: Tensor, member: Tensor, group: Tensor) -> Tensor:
    return info_nce(z, masks_within(member, group), temperature=TEMPERATURE)


def blocked(z: Tensor, member: Tensor, group: Tensor) -> Tensor:
    return info_nce_within(z, member, group, temperature=TEMPERATURE)


FORMS = {"plain": plain, "blocked": blocked}


def step(form: Callable[..., Tensor], z: Tensor, member: Tensor, group: Tensor) -> None:
    z.grad = None
    form(z, member, group).backward()
    if z.is_cuda:
        torch.cuda.synchronize()


def peak_bytes(action: Callable[[], None], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def measure(rows: int, dim: int, repeats: int, device: torch.device) -> dict[str, float | int | None]:
    z = F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)), dim=1).to(device)
    z.requires_grad_()
    member = torch.ones(rows, dtype=torch.bool, device=device)
    group = torch.arange(rows // 2, device=device).repeat(2)
    room = GPU_ROOM if device.type == "cuda" else CPU_ROOM
    forms = {name: form for name, form in FORMS.items() if name == "blocked" or PLAIN_BYTES * rows * rows < room}
    row: dict[str, float | int | None] = {"rows": rows, "rows_of_a_block": rows_of_a_block(z), "n": repeats}
    for name, form in forms.items():
        step(form, z, member, group)  # first calls choose algorithms and fill caches
        z.grad = None
        row[f"{name}_mb"] = peak_bytes(lambda form=form: step(form, z, member, group), device) / 1e6
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            began = time.perf_counter()
            step(form, z, member, group)
            times[name].append(1e3 * (time.perf_counter() - began))
    for name, taken in times.items():
        row |= {f"{name}_ms": statistics.median(taken), f"{name}_ms_min": min(taken), f"{name}_ms_max": max(taken)}
    return row


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--dim", type=int, default=128)
    benchmark.add_argument("--repeats", type=int, default=5)
    args = benchmark.begin()
    device = pick_device()
    print(f"{'N':>6} {'R':>5} {'plain ms':>10} {'blocked ms':>10} {'plain MB':>10} {'blocked MB':>10}")
    table = []
    for rows in QUICK_SIZES if args.quick else SIZES:
        row = measure(rows, args.dim, args.repeats, device)
        table.append(row)
        cells = (row.get(key) for key in ("plain_ms", "blocked_ms", "plain_mb", "blocked_mb"))
        shown = " ".join(f"{'-' if cell is None else f'{cell:.1f}':>10}" for cell in cells)
        print(f"{rows:>6} {row['rows_of_a_block']:>5} {shown}", flush=True)
    benchmark.save({"dim": args.dim, "temperature": TEMPERATURE, "table": table}, device)


if __name__ == "__main__":
    main()
