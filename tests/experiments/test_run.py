"""Whole runs on the digits: train, stop, resume, evaluate."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from opencon.config import (
    AugmentConfig,
    DataConfig,
    EncoderConfig,
    EvalConfig,
    RunConfig,
    SplitConfig,
    TrainConfig,
    ViewConfig,
    to_dict,
    with_settings,
)
from opencon.data.benchmarks import DATASETS, load_dataset
from opencon.data.split import Split
from opencon.encoders import Embedder, Encoder
from opencon.errors import ConfigError, DivergedError, RunError
from opencon.experiments import train as train_module
from opencon.experiments import workbench
from opencon.experiments.callbacks import TensorBoardLogger
from opencon.experiments.evaluate import draw, draw_numbers, evaluate_run
from opencon.experiments.plan import check_fits, plan
from opencon.experiments.recipes import get_recipe, run_config
from opencon.experiments.train import Callbacks, train
from opencon.experiments.workbench import build_loader, open_run, prepare
from opencon.methods import (
    METHODS,
    ConcordConfig,
    GCDConfig,
    KMeansConfig,
    OpenCon,
    OpenConConfig,
    SimCLRConfig,
    SimGCDConfig,
)
from opencon.metrics import knn_accuracy
from opencon.training.judged import measure_norms
from opencon.training.run_folder import RunFolder

CPU = torch.device("cpu")
# Not the recipe, which may be tuned: what these tests see should not move with it.
SMALL = RunConfig(
    data=DataConfig(name="digits"),
    split=SplitConfig(num_seen=5),
    encoder=EncoderConfig(name="convnet"),
    augment=AugmentConfig(crop_scale=None, flip_p=0, jitter_p=0, gray_p=0, rotate=15, shift=0.12, zoom=(0.85, 1.15)),
    method=OpenConConfig(ramp_epochs=2),
    train=TrainConfig(epochs=4, batch_size=256, lr=0.1, schedule="cosine", save_seconds=0),
    eval=EvalConfig(every=2),
)


def small(*settings):
    return with_settings(SMALL, settings)


def weights(folder):
    return RunFolder(folder).load_checkpoint()["method"]


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One small run, for the tests that only look at it."""
    out = tmp_path_factory.mktemp("runs") / "small"
    result = train(small(), out, CPU)
    return out, result


def test_a_run_writes_down_everything(finished):
    out, result = finished
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "split.json",
        "environment.json",
        "metrics.jsonl",
        "checkpoint.pt",
        "encoder.safetensors",
        "classes.json",
        "classes.safetensors",
        "result.json",
    }
    assert json.loads((out / "config.json").read_text()) == to_dict(small())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in records] == [0, 1, 2, 3]
    assert ["all" in r for r in records] == [False, True, False, True]
    assert {"loss", "loss_n", "loss_l", "loss_u", "loss_prior", "share_novel", "seconds"} <= records[0].keys()
    assert (result["protocol"], result["on"], result["num_images"]) == ("orca", "unlabeled", 1332)
    assert result["seed"] == 0
    assert result["all"] > 0.3  # ten classes: chance is far below


def test_training_lowers_the_losses(finished):
    records = RunFolder(finished[0]).read_metrics()
    for term in ("loss_l", "loss_u"):
        assert records[-1][term] < records[0][term]


def test_the_same_seed_gives_the_same_weights_and_another_does_not(finished, tmp_path):
    train(small(), tmp_path / "again", CPU)
    assert_same_state(weights(finished[0]), weights(tmp_path / "again"))
    train(small("train.seed=1"), tmp_path / "other", CPU)
    assert not torch.equal(weights(finished[0])["prototypes"], weights(tmp_path / "other")["prototypes"])
    a, b = (json.loads((p / "split.json").read_text()) for p in (finished[0], tmp_path / "other"))
    assert a == b  # the split has a seed of its own


@pytest.mark.parametrize("stop_at", [0, 2])
def test_interrupted_and_resumed_equals_never_interrupted(finished, tmp_path, stop_at):
    """Bit for bit, weights and metrics, wherever Ctrl-C comes."""
    out = tmp_path / "run"

    def interrupt(record):
        if record["epoch"] == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small(), out, CPU, callbacks=Callbacks(epoch_done=interrupt))
    assert RunFolder(out).load_checkpoint()["epochs_done"] == stop_at + 1
    said = []
    train(small(), out, CPU, callbacks=Callbacks(say=said.append))
    assert any(f"after {stop_at + 1} of 4 epochs" in text for text in said)
    assert_same_state(weights(finished[0]), weights(out))

    def losses(folder):
        return [{k: v for k, v in r.items() if k != "seconds"} for r in RunFolder(folder).read_metrics()]

    assert losses(finished[0]) == losses(out)


