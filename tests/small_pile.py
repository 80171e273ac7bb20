"""Scikit-learn's digits as files: a folder of classes and a pile, of which nobody says the classes unless asked."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SEEN = ("0", "1", "2", "3")
EVERY = 3  # of the images of a seen class, one in three is labeled
NUM_IMAGES = 400
# 8 pixels in color, one short epoch; the rest is the recipe's
SETTINGS = {
    "data.image_size": 8,
    "train.epochs": 1,
    "train.batch_size": 64,
    "train.compile": False,
    "split.num_classes": 10,
}


def make_pile(root):
    """root/labeled/CLASS/*.png and root/pile/CLASS/*.png; the sub-folders of the pile are the truth."""
    digits, count = load_digits(), {}
    for i in range(NUM_IMAGES):
        name = str(digits.target[i])
        count[name] = count.get(name, 0) + 1
        is_labeled = name in SEEN and count[name] % EVERY == 0
        folder = root / ("labeled" if is_labeled else "pile") / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(digits.images[i] * (255 / 16)).astype(np.uint8)).save(folder / f"{i:03}.png")
    return root
