"""Builds the demo model: a Mixture-of-Experts GGUF of 2 to 3 GB that speaks, from one package of 93 MB.

*Sparse upcycling* of SmolLM2-135M-Instruct (dense, Apache-2.0): every layer's FFN becomes E experts, each a copy
quantised to Q8_0 with a rounding noise of its own, so that no two are alike and each is as good as any other. The
routers are fitted to real text, so that routing depends on what is read. The answers are those of the dense
model; what the demo shows is the machinery that reads, caches and computes experts.

    python demo/build_model.py --out models/demo.gguf --experts 32
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch

from routing import TOP_K, RoutingStats, fit_router, routing_stats
from smollm2 import DemoError, DenseModel, default_cache, fetch, ffn_inputs

HERE = Path(__file__).resolve().parent
DEFAULT_OUT = HERE.parent / "models" / "demo.gguf"
WINDOW = 512
CALIBRATION_TOKENS = 10_240
Q8_0_BLOCK, Q8_0_BLOCK_BYTES = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0]
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_NOT_COPIED = ("general.architecture", "general.name", "general.size_label", "general.file_type")

U8Array = npt.NDArray[np.uint8]


def calibration_tokens(model: DenseModel) -> torch.Tensor:
    """Token ids `[windows, WINDOW]`: conversations (`calibration.txt`) and Python's own language reference."""
    from pydoc_data import topics

    tokenizer = model.tokenizer()
    chat = tokenizer.encode((HERE / "calibration.txt").read_text(encoding="utf-8")).ids
    reference = tokenizer.encode("\n\n".join(topics.topics[name] for name in sorted(topics.topics)[:40])).ids
    ids = (chat + reference)[:CALIBRATION_TOKENS]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def fit_routers(model: DenseModel, experts: int) -> tuple[list[torch.Tensor], list[RoutingStats]]:
    """One router and its statistics per layer, fitted on the even windows and judged on the odd ones."""
    tokens = calibration_tokens(model)
    routers, stats = [], []
    for index, states in enumerate(ffn_inputs(model, tokens)):
        by_window = states.view(*tokens.shape, -1)
        fitted, held_out = by_window[0::2], by_window[1::2]
        routers.append(fit_router(fitted.flatten(0, 1), len(fitted), experts, seed=index))
        stats.append(routing_stats(routers[-1], held_out.flatten(0, 1), len(held_out)))
    return routers, stats


