"""Counting classes, one row and one group at a time."""

import itertools


def squared(a, b):
    return float(((a - b) ** 2).sum())


def naive_inertia_of(rows):
    center = sum(rows) / len(rows)
    return sum(squared(row, center) for row in rows)


def naive_ward(rows):
    """Merges (kept, gone) of single rows: always the two groups whose union has the least additional inertia."""
    groups = {i: [row] for i, row in enumerate(rows)}
    merges = []
    while len(groups) > 1:
        cost = {
            (a, b): naive_inertia_of(groups[a] + groups[b]) - naive_inertia_of(groups[a]) - naive_inertia_of(groups[b])
            for a, b in itertools.combinations(sorted(groups), 2)
        }
        a, b = min(cost, key=lambda pair: (cost[pair], pair))
        groups[a] += groups.pop(b)
        merges.append((a, b))
    return merges


def naive_silhouette(rows, group):
    """Mean of (b - a) / max(a, b) over the rows, in squared distances."""
    total = 0.0
    for i, row in enumerate(rows):
        others = {g: [squared(row, r) for j, r in enumerate(rows) if group[j] == g and j != i] for g in set(group)}
        own = others.pop(group[i])
        if own and others:
            a, b = sum(own) / len(own), min(sum(d) / len(d) for d in others.values())
            total += (b - a) / max(a, b) if max(a, b) > 0 else 0.0
    return total / len(rows)


def naive_anchor_share(labels, group, num_groups, num_seen):
    """The largest share of labeled rows that any one-to-one naming gets right."""
    named = [(label, g) for label, g in zip(labels, group, strict=True) if label >= 0]
    places = list(range(max(num_groups, num_seen)))  # a class may go without a group
    best = max(sum(naming[label] == g for label, g in named) for naming in itertools.permutations(places, num_seen))
    return best / max(len(named), 1)