def test_a_run_with_further_views_is_recorded_and_resumed(tmp_path):
    crops = ViewConfig(size=10, crop_scale=(0.5, 1.0), flip_p=0, jitter_p=0, gray_p=0, count=2)
    judged = ("eval.average=0.9", "eval.fresh_norms=true", "eval.mirror=true")
    config = replace(small("train.epochs=2", *judged), method=ConcordConfig(), views=(crops,))
    assert plan(config)["views"] == "2 of 8 px, 2 of 10 px"
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(config, whole, CPU)

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, out, CPU, callbacks=Callbacks(epoch_done=interrupt))
    with pytest.raises(ConfigError, match="other settings:\n  views: "):
        train(replace(config, views=()), out, CPU)
    train(config, out, CPU)
    kept = weights(whole)
    assert_same_state(kept, weights(out))
    assert run_config(json.loads((out / "config.json").read_text())) == config
    assert kept["twin.num_updates"] == 2 * len(build_loader(open_run(whole, CPU)))  # the average follows every step
    floats = {k: v for k, v in load_file(whole / "encoder.safetensors").items() if v.is_floating_point()}
    for name, tensor in floats.items():  # the encoder to take elsewhere is the judged one
        assert torch.equal(tensor, kept["twin.embedder__encoder__" + name.replace(".", "__")]), name
    assert any(not torch.equal(tensor, kept["embedder.encoder." + name]) for name, tensor in floats.items())


def test_judged_are_averages_with_fresh_norms_on_both_mirror_images(monkeypatch):
    bench = prepare(small("eval.average=0.9", "eval.fresh_norms=true", "eval.mirror=true"), CPU)
    few = replace(bench.dataset.train, images=bench.images[:60].flip(-1), classes=bench.dataset.train.classes[:60])
    info = replace(bench.dataset.info, num_test=60)
    bench = replace(bench, dataset=replace(bench.dataset, test=few, info=info))
    method = bench.method
    with torch.no_grad():
        for p in method.parameters():
            p.mul_(1.5)
    method.twin.exchange()
    measure_norms(method, bench.plain())
    method.eval()
    images = torch.cat([bench.view(part) for part in (bench.images, bench.dataset.held_out().images)])
    with torch.no_grad():
        want = F.normalize(method.embed(images) + method.embed(images.flip(-1)), dim=1)
    method.twin.exchange()
    for name, buffer in method.twin.named_buffers():
        if "running" in name:
            buffer.add_(3.0)  # as if they had seen other images: they are measured anew
    torch.testing.assert_close(bench.score("unlabeled", "orca")[1].z, want[: len(bench.images)])
    torch.testing.assert_close(bench.score("test", "orca")[1].z, want)
    how, embed = [], workbench.Workbench.embed
    monkeypatch.setattr(workbench.Workbench, "embed", lambda *a, **k: how.append(k) or embed(*a, **k))
    bench.stability(bench.dataset.train.classes)
    assert [k["mirror"] for k in how] == [True]


def test_a_run_from_before_there_were_further_views_is_resumed(tmp_path):
    out = tmp_path / "run"

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small("train.epochs=2"), out, CPU, callbacks=Callbacks(epoch_done=interrupt))
    recorded, kept = json.loads((out / "config.json").read_text()), torch.load(out / "checkpoint.pt", weights_only=True)
    del recorded["views"], kept["config"]["views"]
    (out / "config.json").write_text(json.dumps(recorded))
    torch.save(kept, out / "checkpoint.pt")
    assert train(small("train.epochs=2"), out, CPU)["epoch"] == 1


