"""The settings of a run.

    `sections.RunConfig`     all of them: frozen dataclasses that check themselves
    `plain.from_dict`        from plain data, such as a TOML file; `to_dict` is the way back
    `plain.with_settings`    changed by --set a.b=c

A run is described once, by a `RunConfig`, and never changed afterwards.
"""

from opencon.config.plain import (
    differences,
    from_dict,
    to_dict,
    with_defaults,
    with_settings,
)
from opencon.config.sections import (
    AugmentConfig,
    DataConfig,
    EncoderConfig,
    EvalConfig,
    EvaluationSet,
    FrozenNorm,
    GroupConfig,
    MethodConfig,
    Precision,
    Protocol,
    RunConfig,
    SplitConfig,
    TrainConfig,
    ViewConfig,
    Views,
)

__all__ = [
    "AugmentConfig",
    "DataConfig",
    "EncoderConfig",
    "EvalConfig",
    "EvaluationSet",
    "FrozenNorm",
    "GroupConfig",
    "MethodConfig",
    "Precision",
    "Protocol",
    "RunConfig",
    "SplitConfig",
    "TrainConfig",
    "ViewConfig",
    "Views",
    "differences",
    "from_dict",
    "to_dict",
    "with_defaults",
    "with_settings",
]
