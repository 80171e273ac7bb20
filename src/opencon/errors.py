"""Errors that the user can fix. The command line prints these without a traceback and exits with code 2.

A message says what is wrong, the value, what is allowed, and what to do. Mistakes of the programmer are
plain `assert` or built-in exceptions.
"""


class OpenConError(Exception):
    """Something the user can put right."""


class ConfigError(OpenConError):
    """A setting is unknown, out of range, or does not fit the others."""


class DataError(OpenConError):
    """Images, labels or archives are missing, unreadable or contradict each other."""


class RunError(OpenConError):
    """A run folder cannot be written, read or resumed."""


class MissingPluginError(RunError):
    """A run needs a file or a package of somebody's own that is not at hand."""


class DivergedError(OpenConError):
    """Training produced a loss that is not a finite number."""


class MissingExtraError(OpenConError):
    """An optional package is not installed; the message names the pip command."""

    def __init__(self, package: str, extra: str, why: str, cause: BaseException | None = None) -> None:
        reason = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
        super().__init__(
            f"{why} needs {package}, which cannot be imported{reason}. Run: pip install 'opencon[{extra}]'"
        )


LARGEST_SEED = 2**63 - 1  # beyond it, different seeds would draw the same random numbers


def require_seed(seed: int, name: str) -> None:
    """Raise `ConfigError` unless the seed is one that draws random numbers of its own."""
    require(0 <= seed <= LARGEST_SEED, f"{name} = {shown(seed)} must be a whole number from 0 to 2^63 - 1.")


def shown(value: object, most: int = 80) -> str:
    """A value for a message, which may have any length."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits, which Python does not print
        text = f"a number of about {value.bit_length() * 3 // 10:,} digits" if isinstance(value, int) else "?"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)
