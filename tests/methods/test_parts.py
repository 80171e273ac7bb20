"""The pieces that several methods are made of."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opencon.config import EncoderConfig
from opencon.encoders import build_embedder
from opencon.methods.parts import CosineClassifier, Swapped, WeightAverage, ramp_up
from opencon.runtime import seeded


@pytest.mark.parametrize(("epoch", "want"), [(0, math.exp(-5)), (5, math.exp(-1.25)), (10, 1.0), (99, 1.0)])
def test_ramp_up(epoch, want):
    assert ramp_up(epoch, 10) == pytest.approx(want)
    assert ramp_up(epoch, 0) == 1.0


def test_cosine_classifier_gives_cosines():
    with seeded(0):
        classifier, rows = CosineClassifier(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)
    got = classifier(rows)
    for i in range(5):
        for k in range(3):
            w = classifier.weight[k]
            assert got[i, k].item() == pytest.approx((rows[i] @ w / (rows[i].norm() * w.norm())).item())
    torch.testing.assert_close(classifier(7 * rows), got)
    with torch.no_grad():
        classifier.weight *= torch.tensor([[2.0], [3.0], [4.0]])
    torch.testing.assert_close(classifier(rows), got)
    assert torch.equal(classifier(torch.zeros(1, 4, dtype=torch.float64)), torch.zeros(1, 3, dtype=torch.float64))


def test_cosine_classifier_starts_on_the_sphere():
    with seeded(0):
        torch.testing.assert_close(CosineClassifier(6, 3).weight.norm(dim=1), torch.ones(3))


# --- a module with other tensors in it --------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * x

    def backwards(self, x, y):
        return x - self.factor * y


def test_swapped_calls_any_method_and_leaves_the_module_alone():
    scale = Scale()
    swapped = Swapped(scale)
    assert swapped({"factor": torch.tensor(5.0)}, "forward", torch.tensor(3.0)) == 15
    assert swapped({"factor": torch.tensor(5.0)}, "backwards", torch.tensor(3.0), torch.tensor(1.0)) == -2
    assert swapped({}, "forward", torch.tensor(3.0)) == 6
    assert scale.factor == 2
    assert swapped.module is scale
    assert not list(swapped.parameters())
    assert not swapped.state_dict()


def test_gradients_reach_what_was_put_in():
    other = torch.tensor(5.0, requires_grad=True)
    scale = Scale()
    Swapped(scale)({"factor": other}, "forward", torch.tensor(3.0)).backward()
    assert other.grad == 3
    assert scale.factor.grad is None


# --- the weight average -----------------------------------------------------------------------------------------------


def network(seed=0, **settings):
    with seeded(seed):
        config = EncoderConfig(name="convnet", **settings)
        return build_embedder(config, in_channels=1, image_size=8, projects=False)


def images(seed=0):
    return torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def move(module):
    """Other parameters and running statistics, in place."""
    for tensor in module.state_dict().values():
        tensor += 0.5 if tensor.is_floating_point() else 1


def test_average_follows_by_the_momentum():
    scale = Scale(1.0)
    average = WeightAverage(scale, 0.9)
    want = 1.0
    for now in (3.0, -2.0, 5.0):
        with torch.no_grad():
            scale.factor.fill_(now)
        average.update()
        want = 0.9 * want + 0.1 * now
        assert average(torch.tensor(1.0)).item() == pytest.approx(want)


def test_warming_up_forgets_the_start():
    scale = Scale(1.0)
    average = WeightAverage(scale, 0.5, warms_up=True)
    with torch.no_grad():
        scale.factor.fill_(0.0)
    want = 1.0
    for n in range(1, 12):
        average.update()
        want *= min(0.5, (1 + n) / (10 + n))
        assert average(torch.tensor(1.0)).item() == pytest.approx(want)
    assert min(0.5, 12 / 21) == 0.5  # the last ones at full momentum


def test_average_restarts_as_the_module_is_now():
    scale = Scale(1.0)
    average = WeightAverage(scale, 0.5, warms_up=True)
    average.update()
    with torch.no_grad():
        scale.factor.fill_(4.0)
    average.restart()
    assert average(torch.tensor(1.0)).item() == 4.0
    with torch.no_grad():
        scale.factor.fill_(0.0)
    average.update()
    assert average(torch.tensor(1.0)).item() == pytest.approx(4.0 * 2 / 11)  # warms up anew


def test_average_starts_as_the_module():
    module = network().eval()
    average = WeightAverage(module, 0.9)
    assert torch.equal(average(images()), module(images()))
    assert torch.equal(average(images(), call="features"), module.features(images()))


def test_average_of_a_network_is_the_network_of_averages():
    """Parameters and running statistics, by hand; what the configuration owns is not touched."""
    module, other = network(), network()
    average = WeightAverage(module, 0.75)
    move(module)
    average.update()
    averaged = {
        name: 0.75 * value + 0.25 * module.state_dict()[name] if value.is_floating_point() else value
        for name, value in other.state_dict().items()
    }
    other.load_state_dict(averaged)
    for m in (module, other):
        m.eval().mean.fill_(0.1)  # in no state_dict: the average uses the module's own
    assert "mean" not in average.state_dict()
    torch.testing.assert_close(average(images()), other(images()))


@pytest.mark.parametrize("norm", ["batch", "measured"])
def test_what_stands_still_is_shared(norm):
    module = network(train_from="conv3", frozen_norm=norm)
    average = WeightAverage(module, 0.9)
    names = set(average.state_dict())
    assert {"encoder__conv3__conv__weight", "encoder__conv3__bn__running_mean"} <= names
    assert "encoder__conv1__conv__weight" not in names
    assert ("encoder__conv1__bn__running_mean" in names) == (norm == "batch")
    with torch.no_grad():
        module.encoder.conv1.conv.weight *= 2
        if norm == "measured":
            module.encoder.conv1.bn.running_mean += 2
    module.eval()
    assert torch.equal(average(images()), module(images()))


def test_what_does_not_change_stays_to_the_last_bit():
    module = network()
    average = WeightAverage(module, 0.999)
    before = {name: value.clone() for name, value in average.state_dict().items() if name != "num_updates"}
    for _ in range(50):
        average.update()
    for name, value in before.items():
        assert torch.equal(average.state_dict()[name], value), name


def test_no_parameters_and_no_gradient():
    module = network()
    average = WeightAverage(module, 0.9)
    assert not list(average.parameters())
    assert not average(images()).requires_grad
    head = network(train_from="head")
    assert not WeightAverage(head, 0.9)(images()).requires_grad


def test_passes_of_the_twin_leave_the_running_statistics_of_the_module():
    module = network().train()
    average = WeightAverage(module, 0.9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    own = average.encoder__conv1__bn__running_mean.clone()
    average(images())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not torch.equal(average.encoder__conv1__bn__running_mean, own)  # its own have moved


def test_saved_and_loaded():
    module = network().eval()
    average = WeightAverage(module, 0.9, warms_up=True)
    move(module)
    average.update()
    file = io.BytesIO()
    torch.save(nn.ModuleDict({"module": module, "average": average}).state_dict(), file)
    file.seek(0)
    again = network(seed=1).eval()
    loaded = nn.ModuleDict({"module": again, "average": WeightAverage(again, 0.9, warms_up=True)})
    loaded.load_state_dict(torch.load(file, weights_only=True))
    twin = loaded["average"]
    assert torch.equal(twin(images()), average(images()))
    move(module)
    move(again)
    average.update()
    twin.update()
    assert torch.equal(twin(images()), average(images()))
    assert twin.num_updates == 2


def test_other_types_and_copies():
    module = network().eval()
    both = nn.ModuleDict({"module": module, "average": WeightAverage(module, 0.9, warms_up=True)})
    move(module)
    double = copy.deepcopy(both).double()
    double["average"].update()
    assert double["average"].encoder__conv1__conv__weight.dtype == torch.float64
    assert double["average"].num_updates == 1
    both["average"].update()
    got = double["average"].encoder__conv1__conv__weight.float()
    torch.testing.assert_close(got, both["average"].encoder__conv1__conv__weight)
    for p in double["module"].parameters():  # a copy follows the copy
        p.data.zero_()
    before = both["average"].encoder__conv1__conv__weight.clone()
    both["average"].update()
    double["average"].update()
    assert not torch.allclose(both["average"].encoder__conv1__conv__weight, got)
    assert (both["average"].encoder__conv1__conv__weight - before).abs().sum() > 0


def test_moving_to_another_device_moves_the_average():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    both = nn.ModuleDict({"module": module, "average": WeightAverage(module, 0.9, warms_up=True)}).to("meta")
    both["average"].update()
    assert all(b.is_meta for b in both["average"].buffers())
    assert both["average"](torch.ones(4, 3, device="meta")).is_meta


@pytest.mark.parametrize("call", ["forward", "features"])
def test_a_network_with_folded_stages(call):
    """The folded form is used by both, and survives calls and updates."""
    with seeded(0):
        config = EncoderConfig(name="resnet18_cifar", train_from="layer4", frozen_norm="running")
        module = build_embedder(config, in_channels=3, image_size=32, projects=False).eval()
    average = WeightAverage(module, 0.5)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain = average(x, call=call)
    module.fold_frozen()
    folded = module.encoder.folded
    assert folded is not None
    torch.testing.assert_close(average(x, call=call), plain, rtol=1e-4, atol=1e-5)
    module.encoder.folded = lambda x: 0 * folded(x)  # would be seen
    assert not torch.allclose(average(x, call=call), plain, rtol=1e-2)
    average.update()
    assert module.encoder.folded is not None


def test_compiles_as_one_graph():
    module = network().eval()
    average = WeightAverage(module, 0.9)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: average(x, call="features"), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), average(images(), call="features"))
    assert F.normalize(average(images(), call="features"), dim=1).allclose(average(images()))
