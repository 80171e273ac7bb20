"""One OpenCon step from the definitions, in Python loops over float64 rows."""

from __future__ import annotations

import numpy as np

from tests.naive.losses import naive_contrast, naive_kl
from tests.naive.prototypes import naive_ema, naive_seen_score


def naive_step(views, labels, prototypes, config, task, *, novel_weight, epoch_threshold):
    """Returns the total loss, its terms, and the prototypes after the update.

    views: V arrays (B, D) of unit rows; labels: (B,), -1 for unlabeled.
    """
    c, S, V, B = config, task.num_seen, len(views), len(labels)
    is_labeled = [y >= 0 for y in labels]

    def decide(v):  # score and nearest prototype of every image, as view v sees it
        cosine = views[v] @ prototypes.T
        return naive_seen_score(cosine, S, c.seen_score), cosine.argmax(axis=1)

    decided = [decide(0 if c.decide_on == "first_view" else v) for v in range(V)]
    if c.threshold_from == "batch":
        deciders = decided[:1] if c.decide_on == "first_view" else decided
        pool = [score[i] for score, _ in deciders for i in range(B) if is_labeled[i]]
        threshold = np.percentile(pool, 100 - c.percentile)
    else:
        threshold = epoch_threshold

    rows, label, is_novel, image, labeled_row = [], [], [], [], []
    for v in range(V):
        score, nearest = decided[v]
        for i in range(B):
            rows.append(views[v][i])
            label.append(labels[i] if is_labeled[i] else nearest[i])
            is_novel.append(not is_labeled[i] and score[i] < threshold)
            image.append(i)
            labeled_row.append(is_labeled[i])

    loss_n = naive_contrast(rows, is_novel, label, c.temperature_novel, c.novel_reduction)
    if c.labeled_loss == "known":
        member = [lab or not nov for lab, nov in zip(labeled_row, is_novel, strict=True)]
    else:
        member = labeled_row
    loss_l = naive_contrast(rows, member, label, c.temperature_labeled)
    loss_u = naive_contrast(rows, [not x for x in labeled_row], image, c.temperature_unlabeled)

    if isinstance(c.prior, tuple):
        shares = list(c.prior)
    else:
        kept = 1 - task.labeled_ratio if c.prior == "unlabeled" else 1.0
        shares = [kept] * S + [1.0] * (task.num_classes - S)
    prior = [s / sum(shares) for s in shares]
    counted = [views[0][i] for i in range(B) if c.prior_over == "batch" or not is_labeled[i]]
    loss_prior = naive_kl(10 * np.array(counted) @ prototypes.T, prior)

    moving_rows, moving_labels = [], []
    for v in range(V if c.update_views == "all" else 1):
        cosine = views[v] @ prototypes.T
        for i in range(B):
            target = -1
            if is_labeled[i]:
                target = labels[i]
            elif c.prototype_members == "novel_argmax":
                target = int(cosine[i].argmax()) if cosine[i].argmax() >= S else -1
            elif is_novel[v * B + i]:
                target = S + int(cosine[i, S:].argmax())
            moving_rows.append(views[v][i])
            moving_labels.append(target)
    moved = naive_ema(prototypes, np.array(moving_rows), moving_labels, c.momentum)

    total = (
        novel_weight * loss_n + c.weight_labeled * loss_l + c.weight_unlabeled * loss_u + c.weight_prior * loss_prior
    )
    return total, {"loss_n": loss_n, "loss_l": loss_l, "loss_u": loss_u, "loss_prior": loss_prior}, moved
