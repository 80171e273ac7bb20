"""The hand-written passes of a ResNet against autograd; plain functions stand in for the kernels, which need a GPU."""

import copy
import importlib
import sys

import pytest
import torch

from opencon.encoders import base, resnet
from opencon.encoders.embedder import quiet_norms
from opencon.encoders.resnet import BasicBlock, Bottleneck, ResNet
from opencon.methods.parts import WeightAverage
from tests.naive import norm_kernel


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opencon.encoders.norm_kernel", norm_kernel)
    monkeypatch.delitem(sys.modules, "opencon.encoders.fused", raising=False)
    yield importlib.import_module("opencon.encoders.fused")
    sys.modules.pop("opencon.encoders.fused")  # what has seen the stand-ins is not for others


def network(block=BasicBlock, depths=(2, 1, 1, 1), *, small_images=True, width=64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = ResNet(block, depths, small_images=small_images, width=width)
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.weight, 1.0, 0.5)  # of both signs
                torch.nn.init.normal_(module.bias, 0.0, 0.5)
    return net.to(memory_format=torch.channels_last).train()


def images(number, side):
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(1))


def passed(net, forward, x):
    """The pooled output, and all gradients of something that looks at every feature."""
    out = net.pool(forward(x))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out.float() * weight).sum().backward()
    return out.detach(), {name: p.grad for name, p in net.named_parameters()}


def fused_form(fused, net):
    return fused.FusedResNet(net.units(len(net.stages)))


def plain(net, x):
    for name in net.stages:
        x = getattr(net, name)(x)
    return x


SHAPES = [
    (BasicBlock, (2, 1, 1, 1), True, 16),
    (BasicBlock, (1, 2, 1, 1), False, 64),  # its stem pools
    (Bottleneck, (1, 2, 1, 1), True, 16),  # a shortcut with a convolution in the first stage, too
]


