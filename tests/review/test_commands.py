"""The commands `review` and `sort`: what they say, and what they refuse."""

import builtins

import pytest

from opencon import cli
from opencon.review.run import open_run
from opencon.review.session import Session


def opencon(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in args])
    said = capsys.readouterr()
    return stop.value.code or 0, " ".join(said.out.split()), " ".join(said.err.split())


@pytest.fixture
def reviewed(run):
    session = Session(open_run(run))
    session.decide({"do": "name", "group": 2, "name": "owl"})
    session.close()
    return run


def test_sort_and_undo(reviewed, tmp_path, capsys):
    into = tmp_path / "out"
    code, out, _ = opencon(capsys, "sort", reviewed, "--into", into, "--as", "symlink")
    assert code == 0
    assert "10 owl" in out
    assert (into / "owl" / "IMG_0025.jpg").is_symlink()
    code, out, _ = opencon(capsys, "sort", "--undo", into)
    assert (code, "40 files were taken back" in out) == (0, True)
    assert not list(into.iterdir())


def test_a_table(reviewed, tmp_path, capsys):
    code, out, _ = opencon(capsys, "sort", reviewed, "--table", tmp_path / "labels.csv", "--looked-at")
    assert (code, "4 photos" in out) == (0, True)
    assert (tmp_path / "labels.csv").read_text().splitlines()[0] == "path,label,looked_at"


def test_a_file_that_was_changed_is_named_when_it_is_kept(reviewed, tmp_path, capsys):
    opencon(capsys, "sort", reviewed, "--into", tmp_path / "out")
    (tmp_path / "out" / "owl" / "IMG_0025.jpg").write_text("edited")
    code, out, err = opencon(capsys, "sort", "--undo", tmp_path / "out")
    assert (code, "39 files" in out, "owl/IMG_0025.jpg" in err) == (0, True, True)


@pytest.mark.parametrize("words", [(), ("RUN",), ("RUN", "--into", "a", "--table", "b.csv"), ("--into", "a")])
def test_sort_wants_to_know_what_and_where(reviewed, capsys, words):
    code, _, err = opencon(capsys, "sort", *(reviewed if word == "RUN" else word for word in words))
    assert code == 2
    assert "opencon sort RUN --into DIR" in err


def test_no_address_that_means_every_address(run, capsys):
    code, _, err = opencon(capsys, "review", run, "--host", "0.0.0.0")
    assert (code, "names no address" in err) == (2, True)


def test_a_port_that_is_taken(run, serve, tmp_path, capsys):
    from tests.review.made import make_discovery

    port = serve(run).base.rpartition(":")[2]
    code, _, err = opencon(capsys, "review", make_discovery(tmp_path / "other"), "--no-browser", "--port", port)
    assert (code, "Give another --port" in err) == (2, True)


def test_a_run_that_is_open_elsewhere(run, serve, capsys):
    pytest.importorskip("fcntl")
    serve(run)
    code, _, err = opencon(capsys, "review", run, "--no-browser")
    assert (code, "is being reviewed already" in err) == (2, True)


def test_a_missing_extra_names_the_command(run, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *more):
        if name.startswith(("starlette", "uvicorn")) or name == "opencon.review.server":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = opencon(capsys, "review", run)
    assert code == 2
    assert "pip install 'opencon[review]'" in err
