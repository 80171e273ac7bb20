"""The record: every run says where it comes from, and a benchmark refuses a tree that no commit describes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))
CPU = torch.device("cpu")


def test_every_run_says_where_it_comes_from():
    assert FILES
    for path in FILES:
        file = json.loads(path.read_text(encoding="utf-8"))
        assert set(file) <= {"claim", "published", "runs"}, path.name
        assert file["claim"].endswith("."), path.name
        assert file["runs"], path.name
        for number, run in enumerate(file["runs"]):
            where = f"{path.name}, run {number}"
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]), where
            assert run["command"], where
            assert run["commit"], where
            assert run["clean"] is True or run["state"].endswith("."), where
            assert run["hardware"]["device"], where
            assert run["versions"], where
            assert isinstance(run["numbers"], dict), where


def test_every_results_file_is_named_by_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"benchmarks/results/([\w-]+)\.json", text)) == {path.stem for path in FILES}


def test_file_names_tell_the_claim_and_not_its_history():
    assert [path.name for path in FILES if re.search(r"-(earlier|more|rest|h200|\d+)$", path.stem)] == []


# --- measure.py ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """The module, with a record of its own and a checkout that is clean."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delenv("OPENCON_RESULTS", raising=False)
    import measure

    monkeypatch.setattr(measure, "RESULTS", tmp_path / "record")
    monkeypatch.setattr(measure.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(measure, "checkout", lambda: ("abc1234", []))
    return measure


def benchmark(measure, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["benchmarks/speed.py", *words])
    one = measure.Benchmark("How fast it is.\n\nMore.")
    one.add_argument("--repeats", type=int)
    one.begin()
    return one


def recorded(path):
    return json.loads(path.read_text())


def test_a_clean_commit_is_recorded_run_after_run(measure, monkeypatch, tmp_path):
    for value in (1, 2):
        path = benchmark(measure, monkeypatch).save({"value": value}, CPU)
    assert path == tmp_path / "record/speed.json"
    assert recorded(path)["claim"] == "How fast it is."
    runs = recorded(path)["runs"]
    assert [run["numbers"] for run in runs] == [{"value": 1}, {"value": 2}]
    assert {(run["command"], run["commit"], run["clean"]) for run in runs} == {("speed.py", "abc1234", True)}
    assert runs[0]["hardware"]["device"] == "cpu"
    assert runs[0]["versions"]["torch"] == torch.__version__


def test_replace_takes_the_place_of_the_same_command_alone(measure, monkeypatch):
    benchmark(measure, monkeypatch).save({"value": 1}, CPU)
    benchmark(measure, monkeypatch, "--repeats", "3").save({"value": 2}, CPU)
    again = benchmark(measure, monkeypatch, "--replace")
    again.save({"value": 3}, CPU)
    path = again.save({"value": 4}, CPU)  # a script may record several runs, which stay together
    assert [run["numbers"]["value"] for run in recorded(path)["runs"]] == [2, 3, 4]


def test_a_dirty_tree_is_refused(measure, monkeypatch, capsys):
    monkeypatch.setattr(measure, "checkout", lambda: ("abc1234", ["M src/opencon/metrics.py"]))
    with pytest.raises(SystemExit):
        benchmark(measure, monkeypatch)
    said = capsys.readouterr().err
    assert "M src/opencon/metrics.py" in said
    assert "--dirty-ok" in said


@pytest.mark.parametrize("flag", ["--dirty-ok", "--quick"])
def test_a_trial_leaves_the_record_alone(measure, monkeypatch, tmp_path, capsys, flag):
    monkeypatch.setattr(measure, "checkout", lambda: ("abc1234", ["?? new.py"]))
    path = benchmark(measure, monkeypatch, flag).save({"value": 1}, CPU)
    assert path == tmp_path / "temporary/opencon-results/speed.json"
    assert not (tmp_path / "record").exists()
    (run,) = recorded(path)["runs"]
    assert not run["clean"]
    assert "?? new.py" in run["state"]
    monkeypatch.setenv("OPENCON_RESULTS", str(tmp_path / "record"))
    with pytest.raises(SystemExit):
        benchmark(measure, monkeypatch, flag)
    assert "a trial does not go into it" in capsys.readouterr().err


def test_a_tree_that_changes_meanwhile_is_not_recorded(measure, monkeypatch, tmp_path):
    one = benchmark(measure, monkeypatch)
    monkeypatch.setattr(measure, "checkout", lambda: ("def5678", []))
    path = one.save({"value": 1}, CPU)
    assert path == tmp_path / "temporary/opencon-results/speed.json"
    (run,) = recorded(path)["runs"]
    assert (run["commit"], run["clean"]) == ("abc1234", False)


def test_runs_of_another_machine_come_in_if_they_are_clean(measure, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OPENCON_RESULTS", str(tmp_path / "elsewhere"))
    path = benchmark(measure, monkeypatch).save({"value": 1}, CPU)
    monkeypatch.setattr("sys.argv", ["measure.py", str(path)])
    measure.main()
    assert recorded(tmp_path / "record/speed.json") == recorded(path)
    benchmark(measure, monkeypatch, "--quick").save({"value": 2}, CPU)
    monkeypatch.setattr("sys.argv", ["measure.py", str(path)])
    with pytest.raises(SystemExit):
        measure.main()
    assert "dirty tree" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_a_checkout_counts_as_changed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import measure

    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "SOURCE", tmp_path / "src/opencon/runtime.py")
    assert measure.checkout() == ("unknown", ["no git checkout"])

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in ("code.py", "benchmarks/results/speed.json"):
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("runs/\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/ignored").write_text("2")
    (tmp_path / "benchmarks/results/speed.json").write_text("2")  # what a benchmark before this one has recorded
    assert measure.checkout() == (git("rev-parse", "--short", "HEAD").strip(), [])
    (tmp_path / "new.py").write_text("2")
    (tmp_path / "code.py").write_text("2")
    assert sorted(measure.checkout()[1]) == ["?? new.py", "M code.py"]
    monkeypatch.setattr(measure, "SOURCE", Path("/elsewhere/opencon/runtime.py"))
    assert measure.checkout()[1][-1] == "opencon is imported from /elsewhere/opencon"
