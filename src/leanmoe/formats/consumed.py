"""The mark on a GGUF file that is being freed while it is packed: nobody takes it for a whole model any more.

It takes the place of the file's magic and version, eight bytes within one sector: `HOLE`, the version in a byte,
and three bytes that say which `lean pack --consume` is freeing it.
"""

MAGIC = b"GGUF"
HEAD_BYTES = 8
MAX_CONSUMER = (1 << 24) - 1
_MARK = b"HOLE"


def marked(head: bytes, consumer: int) -> bytes:
    """The first `HEAD_BYTES` of a GGUF file, `head`, marked as being freed by `consumer` (0 to `MAX_CONSUMER`)."""
    return _MARK + head[4:5] + consumer.to_bytes(3, "little")


def consumer_of(head: bytes) -> int | None:
    """Who is freeing the file that begins with `head`; None if it bears no mark."""
    return int.from_bytes(head[5:HEAD_BYTES], "little") if head[:4] == _MARK else None


def unmarked(head: bytes) -> bytes:
    """`head` (at least `HEAD_BYTES`) as it was before the file was marked."""
    return head if consumer_of(head) is None else MAGIC + head[4:5] + bytes(3) + head[HEAD_BYTES:]