def test_statistics_of_the_frozen_part_are_measured_once_on_the_first_views(tmp_path, monkeypatch):
    config, taken = small("encoder.train_from=conv3", "encoder.frozen_norm=measured"), []

    def interrupt(record):
        raise KeyboardInterrupt

    measure, fold = Embedder.measure_frozen, Embedder.fold_frozen
    monkeypatch.setattr(Embedder, "measure_frozen", lambda self, v: taken.append("measured") or measure(self, v))
    monkeypatch.setattr(Embedder, "fold_frozen", lambda self: taken.append("folded") or fold(self))
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", CPU, callbacks=Callbacks(epoch_done=interrupt))
    train(config, tmp_path / "run", CPU)
    assert taken == ["measured", "folded", "folded"]  # what is folded has its final statistics

    bench = prepare(config, CPU)
    loader = build_loader(bench)
    draws, embedder = loader.draw(0), bench.method.embedder
    conv = embedder.encoder.conv1.conv
    with torch.no_grad():
        views = [view for step in range(len(loader)) for view in loader.batch(draws, torch.tensor([step])).views]
        means = [conv((view - embedder.mean) / embedder.std).mean(dim=(0, 2, 3)) for view in views]
    assert len(means) == 14
    got = weights(tmp_path / "run")["embedder.encoder.conv1.bn.running_mean"]
    torch.testing.assert_close(got, torch.stack(means).mean(dim=0))
    assert not torch.allclose(got, torch.zeros_like(got), atol=1e-3)


@pytest.mark.parametrize("norm", ["batch", "running"])
def test_other_statistics_are_not_measured(tmp_path, monkeypatch, norm):
    monkeypatch.setattr(Encoder, "measure", lambda self, batches: pytest.fail("measured"))
    train(small("encoder.train_from=conv3", f"encoder.frozen_norm={norm}", "train.epochs=1"), tmp_path / "run", CPU)


def test_a_second_command_beside_the_first_is_refused_and_harms_nothing(finished, tmp_path):
    out = tmp_path / "run"

    def again(record):
        if record["epoch"] == 1:
            with pytest.raises(RunError, match="another process is training into"):
                train(small(), out, CPU)

    train(small(), out, CPU, callbacks=Callbacks(epoch_done=again))
    assert [record["epoch"] for record in RunFolder(out).read_metrics()] == [0, 1, 2, 3]
    assert_same_state(weights(finished[0]), weights(out))


def test_ctrl_c_in_the_middle_of_an_epoch_keeps_the_finished_ones(tmp_path):
    """Files are written rarely (save_seconds), the copy in memory at every epoch."""
    out = tmp_path / "run"

    def interrupt(epoch, steps):
        if epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small("train.save_seconds=1000", "train.log_every=1"), out, CPU, callbacks=Callbacks(stepped=interrupt))
    assert RunFolder(out).load_checkpoint()["epochs_done"] == 2


def test_a_finished_run_is_not_trained_again(finished):
    said = []
    again = train(small(), finished[0], CPU, callbacks=Callbacks(say=said.append))
    assert again == json.loads((finished[0] / "result.json").read_text())
    assert "finished already" in said[0]


def test_other_settings_do_not_continue_a_run(finished):
    with pytest.raises(ConfigError, match=r"train.lr: .* in the run, 0.5 now"):
        train(small("train.lr=0.5"), finished[0], CPU)


def test_a_start_that_failed_leaves_the_folder_free(tmp_path):
    """Nothing was computed, so the corrected command may have the folder."""
    with pytest.raises(ConfigError, match="is not a stage"):
        train(small("encoder.train_from=conv9"), tmp_path / "run", CPU)
    train(small("train.epochs=1"), tmp_path / "run", CPU)


def test_resuming_needs_no_weights_file_and_may_save_more_often(tmp_path):
    weights_file = tmp_path / "encoder.safetensors"
    train(replace(small("train.epochs=1"), method=SimCLRConfig()), tmp_path / "pre", CPU)
    shutil.copy(tmp_path / "pre/encoder.safetensors", weights_file)

    def interrupt(record):
        raise KeyboardInterrupt

    config = small(f"encoder.weights={weights_file}")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", CPU, callbacks=Callbacks(epoch_done=interrupt))
    weights_file.unlink()
    result = train(with_settings(config, ["train.save_seconds=5"]), tmp_path / "run", CPU)
    assert result["epoch"] == 3


def test_weights_that_are_not_finite_are_never_kept(tmp_path, monkeypatch):
    """A gradient of the last step shows in no loss of its epoch."""
    plain_after, calls = OpenCon.after_step, []

    def after_step(self, *carry):
        plain_after(self, *carry)
        calls.append(1)
        if len(calls) == 14:  # the last step of the second epoch
            with torch.no_grad():
                next(self.parameters()).fill_(float("nan"))

    monkeypatch.setattr(OpenCon, "after_step", after_step)
    with pytest.raises(DivergedError, match="the weights are not finite after epoch 1"):
        train(small(), tmp_path / "run", CPU)
    assert all(v.isfinite().all() for v in weights(tmp_path / "run").values() if v.is_floating_point() and v.dim())


