"""Hostile settings, tables, arrays, images, archives and weights, damaged files, kills and full disks: what survives.

python benchmarks/torture.py [--seed 0] [--share 1.0] [--only settings,kills] [--quick]

Every try is drawn from the seed. It survives if it works or ends with a sentence. It is lost if it ends with a traceback,
takes longer than its time, or, after a kill or a full disk, the same command does not bring the result of an undisturbed
run. Prints a table and the first failures of each kind; the exit code is 1 if any try was lost.

A try that takes a minute of this process's own time, or ten minutes of the clock, counts as hanging: what else runs on the
machine must not decide.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from measure import Benchmark
from opencon import cli
from opencon.cli import base as cli_base
from opencon.config import DataConfig, to_dict
from opencon.data.benchmarks import CIFAR_FILES, load_dataset
from opencon.data.list_files import list_from_file
from opencon.data.sources import read_images
from opencon.encoders import ENCODERS
from opencon.encoders.weights import load_weights
from opencon.errors import OpenConError
from opencon.estimator import OpenWorldClassifier
from opencon.experiments.recipes import get_recipe
from opencon.methods import METHODS
from opencon.photos.embed import decode_photo
from opencon.photos.listing import check, find_photos, read_truth, typical_side
from opencon.photos.pieces import pieces_of
from opencon.review.log import DecisionLog
from opencon.review.run import open_run
from opencon.review.session import Session, replayed
from opencon.training.run_folder import RunFolder

SECONDS, OF_THE_CLOCK = 60, 600  # for a try, before it counts as hanging; the slowest takes three on a free core
WAYS = (TRACEBACK, HANG, OTHERWISE) = ("tracebacks", "hangs", "otherwise")  # in which a try is lost
SHOWN = 20  # failures of a kind that are printed
# Both commands run in a folder that `world` has made, in about a second each.
TRAIN = ["train", "--config", "run.toml", "--device", "cpu"]
RUN = """
data = {name = "folder", root = "photos/unlabeled", image_size = 16}
split = {num_seen = 2}
encoder = {name = "convnet"}
method = {name = "opencon"}
train = {epochs = 2, batch_size = 8, save_seconds = 0}
"""
DISCOVER = ["discover", "photos", "--novel", "2", "--size", "32", "--device", "cpu", "--cache", "cache"]
EMBED = ["embed", "photos", "--size", "32", "--shard", "12", "--device", "cpu"]
SWEEP = ["sweep", "kmeans/digits", "--vary", "split.labeled_ratio=0.4,0.5", "--device", "cpu"]
# Of a discovery and of features that are there.
ASSIGN = ["predict", "found", "--features", "features", "--device", "cpu"]


class HangError(Exception):
    """A try took too long."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise HangError

    clocks = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, OF_THE_CLOCK)}
    before = {number: signal.signal(number, stop) for number, _ in clocks.values()}
    for clock, (_, limit) in clocks.items():
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


