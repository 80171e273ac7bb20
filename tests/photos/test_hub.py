"""Models on the hub, which is played here by a folder."""

import shutil
import sys
from types import SimpleNamespace

import pytest

from opencon.errors import MissingExtraError, RunError
from opencon.photos.model import OpenConModel
from tests.small_model import NAMES, make_model, make_photos, make_run


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def model(photos, tmp_path_factory):
    return make_model(photos, make_run(tmp_path_factory.mktemp("run")))


class Hub(SimpleNamespace):
    """Repositories are folders; `calls` is what was asked."""

    def __init__(self, root):
        super().__init__(root=root, calls=[])

    def snapshot_download(self, repo_id, *, allow_patterns):
        self.calls.append(("snapshot_download", repo_id, allow_patterns))
        if not (self.root / repo_id).is_dir():
            raise LookupError(f"404: no repository {repo_id}\nand a long story")
        return str(self.root / repo_id)

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create_repo", repo_id, private, exist_ok))
        if repo_id.startswith("somebody/"):
            raise PermissionError("403: not yours")

    def upload_folder(self, *, repo_id, folder_path):
        self.calls.append(("upload_folder", repo_id))
        shutil.copytree(folder_path, self.root / repo_id)
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    return hub


def test_uploaded_with_its_card_and_fetched_by_name(hub, model, photos):
    assert model.push_to_hub("ann/birds.v1", private=True, title="Birds of ours") == "https://hub/ann/birds.v1"
    assert hub.calls == [("create_repo", "ann/birds.v1", True, True), ("upload_folder", "ann/birds.v1")]
    there = hub.root / "ann/birds.v1"
    files = ["README.md", "encoder.safetensors", "model.json", "model.safetensors"]
    assert sorted(path.name for path in there.iterdir()) == files
    assert "\n# Birds of ours\n" in (there / "README.md").read_text("utf-8")
    back = OpenConModel.from_pretrained("ann/birds.v1")
    assert back.class_names == NAMES
    assert list(back.predict(photos)) == list(model.predict(photos))
    name, repo, patterns = hub.calls[-1]
    assert (name, repo) == ("snapshot_download", "ann/birds.v1")
    assert set(patterns) == {"*.json", "*.safetensors", "README.md"}  # nothing that could be executed


def test_a_folder_here_comes_first(hub, model, tmp_path):
    model.save_pretrained(tmp_path / "ann/birds")
    assert OpenConModel.from_pretrained("ann/birds").class_names == NAMES
    assert hub.calls == []


@pytest.mark.parametrize("source", ["birds", "/ann/birds", "./birds", "../birds", "a/b/c", "~/birds"])
def test_what_is_no_name_on_the_hub_is_a_folder(hub, source):
    with pytest.raises(RunError, match=r"holds no model \(no model.json\)"):
        OpenConModel.from_pretrained(source)
    assert hub.calls == []


def test_a_path_is_never_fetched(hub, tmp_path):
    with pytest.raises(RunError, match="holds no model"):
        OpenConModel.from_pretrained((tmp_path / "ann" / "birds").relative_to(tmp_path))
    assert hub.calls == []


def test_a_name_that_the_hub_does_not_have(hub):
    with pytest.raises(RunError, match=r"'ann/owls' is no folder here, and .* \(404: no repository ann/owls\)\.$"):
        OpenConModel.from_pretrained("ann/owls")


def test_a_repository_of_something_else(hub):
    (hub.root / "ann/novels").mkdir(parents=True)
    with pytest.raises(RunError, match=r"'ann/novels' on the hub holds no model of opencon \(no model.json\)"):
        OpenConModel.from_pretrained("ann/novels")


def test_what_cannot_be_uploaded(hub, model):
    with pytest.raises(RunError, match=r"'birds' is no name on the hub. Give one of the form owner/name."):
        model.push_to_hub("birds")
    assert hub.calls == []
    with pytest.raises(RunError, match=r"cannot be uploaded .* \(403: not yours\). Look at the network, and log in"):
        model.push_to_hub("somebody/birds")
    assert [call[0] for call in hub.calls] == ["create_repo"]


def test_without_the_extra_the_command_is_named(hub, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"there is no folder 'ann/owls', and .*pip install 'opencon\[hub\]'"):
        OpenConModel.from_pretrained("ann/owls")
    with pytest.raises(MissingExtraError, match=r"pip install 'opencon\[hub\]'"):
        model.push_to_hub("ann/owls")
