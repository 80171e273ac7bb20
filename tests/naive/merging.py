"""Merging groups that are halves of one class, pair by pair."""

import math

import torch

from opencon.cluster.merging import FARTHEST_HALVES, LEAST_BRIDGE, _apart, _halves


def bridge(a, b):
    """Rows half way between two means, as a share of the rows around the means; each set counts the same."""
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    gap = mean_a - mean_b
    half = math.sqrt(gap @ gap) / 2
    middle = (mean_a + mean_b) / 2

    def share(rows, center):
        return sum(abs((row - middle) @ gap / (2 * half) - center) < half / 3 for row in rows) / len(rows)

    return (share(a, 0) + share(b, 0)) / (share(a, half) + share(b, -half))


def merge_alike(z, assignment, num_seen):
    """The rounds of merging, with every pair of groups measured anew in every round."""
    members = [(assignment == c).nonzero()[:, 0] for c in range(int(assignment.max()) + 1)]
    halves = [_apart(*cut) for rows in members[:num_seen] if (cut := _halves(z[rows])) is not None]
    costs, bridges = torch.tensor(halves).T
    limit, least_bridge = float(costs.quantile(FARTHEST_HALVES)), LEAST_BRIDGE * float(bridges.median())
    while True:
        size = torch.tensor([float(len(rows)) for rows in members])
        mean = torch.stack([z[rows].sum(dim=0) for rows in members]) / size.clamp(min=1)[:, None]
        squared = torch.cdist(mean, mean).square()  # as there, for the order of pairs that cost the same
        found = []
        for a in range(len(members)):
            for b in range(max(a + 1, num_seen), len(members)):
                cost = float(squared[a, b] * (size[a] * size[b] / (size[a] + size[b]).clamp(min=1)))
                near = bool(size[a] > 0 and size[b] > 0) and cost <= limit
                if near and _apart(z[members[a]], z[members[b]])[1] >= least_bridge:
                    found.append((cost, a, b))
        partner = {}
        for _, a, b in sorted(found):
            if a not in partner and b not in partner:
                partner[a], partner[b] = b, a
        if not partner:
            break
        joined = [torch.cat([rows, members[partner[c]]]) if c in partner else rows for c, rows in enumerate(members)]
        members = [rows for c, rows in enumerate(joined) if partner.get(c, c) >= c]
    merged = torch.empty_like(assignment)
    for c, rows in enumerate(members):
        merged[rows] = c
    return merged
