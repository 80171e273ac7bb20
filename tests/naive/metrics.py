"""Slow, obvious metrics: every naming tried, every pair compared, every threshold walked."""

from itertools import permutations


def best_naming_accuracy(predicted, truth):
    """Try every one-to-one naming of groups by classes; blanks stand for 'no name'."""
    groups, classes = sorted(set(predicted)), sorted(set(truth))
    names = classes + [None] * max(0, len(groups) - len(classes))
    best = 0
    for naming in permutations(names, len(groups)):
        name_of = dict(zip(groups, naming, strict=True))
        best = max(best, sum(name_of[p] == t for p, t in zip(predicted, truth, strict=True)))
    return best / len(truth)


def auroc(novelty, is_novel):
    """Share of (novel, seen) pairs in the right order; a tie counts half."""
    novel = [s for s, n in zip(novelty, is_novel, strict=True) if n]
    seen = [s for s, n in zip(novelty, is_novel, strict=True) if not n]
    points = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in novel for b in seen)
    return points / (len(novel) * len(seen))


def aupr(novelty, is_novel):
    """Sum over thresholds, from high to low, of precision times the recall gained."""
    num_novel = sum(bool(n) for n in is_novel)
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(novelty), reverse=True):
        called = [bool(n) for s, n in zip(novelty, is_novel, strict=True) if s >= threshold]
        recall = sum(called) / num_novel
        total += (recall - recall_before) * sum(called) / len(called)
        recall_before = recall
    return total


def fpr95(novelty, is_novel):
    """Raise the bar for being taken as seen while at least 95 % of the seen pass it; count the novel that pass too."""
    novel = [-s for s, n in zip(novelty, is_novel, strict=True) if n]
    seen = [-s for s, n in zip(novelty, is_novel, strict=True) if not n]
    bar = None
    for candidate in sorted(set(seen)):
        if 100 * sum(s >= candidate for s in seen) >= 95 * len(seen):
            bar = candidate
    return sum(s >= bar for s in novel) / len(novel)


def knn_accuracy(z, truth, k, queries):
    """For each query sort all other rows by similarity and let the first k vote."""
    right = 0
    for q in queries:
        others = sorted((j for j in range(len(z)) if j != q), key=lambda j: -float(z[q] @ z[j]))[:k]
        votes = {}
        for j in others:
            votes[int(truth[j])] = votes.get(int(truth[j]), 0) + 1
        most = max(votes.values())
        winner = next(int(truth[j]) for j in others if votes[int(truth[j])] == most)
        right += winner == int(truth[q])
    return right / len(queries)
