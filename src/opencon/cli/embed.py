"""The command for very many photos: `embed` computes features in shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from opencon.cli.base import Device, Imports, app, console, errors, import_plugins, resumable, show_plan
from opencon.cli.photos import Encoder, Size, bars
from opencon.errors import ConfigError, RunError

MOST_WORKERS = 1000  # on one machine, ours: each holds a network
MOST_PROBLEMS = 10  # unreadable photos that are named one by one


@app.command(short_help="Features of very many photos, in shards, by many workers.")
def embed(
    source: Annotated[
        str,
        typer.Argument(help="A folder of photos, a table path[,label], .tar or .parquet files; or an address s3://..."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the shards.")],
    encoder: Encoder = "efficientnet_lite0",
    size: Size = None,
    shard: Annotated[int, typer.Option("--shard", help="Photos in a shard of files.")] = 1024,
    workers: Annotated[int, typer.Option("--workers", help="Processes on this machine.")] = 1,
    half: Annotated[bool, typer.Option("--half", help="Features as 16-bit numbers: half the disk.")] = False,
    decode: Annotated[
        str, typer.Option("--decode", help="Who decodes: threads, processes, or auto (what is faster).")
    ] = "auto",
    device: Device = "auto",
    imports: Imports = None,
) -> None:
    """Compute the features of photos in shards. The same command goes on where it was stopped.

    Any number of workers may work into one folder: more --workers, the command again on other machines, an array job.
    """
    from opencon.data.decoders import DecodeIn
    from opencon.photos.embed import Embedded, make_plan, work
    from opencon.photos.features import Extractor, FeatureSettings
    from opencon.runtime import pick_device

    if shard < 1 or not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"--shard {shard} must be at least 1, and --workers {workers} between 1 and {MOST_WORKERS}.")
    if decode not in get_args(DecodeIn):
        raise ConfigError(f"--decode {decode} must be one of {', '.join(get_args(DecodeIn))}.")
    import_plugins(imports)
    where = pick_device(device)
    extractor = Extractor.open(FeatureSettings(encoder=encoder, image_size=size), where)
    plan = make_plan(source, extractor, out, size=shard, half=half)
    done = sum(plan.is_done(number) for number in range(plan.num_shards))
    workers = min(workers, max(1, plan.num_shards - done))  # nobody else would find a shard
    show_plan(
        {
            "source": source,
            "encoder": f"{encoder} at {extractor.encoder.image_size} px, {plan.record['features']} features",
            "shards": f"{plan.num_shards:,} in {out}, of which {done:,} are done",
            "device": f"{where}, {workers} worker{'s' * (workers > 1)}",
        }
    )
    with resumable("The same command goes on with the shards that are left."):
        if workers > 1:
            del extractor
            words = [source, "--out", str(out), "--encoder", encoder, "--shard", str(shard), "--decode", decode]
            words += ["--half"] if half else []
            words += [word for file in imports or () for word in ("--import", str(file))]
            _start_workers(workers, words, size, device)
        else:
            with bars() as progress:
                work(plan, extractor, lambda done, total: progress("looking", done, total), decode_in=decode)  # type: ignore[arg-type]
    left = sum(not plan.is_done(number) for number in range(plan.num_shards))
    if left:
        console.print(f"{left} of {plan.num_shards} shards are left to other workers, or to the same command again.")
        return
    embedded = Embedded.open(out)
    problems = embedded.problems
    for name, error in problems[:MOST_PROBLEMS]:
        errors.print(f"set aside: {name} {error}")
    if len(problems) > MOST_PROBLEMS:
        errors.print(f"... and {len(problems) - MOST_PROBLEMS} more; the .jsonl files have them all.")
    console.print(
        f"{len(embedded):,} photos in {out}; {len(problems):,} cannot be read.\n"
        f"Groups among them: opencon discover --features {out}",
        soft_wrap=True,
    )


def _start_workers(workers: int, words: list[str], size: int | None, device: str) -> None:
    """The same command in several processes, each with its share of the cores; their errors are ours."""
    words = [*words, "--device", device, *(["--size", str(size)] if size is not None else [])]
    threads = max(1, (os.cpu_count() or 1) // workers)
    # LOCAL_WORLD_SIZE is what torchrun sets, too: threads that decode are shared by as many.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "LOCAL_WORLD_SIZE": str(workers)}
    typed = [sys.executable, "-m", "opencon", "embed", *words]
    running = [subprocess.Popen(typed, env=environment, stdout=subprocess.DEVNULL) for _ in range(workers)]
    try:
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
    if all(codes):
        raise RunError("no worker has come to its end; what they said stands above. The same command goes on.")
