"""What to look at next: groups that may be one, parts of a group, photos alike. It only reads.

Letters: n photos, D embedding size, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opencon.review.run import JUNK
from opencon.review.state import Photos, State

Rows = NDArray[np.float32]
MOST_PAIRS = 40  # pairs to ask about, ours: the list is made anew after each answer
LEAST_LIKE = 0.2  # ours: cosine of two groups' means below which nobody would ask; unrelated groups are around 0
LEAF = 3  # photos that need no order, ours
ROUNDS = 20  # of moving the centers of parts, ours: they settle in ten


@dataclass(frozen=True)
class Pair:
    """Two groups that may be one."""

    a: int
    b: int
    likeness: float  # cosine of their means
    border_a: list[int]  # photos of a that are most like b
    border_b: list[int]


def means(state: State) -> tuple[list[int], Rows]:
    """The groups that hold a photo, and the direction of each (G, D)."""
    order = np.argsort(state.place, kind="stable")
    place = state.place[order]
    groups, starts = np.unique(place, return_index=True)
    z = np.asarray(state.run.z)
    ends = [*starts[1:], len(place)]
    rows = [
        (int(g), z[order[start:end]].sum(axis=0))
        for g, start, end in zip(groups.tolist(), starts.tolist(), ends, strict=True)
        if g >= 0
    ]
    found = np.array([row for _, row in rows], dtype=np.float32).reshape(len(rows), z.shape[1])
    return [g for g, _ in rows], found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def likely_merges(state: State, border: int) -> list[Pair]:
    """Pairs of groups that look alike and that nobody has told apart, the likeliest first.

    Args:
        state: the groups now.
        border: how many photos of each to show.
    """
    groups, mean = means(state)
    like = mean @ mean.T
    rows, columns = np.triu_indices(len(groups), k=1)
    order = np.argsort(-like[rows, columns], kind="stable")
    pairs: list[Pair] = []
    for at in order.tolist():
        i, j = int(rows[at]), int(columns[at])
        a, b = sorted((groups[i], groups[j]))
        if like[i, j] < LEAST_LIKE or len(pairs) == MOST_PAIRS:
            break
        if (a, b) in state.apart or (state.groups[a].kind == state.groups[b].kind == "seen"):
            continue
        ends = [
            _nearest(state, state.members(own), mean[groups.index(other)], border) for own, other in ((a, b), (b, a))
        ]
        pairs.append(Pair(a, b, float(like[i, j]), *ends))
    return pairs


def _nearest(state: State, photos: Photos, direction: Rows, most: int) -> list[int]:
    near = np.asarray(state.run.z[photos]) @ direction
    return [int(i) for i in photos[np.argsort(-near, kind="stable")[:most]]]


def parts_of(state: State, group: int, parts: int) -> list[list[int]]:
    """A group as some parts, the largest first: k-means from cuts across the longest axis of the widest part.

    Fewer parts come back where photos coincide.
    """
    photos = state.members(group)
    z = np.asarray(state.run.z[photos], dtype=np.float32)
    part = np.zeros(len(photos), dtype=np.int64)
    for new in range(1, min(parts, len(photos))):
        spread = [float(((z[part == p] - z[part == p].mean(axis=0)) ** 2).sum()) for p in range(new)]
        widest = int(np.argmax(spread))
        inside = np.flatnonzero(part == widest)
        centered = z[inside] - z[inside].mean(axis=0)
        axis = np.linalg.eigh((centered.T @ centered).astype(np.float64))[1][:, -1]
        far = centered @ axis.astype(np.float32) > 0
        if not far.any() or far.all():
            break
        part[inside[far]] = new
        part = _settled(z, part)
    found = [photos[part == p] for p in np.unique(part)]
    return [[int(i) for i in own] for own in sorted(found, key=len, reverse=True)]


def alike(state: State, group: int) -> list[int]:
    """The photos of a group in an order in which similar ones stand together: halves of halves, cut at the widest gap."""
    return [int(i) for i in _in_line(np.asarray(state.run.z), state.members(group))]


def _in_line(z: Rows, photos: Photos) -> Photos:
    if len(photos) <= LEAF:
        return photos
    centered = z[photos] - z[photos].mean(axis=0)
    axis = np.linalg.eigh((centered.T @ centered).astype(np.float64))[1][:, -1]
    along = centered @ axis.astype(np.float32)
    order = np.argsort(along, kind="stable")
    edge = len(photos) // 4  # neither side is smaller than a quarter
    gaps = np.diff(along[order])[edge : len(photos) - edge - 1]
    cut = edge + 1 + (int(np.argmax(gaps)) if len(gaps) else 0)
    photos = photos[order]
    return np.concatenate([_in_line(z, photos[:cut]), _in_line(z, photos[cut:])])


def _settled(z: Rows, part: NDArray[np.int64]) -> NDArray[np.int64]:
    """Parts after a few rounds of k-means; a part never becomes empty."""
    number = int(part.max()) + 1
    for _ in range(ROUNDS):
        centers = np.stack([z[part == p].mean(axis=0) for p in range(number)])
        after = np.argmin((centers**2).sum(axis=1) - 2 * z @ centers.T, axis=1)
        if (after == part).all() or len(np.unique(after)) < number:
            break
        part = after
    return part


def similar(state: State, photo: int, most: int, among: Photos | None = None) -> list[int]:
    """The photos most like this one, the nearest first, without itself."""
    photos = np.arange(len(state.place)) if among is None else among
    photos = photos[photos != photo]
    near = np.asarray(state.run.z[photos] if among is not None else state.run.z)
    like = near @ np.asarray(state.run.z[photo])
    like = np.delete(like, photo) if among is None else like
    best = np.argpartition(-like, most)[:most] if most < len(like) else np.arange(len(like))
    return [int(i) for i in photos[best[np.argsort(-like[best], kind="stable")]]]


def more_for(state: State, group: int, most: int) -> list[int]:
    """Photos elsewhere that nobody has looked at and that might belong here, the likeliest first.

    They are ordered by how much more like this group than like their own they are.
    """
    groups, mean = means(state)
    if group not in groups:
        return []
    photos = np.flatnonzero((state.place != group) & (state.place != JUNK) & ~state.looked)
    z = np.asarray(state.run.z[photos])
    turn = np.searchsorted(groups, state.place[photos])  # `groups` is sorted; strangers belong to none
    own = np.einsum("ij,ij->i", z, mean[turn]) * (state.place[photos] >= 0)
    lead = z @ mean[groups.index(group)] - own
    return [int(i) for i in photos[np.argsort(-lead, kind="stable")[:most]]]


def about(state: State, photo: int, most: int) -> dict[str, Any]:
    """Why a photo is where it is: the photos most like it, and the most similar ones that a person has placed."""
    judged = np.flatnonzero(state.looked & (state.place != JUNK))
    return {
        "photo": photo,
        "similar": similar(state, photo, most),
        "examples": similar(state, photo, most, judged) if len(judged) else [],
        "twins": [int(i) for i in _twins(state, photo)],
    }


def _twins(state: State, photo: int) -> Photos:
    twin_of = state.run.twin_of
    first = int(twin_of[photo]) if twin_of[photo] >= 0 else photo
    same: Photos = np.flatnonzero((twin_of == first) | (np.arange(len(twin_of)) == first))
    others: Photos = same[same != photo]
    return others
