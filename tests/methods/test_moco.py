"""MoCo v3 shares its tests with BYOL: `test_byol`."""

import torch

from opencon.methods import MoCo, MoCoConfig
from tests.methods.toys import TASK, Blobs, ExactEmbedder

BLOBS = Blobs(seen=0.7)  # k-means of features may join two classes


def test_one_point_for_all_images_costs_the_logarithm_of_their_number():
    method = MoCo(MoCoConfig(), TASK, ExactEmbedder())
    same = torch.ones(3, 8, 4).double() / 2
    torch.testing.assert_close(method.apart(same, same[:2]), torch.full((3, 2), 8.0).double().log())
