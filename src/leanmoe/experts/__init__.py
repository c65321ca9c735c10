"""The heart: where experts live. Files on disk (`store`), slots on a device (`slots`), the cache in between (`cache`).

`slots`, `policy`, `stats` and `store` do without torch; `pool` is what the network gets its experts from.
"""
