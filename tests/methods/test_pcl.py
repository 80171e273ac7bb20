"""PCL's step against loops, and the state around it: queue, slower encoder, clusters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from opencon.cluster.kmeans import kmeans
from opencon.errors import ConfigError
from opencon.methods import PCL, Epoch, FeatureBank, PCLConfig, Task
from opencon.methods.pcl import concentration, levels
from opencon.runtime import generator, seeded
from tests.methods.toys import TASK, Blobs, ExactEmbedder, toy_batch
from tests.naive.pcl import naive_concentration, naive_instance_loss, naive_prototype_loss, naive_queue

BLOBS = Blobs(epochs=60)  # the prototypes start after epoch 20, and the slower encoder they come from has to follow

CPU = torch.device("cpu")


def build(seed=0, task=TASK, **settings):
    with seeded(seed):
        return PCL(PCLConfig(**{"warmup_epochs": 2, **settings}), task, ExactEmbedder()).double()


def epoch(method, index, seed=0):
    """An epoch over as many random images as the task has; features are what `embed` gives at the time of asking."""
    images = torch.rand(TASK.num_images, 1, 3, 3, generator=torch.Generator().manual_seed(seed))

    def features():
        with torch.no_grad():
            return FeatureBank(method.embed(images), torch.full((TASK.num_images,), -1))

    return Epoch(index, 10, features), images


def moved(method, by=0.3):
    """The same method, its encoder away from the slower copy."""
    with torch.no_grad():
        noise = torch.randn(method.embedder.linear.weight.shape, generator=torch.Generator().manual_seed(9))
        method.embedder.linear.weight += by * noise
    return method


def parts(method):
    """Prototypes, phi and members of each level."""
    sizes = method.levels
    return list(zip(torch.split(method.prototypes, sizes), torch.split(method.phi, sizes), method.members, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "num_prototypes": (3, 7), "queue_size": 9}])
def test_step_equals_the_definitions(seed, settings):
    method, batch = moved(build(seed, **settings)), toy_batch(seed)
    method.before_epoch(epoch(method, 2)[0])
    with torch.no_grad():
        z, keys = method.embedder(batch.views[0]), method.average(batch.views[1])
    assert not torch.allclose(keys, method.embedder(batch.views[1]))
    instance = naive_instance_loss(z, keys, method.queue, method.config.temperature)
    prototype = naive_prototype_loss(z, batch.rows.tolist(), parts(method))
    out = method.step(batch)
    assert out.logs["loss_instance"].item() == pytest.approx(instance, rel=1e-9)
    assert out.logs["loss_prototype"].item() == pytest.approx(prototype, rel=1e-9)
    assert out.loss.item() == pytest.approx(instance + prototype, rel=1e-9)
    torch.testing.assert_close(out.carry[0], keys)


def test_only_the_first_encoder_learns():
    method, batch = moved(build()), toy_batch()
    method.before_epoch(epoch(method, 5)[0])
    assert {name for name, p in method.named_parameters() if p.requires_grad} == {
        "embedder.linear.weight",
        "embedder.linear.bias",
    }
    keys = method.step(batch).carry[0]
    assert not keys.requires_grad
    w = method.embedder.linear.weight
    w.grad = None
    method.step(batch).loss.backward()
    got = w.grad.clone()
    # With constants in the place of the keys the gradient is the same.
    w.grad = None
    z = method.embedder(batch.views[0])
    logits = torch.cat([(z * keys).sum(dim=1, keepdim=True), z @ method.queue.T], dim=1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))
    each = [F.cross_entropy(z @ mu.T / phi, members[batch.rows]) for mu, phi, members in parts(method)]
    (loss + sum(each) / len(each)).backward()
    torch.testing.assert_close(got, w.grad)


def test_labels_are_not_looked_at():
    method, batch = build(), toy_batch()
    method.before_epoch(epoch(method, 5)[0])
    nobody = replace(batch, labels=torch.full_like(batch.labels, -1), num_labeled=0)
    assert torch.equal(method.step(batch).loss, method.step(nobody).loss)


def test_warm_up_is_info_nce_alone_and_asks_for_no_features():
    method, batch = build(warmup_epochs=3), toy_batch()

    def never():
        raise AssertionError("features cost a pass over all images")

    for index in (0, 2):
        method.before_epoch(Epoch(index, 10, never))
        out = method.step(batch)
        assert torch.equal(out.loss, out.logs["loss_instance"])
        assert out.logs["loss_prototype"].item() == 0.0
    method.before_epoch(epoch(method, 3)[0])
    out = method.step(batch)
    assert out.logs["loss_prototype"].item() > 0
    assert out.loss.item() == pytest.approx(sum(value.item() for value in out.logs.values()))


def test_clusters_are_those_of_the_slower_encoder():
    method = moved(build(num_prototypes=(4, 6)))
    now, images = epoch(method, 7)
    method.before_epoch(now)
    with torch.no_grad():
        z = method.average(images)
    first = 0
    for level, K in enumerate((4, 6)):
        found = kmeans(z, K, num_starts=5, max_iterations=20, generator=generator(CPU, 7, level))
        assert torch.equal(method.members[level], found.assignment)
        mu, phi = method.prototypes[first : first + K], method.phi[first : first + K]
        torch.testing.assert_close(mu, F.normalize(found.centers.double(), dim=1))
        want = naive_concentration(z, found.centers, found.assignment, 10.0, 0.2)
        assert phi.tolist() == pytest.approx(want, rel=1e-5)
        first += K
    # Afterwards it is the first encoder again that `assign` sees.
    torch.testing.assert_close(method.embed(images), method.embedder(images))
    assert not torch.allclose(method.embed(images), z)


def test_embed_is_put_back_when_features_fail():
    method = moved(build())

    def fails():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        method.before_epoch(Epoch(5, 10, fails))
    images = toy_batch().views[0]
    torch.testing.assert_close(method.embed(images), method.embedder(images))


def test_every_epoch_clusters_anew_and_the_same_way_every_time():
    method = build()
    states = []
    for index in (4, 5, 4):
        method.before_epoch(epoch(method, index)[0])
        states.append(method.members.clone())
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])


def test_the_slower_encoder_follows():
    method = build(momentum=0.9)
    before = method.embedder.linear.weight.detach().clone()
    moved(method)
    after = method.embedder.linear.weight.detach()
    method.after_step(torch.zeros(1, 6, dtype=torch.float64))
    images = toy_batch().views[0]
    slow = F.normalize(
        F.linear(images.flatten(1).double(), 0.9 * before + 0.1 * after, method.embedder.linear.bias), dim=1
    )
    torch.testing.assert_close(method.average(images), slow)


@pytest.mark.parametrize("batch_size", [3, 4, 8, 11])
def test_queue_is_a_ring(batch_size):
    """Also where a batch does not divide it, or is longer than it: then only its last rows stay."""
    method = build(queue_size=8)
    g = torch.Generator().manual_seed(0)
    pushes = [torch.randn(batch_size, 6, generator=g, dtype=torch.float64) for _ in range(5)]
    start = method.queue.clone()
    for rows in pushes:
        method.after_step(rows)
    want, place = naive_queue(start, [rows[-8:] for rows in pushes])
    assert method.queue.tolist() == want
    assert int(method.pointer) == place


def test_queue_is_no_longer_than_half_the_images():
    assert build(queue_size=7).queue.shape == (7, 6)
    assert build().queue.shape == (20, 6)
    torch.testing.assert_close(build().queue.norm(dim=1), torch.ones(20, dtype=torch.float64))
    assert build(task=Task(1, 2, 0.5, num_images=1), num_prototypes=None).queue.shape == (1, 6)


def test_levels_by_default_double_twice():
    assert levels(None, TASK) == [5, 10, 20]
    assert levels(None, replace(TASK, num_images=24)) == [5, 10, 12]  # two images for each, at least
    assert levels(None, replace(TASK, num_images=6)) == [5, 5, 5]
    assert levels((30, 3), TASK) == [30, 3]


def test_more_prototypes_than_images_are_refused():
    with pytest.raises(
        ConfigError, match=r"method.num_prototypes = \(4, 41\) asks for more clusters than the 40 train"
    ):
        build(num_prototypes=(4, 41))


def test_concentration_repairs_single_images_and_extremes():
    """Twelve clusters: one empty, one of a single image, the others of growing spread."""
    g = torch.Generator().manual_seed(0)
    sizes = [0, 1, *range(2, 12)]
    assignment = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    centers = torch.randn(12, 3, generator=g, dtype=torch.float64)
    spread = torch.linspace(0.01, 3.0, 12, dtype=torch.float64)[assignment, None]
    z = centers[assignment] + spread * torch.randn(len(assignment), 3, generator=g, dtype=torch.float64)
    distance = (z - centers[assignment]).norm(dim=1)
    got = concentration(distance, assignment, 12, smoothing=10.0, temperature=0.3)
    assert got.tolist() == pytest.approx(naive_concentration(z, centers, assignment, 10.0, 0.3))
    assert got.mean().item() == pytest.approx(0.3)
    assert got[0] == got[1] == got.max()


def test_concentration_is_smaller_for_more_images_at_the_same_distance():
    assignment = torch.cat([torch.full((n,), c) for c, n in enumerate([3, 30])])
    got = concentration(torch.ones(33), assignment, 2, smoothing=10.0, temperature=0.2)
    assert got[1] < got[0]


def test_concentration_of_points_is_the_temperature():
    assignment = torch.arange(6) // 2
    got = concentration(torch.zeros(6), assignment, 3, smoothing=10.0, temperature=0.2)
    assert got.tolist() == pytest.approx([0.2, 0.2, 0.2])
    got = concentration(torch.zeros(3), torch.arange(3), 3, smoothing=10.0, temperature=0.2)
    assert got.tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_assign_finds_the_groups_and_names_the_seen_ones():
    rng = torch.Generator().manual_seed(0)
    group = torch.arange(4).repeat_interleave(10)
    z = F.normalize(torch.eye(4)[group] + 0.05 * torch.randn(40, 4, generator=rng), dim=1)
    labels = torch.full((40,), -1)
    labels[30:33], labels[10:13] = 0, 1
    task = Task(num_seen=2, num_classes=4, labeled_ratio=0.3, num_images=40)
    classes = build(task=task).assign(FeatureBank(z, labels)).classes
    assert (classes[30:] == 0).all()
    assert (classes[10:20] == 1).all()
    assert {tuple(classes[:10].unique().tolist()), tuple(classes[20:30].unique().tolist())} == {(2,), (3,)}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", 0.0, "above zero"),
        ("momentum", 1.0, r"\[0, 1\)"),
        ("momentum", -0.1, r"\[0, 1\)"),
        ("queue_size", 0, "at least 1"),
        ("kmeans_starts", 0, "at least 1"),
        ("kmeans_iterations", 0, "at least 1"),
        ("warmup_epochs", -1, "not be negative"),
        ("smoothing", -1.0, "not be negative"),
        ("num_prototypes", (), "each at least 2"),
        ("num_prototypes", (4, 1), "each at least 2"),
    ],
)
def test_bad_settings_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"method.{key} = .*{message}"):
        PCLConfig(**{key: value})