def dithered_copies(weight: torch.Tensor, copies: int, seed: int) -> Iterator[U8Array]:
    """`copies` Q8_0 versions `[rows, row bytes]` of `weight`, each rounded up or down at random in proportion.

    The rounding is unbiased: the mean of many copies tends to the weight itself.
    """
    rows = len(weight)
    blocks = weight.view(-1, Q8_0_BLOCK)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / 127).half()
    steps = (blocks / scale.float().clamp_min(1e-12)).clamp_(-127, 127).numpy()
    out = np.empty((len(blocks), Q8_0_BLOCK_BYTES), dtype=np.uint8)
    out[:, :2] = scale.numpy().view(np.uint8)
    generator = np.random.default_rng(seed)
    shifted = np.empty_like(steps)
    for _ in range(copies):
        noise = np.frombuffer(generator.bytes(steps.size), dtype=np.uint8).reshape(steps.shape)
        np.multiply(noise, np.float32(1 / 256), out=shifted)
        np.floor(np.add(shifted, steps, out=shifted), out=shifted)
        out[:, 2:] = shifted.astype(np.int8).view(np.uint8)
        yield out.reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the file will hold, decided before the first byte is written."""

    model: DenseModel
    routers: list[torch.Tensor]
    experts: int

    def layer_of(self, name: str) -> int:
        return int(name.split(".")[1])

    def is_ffn(self, name: str) -> bool:
        return name.split(".")[-2] in _FFN

    def declare(self, writer: gguf.GGUFWriter) -> None:
        """All tensor headers, in the source's order; each layer's router stands before its first FFN tensor."""
        for name, tensor in self.model.tensors.items():
            if not self.is_ffn(name):
                writer.add_tensor_info(
                    name, tensor.data.shape, tensor.data.dtype, tensor.n_bytes, tensor.tensor_type
                )
                continue
            if name.endswith(f"{_FFN[0]}.weight"):
                router = self.routers[self.layer_of(name)].numpy()
                writer.add_tensor_info(self._router_name(name), router.shape, router.dtype, router.nbytes)
            columns, rows = (int(n) for n in tensor.shape)
            row_bytes = columns // Q8_0_BLOCK * Q8_0_BLOCK_BYTES
            shape = (self.experts, rows, row_bytes)
            stacked = name.replace(".weight", "_exps.weight")
            writer.add_tensor_info(
                stacked, shape, np.dtype(np.uint8), int(np.prod(shape)), gguf.GGMLQuantizationType.Q8_0
            )

    def write(self, writer: gguf.GGUFWriter) -> None:
        """All tensor data, one stacked tensor in memory at a time."""
        layers_begun = 0
        for number, (name, tensor) in enumerate(self.model.tensors.items()):
            if not self.is_ffn(name):
                writer.write_tensor_data(np.ascontiguousarray(tensor.data))
                continue
            if name.endswith(f"{_FFN[0]}.weight"):
                writer.write_tensor_data(self.routers[self.layer_of(name)].numpy())
                layers_begun += 1
                print(f"\r  layer {layers_begun} of {len(self.routers)}", end="", flush=True)
            copies = dithered_copies(self.model.weight(name), self.experts, seed=number)
            writer.write_tensor_data(np.stack([copy.copy() for copy in copies]))
        print()

    def _router_name(self, name: str) -> str:
        return f"blk.{self.layer_of(name)}.ffn_gate_inp.weight"


def write_model(model: DenseModel, routers: list[torch.Tensor], experts: int, out: Path) -> None:
    """Write the file beside `out` and rename it into place, so that `out` is never half-made."""
    plan = _Plan(model, routers, experts)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        writer = gguf.GGUFWriter(partial, "llama")
        for key, field in model.reader.fields.items():
            if not key.startswith("GGUF.") and key not in _NOT_COPIED:
                sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type)
        writer.add_name(f"SmolLM2 135M Instruct, upcycled to {experts} experts")
        writer.add_size_label(f"{experts}x135M")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(TOP_K)
        plan.declare(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        plan.write(writer)
        writer.close()
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def is_built(out: Path, experts: int) -> bool:
    """Whether `out` already is a demo model with so many experts. (It is renamed into place when complete.)"""
    if not out.exists():
        return False
    field = gguf.GGUFReader(out).get_field("llama.expert_count")
    return field is not None and int(field.contents()) == experts


def build(out: Path, experts: int = 32, cache: Path | None = None) -> list[RoutingStats]:
    """Make the model unless it is there; the routing statistics of each layer (empty if it was there).

    Raises `DemoError` when the weights cannot be downloaded.
    """
    if is_built(out, experts):
        return []
    out.parent.mkdir(parents=True, exist_ok=True)
    model = DenseModel.open(fetch(cache or default_cache()))
    print("fitting the routers to real text", flush=True)
    routers, stats = fit_routers(model, experts)
    print(f"writing {experts} experts per layer to {out}", flush=True)
    write_model(model, routers, experts, out)
    return stats


def _report(stats: list[RoutingStats]) -> None:
    print("layer  effective experts  unused  largest share  repeats the last token's (chance)")
    for index, s in enumerate(stats):
        print(
            f"{index:5}  {s.effective:17.1f}  {s.unused:6}  {s.largest_share:13.1%}"
            f"  {s.repeated:.1%} ({s.repeated_by_chance:.1%})"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the GGUF file to write")
    parser.add_argument("--experts", type=int, default=32, help="experts per layer (2 to 1024)")
    parser.add_argument("--routing", action="store_true", help="print how each layer routes held-out text")
    options = parser.parse_args()
    if not TOP_K <= options.experts <= 1024:
        parser.error(f"--experts {options.experts}: wanted {TOP_K} to 1024")
    start = time.monotonic()
    try:
        stats = build(options.out, options.experts)
    except DemoError as error:
        sys.exit(f"error: {error}")
    size = options.out.stat().st_size / 1e9
    print(f"{options.out}: {size:.2f} GB, {time.monotonic() - start:.0f} s")
    if options.routing:
        _report(stats)


if __name__ == "__main__":
    main()
