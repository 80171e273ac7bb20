"""The blocked InfoNCE equals the plain one, and never holds an N x N matrix."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from opencon.losses import blocked
from opencon.losses.blocked import info_nce_within, rows_of_a_block
from opencon.losses.contrastive import info_nce, masks_within
from tests.naive.losses import naive_contrast


def batch(seed, rows=37, dim=6, groups=5, share=0.7, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    z = F.normalize(torch.randn(rows, dim, generator=g, dtype=torch.float64), dim=1).to(dtype)
    member = torch.rand(rows, generator=g) < share
    return z, member, torch.randint(groups, (rows,), generator=g)


def value_and_gradient(loss_of, z):
    z = z.clone().requires_grad_()
    loss = loss_of(z)
    (gradient,) = torch.autograd.grad(loss, z)
    return loss.detach(), gradient


def both(z, member, group, *, block=None, plain_dtype=torch.float64, **settings):
    plain = value_and_gradient(lambda z: info_nce(z, masks_within(member, group), **settings), z.to(plain_dtype))
    fast = value_and_gradient(lambda z: info_nce_within(z, member, group, block=block, **settings), z)
    return plain, fast


def assert_equal(plain, fast, *, tolerance, floor=1e-3):
    """Relative to the largest entry, or `floor` if that is less: the small ones are differences of large terms."""
    for want, got in zip(plain, fast, strict=True):
        scale = max(want.abs().max().item(), floor) if want.numel() else 1.0
        torch.testing.assert_close(got.to(want.dtype), want, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("temperature", [0.005, 0.07, 0.4, 1.0])
@pytest.mark.parametrize("block", [1, 8, 36, 37, 38, None])
def test_equals_the_plain_form(block, temperature, reduction):
    for seed in range(3):
        plain, fast = both(*batch(seed), block=block, temperature=temperature, reduction=reduction)
        assert plain[1].abs().max() > 0.01
        assert_equal(plain, fast, tolerance=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_matches_the_formula(reduction):
    z, member, group = batch(7)
    got = info_nce_within(z, member, group, temperature=0.3, reduction=reduction, block=10)
    assert got.item() == pytest.approx(naive_contrast(z, member, group, 0.3, reduction), rel=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(0, 50),
    groups=st.integers(1, 60),
    share=st.floats(0, 1),
    temperature=st.floats(0.01, 2),
    block=st.integers(1, 60),
)
def test_equals_the_plain_form_whatever_the_batch(seed, rows, groups, share, temperature, block):
    z, member, group = batch(seed, rows=rows, groups=groups, share=share)
    plain, fast = both(z, member, group, block=block, temperature=temperature)
    # A gradient that is zero, such as that of a single group, is a difference of terms of up to 1 / temperature.
    assert_equal(plain, fast, tolerance=1e-10, floor=max(1e-3, 0.01 / temperature))


@pytest.mark.parametrize(
    ("groups", "share", "temperature", "tolerance"),
    [(300, 1.0, 0.4, 3e-6), (1, 1.0, 0.7, 3e-6), (20, 0.3, 0.1, 3e-6), (20, 0.3, 0.02, 1e-5)],
)
def test_as_exact_as_float32_allows(groups, share, temperature, tolerance):
    z, member, group = batch(0, rows=600, dim=128, groups=groups, share=share, dtype=torch.float32)
    plain, fast = both(z, member, group, temperature=temperature)
    assert fast[0].dtype == fast[1].dtype == torch.float32
    assert_equal(plain, fast, tolerance=tolerance)


def test_groups_may_be_any_numbers():
    z, member, group = batch(1)
    names = torch.tensor([-3, 2**62, 0, -(2**62), 17])
    torch.testing.assert_close(
        info_nce_within(z, member, names[group], temperature=0.2), info_nce_within(z, member, group, temperature=0.2)
    )


def test_a_stranger_nearer_than_every_candidate_changes_nothing():
    """Rows that are left out must not set the scale either: at this temperature everything else would vanish beside it."""
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    member = torch.tensor([True, True, False])
    loss = info_nce_within(z, member, torch.zeros(3, dtype=torch.long), temperature=0.005, block=2)
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.item() == 0.0  # one candidate, the positive: -s + log exp s
    assert (gradient == 0).all()


def test_two_orthogonal_pairs_in_closed_form():
    z = torch.eye(2, dtype=torch.float64).repeat(2, 1)
    loss = info_nce_within(z, torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 0, 1]), temperature=0.5)
    assert loss.item() == pytest.approx(-2 + math.log(math.e**2 + 2))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("members", [[], [2], [0, 1, 2, 3]])
def test_no_positive_is_zero_and_has_a_zero_gradient(members, reduction):
    z, _, _ = batch(0, rows=4, dtype=torch.float32)
    member = torch.zeros(4, dtype=torch.bool)
    member[members] = True
    loss, gradient = value_and_gradient(
        lambda z: info_nce_within(z, member, torch.arange(4), temperature=0.1, reduction=reduction, block=3), z
    )
    assert loss.item() == 0.0
    assert (gradient == 0).all()


def test_not_a_number_is_not_hidden():
    z, member, group = batch(0, share=1.0)
    z[3, 0] = float("nan")
    assert info_nce_within(z, member, group, temperature=0.1).isnan()


def test_gradient_is_the_derivative():
    z, member, group = batch(3, rows=9)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: info_nce_within(z, member, group, temperature=0.3, block=4), z)


def test_the_upstream_gradient_counts():
    z, member, group = batch(4)
    once = value_and_gradient(lambda z: info_nce_within(z, member, group, temperature=0.3), z)
    scaled = value_and_gradient(lambda z: -2.5 * info_nce_within(z, member, group, temperature=0.3), z)
    torch.testing.assert_close(scaled[1], -2.5 * once[1])


def test_a_second_derivative_is_refused():
    z, member, group = batch(5)
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(info_nce_within(z, member, group, temperature=0.3), z, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def peak_bytes(action, folder):
    """The most memory that `action` held at any moment, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def test_no_matrix_of_all_pairs_is_held(tmp_path):
    N = 4096
    z, member, group = batch(0, rows=N, dim=16, groups=50, dtype=torch.float32)
    peak = peak_bytes(
        lambda: value_and_gradient(lambda z: info_nce_within(z, member, group, temperature=0.1), z), tmp_path
    )
    two_blocks = 2 * rows_of_a_block(z) * N * 4
    assert two_blocks <= peak < two_blocks + 12 * N * 16 * 4
    assert peak < N * N * 4 / 8


