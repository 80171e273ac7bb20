"""Commands to look at a discovery and to take it away: review, sort."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from opencon.cli.base import app, console, errors
from opencon.errors import ConfigError, MissingExtraError

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a discovery.")]
Photos = Annotated[Path | None, typer.Option("--photos", help="Where the photos lie now, if they were moved.")]


@app.command(short_help="Look at a discovery in the browser: name, merge, split, move, learn again.")
def review(
    run_folder: RunArgument,
    photos: Photos = None,
    port: Annotated[int, typer.Option("--port", help="0: any that is free.", min=0, max=65535)] = 0,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others can reach any but this.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    start_over: Annotated[bool, typer.Option("--start-over", help="Put earlier decisions aside.")] = False,
) -> None:
    """Look at a discovery in the browser: name groups, merge and split them, move photos, and learn again.

    Everything you decide is kept in RUN/review. Your photos are never touched.
    """
    try:
        from opencon.review.server import listen, serve
    except ModuleNotFoundError as err:
        raise MissingExtraError("starlette and uvicorn", "review", "opencon review", err) from err
    from opencon.review.run import open_run
    from opencon.review.session import Session, set_aside

    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--host {host} names no address that a browser could open. Give this machine's own, or none."
        )
    run = open_run(run_folder, photos)
    if start_over and (old := set_aside(run.folder)):
        console.print(f"Earlier decisions are now in {old}.", soft_wrap=True)
    session = Session(run)
    sock = listen(host, port)
    told = len(session.log.entries)
    console.print(f"{len(run.files):,} photos; {told:,} decisions so far, in {session.log.path}", soft_wrap=True)
    if host != "127.0.0.1":
        errors.print("note: others on the network can reach this address, and the link is not encrypted.")
    links: list[str] = []

    def say(link: str) -> None:
        links.append(link)
        if len(links) == 1:
            console.print(f"Open {link}\nStop with Ctrl-C; nothing is lost.", soft_wrap=True)
            if browser:
                threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
        else:
            console.print(f"That link is used up. For another browser: {link}", soft_wrap=True)

    serve(session, sock, host=host, say=say)
    console.print(f"Stopped. {len(session.log.entries):,} decisions are in {session.log.path}", soft_wrap=True)


@app.command(short_help="Put the photos of a reviewed discovery into folders.")
def sort(
    run_folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The folder of a discovery.")] = None,
    into: Annotated[Path | None, typer.Option("--into", help="A new or empty folder.")] = None,
    way: Annotated[str, typer.Option("--as", help="copy, hardlink, symlink or imagefolder.")] = "copy",
    table: Annotated[Path | None, typer.Option("--table", help="Write a table instead: .csv or .jsonl.")] = None,
    looked: Annotated[bool, typer.Option("--looked-at", help="Only photos that a person has looked at.")] = False,
    undo: Annotated[Path | None, typer.Option("--undo", help="Take back what was sorted into this folder.")] = None,
    photos: Photos = None,
) -> None:
    """Put every photo into a folder of its class, as copies or links. Nothing is written over, and --undo takes it back.

    imagefolder also writes metadata.csv, as Hugging Face datasets reads it. Junk is left out.
    """
    from opencon.review.take import sort_photos, taken, undo_sort, write_table

    if undo is not None:
        removed, kept = undo_sort(undo)
        console.print(f"{removed:,} files were taken back from {undo}.", soft_wrap=True)
        for name in kept:
            errors.print(f"kept, because it was changed: {name}")
        return
    if run_folder is None or (into is None) == (table is None):
        raise ConfigError("say what to sort and where: opencon sort RUN --into DIR, or --table FILE; or --undo DIR.")
    from opencon.review.session import replayed

    state = replayed(run_folder, photos)
    rows = taken(state, looked_only=looked)
    if table is not None:
        write_table(rows, table.expanduser())
        console.print(f"{len(rows):,} photos in {table}", soft_wrap=True)
        return
    assert into is not None
    counts = sort_photos(rows, state.run.root, into, way=way)
    for name, number in counts.items():
        console.print(f"{number:>8,}  {name}", soft_wrap=True)
    console.print(
        f"{sum(counts.values()):,} photos in {into}. Take it back with: opencon sort --undo {into}", soft_wrap=True
    )