class Tally:
    """What was tried, what survived, and what was lost and how."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.lost: dict[str, list[tuple[str, str]]] = {}  # by kind: how, and the whole story

    def run(self, kind: str, what: str, attempt: Callable[[], object]) -> None:
        """One try. It may return a text: why it is lost."""
        self.tried[kind] += 1
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                try:
                    with limited(SECONDS):
                        why = attempt()
                    if why:
                        self.lose(kind, OTHERWISE, f"{what[:150]}: {why}")
                except OpenConError:
                    pass
                except HangError:
                    self.lose(kind, HANG, f"{what[:150]}: takes more than {SECONDS} s")
                except BaseException as err:
                    if isinstance(err, KeyboardInterrupt):
                        raise
                    last = traceback.extract_tb(err.__traceback__)[-1]
                    why = f"{type(err).__name__}: {str(err)[:150]} ({Path(last.filename).name}:{last.lineno})"
                    self.lose(kind, TRACEBACK, f"{what[:150]}: {why}")

    def lose(self, kind: str, how: str, story: str) -> None:
        """Count a try as lost."""
        self.lost.setdefault(kind, []).append((how, story))

    def table(self) -> list[dict[str, Any]]:
        """A row for each kind, and one for all."""
        rows = []
        for kind, tried in self.tried.items():
            how = Counter(way for way, _ in self.lost.get(kind, []))
            rows.append({"kind": kind, "tried": tried, "survived": tried - how.total()} | {w: how[w] for w in WAYS})
        return [*rows, {"kind": "all"} | {key: sum(row[key] for row in rows) for key in ("tried", "survived", *WAYS)}]

    def show(self) -> int:
        """Print the table and the first stories of each kind. How many were lost."""
        rows = self.table()
        print(f"{'kind':<10}" + "".join(f"{key:>12}" for key in list(rows[0])[1:]))
        for row in rows:
            print(f"{row['kind']:<10}" + "".join(f"{number:>12}" for number in list(row.values())[1:]))
        for kind, stories in self.lost.items():
            for how, story in stories[:SHOWN]:
                print(f"lost, {kind}, {how}: {story}")
        return int(rows[-1]["tried"] - rows[-1]["survived"])


def command(*words: object) -> Callable[[], object]:
    """A try that types a command. Any exit code of ours will do."""

    def attempt() -> object:
        try:
            cli.main([str(word) for word in words])
        except SystemExit as stop:
            if stop.code not in (0, 1, 2, None):
                return f"exit code {stop.code}"
        return None

    return attempt


# --- settings ---------------------------------------------------------------------------------------------------------

VALUES = [
    "-5",
    "0",
    "-1",
    "1e308",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    str(2**64),
    str(2**63),
    str(-(2**63)),
    "1" * 5000,
]
VALUES += ["", "x" * 5000, "[]", "{}", "null", "true", "[1,2,3]", '{"a":1}', "[" * 5000, '"\\ud800"', "0.5", "1e-320"]
VALUES += ["none", "=1+1", "[null]", "[[[]]]", "99999999999", "a.b", '["a"]', "-0.0", "\udcff"]


def settings(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Every setting of every method, with values that nobody means."""
    tries = []
    for method in METHODS.names():
        plain = to_dict(get_recipe(f"{method}/digits"))
        keys = [f"{section}.{key}" for section, inner in plain.items() if isinstance(inner, dict) for key in inner]
        tries += [(method, key, value) for key in [*keys, "views", "strong", "nothing.there"] for value in VALUES]
    for method, key, value in rng.sample(tries, int(1200 * share)):
        words = ["train", f"{method}/digits", "--set", f"{key}={value}", "--dry-run", "--device", "cpu"]
        tally.run("settings", f"{method} {key}={value[:40]}", command(*words))


# --- tables -----------------------------------------------------------------------------------------------------------

CELLS = [
    "a.png",
    "b.png",
    "c.png",
    "../a.png",
    "/etc/passwd",
    "",
    " ",
    "nowhere.png",
    "x" * 5000,
    "a\x00b.png",
    "\ufeffa.png",
]
CELLS += [
    "a.png\r",
    '"',
    '""',
    "'",
    "=HYPERLINK(1)",
    "-1",
    "9" * 5000,
    "0",
    "1e17",
    "cat",
    "Hund",
    "\u202e",
    "\udcff",
    "~/x",
    ".",
]
HEADERS = [
    "path,label",
    "file,class",
    "filename\tlabel",
    "path;label",
    "label,path",
    "path",
    "",
    "path,label,path",
    "PATH , LABEL",
]
HEADERS += ['{"path": "a.png", "label": "x"}', "# classes: a b", "\ufeffpath,label", "path,label\x00"]


def table_text(rng: random.Random) -> bytes:
    lines = [rng.choice(HEADERS)]
    separator = rng.choice([",", ",", "\t", ";", " ", "|"])
    for _ in range(rng.randrange(6)):
        cells = [rng.choice(CELLS) for _ in range(rng.choice([1, 2, 2, 2, 3]))]
        if rng.random() < 0.2:
            record = {"path": rng.choice(CELLS), "label": rng.choice([*CELLS, 3, None, [], {}, True])}
            lines.append(rng.choice([json.dumps(record), json.dumps([record]), "[" * 2000, "{", "1" * 5000, "null"]))
        else:
            lines.append(separator.join(cells))
    text = rng.choice(["\n", "\n", "\r\n", "\r"]).join(lines).encode("utf-8", "surrogateescape")
    if rng.random() < 0.2:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + bytes([rng.randrange(256)]) + text[at:]
    return text