def test_the_memory_test_would_see_the_plain_form(tmp_path):
    N = 512
    z, member, group = batch(0, rows=N, dim=16, dtype=torch.float32)
    plain = peak_bytes(
        lambda: value_and_gradient(lambda z: info_nce(z, masks_within(member, group), temperature=0.1), z), tmp_path
    )
    assert plain > 3 * N * N * 4


def test_operators_keep_torchs_contract():
    """Known shapes, nothing modified or aliased, a gradient that torch.compile can take apart."""
    z, member, group = batch(6)
    is_anchor = masks_within(member, group).positives.any(dim=1)
    torch.library.opcheck(blocked._uniformity, (z.clone().requires_grad_(), member, is_anchor, 0.3, 8, 0, 1))
    _, lse = blocked._uniformity(z, member, is_anchor, 0.3, 8, 0, 1)
    torch.library.opcheck(blocked._uniformity_gradient, (z, member, lse, 0.3, 8, 0, 1))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_in_one_piece(backend):
    z, member, group = batch(8)

    def loss_of(z):
        return 3 * info_nce_within(F.normalize(z, dim=1), member, group, temperature=0.2, block=16)

    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    assert_equal(value_and_gradient(loss_of, z), value_and_gradient(compiled, z), tolerance=1e-12)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(*tensors):
    return tuple(t.to("cuda") for t in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [128, 1000, None])
def test_a_gpu_gives_the_same(block):
    z, member, group = on_gpu(*batch(0, rows=1500, dim=128, groups=100, dtype=torch.float32))
    assert_equal(*both(z, member, group, temperature=0.1, block=block), tolerance=3e-6)


@pytest.mark.gpu
def test_a_gpu_can_record_it():
    """Recording refuses whatever makes the host wait; replaying computes with the numbers of now."""
    first, member, group = on_gpu(*batch(0, rows=700, dim=32, dtype=torch.float32))
    second, _, _ = on_gpu(*batch(1, rows=700, dim=32, dtype=torch.float32))
    z = first.clone().requires_grad_()

    def once():
        loss = info_nce_within(z, member, group, temperature=0.1, block=300)
        return loss.detach(), torch.autograd.grad(loss, z)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = once()
    with torch.no_grad():
        z.copy_(second)
    graph.replay()
    plain, _ = both(second, member, group, temperature=0.1)
    assert_equal(plain, recorded, tolerance=3e-6)


@pytest.mark.gpu
def test_a_gpu_needs_less_than_200_mb():
    z, member, group = on_gpu(*batch(0, rows=16384, dim=128, groups=100, dtype=torch.float32))

    def once():
        value_and_gradient(lambda z: info_nce_within(z, member, group, temperature=0.1), z)

    once()  # the matrix library takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    assert torch.cuda.max_memory_allocated() - before < 200e6
