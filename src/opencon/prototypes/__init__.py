"""One unit vector per class: how near an image is to the seen ones, and how they move.

`seen_score`, `novelty_threshold`   does an image count as novel?
`ema_update`                        the moving average on the sphere; on a GPU by `kernel`
`random_prototypes`                 where they start
"""

from opencon.prototypes.formulas import (
    LOGIT_SCALE,
    SeenScore,
    ema_update,
    novelty_threshold,
    random_prototypes,
    seen_score,
)

__all__ = ["LOGIT_SCALE", "SeenScore", "ema_update", "novelty_threshold", "random_prototypes", "seen_score"]
