"""One run of llama.cpp (through `xllamacpp`) in this process: `python -m leanmoe.bench.rival MODEL TOKENS CONTEXT`.

The prompt comes on standard input; one JSON record goes to standard output. The model is mapped, not loaded, as
llama.cpp does by default; its warm-up pass is off, since it would touch every expert once.
"""

import json
import os
import sys

from leanmoe.engine.memory import peak_bytes


def main() -> None:
    import xllamacpp  # type: ignore[import-untyped]

    model, tokens, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = context
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = xllamacpp.Server(params)
    request = {"prompt": sys.stdin.read(), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.handle_completions(request)
    timings = answer["timings"]
    record = {
        "text": answer["choices"][0]["text"],
        "prompt_tokens": timings["prompt_n"],
        "prompt_tokens_per_second": timings["prompt_per_second"],
        "decode_tokens_per_second": timings["predicted_per_second"],
        "memory_peak": peak_bytes(),
    }
    print("\n" + json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
