"""The server as a program: who gets in, what two pages see, what a kill leaves, and what hostile requests do (nothing)."""

import contextlib
import json
import socket
import threading

import httpx
import numpy as np
import pytest

from opencon.review.log import LOG, read_log
from opencon.review.run import open_run
from opencon.review.session import replayed


@pytest.fixture
def served(run, serve):
    return serve(run)


def column(client, name, kind):
    return np.frombuffer(client.get(f"/api/column/{name}").content, dtype=kind)


def test_the_page_and_everything_it_loads_comes_from_here(served):
    client = served.client()
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "<script>" not in page.text
    for name, kind in (("app.js", "javascript"), ("review.css", "css"), ("icon.svg", "svg")):
        assert kind in client.get(f"/static/{name}").headers["content-type"]
    facts = client.get("/api").json()
    assert facts["photos"] == 40
    assert [group["name"] for group in facts["groups"]] == ["cat", "dog", "new-1", "new-2"]
    assert column(client, "place", "<i4").tolist() == [i // 10 for i in range(40)]
    assert column(client, "map", "<f4").shape == (80,)
    picture = client.get(f"/picture/{facts['run']}/small/3.jpg")
    assert picture.content[:2] == b"\xff\xd8"
    assert client.get(f"/picture/{facts['run']}/large/3.jpg").content[:2] == b"\xff\xd8"
    assert client.get("/api/search?q=0007").json() == {"photos": [7], "number": 1}


def test_a_decision_is_in_the_log_when_the_answer_comes(run, served):
    client = served.client()
    answer = client.post("/api/do", json={"do": "move", "photos": [5, 6], "to": 1, "since": 0}).json()
    assert answer["photos"] == [5, 6]
    assert answer["place"] == [1, 1]
    assert answer["version"] == 1
    (entry,) = read_log(run / "review" / LOG, open_run(run).identity)
    assert (entry["do"], entry["photos"], entry["to"]) == ("move", [5, 6], 1)


def test_two_tabs_agree(served):
    one, two = served.client(), served.client()
    one.post("/api/do", json={"do": "move", "photos": [5], "to": 1, "since": 0})
    late = two.post("/api/do", json={"do": "name", "group": 2, "name": "owl", "since": 0}).json()
    assert late["version"] == 2
    assert late["photos"] == [5]  # what the other tab did comes along
    assert one.get("/api/changes?since=1").json()["groups"] == late["groups"]
    threads = [
        threading.Thread(target=lambda c=c, i=i: c.post("/api/do", json={"do": "move", "photos": [i], "to": 3}))
        for i, c in zip(range(20, 30), [one, two] * 5, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.get("/api").json()["version"] == two.get("/api").json()["version"] == 12
    assert (column(one, "place", "<i4")[20:30] == 3).all()


def test_a_stream_tells_of_a_change(served):
    one, two = served.client(), served.client()
    with one.stream("GET", "/api/events") as stream:
        lines = (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data"))
        assert next(lines)["version"] == 0
        two.post("/api/do", json={"do": "confirm", "photos": [3], "since": 0})
        assert any(facts["version"] == 1 for facts in lines)


def test_a_large_change_is_fetched_as_columns(run, serve, tmp_path, monkeypatch):
    from opencon.review import session as module
    from opencon.review.session import Session

    monkeypatch.setattr(module, "MANY", 5)
    session = Session(open_run(run))
    session.decide({"do": "confirm", "photos": list(range(6))})
    assert session.changes(0)["all"] is True
    assert session.changes(1)["photos"] == []
    session.close()


def test_a_kill_at_any_moment_loses_nothing_that_was_answered(run, serve):
    """A few kills here; benchmarks/review_scale.py does a hundred."""
    answered = []
    for turn in range(3):
        served = serve(run)
        client = served.client()
        stop = threading.Timer(0.15 + 0.1 * turn, served.process.kill)
        stop.start()
        with contextlib.suppress(httpx.TransportError):  # the connection broke: this one was not answered
            for k in range(10_000):
                photo = (17 * k + turn) % 40
                client.post("/api/do", json={"do": "move", "photos": [photo], "to": k % 4}).raise_for_status()
                answered.append((photo, k % 4))
        stop.join()
        served.process.wait()
        entries = read_log(run / "review" / LOG, open_run(run).identity)
        moves = [(entry["photos"][0], entry["to"]) for entry in entries]
        assert len(moves) - len(answered) in (0, 1)  # one may have been written and not yet answered
        assert moves[: len(answered)] == answered
        answered = moves
    state = replayed(run)
    for photo in range(40):
        last = [to for own, to in answered if own == photo]
        assert not last or state.place[photo] == last[-1]
    assert len(answered) > 3


# --- hostile requests -------------------------------------------------------------------------------------------------

POST = {"content-type": "application/json"}
BODY = json.dumps({"do": "move", "photos": [5], "to": 1})
HOSTILE = {
    "another Host": ("GET", "/api", {"host": "evil.example"}, "", 403),
    "another port in Host": ("GET", "/api", {"host": "127.0.0.1:1"}, "", 403),
    "Host of a rebinding": ("POST", "/api/do", {**POST, "host": "127.0.0.1.evil.example"}, BODY, 403),
    "no cookie": ("GET", "/api", {"cookie": ""}, "", 401),
    "no cookie for a picture": ("GET", "/picture/x/small/1.jpg", {"cookie": ""}, "", 401),
    "no cookie for the page": ("GET", "/", {"cookie": ""}, "", 401),
    "no cookie for a script": ("GET", "/static/app.js", {"cookie": ""}, "", 401),
    "a wrong cookie": ("GET", "/api", {"cookie": "opencon=1; {own}=guess"}, "", 401),
    "a broken cookie": ("GET", "/api", {"cookie": "\u00e4=;;;=\x7f"}, "", 401),
    "a token that was used": ("GET", "{used}", {"cookie": ""}, "", 401),
    "an empty token": ("GET", "/?token=", {"cookie": ""}, "", 401),
    "a token elsewhere": ("GET", "/api?token=x", {"cookie": ""}, "", 401),
    "a POST from another page": ("POST", "/api/do", {**POST, "origin": "http://evil.example"}, BODY, 403),
    "a POST from nowhere": ("POST", "/api/do", {**POST, "origin": "null"}, BODY, 403),
    "a POST without an origin": ("POST", "/api/do", {**POST, "origin": None}, BODY, 403),
    "a GET from another page": ("GET", "/api", {"sec-fetch-site": "cross-site"}, "", 403),
    "a form": ("POST", "/api/do", {"content-type": "text/plain"}, BODY, 415),
    "no type": ("POST", "/api/do", {}, BODY, 415),
    "DELETE": ("DELETE", "/api", {}, "", 405),
    "PUT": ("PUT", "/api/do", POST, BODY, 405),
    "dots in a file name": ("GET", "/static/../server.py", {}, "", 404),
    "dots, encoded": ("GET", "/static/%2e%2e%2fserver.py", {}, "", 404),
    "an absolute path": ("GET", "/static//etc/passwd", {}, "", 404),
    "a path as a photo": ("GET", "/picture/{run}/small/..%2F..%2Fsecret.jpg", {}, "", 404),
    "a number out of range": ("GET", "/picture/{run}/small/40.jpg", {}, "", 409),
    "a negative number": ("GET", "/picture/{run}/small/-1.jpg", {}, "", 409),
    "a huge number": ("GET", "/api/about/99999999999999999999", {}, "", 409),
    "digits of another script": ("GET", "/api/about/%D9%A1", {}, "", 409),
    "another run's picture": ("GET", "/picture/{other}/small/1.jpg", {}, "", 404),
    "no JSON": ("POST", "/api/do", POST, "{", 409),
    "a list": ("POST", "/api/do", POST, "[]", 409),
    "deep JSON": ("POST", "/api/do", POST, "[" * 100_000, 409),
    "a huge body": ("POST", "/api/do", POST, "x" * (5 << 20), 413),
    "a length that is no number": ("POST", "/api/do", {**POST, "content-length": "-5"}, None, 400),
    "a folder elsewhere": ("POST", "/api/take", POST, '{"name": "../../out", "way": "copy"}', 409),
    "an absolute folder": ("POST", "/api/take", POST, '{"name": "/tmp/out", "way": "copy"}', 409),
    "a hidden folder": ("POST", "/api/take", POST, '{"name": "..", "way": "copy"}', 409),
    "an unknown column": ("GET", "/api/column/__class__", {}, "", 404),
    "an unknown way": ("POST", "/api/take", POST, '{"name": "out", "way": "move"}', 409),
    "someone else's learning": ("POST", "/api/do", POST, '{"do": "learned", "file": "../../x"}', 409),
}


def raw(served, method, path, headers, body):
    """A request written by hand, so that no library mends it. Returns the status."""
    host, port = served.base.removeprefix("http://").split(":")
    lines = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items() if value is not None)]
    if "content-length" not in headers:
        lines.append(f"content-length: {len(body)}")
    with socket.create_connection((host, int(port)), timeout=60) as link:
        head = ("\r\n".join([*lines, "connection: close"]) + "\r\n\r\n").encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was read
            link.sendall(head + (body or "").encode())
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := link.recv(65536):
                answer += piece
    return int(answer.split(b" ", 2)[1]), answer


def test_hostile_requests_are_refused_and_change_nothing(run, served, tmp_path):
    used = served.link.removeprefix(served.base)
    client = served.client()
    (cookie,) = client.cookies.jar
    files = sorted(tmp_path.rglob("*"))
    wanted, got = {}, {}
    for name, (method, path, headers, body, status) in HOSTILE.items():
        own = {
            "host": served.base.removeprefix("http://"),
            "origin": served.base,
            "cookie": f"{cookie.name}={cookie.value}",
        }
        own |= headers
        if own["cookie"]:
            own["cookie"] = own["cookie"].replace("{own}", cookie.name)
        path = path.replace("{used}", used).replace("{run}", open_run(run).identity).replace("{other}", "0" * 16)
        wanted[name] = status
        got[name], answer = raw(served, method, path, own, body)
        assert b"Traceback" not in answer
        assert b"root:" not in answer
    assert len(HOSTILE) >= 30
    assert got == wanted
    assert client.get("/api").json()["version"] == 0
    own_files = (run / "review" / "map.npy", run / "review" / "map.npy.partial")
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in own_files] == [
        f for f in files if f not in own_files
    ]


def test_chunks_without_end_are_cut_off(served):
    client = served.client()
    chunks = (b" " * 65536 for _ in range(200))
    try:
        answer = client.post("/api/do", content=chunks, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]) == (409, "Too much at once.")
    except httpx.TransportError:
        pass  # it hung up before everything was sent
    assert client.get("/api").json()["version"] == 0


