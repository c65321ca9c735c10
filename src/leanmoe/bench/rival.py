"""One run of llama.cpp (through `xllamacpp`) in this process: `python -m leanmoe.bench.rival MODEL [FLAGS]`.

The prompt comes on standard input; one JSON record goes to standard output. Ctrl-C ends the run at once, and the
record then has what was finished, timed by when each token came.
"""

import argparse
import json
import os
import sys
import threading
import time
from typing import Any

from leanmoe.engine.memory import peak_bytes


def _answer(server: Any, prompt: str, tokens: int) -> dict[str, Any]:
    """The record of one answer, or of as much of it as there was at Ctrl-C."""
    texts: list[str] = []
    times: list[float] = []
    last: list[Any] = []

    def heard(piece: Any) -> None:
        times.append(time.perf_counter())
        texts.append(piece["choices"][0].get("text", ""))
        last[:] = [piece]

    request = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }
    worker = threading.Thread(target=server.handle_completions, args=(request, heard), daemon=True)
    try:
        worker.start()
        while worker.is_alive():
            worker.join(0.1)
    except KeyboardInterrupt:
        # The first token comes with the prompt; of the others, those that came count.
        fed = max(0, len(times) - 1)
        rate = fed / (times[-1] - times[0]) if fed else None
        return {
            "text": "".join(texts),
            "finished": False,
            "decode_tokens": fed,
            "decode_tokens_per_second": rate,
        }
    timings = last[0]["timings"]
    fed = timings["predicted_n"] - 1  # the clock of these starts with the first, which came with the prompt
    return {
        "text": "".join(texts),
        "finished": True,
        "prompt_tokens": timings["prompt_n"],
        "decode_tokens": fed,
        "prompt_tokens_per_second": timings["prompt_per_second"],
        "decode_tokens_per_second": 1000 * fed / timings["predicted_ms"] if fed else None,
    }


def main() -> None:
    import xllamacpp  # type: ignore[import-untyped]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, required=True, help="to generate")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--load", choices=["mmap", "none"], default="mmap")
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--warm", action="store_true", help="with llama.cpp's own warm-up")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_ctx = options.context
    params.n_parallel = 1
    params.warmup = options.warm
    params.no_extra_bufts = options.no_repack
    modes = xllamacpp.llama_load_mode
    params.load_mode = next(m for m in modes if m.name.upper().endswith(options.load.upper()))
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    record = _answer(xllamacpp.Server(params), sys.stdin.read(), options.tokens)
    print("\n" + json.dumps(record | {"memory_peak": peak_bytes()}), flush=True)
    if not record["finished"]:
        os._exit(0)  # the computing thread would be waited for


if __name__ == "__main__":
    main()