@pytest.mark.parametrize(("block", "depths", "small_images", "side"), SHAPES)
def test_both_passes_equal_autograd(fused, block, depths, small_images, side):
    net, x = network(block, depths, small_images=small_images), images(4, side)
    net, x = net.double(), x.double()  # so that no ReLU falls the other way for a rounding
    other = copy.deepcopy(net)
    out, grads = passed(net, lambda x: plain(net, x), x)
    fast, fast_grads = passed(other, fused_form(fused, other), x)
    torch.testing.assert_close(fast, out, atol=1e-9, rtol=1e-9)
    for name, grad in grads.items():
        torch.testing.assert_close(fast_grads[name], grad, atol=1e-9 * float(grad.abs().max()), rtol=0, msg=name)
    for (name, new), old in zip(other.named_buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(new, old, atol=1e-9, rtol=1e-9, msg=name)


def test_in_reduced_precision_it_is_as_near_to_the_truth_as_autocast(fused):
    net, x = network(), images(16, 16)
    fast, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    truth, true_grads = passed(exact, lambda x: plain(exact, x), x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        slow_out, slow_grads = passed(net, lambda x: plain(net, x), x)
        fast_out, fast_grads = passed(fast, fused_form(fused, fast), x)
    assert fast_out.dtype == slow_out.dtype == torch.bfloat16
    assert error(fast_out, truth) < 1.1 * error(slow_out, truth) < 0.02
    for name, true in true_grads.items():
        assert fast_grads[name].dtype == torch.float32
        assert error(fast_grads[name], true) < 1.2 * error(slow_grads[name], true), name


def error(result, truth):
    return float((result.double() - truth).norm() / truth.norm())


def test_no_second_derivative_is_promised(fused):
    net = network()
    out = net.pool(fused_form(fused, net)(images(4, 16))).sum()
    (slope,) = torch.autograd.grad(out, [net.stem.conv1.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        slope.square().sum().backward()


def test_weights_that_stand_in_for_those_of_the_network(fused):
    """Backward, too, they are those of the forward pass, whatever the modules hold by then."""
    net, x = network().double(), images(4, 16).double()
    other = {name: (1.5 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
    grads = []
    for forward in (lambda: plain(net, x), lambda: fused_form(fused, net)(x)):
        net.forward = lambda forward=forward: net.pool(forward())  # functional_call knows no other
        out = torch.func.functional_call(net, other, ())
        grads.append(torch.autograd.grad(out.square().sum(), list(other.values())))
    for name, a, b in zip(other, *grads, strict=True):
        torch.testing.assert_close(b, a, atol=1e-9 * float(a.abs().max()), rtol=0, msg=name)


def test_weights_that_change_before_the_backward_pass_are_noticed(fused):
    net = network()
    out = fused_form(fused, net)(images(4, 16)).sum()
    with torch.no_grad():
        net.layer2[0].bn1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_without_gradients_nothing_is_kept_but_the_statistics(fused, monkeypatch):
    net = network()
    other, kept = copy.deepcopy(net), []
    monkeypatch.setattr(fused, "Passed", lambda *tensors: kept.append(tensors))
    with torch.no_grad():
        fast = fused_form(fused, other)(images(4, 16))
        torch.testing.assert_close(fast, plain(net, images(4, 16)), atol=1e-3, rtol=0)
    assert kept == []
    assert int(other.stem.bn1.num_batches_tracked) == 1
    torch.testing.assert_close(other.layer4[0].bn2.running_var, net.layer4[0].bn2.running_var, atol=1e-5, rtol=1e-4)


def test_images_that_want_a_gradient_are_refused(fused):
    with pytest.raises(AssertionError, match="images get no gradient"):
        fused_form(fused, network())(images(4, 16).requires_grad_())


# --- where it is used --------------------------------------------------------------------------------------------------


def test_it_is_used_where_everything_learns_and_there_are_kernels(fused, monkeypatch):
    monkeypatch.setattr(resnet, "has_triton", lambda: True)
    net = network()
    net.fuse()
    assert isinstance(net.fused, fused.FusedResNet)
    net.freeze("layer4", "running")
    assert net.fused is None
    net.fuse()
    assert net.fused is None
    averaging = network()
    averaging.layer3[0].bn1.momentum = None
    for other in (network(width=16), network().double(), averaging):
        other.fuse()
        assert other.fused is None
    monkeypatch.setattr(resnet, "has_triton", lambda: False)
    net.freeze("all")
    net.fuse()
    assert net.fused is None


def test_it_is_used_in_training_on_a_gpu_only():
    net, asked = network(), []
    net.fused = lambda x: asked.append(x) or torch.zeros(len(x), 512, 1, 1)

    class OnGPU(torch.Tensor):
        is_cuda = True

    on_gpu = images(2, 16).as_subclass(OnGPU)
    assert not base.Encoder.forward(net, on_gpu).any()
    assert len(asked) == 1
    net(images(2, 16))
    net.eval()
    net(on_gpu)
    assert len(asked) == 1


def test_a_copy_has_its_own(fused, monkeypatch):
    """Teachers and averages are copies of the whole network."""
    monkeypatch.setattr(resnet, "has_triton", lambda: True)
    net = network()
    net.fuse()
    other = copy.deepcopy(net)
    assert other.fused.units[0].conv is other.stem.conv1
    assert other.fused.units[0].conv is not net.stem.conv1


def test_two_passes_of_different_sizes_in_one_step(fused):
    """Gradients add up; a pass that is to be quiet leaves the running statistics alone."""
    net = network().double()
    other, small, large = copy.deepcopy(net), images(6, 10).double(), images(4, 16).double()
    found = []
    for n, forward in ((net, lambda x: plain(net, x)), (other, fused_form(fused, other))):
        out = n.pool(forward(large)).square().sum()
        with quiet_norms(n):
            out = out + n.pool(forward(small)).square().sum()
        out.backward()
        found.append({name: p.grad for name, p in n.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-9 * float(grad.abs().max()), rtol=0, msg=name)
    alone = network().double()
    plain(alone, large)
    for n in (net, other):
        for (name, new), old in zip(n.named_buffers(), alone.buffers(), strict=True):
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(new, old, atol=1e-9, rtol=1e-9, msg=name)


def test_an_averaged_twin_has_its_own_weights_and_statistics_in_fused_passes(fused):
    """The fused form reads modules when it is called, so it sees the tensors that a twin has put in their place."""
    net, x = network(width=16).double(), images(8, 16).double()
    apart = copy.deepcopy(net)
    twin = WeightAverage(net, 0.9)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
    form = fused_form(fused, net)
    net.through = lambda x: net.pool(form(x))  # as on a GPU
    before = {name: b.clone() for name, b in net.named_buffers()}
    with torch.no_grad():
        got = twin(x, call="through")
        want = apart.pool(plain(apart, x))
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    moved = dict(apart.named_buffers())["stem.bn1.running_mean"]
    torch.testing.assert_close(twin.get_buffer("stem__bn1__running_mean"), moved, atol=1e-9, rtol=1e-9)