def test_hostile_names_stay_text(serve, tmp_path):
    from tests.review.made import make_discovery

    names = ("<img src=x onerror=alert(1)>", "../../../etc", "new-1", "new-2")
    files = [f"IMG_{i:04d}.jpg" for i in range(38)] + [
        "<script>alert(1)</script>.jpg".replace("/", "\u2215"),
        "\udcff\u202e.jpg",
    ]
    run = make_discovery(tmp_path, names=names, files=files)
    client = serve(run).client()
    answer = client.get("/api/files")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()[-1] == "\\xff\\u202e.jpg"
    assert client.get("/api").json()["groups"][0]["name"] == names[0]
    assert client.get(f"/picture/{client.get('/api').json()['run']}/small/39.jpg").status_code == 200
    answer = client.post("/api/take", json={"name": "out", "way": "copy"})
    assert answer.status_code == 200, answer.text
    made = sorted(path.relative_to(run / "sorted" / "out").parts[0] for path in (run / "sorted" / "out").rglob("*.jpg"))
    assert set(made) == {"_img src=x onerror=alert(1)_", "_.._.._etc", "new-1", "new-2"}


def test_the_link_opens_once_and_the_terminal_shows_the_next(served):
    first = served.link
    served.client()
    assert served.link != first
    assert httpx.get(first).status_code == 401
    served.client()
