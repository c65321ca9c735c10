"""`lean pull`."""

from pathlib import Path
from typing import Annotated

import typer

from leanmoe.cli.check import check_model
from leanmoe.cli.progress import progress_bar


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME[:TAG]",
            help="A repository on the hub, and which of its models: a tag like Q4_K_M in a GGUF's name, or what to "
            "quantise a checkpoint to. OWNER/NAME:TAG@REVISION takes it from a branch, tag or commit.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Argument(help="The pack to make. [default: NAME-TAG.lmpack here]")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the downloaded files, beside the pack in NAME-TAG.download.")
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="Pack each file while the next is downloaded. A GGUF then never needs the disk twice over.",
        ),
    ] = False,
) -> None:
    """Download a model from a Hugging Face hub and pack it. Run it again to resume after an interruption.

    The address of the hub, the token and the proxy are those of huggingface_hub (HF_ENDPOINT, hf auth login).
    """
    from leanmoe.hub import pull as pull_model  # loads a network library

    with progress_bar("downloading") as downloading, progress_bar("packing") as packing:
        pulled = pull_model(
            model,
            out,
            keep=keep,
            overlap=overlap,
            check=check_model,
            downloading=None if overlap else downloading,
            packing=packing,
        )
    print(pulled.pack)
