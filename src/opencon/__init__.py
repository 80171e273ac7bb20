"""opencon: recognize the classes you named, discover the ones you did not.

    opencon.discover("photos/", out="runs/photos")                  photos to classes and groups
    opencon.OpenConModel.from_pretrained("runs/photos")             a discovery, or a trained run, on new photos
    opencon.name("runs/photos", {"new-1": "cat"}), count, export    its groups, their number, the model elsewhere
    opencon.OpenWorldClassifier().fit(X, y)                         the same on rows, as in scikit-learn
    opencon.train("digits", out="runs/a"), evaluate, compare        experiments
    opencon.configure, open_run, Callback, WandbLogger, ...         their settings, results, and what watches them
    opencon.open_world_accuracy(predicted, truth, ...)              the two protocols

Everything else is private: it may change with any version.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from opencon.version import __version__

if TYPE_CHECKING:
    from opencon.api import Run, compare, configure, count, discover, draw, evaluate, export, name, open_run, train
    from opencon.estimator import DiscoveryWarning, OpenWorldClassifier
    from opencon.experiments.callbacks import Callback, MLflowLogger, TensorBoardLogger, Training, WandbLogger
    from opencon.metrics import open_world_accuracy
    from opencon.photos.model import OpenConModel

# A thread of torch that waits for the others runs in circles for milliseconds. Beside another program on the same cores it
# keeps the very thread from running that it waits for, and a fit takes many times as long. Passive threads sleep. This is
# read when torch is loaded, so it must be said before; where torch is loaded already, `runtime.calm_threads` helps.
if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

__all__ = [
    "Callback",
    "DiscoveryWarning",
    "MLflowLogger",
    "OpenConModel",
    "OpenWorldClassifier",
    "Run",
    "TensorBoardLogger",
    "Training",
    "WandbLogger",
    "__version__",
    "compare",
    "configure",
    "count",
    "discover",
    "draw",
    "evaluate",
    "export",
    "name",
    "open_run",
    "open_world_accuracy",
    "train",
]

_HOMES = {
    "Callback": "opencon.experiments.callbacks",
    "DiscoveryWarning": "opencon.estimator",
    "MLflowLogger": "opencon.experiments.callbacks",
    "OpenConModel": "opencon.photos.model",
    "OpenWorldClassifier": "opencon.estimator",
    "Run": "opencon.api",
    "TensorBoardLogger": "opencon.experiments.callbacks",
    "Training": "opencon.experiments.callbacks",
    "WandbLogger": "opencon.experiments.callbacks",
    "compare": "opencon.api",
    "configure": "opencon.api",
    "count": "opencon.api",
    "discover": "opencon.api",
    "draw": "opencon.api",
    "evaluate": "opencon.api",
    "export": "opencon.api",
    "name": "opencon.api",
    "open_run": "opencon.api",
    "open_world_accuracy": "opencon.metrics",
    "train": "opencon.api",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch and scikit-learn on first use: `opencon --version` should not wait for them."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