def test_hidden_labels_cannot_matter(finished, tmp_path, monkeypatch):
    """Shuffle the classes of all unlabeled images: not one bit of the weights changes."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("split.json", "config.json"):
        shutil.copy(finished[0] / name, out / name)
    unlabeled = Split.from_json(json.loads((out / "split.json").read_text())).unlabeled

    def shuffled(config, *, download=False):
        dataset = load_dataset(config, download=download)
        classes = dataset.train.classes.clone()
        order = torch.randperm(len(unlabeled), generator=torch.Generator().manual_seed(0))
        classes[unlabeled] = classes[unlabeled[order]]
        return replace(dataset, train=replace(dataset.train, classes=classes))

    monkeypatch.setattr(workbench, "load_dataset", shuffled)
    result = train(small(), out, CPU)
    assert_same_state(weights(finished[0]), weights(out))
    assert result["all"] < finished[1]["all"] - 0.1  # only the score has noticed


def test_evaluation_repeats_the_result_and_takes_either_protocol(finished):
    out, result = finished
    again = evaluate_run(out, CPU)
    for key in ("all", "novel", "seen", "auroc", "classes_in_use"):
        assert again[key] == pytest.approx(result[key])
    other = evaluate_run(out, CPU, protocol="gcd")
    assert other["protocol"] == "gcd"
    assert other["all"] == pytest.approx(result["all"])
    with pytest.raises(ConfigError, match=r"eval.protocol = 'foo' must be one of 'orca', 'gcd'"):
        evaluate_run(out, CPU, protocol="foo")
    with pytest.raises(ConfigError, match="no held-out test images"):
        evaluate_run(out, CPU, on="test")


def test_evaluation_draws_the_embedding(finished, tmp_path):
    evaluate_run(finished[0], CPU, picture=tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_without_novelty_scores_is_drawn_without_that_panel(finished, tmp_path):
    pytest.importorskip("matplotlib")
    bench = open_run(finished[0], CPU)
    _, bank, assignment = bench.score("unlabeled", "orca")
    both = draw(bench, bank, assignment, tmp_path / "both.png")
    one = draw(bench, bank, replace(assignment, novelty=None), tmp_path / "one.png")
    widths = [Image.open(path).width for path in (both, one)]
    assert widths[1] < widths[0]


def test_nan_stops_the_run_and_leaves_a_checkpoint_from_before(tmp_path, monkeypatch):
    plain_step = OpenCon.step
    calls = []

    def step(self, batch):
        out = plain_step(self, batch)
        calls.append(1)
        if len(calls) == 14:
            out.logs["loss_u"] = torch.tensor(float("nan"))
        return out

    monkeypatch.setattr(OpenCon, "step", step)
    with pytest.raises(DivergedError, match="loss_u was not a finite number at epoch 1, step 6"):
        train(small(), tmp_path / "run", CPU)
    state = RunFolder(tmp_path / "run").load_checkpoint()
    assert state["epochs_done"] == 1
    assert all(v.isfinite().all() for v in state["method"].values() if v.is_floating_point() and v.dim())


def test_full_disk_while_training_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    out, plain_save, calls = tmp_path / "run", torch.save, []

    def save(state, path):
        calls.append(1)
        if len(calls) > 2:
            path.write_bytes(b"torn")
            raise OSError(28, "No space left on device")
        plain_save(state, path)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RunError, match="the disk is full"):
        train(small(), out, CPU)
    monkeypatch.undo()
    assert RunFolder(out).load_checkpoint()["epochs_done"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["split.num_seen=10"], "leaves no novel class"),
        (["split.num_seen=12"], "leaves no novel class"),
        (["train.batch_size=3"], "labeled"),
        (["eval.on=test"], "no held-out test images"),
        (["encoder.name=resnet"], "unknown encoder 'resnet'"),
        (["encoder.weights=nowhere.pt"], "nowhere.pt is not a file"),
        (["data.name=digit"], "unknown data set 'digit'"),
        (["train.schedule=linear"], "unknown schedule 'linear'"),
        (["train.optimizer=adam"], r"unknown optimizer 'adam'. Did you mean 'adamw'\?"),
        (["augment.name=standart"], r"unknown augmentation 'standart'. Did you mean 'standard'\?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(settings, message, monkeypatch):
    monkeypatch.setattr(workbench, "load_dataset", lambda *a, **k: pytest.fail("loaded"))
    for look in (plan, lambda config: prepare(config, CPU)):
        with pytest.raises(ConfigError, match=message):
            look(small(*settings))


def test_a_further_view_that_the_encoder_cannot_take_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of 16 pixels, but these have 90"):
        check_fits(with_settings(get_recipe("concord/cub200"), ["views.0.size=90"]), DATASETS["cub200"].info)


def test_frozen_random_weights_are_pointed_out():
    assert "give --weights" in plan(small("encoder.train_from=head"))["note"]
    assert "note" not in plan(small())


def test_overestimating_the_classes_is_allowed(tmp_path):
    result = train(small("split.num_classes=14"), tmp_path / "run", CPU)
    assert weights(tmp_path / "run")["prototypes"].shape[0] == 14
    assert result["classes_in_use"] <= 14


def test_a_method_that_counts_anew_says_so_and_is_drawn(tmp_path):
    told: list[str] = []
    small = ["train.epochs=4", "method.contrast_epochs=2", "method.num_starts=2"]
    config = with_settings(get_recipe("concord/digits"), [*small, "split.num_classes=30", "method.counts=true"])
    result = train(config, tmp_path / "run", CPU, callbacks=Callbacks(say=told.append))
    assert told == [f"Epoch 2: the classes were counted anew: 30 became {result['prototypes']:.0f}."]
    assert result["prototypes"] < 30
    draw_numbers(RunFolder(tmp_path / "run").read_metrics(), tmp_path / "run")
    assert (tmp_path / "run" / "numbers.png").stat().st_size > 1000


def test_pretraining_gives_weights_that_training_takes(tmp_path):
    result = train(replace(SMALL, method=SimCLRConfig()), tmp_path / "pre", CPU)
    losses = [record["loss"] for record in RunFolder(tmp_path / "pre").read_metrics()]
    assert losses[-1] < losses[0] - 0.5
    assert result["knn20"] > 0.85
    said = []
    file = tmp_path / "pre/encoder.safetensors"
    train(
        small("train.epochs=1", f"encoder.weights={file}", "encoder.train_from=head"),
        tmp_path / "run",
        CPU,
        callbacks=Callbacks(say=said.append),
    )
    assert "loaded" in said[0].lower()
    pre, fine = weights(tmp_path / "pre"), weights(tmp_path / "run")
    name = "embedder.encoder.conv1.conv.weight"
    assert torch.equal(pre[name], fine[name])  # frozen, so still what was loaded


def test_an_encoder_is_judged_by_what_the_next_run_gets_of_it(tmp_path):
    result = train(replace(small("train.epochs=2"), method=SimCLRConfig()), tmp_path / "pre", CPU)
    file = tmp_path / "pre/encoder.safetensors"
    bench = prepare(with_settings(FROZEN, [f"encoder.weights={file}"]), CPU)
    assert result["knn20"] == knn_accuracy(bench.bank().z, bench.dataset.train.classes, k=20)


# --- no epoch ---------------------------------------------------------------------------------------------------------


FROZEN = replace(SMALL, method=KMeansConfig(), train=TrainConfig(epochs=0))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """A run of k-means, which learns nothing."""
    out = tmp_path_factory.mktemp("runs") / "frozen"
    return out, train(FROZEN, out, CPU)


def test_a_method_that_does_not_train_is_a_run_like_any_other(frozen, monkeypatch):
    out, result = frozen
    files = {"config.json", "split.json", "environment.json", "checkpoint.pt", "encoder.safetensors", "result.json"}
    files |= {"classes.json", "classes.safetensors"}
    assert {p.name for p in out.iterdir()} == files
    assert (result["protocol"], result["on"], result["num_images"], result["seed"]) == ("orca", "unlabeled", 1332, 0)
    assert result["seen"] > 0.5  # a tenth by chance: the pixels, blurred by random weights, and the names from labels
    again = evaluate_run(out, CPU)
    assert all(again[key] == result[key] for key in ("all", "seen", "novel", "classes_in_use"))
    assert evaluate_run(out, CPU, protocol="gcd")["protocol"] == "gcd"

    said = []
    monkeypatch.setattr(train_module, "prepare", lambda *a, **k: pytest.fail("computed again"))
    assert train(FROZEN, out, CPU, callbacks=Callbacks(say=said.append)) == result
    assert "finished already" in said[0]


def test_other_seeds_of_a_run_without_epochs_are_other_draws(frozen, tmp_path):
    train(with_settings(FROZEN, ["train.seed=1"]), tmp_path / "run", CPU)
    a, b = weights(frozen[0]), weights(tmp_path / "run")
    assert a["seed"] != b["seed"]
    assert not torch.equal(a["embedder.encoder.conv1.conv.weight"], b["embedder.encoder.conv1.conv.weight"])


def test_a_method_that_does_not_train_has_no_epochs(tmp_path):
    config = with_settings(FROZEN, ["train.epochs=3"])
    with pytest.raises(ConfigError, match=r"kmeans learns nothing: train.epochs = 3 must be 0"):
        plan(config)
    with pytest.raises(ConfigError, match="kmeans learns nothing"):
        train(config, tmp_path / "run", CPU)


@pytest.mark.parametrize("method", [OpenConConfig(), SimCLRConfig(), GCDConfig(), SimGCDConfig()])
def test_any_method_without_epochs_evaluates_its_start(method, tmp_path, monkeypatch):
    config = replace(small("train.epochs=0", "train.seed=3"), method=method)
    start = prepare(config, CPU).method.state_dict()
    monkeypatch.setattr(METHODS[method.name].build, "step", lambda *a: pytest.fail("stepped"))
    result = train(config, tmp_path / "run", CPU)
    assert_same_state(weights(tmp_path / "run"), start)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    again = evaluate_run(tmp_path / "run", CPU)
    measure = "all" if method.uses_labels else "knn20"
    assert 0 < again[measure] == result[measure]


def test_a_run_without_epochs_starts_from_its_weights_and_outlives_them(tmp_path):
    pre = replace(small("train.epochs=3"), method=SimCLRConfig())
    train(pre, tmp_path / "pre", CPU)
    file = tmp_path / "pre/encoder.safetensors"
    config = with_settings(FROZEN, [f"encoder.weights={file}"])
    result = train(config, tmp_path / "run", CPU)
    name = "embedder.encoder.conv3.conv.weight"
    assert torch.equal(weights(tmp_path / "run")[name], weights(tmp_path / "pre")[name])
    file.unlink()
    assert evaluate_run(tmp_path / "run", CPU)["all"] == result["all"]
    (tmp_path / "run/result.json").unlink()  # killed a moment before the end
    assert train(config, tmp_path / "run", CPU)["all"] == result["all"]


def test_the_plan_of_a_run_without_epochs_says_so():
    shown = plan(FROZEN)
    assert shown["training"].startswith("none")
    assert "nothing learns" in shown["encoder"]
    assert "give --weights" in shown["note"]
    assert "note" not in plan(with_settings(FROZEN, [f"encoder.weights={__file__}"]))


def test_without_epochs_no_batch_has_to_be_filled():
    """The size of a batch that nobody makes does not have to fit."""
    for method in (KMeansConfig(), SimCLRConfig()):
        config = replace(FROZEN, method=method)
        plan(with_settings(config, ["train.batch_size=2000"]))
        plan(with_settings(config, ["train.batch_size=2"]))
    with pytest.raises(ConfigError, match=r"train.batch_size = 2000"):
        plan(replace(small("train.batch_size=2000"), method=SimCLRConfig()))


def test_tensorboard_logs_beside_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    train(small("train.epochs=1"), tmp_path / "run", CPU, watchers=[TensorBoardLogger()])
    assert list((tmp_path / "run/tensorboard").glob("events*"))


def test_bf16_trains_on_a_cpu(tmp_path):
    result = train(small("train.epochs=2", "train.precision=bf16"), tmp_path / "run", CPU)
    assert result["all"] > 0.25


# Ten steps at a fixed seed, kept as text: a change that moves them must say why.
TEN_STEPS = Path(__file__).parent / "ten_steps.json"


def test_ten_steps_are_what_they_were(tmp_path):
    train(small("train.epochs=2", "train.batch_size=180"), tmp_path / "run", CPU)
    got = [
        {k: r[k] for k in ("loss", "loss_n", "loss_l", "loss_u", "loss_prior")}
        for r in RunFolder(tmp_path / "run").read_metrics()
    ]
    if not TEN_STEPS.exists():
        TEN_STEPS.write_text(json.dumps(got, indent=1) + "\n")
        pytest.fail("ten_steps.json was missing and has been written; look at it and commit it")
    want = json.loads(TEN_STEPS.read_text())
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-3)
