"""Tiny photos in four colors, a tiny encoder with random weights, and a model of them: two seen classes, two new groups."""

import numpy as np
import torch
from PIL import Image

from opencon.encoders.convnet import ConvNet
from opencon.encoders.pretrained import open_encoder
from opencon.encoders.stored import EncoderFacts
from opencon.openworld.fit import OpenWorldConfig, fit_features
from opencon.photos.features import Extractor, FeatureSettings, photo_features
from opencon.photos.model import OpenConModel
from opencon.training.run_folder import RunFolder

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 210), "gray": (128, 128, 128)}
PER_COLOR = 12
NUM_LABELED = 5  # of each of the first two
NAMES = ("red", "green", "new-1", "new-2")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
CPU = torch.device("cpu")


def make_photos(folder, side=12):
    """PER_COLOR photos of each color, each with light and shade of its own; the paths in order of the colors.

    Without, they would be twins of each other, and show nothing but noise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    paths = []
    for name, color in COLORS.items():
        for i in range(PER_COLOR):
            shade = Image.fromarray(rng.uniform(0.6, 1.0, (4, 4)).astype(np.float32)).resize((side, side))
            lit = np.array(color) * np.asarray(shade)[..., None]
            pixels = np.clip(lit + rng.normal(0, 4, (side, side, 3)), 0, 255).astype(np.uint8)
            paths.append(folder / f"{name}{i}.png")
            Image.fromarray(pixels).save(paths[-1])
    return paths


def make_run(folder, *, seed=0, channels=3):
    """A folder such as a finished training leaves: a convnet whose batch norms have seen something."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ConvNet(channels, 8)
        for _ in range(20):
            net(torch.randn(16, channels, 8, 8) + torch.randn(16, channels, 1, 1))
    run = RunFolder(folder)
    run.save_tensors("encoder.safetensors", net.state_dict(), {"encoder": "convnet"})
    mean, std = (MEAN, STD) if channels == 3 else (MEAN[:1], STD[:1])
    run.write_json("config.json", {"encoder": {"mean": list(mean), "std": list(std)}})
    return folder


def given_labels():
    labels = torch.full((len(COLORS) * PER_COLOR,), -1)
    for c in range(2):
        labels[c * PER_COLOR : c * PER_COLOR + NUM_LABELED] = c
    return labels


def fit(paths, features):
    extractor = Extractor(open_encoder(features.encoder, features.image_size), features, CPU)
    rows = photo_features(paths, extractor, cache=None).plain
    return fit_features(rows, given_labels(), OpenWorldConfig(num_novel=2, steps=4))


def make_model(paths, encoder, *, names=NAMES, image_size=None):
    features = FeatureSettings(encoder=str(encoder), image_size=image_size, num_views=0)
    fitted = fit(paths, features)
    names = names[: fitted.model.num_classes]  # in gray, say, colors may look alike
    facts = EncoderFacts.of(open_encoder(features.encoder, features.image_size))
    return OpenConModel.of(fitted, names, features, facts, [path.name for path in paths], given_labels())
