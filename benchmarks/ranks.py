"""Training by several ranks: losses beside those of one, what a step sends, and the efficiency to expect of more GPUs.

python benchmarks/ranks.py --data FOLDER --weights FILE [--epochs 3] [--set KEY=VALUE] [--quick]
python benchmarks/ranks.py --expected

The recipe is opencon/cifar100, not compiled: compiling takes longer than these epochs. Each part is a process of its own.

  one     one process: losses of each epoch, and milliseconds of a step at several sizes of the batch, recorded as a CUDA
          graph where there is a GPU; and of loss and head alone, which every rank computes for the batch of all ranks
  two     two ranks over gloo with the same batches, on the same GPU where there is one: losses, and for a step how many
          tensors of which size are sent, how many bytes, and how long that takes when both ranks are there
  nccl    one rank over NCCL that sends as several would, its step recorded as a CUDA graph (GPU only)
  refused what NCCL says to two ranks on one GPU (GPU only)

The table of expected efficiency is arithmetic, not a measurement. A step of R ranks takes

    views and encoder of its own rows + loss of all rows + bytes / link + calls * latency

with the first two measured here, and nothing sent while something is computed, as it is in the code. LINKS are assumptions.
Ranks share the pairs of a loss of many rows: what grows with the square of the rows is divided by R, and its gradient is
sent.

--expected does only the arithmetic: from the last run of results/ranks.json, and for the recipe imagenet100. What its step
would send is counted, its images per second in one process are those of results/worker_path.json, taken to be the same for
any number of rows, and the loss is that of results/ranks.json, whose rows have as many numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from made_up import made_up
from measure import RESULTS, Benchmark, settings
from opencon.config import with_settings
from opencon.data.benchmarks import DATASETS, load_dataset
from opencon.data.loader import Batch
from opencon.data.shares import Sharing
from opencon.encoders.synchronized import synchronize_norms
from opencon.experiments.recipes import get_recipe
from opencon.experiments.train import MEASURED_STEPS
from opencon.experiments.workbench import Workbench, assemble, build_loader, build_method
from opencon.losses.contrastive import BLOCKED_FROM
from opencon.methods import Task
from opencon.runtime import pick_device
from opencon.training.optimizer import build_optimizer
from opencon.training.ranks import joined, rank
from opencon.training.trainer import Captured, TrainStep, fit

RECIPE, PARTS = "opencon/cifar100", ("one", "two", "nccl", "refused")
VIEWS, DIM = 2, 128  # of both recipes: views of an image, numbers in a row of the loss
SMALL = 65_536  # bytes, ours: what takes longer to begin than to send
MEASURED = 20  # steps whose communication is measured one by one
PATIENCE = 120  # seconds for a part
# Assumptions. Bytes per second in one direction for each GPU: NVLink 4 has 900 GB/s in both (NVIDIA, H200 data sheet), and a
# DGX H100 has a 400 Gb/s InfiniBand port for each GPU (NVIDIA, DGX H100 data sheet). Ours: three quarters of it are reached,
# and a collective takes 20 microseconds to begin within a machine and 50 between machines.
REACHED = 0.75
LINKS = {
    8: {"what": "8 GPUs of one machine, NVLink", "bytes_per_second": REACHED * 450e9, "latency": 20e-6},
    64: {"what": "8 machines of 8 GPUs, InfiniBand", "bytes_per_second": REACHED * 50e9, "latency": 50e-6},
}


def open_bench(args: argparse.Namespace, device: torch.device, *more: str) -> Workbench:
    fixed = [f"train.epochs={args.epochs}", "train.compile=false", "train.log_every=100000"]
    config = with_settings(get_recipe(RECIPE), [*fixed, *settings(args), *more])
    dataset = load_dataset(config.data) if args.data else made_up(config.data.name, num_images=args.num_train)
    bench = assemble(config, dataset, device)
    torch.backends.cudnn.benchmark = True
    return bench


def run_epochs(bench: Workbench) -> dict[str, Any]:
    """The mean loss of each epoch, and its seconds."""
    loader, losses, ends = build_loader(bench), [], []
    bench.method.embedder.measure_frozen(loader.first_views(MEASURED_STEPS))
    bench.method.embedder.fold_frozen()

    def on_epoch(epoch: int, means: dict[str, float]) -> None:
        losses.append(means["loss"])
        ends.append(time.perf_counter())

    began = time.perf_counter()
    fit(
        bench.method,
        build_optimizer(bench.method, bench.config.train),
        loader,
        bench.config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler(bench.device.type, enabled=False),
        on_epoch=on_epoch,
    )
    seconds = [b - a for a, b in zip([began, *ends], ends, strict=False)]
    return {"losses": losses, "epoch_seconds": seconds, "steps_per_epoch": len(loader)}


def new_step(bench: Workbench, *, sharing: Sharing | None = None) -> TrainStep:
    loader, scaler = build_loader(bench), torch.amp.GradScaler(bench.device.type, enabled=False)
    if sharing is not None:
        loader.sharing = sharing
    train = bench.config.train
    step = TrainStep(bench.method, build_optimizer(bench.method, train), loader, scaler, train)
    bench.method.train()
    step.start_epoch(0, loader.draw(0))
    return step


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, number: int) -> float:
    for _ in range(Captured.WARM_UP + 2):
        work()
    wait(device)
    began = time.perf_counter()
    for _ in range(number):
        work()
    wait(device)
    return (time.perf_counter() - began) / number


def seconds_of_step(bench: Workbench, size: int, number: int) -> float:
    """A step of one process with batches of another size."""
    train = replace(bench.config.train, batch_size=size)
    step = new_step(replace(bench, config=replace(bench.config, train=train)))
    number = max(1, min(number, len(step.loader) - Captured.WARM_UP - 2))
    is_cuda = bench.device.type == "cuda"
    return seconds_of(Captured(step) if is_cuda else step, bench.device, number)


def seconds_of_loss(bench: Workbench, times: int, number: int) -> float | None:
    """Head, loss, their backward pass and the prototypes, for a batch so many times as large; None: out of memory."""
    loader, method = build_loader(bench), bench.method
    batch = loader.batch(loader.draw(0), torch.zeros(1, dtype=torch.long, device=bench.device))
    parts = batch.labels[: batch.num_labeled], batch.labels[batch.num_labeled :]
    labels = torch.cat([part.repeat(times) for part in parts])
    views = tuple(view[:1].expand(len(labels), *view.shape[1:]) for view in batch.views)
    large = Batch(views, labels, batch.num_labeled * times, batch.rows.repeat(times))
    shape = (len(views) * len(labels), method.embedder.num_features)
    features = torch.rand(shape, device=bench.device, requires_grad=True)

    def work() -> None:
        with mock.patch.object(type(method.embedder), "features_of_views", return_value=features):
            out = method.step(large)
        out.loss.backward()
        method.after_step(*out.carry)

    try:
        if bench.device.type != "cuda":
            return seconds_of(work, bench.device, 1)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(Captured.WARM_UP):
                work()
        wait(bench.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        return seconds_of(graph.replay, bench.device, number)
    except torch.OutOfMemoryError:
        return None


class Spy:
    """Counts what a rank sends, and the seconds that takes once all ranks are there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        self.sent: Counter[tuple[str, int]] = Counter()  # (kind, bytes of the rank's own tensor) -> calls

    def wrapped(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spied(*args: Any, **kwargs: Any) -> Any:
            tensor = args[1] if kind == "gather" else args[0]
            self.sent[kind, tensor.numel() * tensor.element_size()] += 1
            wait(self.device)
            dist.barrier()
            began = time.perf_counter()
            result = call(*args, **kwargs)
            wait(self.device)
            self.seconds += time.perf_counter() - began
            return result

        return spied

    def numbers(self, steps: int) -> dict[str, Any]:
        rows = [
            {"kind": kind, "bytes": size, "calls": calls / steps} for (kind, size), calls in sorted(self.sent.items())
        ]

        def total(kind: str, is_small: bool) -> float:
            return sum(r["bytes"] * r["calls"] for r in rows if r["kind"] == kind and (r["bytes"] < SMALL) == is_small)

        return {
            "tensors": rows,
            "calls": sum(row["calls"] for row in rows),
            "gathered_bytes": total("gather", False) + total("gather", True),
            "reduced_bytes": total("reduce", False),
            "reduced_small_bytes": total("reduce", True),
            "seconds": self.seconds / steps,
        }


def part_one(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    bench, number = open_bench(args, device), 2 if args.quick else MEASURED
    found = run_epochs(bench)
    size = bench.config.train.batch_size
    found["batch"] = size
    found["step_seconds"] = {b: seconds_of_step(bench, b, number) for b in (size, size // 8, size // 64) if b >= 4}
    bench.method.train()
    found["loss_seconds"] = {}
    for times in (1, 8, 64)[: 2 if args.quick else 3]:
        found["loss_seconds"][size * times] = seconds_of_loss(bench, times, 2 if times > 8 else number)
    return found


def part_two(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    bench = open_bench(args, device)
    found = run_epochs(bench)
    step, steps = new_step(bench), 2 if args.quick else MEASURED
    steps = max(1, min(steps, len(step.loader) - 2))
    step()
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    found["step_seconds"] = time.perf_counter() - began
    step.start_epoch(0, step.loader.draw(0))
    spy = Spy(device)
    calls = {"all_gather": "gather", "all_reduce": "reduce"}
    with mock.patch.multiple(dist, **{name: spy.wrapped(kind, getattr(dist, name)) for name, kind in calls.items()}):
        for _ in range(steps):
            step()
    return found | {
        "backend": dist.get_backend(),
        "own_rows": step.loader.sharing.num_own,
        "measured_steps": steps,
        "communication": spy.numbers(steps),
    }


def part_nccl(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One rank as if it were one of several: it gathers, synchronizes norms and adds gradients, all inside a graph."""
    bench = open_bench(args, device, "train.kernels=false")  # kernels would take the place of synchronized norms
    bench.method.kernels = bench.config.train.capture  # those of the prototypes do not
    synchronize_norms(bench.method.embedder.encoder)
    loader = build_loader(bench)
    bench.method.embedder.measure_frozen(loader.first_views(MEASURED_STEPS))
    bench.method.embedder.fold_frozen()
    step = new_step(bench, sharing=Sharing(0, 1, loader.num_labeled, loader.num_labeled + loader.num_unlabeled))
    is_cuda = device.type == "cuda"
    advance = Captured(step) if is_cuda else step
    for _ in range(len(loader)):
        advance()
    step.check(0)
    loss = step.means()["loss"]
    return {"backend": dist.get_backend(), "loss": loss, "is_recorded": is_cuda and advance.graph is not None}


def part_refused(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    try:
        dist.destroy_process_group()
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(1, device=device))
        wait(device)
    except Exception as err:  # NCCL's errors have several types
        text = " ".join(str(err).split())
        at = max(text.find("Duplicate"), 0)
        return {"refused": True, "said": text[at : at + 120]}
    return {"refused": False}


def run_part(name: str, args: argparse.Namespace, out: Path) -> None:
    """In a process that this script has started: the numbers of a part, to a file."""
    device = pick_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    with joined(device) as own:
        found = globals()[f"part_{name}"](args, own)
        if rank() == 0:
            out.write_text(json.dumps(found))
        if name == "refused":  # what is left of the group cannot be ended in order
            os._exit(0)


def start_part(name: str, words: list[str]) -> dict[str, Any] | None:
    ranks = {"one": 0, "nccl": 1, "two": 2, "refused": 2}[name]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "numbers.json")
        typed = [sys.executable, *launcher, __file__, *words, "--part", name, "--part-out", str(out)]
        began = time.perf_counter()
        try:
            said = subprocess.run(typed, capture_output=True, text=True, timeout=PATIENCE, check=False).stderr
        except subprocess.TimeoutExpired as err:
            said = f"longer than {PATIENCE} seconds; {err.stderr!r}"
        if not out.is_file():
            print(f"{name}: failed\n{said[-3000:]}", flush=True)
            return None
        found: dict[str, Any] = json.loads(out.read_text())
    found["part_seconds"] = time.perf_counter() - began
    print(f"{name}: {json.dumps(found)}"[:900], flush=True)
    return found


def expected(one: dict[str, Any], two: dict[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds of a step of more ranks, by the arithmetic at the top, for the sizes that were measured."""
    size = one["batch"]
    step, loss = ({int(b): t for b, t in one[f"{what}_seconds"].items()} for what in ("step", "loss"))
    sent = two["communication"]
    sizes = {
        "gathered_bytes_of_a_row": sent["gathered_bytes"] / two["own_rows"],
        "reduced_bytes": sent["reduced_bytes"] + sent["reduced_small_bytes"],
        "calls": sent["calls"],
    }
    # Of one process with so few rows, the loss is not measured: it has few rows, too.
    encoder = {b: max(t - loss[size] * b / size, 0.0) for b, t in step.items() if loss.get(size) is not None}
    return scaled(size, encoder, {b: t for b, t in loss.items() if t is not None}, sizes)


def scaled(
    size: int, encoder: dict[int, float], loss: dict[int, float], sizes: dict[str, float]
) -> list[dict[str, Any]]:
    """A row for each number of GPUs, with one batch for all of them, and with one for each.

    Args:
        size: rows of the batch of one process.
        encoder: seconds of views, encoder and optimizer by the rows of a rank.
        loss: seconds of the loss in one process by the rows of all ranks.
        sizes: gathered_bytes_of_a_row, reduced_bytes and calls, of a step.
    """
    rows = []
    for ranks, link in LINKS.items():
        for what, own in (("the same batch", size // ranks), ("a batch for each GPU", size)):
            whole = own * ranks
            if own not in encoder or whole not in loss:
                continue
            pairs = pair_seconds(loss, whole)
            shared_loss = loss[whole] - pairs + pairs / ranks
            reduced, calls = sizes["reduced_bytes"], sizes["calls"]
            if pairs:  # for each of the three losses: numbers (N,), and a gradient (N, D)
                reduced, calls = reduced + 3 * 4 * VIEWS * whole * (1 + DIM), calls + 6
            sending = sizes["gathered_bytes_of_a_row"] * whole * (ranks - 1) / ranks
            sending = (sending + 2 * (ranks - 1) / ranks * reduced) / link["bytes_per_second"]
            begin = calls * link["latency"]
            total = encoder[own] + shared_loss + sending + begin
            alone = (encoder[size] + loss[size]) * whole / size / ranks
            parts = {
                "encoder": encoder[own],
                "loss": shared_loss,
                "sending": sending,
                "beginning": begin,
                "step": total,
            }
            rows.append(
                {"gpus": ranks, "what": what, "link": link["what"], "rows_of_a_gpu": own}
                | {f"{part}_ms": 1e3 * seconds for part, seconds in parts.items()}
                | {"efficiency": alone / total}
            )
    return rows


def pair_seconds(loss: dict[int, float], rows: int) -> float:
    """Of a loss in blocks, the part that grows with the square of the rows, by the two largest batches; 0 of a small one."""
    if VIEWS * rows < BLOCKED_FROM["cuda"] or len(loss) < 2:
        return 0.0
    few, many = sorted(loss)[-2:]
    square = (loss[many] - loss[few] * many / few) / (many**2 - few * many)
    return max(square, 0.0) * rows**2


def recorded() -> dict[str, Any]:
    """The numbers of the last run on record."""
    runs = json.loads((RESULTS / "ranks.json").read_text())["runs"]
    found: dict[str, Any] = [run["numbers"] for run in runs if run["numbers"].get("one")][-1]
    return found


def counted(recipe: str, cifar: dict[str, Any]) -> dict[str, Any]:
    """What a step of a recipe would send, and the efficiency to expect."""
    config = get_recipe(recipe)
    side = config.augment.size or DATASETS[config.data.name].info.image_size
    task = Task(config.split.num_seen or 1, DATASETS[config.data.name].info.num_classes, 0.5, 1000)
    method = build_method(config, task, in_channels=3, image_size=side)
    encoder, views = method.embedder.encoder, 2 + len(config.views)
    norms = [m for m in encoder.modules() if isinstance(m, torch.nn.BatchNorm2d) and m.weight.requires_grad]
    sizes = {
        "gathered_bytes_of_a_row": 4 * views * method.embedder.num_features,
        # Gradients, and for each norm a count, two sums, and their two gradients.
        "reduced_bytes": 4 * sum(p.numel() for p in method.parameters() if p.requires_grad)
        + sum(4 + 4 * 4 * norm.num_features for norm in norms),
        "calls": 2 + 5 * len(norms),
    }
    rate = json.loads((RESULTS / "worker_path.json").read_text())["runs"][-1]["numbers"]["step"]["memory"]["median"]
    loss = {int(b): t for b, t in cifar["one"]["loss_seconds"].items() if t is not None}
    size = config.train.batch_size
    seconds = {size // n: size // n / rate - loss[size] * (size // n) / size for n in (1, *LINKS)}
    return {"recipe": recipe, "images_per_second": rate, "sizes": sizes, "expected": scaled(size, seconds, loss, sizes)}


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print({k: (round(v, 3) if isinstance(v, float) else v) for k, v in row.items()})


def main() -> None:
    benchmark = Benchmark(__doc__)
    benchmark.add_settings()
    benchmark.add_argument("--epochs", type=int, default=3)
    benchmark.add_argument("--num-train", type=int, help="made-up images, without --data")
    benchmark.add_argument("--expected", action="store_true", help="only the arithmetic, from recorded runs")
    benchmark.add_argument("--part", choices=PARTS, help="used by the script itself")
    benchmark.add_argument("--part-out", type=Path, help="used by the script itself")
    args = benchmark.parse_args()
    if args.quick and not args.data:
        args.epochs, args.num_train = 1, args.num_train or 640
        args.settings = ["train.batch_size=32", "train.precision=fp32", *args.settings]
    if args.part:
        run_part(args.part, args, args.part_out)
        return
    benchmark.begin()
    if args.expected:
        cifar = recorded()
        tables = [{"recipe": RECIPE, "expected": expected(cifar["one"], cifar["two"])}, counted("imagenet100", cifar)]
        for table in tables:
            print(table["recipe"])
            show(table["expected"])
        benchmark.save({"recipe": "arithmetic", "links": LINKS, "tables": tables}, torch.device("cpu"))
        return
    device = pick_device()
    parts = {name: start_part(name, sys.argv[1:]) for name in (PARTS if device.type == "cuda" else PARTS[:2])}
    one, two = parts["one"], parts["two"]
    numbers = {"recipe": RECIPE, "settings": settings(args), "epochs": args.epochs, **parts}
    if one and two:
        apart = [abs(a - b) / abs(a) for a, b in zip(one["losses"], two["losses"], strict=True)]
        numbers["losses_apart"] = max(apart)
        numbers["links"] = LINKS
        numbers["expected"] = expected(one, two)
        print(f"losses differ by {max(apart):.2%} at most: {one['losses']} and {two['losses']}")
        show(numbers["expected"])
    benchmark.save(numbers, device)
    if not all(parts.values()):
        sys.exit("a part has failed; what it said stands above")


if __name__ == "__main__":
    main()
