"""The network: one decoder assembled from a `ModelSpec`. Knows nothing of where an expert's bytes come from.

`spec`, `registry` and `architectures` read headers only and do without torch; `decoder` is the network.
"""
