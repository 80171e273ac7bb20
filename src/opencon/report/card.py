"""The model card: a README that says what a saved model is, how it was made, what it is for, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_ROWS = 200  # classes and groups listed one by one, ours: a page that can still be read


@dataclass(frozen=True, kw_only=True)
class CardData:
    """The content of a model card."""

    title: str
    class_names: tuple[str, ...]  # the seen classes, then the new groups
    num_seen: int
    sizes: tuple[int, ...]  # training photos of each
    encoder: str
    image_size: int  # pixels
    outlier_threshold: float
    version: str  # of opencon
    facts: Mapping[str, str]  # further lines of the table of how it was made


def model_card(data: CardData) -> str:
    """The card as Markdown; bytes of a name that are no text are shown as "?"."""
    rows = [
        (name, "seen" if c < data.num_seen else "new", size)
        for c, (name, size) in enumerate(zip(data.class_names, data.sizes, strict=True))
        if c < data.num_seen or size  # a run may have been told to look for more groups than there are
    ]
    num_new = len(rows) - data.num_seen
    listed = [f"| {_cell(name)} | {kind} | {size} |" for name, kind, size in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        listed.append(f"| ... and {len(rows) - MOST_ROWS} more, see model.json | | |")
    made = {
        "encoder": f"{data.encoder} at {data.image_size} px",
        "head": "a small network on the encoder's features, one prototype for each class and group",
        "made with": f"opencon {data.version}",
    }
    facts = [f"| {_cell(what)} | {_cell(how)} |" for what, how in (made | dict(data.facts)).items()]
    text = CARD.format(
        title=" ".join(data.title.split()),
        num_seen=data.num_seen,
        seen_noun="class" if data.num_seen == 1 else "classes",
        num_new=num_new,
        new_noun="group" if num_new == 1 else "groups",
        photos=f"{sum(data.sizes):,}",
        size=data.image_size,
        draft=data.image_size * 5 // 4,
        outlier=f"{data.outlier_threshold:.4g}",
        classes="\n".join(listed),
        facts="\n".join(facts),
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def _cell(text: str) -> str:
    """Text that stays within its cell and is shown literally."""
    plain = " ".join(text.split())
    for sign in "\\|`*_<>[]":
        plain = plain.replace(sign, f"\\{sign}")
    return plain


CARD = """\
---
library_name: opencon
pipeline_tag: image-classification
tags: [open-world, category-discovery, image-classification]
---

# {title}

This model sorts photos. It recognizes {num_seen} seen {seen_noun} that were named with examples, and {num_new} new \
{new_noun} that were discovered among photos without labels. A photo may be unlike all of them.

## Classes and groups

{photos} training photos belong to one of these: they carried the label, or the model put them there.

| name | kind | photos |
|---|---|---|
{classes}

## How it was made

| | |
|---|---|
{facts}

opencon is built around OpenCon (Sun and Li, "OpenCon: Open-world Contrastive Learning", TMLR 2023).

## Use

```python
from opencon import OpenConModel

model = OpenConModel.from_pretrained(".")  # this folder
for photo in model.predict(["photo.jpg"]):  # photos, or folders of them
    print(photo.file, photo.predicted, photo.kind, photo.confidence, photo.unlike_everything, photo.nearest)
```

Or without opencon and PyTorch, from the graph that `opencon export` writes:

```python
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("model.onnx")
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
photo = Image.open("photo.jpg")
photo.draft(None, ({draft}, {draft}))  # a large JPEG is decoded smaller, as opencon does
photo = ImageOps.exif_transpose(photo).convert("RGBA")  # upright, and on white where it is transparent
photo = Image.alpha_composite(Image.new("RGBA", photo.size, "white"), photo).convert("RGB")
square = ImageOps.fit(photo, ({size}, {size}), Image.Resampling.BICUBIC)  # the central square
images = np.asarray(square, dtype=np.float32).transpose(2, 0, 1)[None] / 255  # (1, 3, {size}, {size}) in [0, 1]
wanted = ["probabilities", "confidence", "unlike_everything"]
p, confidence, unlike_everything = session.run(wanted, {{"images": images}})
print("none of these" if unlike_everything[0] else names[int(p[0].argmax())], round(float(confidence[0]), 3))
```

- `confidence` says how often such a choice is right: nine of ten where it is 0.9, in the mean over piles of many kinds.
- `novelty` is larger the less a photo is like the seen classes; above 0 it is more likely something else than seen.
- `oddness` is the distance to the nearest training photos, beside what is usual there. A photo is unlike everything where
  it is above {outlier}; one in twenty photos of the classes and groups is, too.

The graph and `predict` see the same pixels and say the same.

## Intended use

Sorting photos like those it was made from: the same sort of subject, camera and framing. Look at the new groups before
relying on them: the photos suggest them, and no person has checked them. Their names are numbers unless somebody renamed
them.

## Limits

- It knows only the classes and groups above. Other subjects should be unlike everything, but some are taken for a class.
- Confidence holds in the mean over many piles. In this one it may be too high or too low, and more so on other photos.
- It sees only the central square of a photo, at {size} x {size} pixels. It misses small things and things at the edge.
- The groups inherit the biases of the encoder's training images.
- It must not be used to make decisions about people.
"""
