"""opencon: recognize the classes you named, discover the ones you did not."""

from opencon.version import __version__

__all__ = ["__version__"]
