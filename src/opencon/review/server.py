"""The review as a server for one browser on this machine. Addresses in, session out; `guard` stands before it.

A request names photos and groups by number, never by a path. The only words that reach the disk are names of classes and
of a new folder, and both are spelled safely first.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from opencon.errors import OpenConError, RunError
from opencon.report.embed import readable
from opencon.review import suggest
from opencon.review.guard import Guard, read_json, refusal
from opencon.review.session import Session
from opencon.review.state import MOST_PARTS, RefusedError
from opencon.review.take import WAYS, labels_csv, labels_jsonl, sort_photos, taken

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
BORDER, NEIGHBORS, SIMILAR, FOUND = 8, 12, 300, 5000  # photos in an answer, ours: what a page shows of each
PICTURES = 4  # made at once, ours: more would only wait for the same cores
HEARTBEAT = 15.0  # seconds, ours: a page that was closed is noticed
FOLDER_NAME = re.compile(r"[\w][\w .-]{0,60}")

Handler = Callable[[Request, Session], Awaitable[Response]]


def make_app(session: Session) -> Starlette:
    """The application; whoever serves it puts a `Guard` before it."""
    files = _static()
    pictures = asyncio.Semaphore(PICTURES)

    def handled(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request, session)
            except OpenConError as err:
                return JSONResponse({"error": readable(str(err))}, status_code=409)

        return answer

    async def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return refusal(404, "There is no such page.")
        headers = {"cache-control": "no-cache"}
        return Response(files[name], media_type=TYPES[Path(name).suffix], headers=headers)

    async def picture(request: Request, session: Session) -> Response:
        photo = _number(request.path_params["photo"], len(session.run.files))
        is_small = request.path_params["size"] == "small"
        if request.path_params["run"] != session.run.identity:
            return refusal(404, "There is no such picture.")
        async with pictures:
            data = await run_in_threadpool(session.thumbs.small if is_small else session.thumbs.large, photo)
        if not data:
            return refusal(404, "The photo cannot be read any more.")
        return Response(
            data, media_type="image/jpeg", headers={"cache-control": "private, max-age=31536000, immutable"}
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        session.close()

    get = {"": overview, "files": files_of, "column/{name}": column, "changes": changes, "events": events}
    get |= {
        "merges": merges,
        "similar/{photo}": similar,
        "about/{photo}": about,
        "more/{group}": more,
        "alike/{group}": alike,
    }
    get |= {"search": search, "learn": learning, "labels/{form}": labels}
    post = {"do": decide, "parts": parts, "learn": learn, "take": take}
    routes = [Route("/", static), Route("/static/{name}", static)]
    routes += [Route("/picture/{run}/{size}/{photo}.jpg", handled(picture))]
    routes += [Route(f"/api/{path}".rstrip("/"), handled(handler)) for path, handler in get.items()]
    routes += [Route(f"/api/{path}", handled(handler), methods=["POST"]) for path, handler in post.items()]
    return Starlette(routes=routes, lifespan=lifespan)


def _static() -> dict[str, bytes]:
    """The files of the page, by name; no other file can be asked for."""
    folder = importlib.resources.files("opencon.review") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in TYPES}


def _number(value: object, most: int) -> int:
    """A number of a photo, from an address or a request."""
    text = str(value)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < most):
        raise RefusedError("There is no such photo.")
    return int(text)


def _group(value: object, session: Session) -> int:
    text = str(value)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) in session.state.groups):
        raise RefusedError("That group is gone: it was merged or taken back meanwhile.")
    return int(text)


async def overview(request: Request, session: Session) -> Response:
    """Everything a page begins with but the columns."""
    return JSONResponse(session.overview())


async def files_of(request: Request, session: Session) -> Response:
    """The names of all photos."""
    return JSONResponse([readable(file) for file in session.run.files])


async def column(request: Request, session: Session) -> Response:
    """A column of numbers of all photos, as the bytes of an array."""
    state = session.state
    columns: dict[str, Callable[[], Any]] = {
        "place": lambda: state.place.astype("<i4"),
        "looked": lambda: state.looked.astype("u1"),
        "given": lambda: session.run.given.astype("u1"),
        "confidence": lambda: state.confidence.astype("<f4"),
        "twin_of": lambda: session.run.twin_of.astype("<i4"),
        "map": lambda: session.positions().astype("<f4"),
    }
    make = columns.get(request.path_params["name"])
    if make is None:
        return refusal(404, "There is no such column.")
    headers = {"cache-control": "no-store", "x-version": str(state.version), "x-map": session.map_kind}
    if request.path_params["name"] == "map":
        session.start_map()
    return Response(make().tobytes(), media_type="application/octet-stream", headers=headers)


async def decide(request: Request, session: Session) -> Response:
    """Take a decision; the answer is what changed since the version that the page has seen."""
    asked = await read_json(request)
    since = asked.get("since")
    session.decide(asked)
    return JSONResponse(session.changes(since if type(since) is int else session.state.version - 1))


async def changes(request: Request, session: Session) -> Response:
    """What a page is missing."""
    return JSONResponse(session.changes(_number(request.query_params.get("since"), 1 << 30)))


async def events(request: Request, session: Session) -> Response:
    """A stream that says when something has changed."""

    def facts() -> dict[str, Any]:
        return {"version": session.state.version, "map": session.map_kind, "learn": session.learner.progress()}

    async def stream() -> AsyncIterator[str]:
        last: dict[str, Any] = {}
        quiet = 0.0
        while not session.is_closing:
            now = facts()
            if now != last or quiet >= HEARTBEAT:
                yield f"data: {json.dumps(now)}\n\n"
                last, quiet = now, 0.0
            busy = now["learn"]["is"] == "running" or now["map"] == "rough"
            pause = 0.5 if busy else HEARTBEAT
            await session.wait(pause)
            quiet += pause

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-store"})


async def merges(request: Request, session: Session) -> Response:
    """Groups that may be one."""
    return JSONResponse([asdict(pair) for pair in suggest.likely_merges(session.state, BORDER)])


async def similar(request: Request, session: Session) -> Response:
    """Photos like this one."""
    photo = _number(request.path_params["photo"], len(session.run.files))
    return JSONResponse(suggest.similar(session.state, photo, SIMILAR))


async def about(request: Request, session: Session) -> Response:
    """Why a photo is where it is."""
    photo = _number(request.path_params["photo"], len(session.run.files))
    return JSONResponse(suggest.about(session.state, photo, NEIGHBORS))


async def more(request: Request, session: Session) -> Response:
    """Photos elsewhere that might belong to this group."""
    return JSONResponse(suggest.more_for(session.state, _group(request.path_params["group"], session), SIMILAR))


async def alike(request: Request, session: Session) -> Response:
    """The photos of a group, similar ones together."""
    return JSONResponse(suggest.alike(session.state, _group(request.path_params["group"], session)))


async def search(request: Request, session: Session) -> Response:
    """Photos whose name holds these words."""
    words = request.query_params.get("q", "")[:200].casefold().split()
    found = [i for i, file in enumerate(session.run.files) if words and all(w in file.casefold() for w in words)]
    return JSONResponse({"photos": found[:FOUND], "number": len(found)})


async def parts(request: Request, session: Session) -> Response:
    """How a group could be split; nothing is changed."""
    asked = await read_json(request)
    number = asked.get("parts")
    if type(number) is not int or not 2 <= number <= MOST_PARTS:
        raise RefusedError(f"A group splits into 2 to {MOST_PARTS} parts.")
    found = suggest.parts_of(session.state, _group(asked.get("group"), session), number)
    if len(found) < 2:
        raise RefusedError("These photos are too few or too alike to split.")
    return JSONResponse(found)


async def learning(request: Request, session: Session) -> Response:
    """How far learning is, and what would change."""
    return JSONResponse(session.learner.status(session.state))


async def learn(request: Request, session: Session) -> Response:
    """Begin to learn, or throw away what was learned."""
    asked = await read_json(request)
    if asked.get("do") == "start":
        session.learner.start(session.state, look_for_more=asked.get("more") is True)
    elif asked.get("do") == "discard":
        session.learner.discard()
    else:
        raise RefusedError("This page is older or newer than the program. Load it again.")
    session.tell()
    return JSONResponse(session.learner.status(session.state))


async def labels(request: Request, session: Session) -> Response:
    """The table of names, to download."""
    forms = {"labels.csv": (labels_csv, "text/csv"), "labels.jsonl": (labels_jsonl, "application/jsonl")}
    form = request.path_params["form"]
    if form not in forms:
        return refusal(404, "There is no such table.")
    make, kind = forms[form]
    rows = taken(session.state, looked_only=request.query_params.get("looked") == "yes")
    data = make(rows).encode("utf-8", "surrogateescape")
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{form}"'})


async def take(request: Request, session: Session) -> Response:
    """Sort the photos into a new folder inside the run."""
    asked = await read_json(request)
    name, way = asked.get("name"), asked.get("way")
    if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name) or name.endswith((".", " ")):
        raise RefusedError("Give the folder a name of letters, digits, spaces, dots and dashes.")
    if way not in WAYS:
        raise RefusedError("Choose copies, links or a data set.")
    into = session.run.folder / "sorted" / name
    rows = taken(session.state, looked_only=asked.get("looked") is True)
    counts = await run_in_threadpool(sort_photos, rows, session.run.root, into, way=way)
    folders = {readable(label): count for label, count in counts.items()}
    return JSONResponse(
        {"folder": readable(into.resolve()), "counts": folders, "photos": int(np.sum(list(counts.values())))}
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that is open already, so that its port is known."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen()  # a browser that is quicker than the program waits its turn
    except OSError as err:
        raise RunError(f"cannot listen on {host}:{port} ({err.strerror}). Give another --port.") from err
    return opened


def serve(session: Session, sock: socket.socket, *, host: str, say: Callable[[str], None]) -> None:
    """Serve until the program is stopped.

    Args:
        session: the review.
        sock: from `listen`.
        host: as it was asked for.
        say: told of the link that opens the page: at the start, and whenever one was used.
    """
    port = sock.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    hosts = {f"{name}:{port}" for name in ({"127.0.0.1", "localhost"} if host == "127.0.0.1" else {shown})}

    def link(token: str) -> None:
        say(f"http://{shown}:{port}/?token={token}")

    app: ASGIApp = make_app(session)
    guard = Guard(app, hosts=hosts, say=link)
    config = uvicorn.Config(
        guard, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    link(guard.token)
    uvicorn.Server(config).run(sockets=[sock])
