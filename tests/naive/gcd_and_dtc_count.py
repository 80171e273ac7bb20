"""DTC's and GCD's counts from their descriptions: every naming tried, every pair of rows measured."""

import itertools
import math


def naive_accuracy(group, truth):
    """The largest share of rows that any one-to-one naming of groups by classes gets right."""
    groups, classes = sorted(set(group)), sorted(set(truth))
    places = groups + [None] * max(0, len(classes) - len(groups))  # a class may go without a group
    best = 0
    for naming in itertools.permutations(places, len(classes)):
        where = dict(zip(classes, naming, strict=True))
        best = max(best, sum(where[t] == g for g, t in zip(group, truth, strict=True)))
    return best / len(truth)


def naive_silhouette(rows, group):
    """Mean of (b - a) / max(a, b) over the rows, in distances; 0 for a row that is alone in its group."""
    total = 0.0
    for i, row in enumerate(rows):
        away = {g: [math.dist(row, r) for j, r in enumerate(rows) if group[j] == g and j != i] for g in set(group)}
        own = away.pop(group[i])
        if own and away:
            a, b = sum(own) / len(own), min(sum(d) / len(d) for d in away.values())
            total += (b - a) / max(a, b)
    return total / len(rows)


def naive_dtc(x, labels, anchors, clusterings):
    """DTC's answer from a grouping of all rows for every k.

    x: rows; labels: class or -1; anchors: the classes that kept their labels; clusterings: {k: group of each row}, where
    the groups of anchor classes have the numbers below len(anchors).
    """
    probe = [i for i, label in enumerate(labels) if label >= 0 and label not in anchors]
    free = [i for i, label in enumerate(labels) if label < 0]
    accuracy, apart = {}, {}
    for k, group in clusterings.items():
        accuracy[k] = naive_accuracy([group[i] for i in probe], [labels[i] for i in probe])
        apart[k] = naive_silhouette([x[i] for i in free], [group[i] for i in free])
    k_a = max(k for k in accuracy if accuracy[k] >= max(accuracy.values()) - 1e-9)
    k_s = max(k for k in apart if apart[k] >= max(apart.values()) - 1e-9)
    halfway = math.ceil((k_a + k_s) / 2)
    group = clusterings[halfway]
    sizes = {g: sum(group[i] == g for i in free) for g in set(group)}
    large = {g for g, size in sizes.items() if size > 0.01 * max(sizes.values())}
    return k_a, k_s, halfway, large, {k: accuracy[k] + apart[k] for k in accuracy}
