"""opencon: recognize the classes you named, discover the ones you did not."""

from typing import TYPE_CHECKING, Any

from opencon.version import __version__

if TYPE_CHECKING:
    from opencon.estimator import OpenWorldClassifier

__all__ = ["OpenWorldClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what needs torch and scikit-learn on first use: `opencon --version` should not wait for them."""
    if name == "OpenWorldClassifier":
        from opencon.estimator import OpenWorldClassifier

        return OpenWorldClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
