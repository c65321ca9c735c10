"""The errors that lean raises on purpose. All of them name the file or flag, what was found and what was wanted.

`cli` turns a `LeanError` into one message on stderr and exit code 1 (2 for `UsageError`), without a traceback.
"""


class LeanError(Exception):
    """Base of every error that a user can cause or meet. Its text is the message shown to the user."""


class UsageError(LeanError):
    """A flag, an argument or a request that cannot be honoured as given."""


class FormatError(LeanError):
    """A file (GGUF, manifest, digest list) is malformed: truncated, out of bounds or inconsistent."""


class UnsupportedError(LeanError):
    """A well-formed file asks for something lean does not do (architecture, type, format version)."""


class BudgetError(LeanError):
    """Memory or disk budget is too small; the message names the smallest that would do."""


class ExpertReadError(LeanError):
    """An expert file is missing, short, or not what its digest says."""
