"""Names suggested for new groups: what ImageNet's classifier takes their photos for. A guess, and always marked as one.

The encoder that photos are looked at with was trained for that classifier, so the guess costs one multiplication. It knows
1,000 things, among them 120 breeds of dogs and few flowers; a group of anything else looks like the nearest of these.

Letters: n photos, F features, C classes and groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from opencon.encoders.imagenet import imagenet_classes, imagenet_mean

KNOWS = "efficientnet_lite0"  # the encoder, as it is installed, whose features the classifier was trained on
LEAST = 0.1  # ours: below this mean probability, the likeliest of a thousand things says nothing


@dataclass(frozen=True)
class Guess:
    """What a group looks like."""

    name: str
    share: float  # mean probability over its photos

    def __str__(self) -> str:
        return f"{self.name}, {self.share:.0%}"


def guess_names(x: Tensor | None, classes: Tensor, num_seen: int, num_classes: int) -> tuple[Guess | None, ...]:
    """A guess for each of C classes and groups; None for a seen class, and where nothing is likely.

    Args:
        x: (n, F) features of `KNOWS`; None: another encoder was used, and there is no guess.
        classes: (n,) class or group of each photo, -1 for those that belong to none.
        num_seen: how many of them have a name already.
        num_classes: C.
    """
    guesses: list[Guess | None] = [None] * num_classes
    if x is None:
        return tuple(guesses)
    for c in range(num_seen, num_classes):
        members = x[classes == c]
        if len(members):
            share, which = imagenet_mean(members).max(dim=0)
            if float(share) >= LEAST:
                guesses[c] = Guess(imagenet_classes()[int(which)], float(share))
    return tuple(guesses)


def without_twice(guesses: tuple[Guess | None, ...], taken: set[str]) -> list[str | None]:
    """A name for each group from its guess, marked by a question mark; the second of a name gets a number."""
    names: list[str | None] = []
    for guess in guesses:
        if guess is None:
            names.append(None)
            continue
        name, number = f"{guess.name}?", 2
        while name in taken:
            name, number = f"{guess.name} {number}?", number + 1
        taken = taken | {name}
        names.append(name)
    return names
