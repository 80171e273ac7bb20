"""On a GPU: every method's recorded step equals the plain one."""

import pytest
import torch

from opencon.config import with_settings
from opencon.experiments.recipes import get_recipe
from opencon.experiments.workbench import build_loader, prepare
from opencon.methods import METHODS
from opencon.training.optimizer import build_optimizer
from opencon.training.trainer import fit

pytestmark = pytest.mark.gpu
AT_ONCE = {"concord": ["method.contrast_epochs=0"]}  # every part of a loss is on in the first epoch
CUDA = torch.device("cuda")


def two_epochs(name, *settings):
    """Mean loss of each of two epochs, and how far all weights have moved.

    At so small a rate rounding does not grow: with weights perturbed by 3e-5 the losses differ by 5e-5 and the moves by
    6e-3 at most. At their own rates some methods, ranks of features above all, amplify it a thousandfold.
    """
    config = with_settings(
        get_recipe(f"{name}/digits"), ["train.epochs=2", "train.lr=0.001", *AT_ONCE.get(name, []), *settings]
    )
    bench = prepare(config, CUDA)
    learning = [p for p in bench.method.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in learning]
    means = []
    fit(
        bench.method,
        build_optimizer(bench.method, config.train),
        build_loader(bench),
        config.train,
        features=bench.bank,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        on_epoch=lambda epoch, m: means.append(m["loss"]),
    )
    return means, torch.cat([(p.detach() - s).flatten() for p, s in zip(learning, start, strict=True)])


@pytest.mark.parametrize("name", [name for name in METHODS.names() if METHODS[name].config.trains])
def test_a_recorded_step_equals_the_plain_one(name):
    plain, plain_move = two_epochs(name, "train.capture=false", "train.kernels=false")
    recorded, recorded_move = two_epochs(name)
    assert recorded == pytest.approx(plain, rel=1e-3)
    assert (recorded_move - plain_move).norm() < 0.05 * plain_move.norm()
