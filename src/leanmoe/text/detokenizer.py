"""Text from token ids, one at a time, never half a character."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Collects the bytes of tokens and hands out whole characters as soon as they are complete.

    Bytes that can never become UTF-8 come out as U+FFFD, as in `bytes.decode(errors="replace")`, so that all
    that `push` and `flush` return together is the text of all the bytes.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_space: bool = False) -> None:
        """`token_bytes` gives a token's bytes; `strip_space` drops one space at the start of the first."""
        self._token_bytes = token_bytes
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Adds one token; returns the characters that are now complete, which may be none."""
        data = self._token_bytes(token)
        if self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the text: returns U+FFFD for a character that was begun and never completed, or nothing."""
        return self._decoder.decode(b"", final=True)