def tables(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Tables of labels, lists of images and tables of truth."""
    photos(folder / "images", rng, names=["a.png", "b.png", "c.png"])

    def attempt(text: bytes, how: str) -> None:
        path = folder / "images" / f"table.{rng.choice(['csv', 'txt', 'jsonl'])}"
        path.write_bytes(text)
        if how == "list":
            list_from_file(path)
        elif how == "truth":
            read_truth(path)
        else:
            check(find_photos(folder / "images", labels=path) if how == "labels" else find_photos(manifest=path))

    for _ in range(int(800 * share)):
        text, how = table_text(rng), rng.choice(["labels", "manifest", "list", "truth"])
        tally.run("tables", f"{how} {text[:60]!r}", lambda text=text, how=how: attempt(text, how))


# --- arrays -----------------------------------------------------------------------------------------------------------


def arrays(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Rows and labels for the estimator. Like scikit-learn's own, it may answer with ValueError and TypeError."""
    special = [np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-300, 0.0, 1e38]

    def attempt(seed: int) -> None:
        draw = np.random.default_rng(seed)
        n, dim = int(draw.choice([0, 1, 2, 3, 5, 20, 40])), int(draw.choice([0, 1, 2, 7, 30]))
        x: Any = draw.normal(size=(n, dim))
        kind = int(draw.integers(9))
        if kind == 0 and x.size:
            x.flat[int(draw.integers(x.size))] = special[int(draw.integers(len(special)))]
        elif kind == 1:
            x = np.ones_like(x) * special[int(draw.integers(len(special)))]
        elif kind == 2:
            x = x.astype([np.float16, np.int8, bool, complex, object, "S3"][int(draw.integers(6))])
        elif kind == 3:
            x = x[:, :1].repeat(dim, axis=1) if dim else x
        elif kind == 4:
            x = [x, x[0] if n else x, "text", None, 3.0, [[1, 2], [3]]][int(draw.integers(6))]
        y: Any = draw.integers(-1, 3, size=n)
        odd = int(draw.integers(8))
        if odd == 0 and n:
            y = y.astype(float)
            y[0] = special[int(draw.integers(len(special)))]
        elif odd == 1:
            y = y[: n // 2]
        elif odd == 2:
            y = y.astype(object)
            y[: n // 2] = "cat"
        elif odd == 3 and n:
            y = y.astype(np.int64)
            y[0] = [2**63 - 1, -(2**63), -2, 10**17][int(draw.integers(4))]
        elif odd == 4:
            y = None
        with contextlib.suppress(ValueError, TypeError):
            OpenWorldClassifier(random_state=0).fit(x, y).predict(x)

    for _ in range(int(240 * share)):
        seed = rng.randrange(2**32)
        tally.run("arrays", f"seed {seed}", lambda seed=seed: attempt(seed))


# --- images and weights -----------------------------------------------------------------------------------------------


def photos(folder: Path, rng: random.Random, names: list[str]) -> None:
    """Small pictures, each of a color that its folder shares."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        base = random.Random(str(path.parent)).choices(range(40, 216), k=3)
        color = np.array([[[*base]]]) + np.random.default_rng(rng.randrange(2**32)).integers(-40, 40, (32, 32, 3))
        Image.fromarray(color.astype(np.uint8)).save(path)


def image_bytes(rng: random.Random) -> bytes:
    picture = Image.fromarray(np.random.default_rng(rng.randrange(2**32)).integers(0, 255, (24, 20, 3), dtype=np.uint8))
    mode = rng.choice(["RGB", "L", "P", "1", "RGBA", "CMYK", "I;16", "F", "LA"])
    form = rng.choice(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
    out = io.BytesIO()
    try:
        picture.convert(mode if mode != "I;16" else "I").save(out, form)
    except (OSError, ValueError, KeyError):
        picture.save(out, form)
    content = bytearray(out.getvalue())
    harm = rng.randrange(8)
    if harm == 0:
        content = content[: rng.randrange(len(content))]
    elif harm == 1:
        for _ in range(rng.randrange(1, 20)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    elif harm == 2:
        content = bytearray(rng.randbytes(rng.randrange(200)))
    elif harm == 3:  # the header of a PNG that claims to be huge
        sides = rng.choice([(2**31 - 1, 2**31 - 1), (0, 0), (50_000, 50_000), (1, 10**6)])
        content = bytearray(
            b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", *sides, 8, 2, 0, 0, 0) + b"\0" * 4
        )
    elif harm == 4:
        content = bytearray(b"")
    return bytes(content)


def images(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Files that are called photos: damaged ones, pipes, folders, links in circles."""
    folder.mkdir()

    def attempt(kind: str, content: bytes) -> object:
        path = folder / "one.jpg"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(rng.choice([path, folder / "nowhere", "/dev/zero", "/dev/null", folder]))
        else:
            path.write_bytes(content)
        _, kept, problems = read_images([path], 16)
        typical_side((path,))
        return None if len(kept) + len(problems) == 1 else "neither read nor named"

    for _ in range(int(400 * share)):
        kind = rng.choice(["bytes"] * 8 + ["pipe", "folder", "link"])
        content = image_bytes(rng)
        tally.run("images", f"{kind} {content[:20]!r}", lambda kind=kind, content=content: attempt(kind, content))


def harmed(content: bytes, rng: random.Random) -> bytes:
    """The same with a bit flipped, a piece lost or added, or something else in its place."""
    data = bytearray(content)
    harm = rng.randrange(8)
    if harm == 0 and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif harm == 1:
        data = data[: rng.randrange(len(data) + 1)]
    elif harm == 2:
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.choice([b"\xff", b"\0", b"[", b'"', b"9" * 5000, rng.randbytes(9)])
    elif harm == 3:
        data = bytearray(
            rng.choice([b"", b"[]", b"3", b"null", b'"x"', b"[" * 50_000, b"\xff\xfe", b"{}", b'{"a": 1}'])
        )
    elif harm == 4:
        out = io.BytesIO()
        torch.save(rng.choice([{"a": torch.ones(2)}, [1], torch.ones(3), {"config": {}}]), out)
        data = bytearray(out.getvalue())
    elif harm == 5:
        data = bytearray(rng.randbytes(rng.randrange(300)))
    else:  # JSON of another shape: some value becomes something else
        try:
            plain = json.loads(content)
            for _ in range(rng.randrange(1, 3)):
                inner = plain
                while isinstance(inner, (dict, list)) and inner:
                    key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
                    if not isinstance(inner[key], (dict, list)) or not inner[key] or rng.random() < 0.4:
                        inner[key] = rng.choice([None, [], {}, "x", -1, 1e300, True, "\ud800", [None], {"a": {}}])
                        break
                    inner = inner[key]
            data = bytearray(json.dumps(plain).encode())
        except (ValueError, TypeError):
            data = data[len(data) // 2 :]
    return bytes(data)


def weights(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Files of weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    net = ENCODERS["convnet"].build(1, 8)
    whole = {}
    for suffix in (".safetensors", ".pt"):
        save = save_file if suffix == ".safetensors" else torch.save
        save(net.state_dict(), folder / f"whole{suffix}")
        whole[suffix] = (folder / f"whole{suffix}").read_bytes()

    def attempt(suffix: str, content: bytes | None) -> None:
        path = folder / f"bad{suffix}"
        path.unlink(missing_ok=True)
        os.mkfifo(path) if content is None else path.write_bytes(content)
        load_weights(net, path)

    for _ in range(int(160 * share)):
        suffix = rng.choice([".safetensors", ".pt"])
        content = None if rng.random() < 0.05 else harmed(whole[suffix], rng)
        tally.run("weights", f"{suffix} {(content or b'')[:20]!r}", lambda s=suffix, c=content: attempt(s, c))


# --- archives ---------------------------------------------------------------------------------------------------------


def tar_bytes(rng: random.Random) -> bytes:
    """A tar of photos and labels, as WebDataset writes them, with what does not belong there."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=rng.choice(["w", "w", "w:gz", "w:xz"])) as tar:
        for number in range(rng.randrange(5)):
            name = rng.choice(
                [
                    f"{number}.png",
                    f"{number}.cls",
                    "../../up.png",
                    "/root.png",
                    "cifar-100-python/train",
                    "x" * 300 + ".png",
                    ".png",
                ]
            )
            member, content = tarfile.TarInfo(name), image_bytes(rng)
            member.type = rng.choice(
                [tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
            )
            member.linkname, member.size = "/etc/passwd", len(content) if member.isreg() else 0
            if rng.random() < 0.2:
                member.pax_headers = {rng.choice(["size", "path", "mtime", "GNU.sparse.major", "GNU.sparse.map"]): "-1"}
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def parquet_bytes(rng: random.Random) -> bytes:
    """A table of photos with labels, or with columns of other kinds. Nothing where pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return b"PAR1"
    number = rng.randrange(5)
    column = rng.choice(["image", "jpg", "picture", "bytes"])
    kinds: list[list[Any]] = [
        [image_bytes(rng) for _ in range(number)],
        [{"bytes": image_bytes(rng), "path": f"{i}.png"} for i in range(number)],
        [None] * number,
        list(range(number)),
        ["text"] * number,
    ]
    out = io.BytesIO()
    labels = [rng.choice([None, 3, -(2**63)]) for _ in range(number)]
    parquet.write_table(pyarrow.table({column: rng.choice(kinds), "label": labels}), out, row_group_size=2)
    return out.getvalue()


def archives(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Tars and Parquet files of photos, and archives of CIFAR."""
    folder.mkdir()

    def attempt(name: str, content: bytes) -> object:
        path = folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path) if content == b"" else path.write_bytes(content)
        if name.endswith(".gz"):
            load_dataset(DataConfig(name="cifar100", root=str(folder)))
            return None
        found = [decode_photo(photo, 16) for piece in pieces_of(str(path), 10) for photo in piece.photos()]
        return None if all(isinstance(one, (str, np.ndarray)) for one in found) else "neither read nor named"

    for _ in range(int(240 * share)):
        name = rng.choice(["a.tar", "a.tar", "a.parquet", CIFAR_FILES["cifar100"].archive])
        content = parquet_bytes(rng) if name.endswith(".parquet") else tar_bytes(rng)
        content = b"" if rng.random() < 0.05 else harmed(content, rng) if rng.random() < 0.7 else content
        tally.run("archives", f"{name} {content[:20]!r}", lambda name=name, content=content: attempt(name, content))


# --- files of runs and discoveries ------------------------------------------------------------------------------------


def world(folder: Path, rng: random.Random) -> None:
    """Photos for both commands, and the settings of the run."""
    labeled = [f"photos/labeled/{c}/{i}.png" for c in ("red", "=b|ue") for i in range(4)]
    photos(folder, rng, labeled + [f"photos/unlabeled/{c}/{i}.png" for c in "xyz" for i in range(8)])
    (folder / "run.toml").write_text(RUN)


def made(folder: Path, rng: random.Random) -> None:
    """One folder of every kind that commands write, in the current folder: whole ones, and some that were stopped."""
    world(folder, rng)
    (folder / "names.csv").write_text("group,name\nnew-1,-first\n")
    command(*TRAIN, "--out", "run")()
    shutil.copytree("run", "half")
    for name in ("result.json", "encoder.safetensors"):
        (folder / "half" / name).unlink()
    command(*DISCOVER, "--out", "found")()
    command(*EMBED, "--out", "features")()
    command(*ASSIGN, "--out", "tables")()
    state = replayed(Path("found"))
    log = DecisionLog(folder / "found/review", state.run.identity, len(state.run.files))
    for asked in ({"do": "move", "photos": [0, 5], "to": 2}, {"do": "name", "group": 2, "name": "one"}, {"do": "undo"}):
        state.apply(log.append(state.complete(asked)))
    log.close()
    command("sort", "found", "--into", "sorted")()
    command(*SWEEP, "--out", "swept")()
    for name in ("run/result.json", "found/result.json", "features/embed.json", "tables/counts.json"):
        assert (folder / name).is_file(), name
    assert (folder / "sorted/sorted.jsonl").is_file()
    assert (folder / "swept/results.json").is_file()


def reviewed() -> None:
    """What `opencon review` does before it listens, and what its page asks for first."""
    session = Session(open_run(Path("found")))
    try:
        json.dumps(session.overview())
        session.positions()
    finally:
        session.close()


def readers() -> dict[str, list[tuple[str, Callable[[], object]]]]:
    """For each folder, the commands that read it."""
    sampled = ["--features", "features", "--device", "cpu"]
    typed: dict[str, list[list[str]]] = {
        "run": [
            ["evaluate", "run", "--device", "cpu"],
            ["compare", "run"],
            [*TRAIN, "--out", "run"],
            ["discover", "photos", "--encoder", "run", "--device", "cpu", "--dry-run"],
            ["predict", "run", "photos/unlabeled/x/1.png", "--device", "cpu"],
            ["export", "run", "--out", "away", "--no-onnx"],
        ],
        "half": [["evaluate", "half", "--device", "cpu"], [*TRAIN, "--out", "half"]],
        "found": [
            ["predict", "found", "photos/unlabeled/x/1.png", "--device", "cpu"],
            ["name", "found", "names.csv"],
            ["export", "found", "--out", "away", "--no-onnx"],
            [*DISCOVER, "--out", "found", "--dry-run"],
            [*ASSIGN, "--out", "away"],
            ["sort", "found", "--table", "away.csv"],
        ],
        "features": [
            [*EMBED, "--out", "features"],
            ["discover", *sampled, "--dry-run"],
            ["count", *sampled],
            [*ASSIGN, "--out", "away"],
        ],
        "tables": [[*ASSIGN, "--out", "tables"]],
        "sorted": [["sort", "--undo", "sorted"], ["sort", "found", "--into", "sorted"]],
        "swept": [["sweep", "--out", "swept"], [*SWEEP, "--out", "swept", "--format", "json"], ["compare", "swept"]],
    }
    found = {name: [(words[0], command(*words)) for words in many] for name, many in typed.items()}
    found["found"].append(("review", reviewed))
    return found


def damage(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Every file of every folder that commands write, damaged, and every command that reads it."""
    folder.mkdir()
    with contextlib.chdir(folder):
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made(folder, rng)
        tries = [
            (name, path, word, attempt)
            for name, many in readers().items()
            for path in sorted(Path(name).rglob("*"))
            if path.is_file() and path.suffix != ".png"
            for word, attempt in many
        ]
        for _ in range(int(800 * share)):
            name, path, word, attempt = rng.choice(tries)
            shutil.copytree(name, "kept")
            if rng.random() < 0.05:
                path.unlink()
                os.mkfifo(path)
            else:
                path.write_bytes(harmed(path.read_bytes(), rng))
            tally.run("damage", f"{path} before {word}, {path.stat().st_size} bytes", attempt)
            for left in (name, "away"):
                shutil.rmtree(left, ignore_errors=True)
            Path("away.csv").unlink(missing_ok=True)
            os.rename("kept", name)


# --- kills and full disks ---------------------------------------------------------------------------------------------


def import_all() -> None:
    """Import what both commands import, so that a forked child need not: seconds, a hundred times."""
    for name in ("torch._dynamo", "opencon.api", "sklearn.datasets", "sklearn.manifold", "opencon.experiments.train"):
        importlib.import_module(name)


def in_child(words: list[str], inside: Path, at: int, harm: Callable[[], None] | None) -> tuple[int, str, int]:
    """Type a command in a child of this process. When it is about to touch a file below `inside` for the `at`-th time,
    `harm` is done to it. Returns the exit code (minus the number of a signal), what it said, and how often it touched.
    """
    # A pipe and shared memory, because a full disk must not keep the child from telling.
    read, write = os.pipe()
    counted = mmap.mmap(-1, 8)
    pid = _forked(words, inside, at, harm, write, counted)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        text = said.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), text, int.from_bytes(counted[:8], "little")


def _forked(
    words: list[str], inside: Path, at: int, harm: Callable[[], None] | None, said: int, counted: mmap.mmap
) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
            for console in (cli_base.console, cli_base.errors):
                console.file = sys.stdout
            count = 0

            def hook(event: str, args: tuple[Any, ...]) -> None:
                nonlocal count
                if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod") and args:
                    path = args[0]
                    if isinstance(path, (str, bytes, Path)) and str(inside) in os.path.abspath(os.fsdecode(path)):
                        count += 1
                        counted[:8] = count.to_bytes(8, "little")
                        if count == at and harm is not None:
                            harm()

            sys.addaudithook(hook)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # of `fill_disk`; here, because only the main thread may
            signal.alarm(OF_THE_CLOCK)
            cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    return pid


def fill_disk() -> None:
    """From now on, files of this process cannot grow: each write fails, as on a full disk, whoever writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def result_of(out: Path) -> object:
    """What must be the same after a kill: the weights of a run, the table of a discovery, features, tables and counts."""
    if (out / "embed.json").is_file():
        return [(p.name, p.read_bytes()) for p in sorted((out / "shards").iterdir())]
    if (out / "counts.json").is_file():
        return [(p.name, p.read_bytes()) for p in sorted(out.iterdir())]
    if (out / "assignments.csv").is_file():
        return list(csv.reader((out / "assignments.csv").open(errors="surrogateescape")))
    tensors = RunFolder(out).load_checkpoint()["method"]
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def kills(tally: Tally, rng: random.Random, folder: Path, share: float) -> None:
    """Kill, fill the disk or delete the folder at every file operation; then the same command must bring the result."""
    import_all()
    folder.mkdir()
    with contextlib.chdir(folder):
        world(folder, rng)
        for words in ([*DISCOVER, "--out", "found"], [*EMBED, "--out", "features"]):
            code, said, _ = in_child(words, folder, 0, None)
            assert code == 0, said
        for words in (TRAIN, DISCOVER, EMBED, ASSIGN):
            out = folder / "whole" / words[0]
            code, said, touched = in_child([*words, "--out", str(out)], out, 0, None)
            assert code == 0, said
            expected = result_of(out)
            again = folder / "again"

            def attempt(
                how: str, at: int, words: list[str] = words, again: Path = again, expected: object = expected
            ) -> tuple[str, str] | None:
                shutil.rmtree(again, ignore_errors=True)
                harm = {
                    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                    "disk": fill_disk,
                    "deleted": lambda: shutil.rmtree(again, ignore_errors=True),
                }[how]
                typed = [*words, "--out", str(again)]
                code, said, _ = in_child(typed, again, at, harm)
                if code == -signal.SIGALRM:
                    return HANG, "hangs"
                if "Traceback" in said or "enforce fail" in said or code == 99:
                    return TRACEBACK, f"{code}: {said.strip()[-300:]}"
                if how != "kill" and code not in (0, 2):
                    return OTHERWISE, f"exit code {code}: {said.strip()[-300:]}"
                code, said, _ = in_child(typed, again, 0, None)
                if code != 0:
                    return OTHERWISE, f"the same command then ends with {code}: {said.strip()[-300:]}"
                is_same = result_of(again) == expected
                return None if is_same else (OTHERWISE, "another result than the undisturbed one")

            moments = [(how, at) for how in ("kill", "disk", "deleted") for at in range(1, touched + 1)]
            for how, at in rng.sample(moments, min(len(moments), int(50 * share))):
                tally.tried["kills"] += 1
                if lost := attempt(how, at):
                    tally.lose("kills", lost[0], f"{words[0]}, {how} at file operation {at}: {lost[1]}")


KINDS = {"kills": kills, "settings": settings, "tables": tables, "arrays": arrays, "images": images, "weights": weights}
KINDS |= {
    "archives": archives,
    "damage": damage,
}  # kills come first: they fork, which a process with threads of torch should not


def main() -> int:
    benchmark = Benchmark(__doc__)
    benchmark.add_argument("--seed", type=int, default=0)
    benchmark.add_argument("--share", type=float, default=1.0, help="of the tries")
    benchmark.add_argument("--only", default=",".join(KINDS))
    args = benchmark.begin()
    share = args.share * (0.05 if args.quick else 1)
    os.environ["OPENCON_KEEP_MEMORY"] = "0"
    torch.set_num_threads(1)
    tally, began = Tally(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.only.split(","):
            print(f"{time.perf_counter() - began:.0f} s: {kind}", file=sys.stderr, flush=True)
            KINDS[kind](tally, random.Random(f"{args.seed} {kind}"), Path(folder).resolve() / kind, share)
    numbers = {"seed": args.seed, "kinds": tally.table(), "seconds": time.perf_counter() - began, "n": 1}
    benchmark.save(numbers, torch.device("cpu"))
    return tally.show()


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
