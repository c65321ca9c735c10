"""Which files of a repository make the model that was asked for."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from leanmoe.convert import QUANTS, SETTINGS
from leanmoe.errors import UsageError
from leanmoe.formats.safetensors import INDEX

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# A tensor type or mixture in a file's name: Q4_K_M, UD-Q4_K_XL, IQ2_XXS, BF16, MXFP4 ...
_TAG = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|BF16|F16|FP16|F32|MXFP4\w*|NVFP4|TQ\d_\d))(?=$|[-._/])", re.IGNORECASE
)
_PREFERRED = "Q4_K_M"
# Beside a model: projectors for images, importance matrices, adapters, draft heads.
_NOT_MODELS = re.compile(
    r"(.*/)?(mmproj|imatrix|adapter|lora|mtp)[-._].*|.*[-._](mmproj|imatrix)[-._].*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: its path there, its size in bytes, and its digest where the hub gives one."""

    name: str
    nbytes: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The files that make a model: the shards of one GGUF in order, or a checkpoint, to be stored as `quant`."""

    files: tuple[RemoteFile, ...]
    gguf: bool
    quant: str | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(file.nbytes for file in self.files)


def choose_files(repo: str, files: Iterable[RemoteFile], quant: str | None) -> Choice:
    """The files of `repo` to fetch for `quant`, a tag like Q4_K_M in the name of a GGUF, or None for the usual choice.

    A GGUF is preferred; a safetensors checkpoint is quantised here if no GGUF has the tag. Without a tag the GGUF is
    the only one there is, or the one tagged Q4_K_M; a checkpoint is kept as it is stored.
    Raises `UsageError`, listing what there is, if nothing fits, several do, or a shard is missing.
    """
    files = list(files)
    models = _gguf_models(repo, files)
    checkpoint = _checkpoint(files)
    fitting = _fitting(models, quant)
    if len(fitting) > 1:
        raise UsageError(
            f"{repo}: several GGUF models fit {quant or 'an empty tag'}: {', '.join(sorted(fitting))}"
        )
    if fitting:
        return Choice(next(iter(fitting.values())), gguf=True)
    tags = ", ".join(sorted({tag for stem in models if (tag := _tag(stem))})) or ", ".join(sorted(models))
    if checkpoint and (quant is None or quant.lower() in QUANTS) and not (models and quant is None):
        return Choice(checkpoint, gguf=False, quant=quant)
    if models:
        how = f"no GGUF tagged {quant}" if quant else f"several GGUF models and none tagged {_PREFERRED}"
        raise UsageError(f"{repo}: has {how}; choose with {repo}:TAG, one of: {tags}")
    if checkpoint:
        raise UsageError(f"{repo}: '{quant}' is no quantisation that lean writes; known: {', '.join(QUANTS)}")
    raise UsageError(f"{repo}: has neither a GGUF nor a safetensors model among its {len(files)} files")


def _gguf_models(repo: str, files: Sequence[RemoteFile]) -> dict[str, tuple[RemoteFile, ...]]:
    """The GGUF models among `files`, by their path without what makes it a shard; shards in order, none missing."""
    whole: dict[str, tuple[RemoteFile, ...]] = {}
    shards: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        if not file.name.endswith(".gguf") or _NOT_MODELS.fullmatch(file.name):
            continue
        if match := _SPLIT.fullmatch(file.name):
            shards.setdefault((match["stem"], int(match["count"])), {})[int(match["number"])] = file
        else:
            whole[file.name.removesuffix(".gguf")] = (file,)
    for (stem, count), parts in shards.items():
        if sorted(parts) != list(range(1, count + 1)):
            raise UsageError(
                f"{repo}: {stem} has {len(parts)} of its {count} shards; nothing can be made of it"
            )
        whole[stem] = tuple(parts[number] for number in range(1, count + 1))
    return whole


def _tag(stem: str) -> str:
    """The last tag in a model's path, "" if it has none."""
    found = _TAG.findall(stem)
    return found[-1] if found else ""


def _fitting(
    models: Mapping[str, tuple[RemoteFile, ...]], quant: str | None
) -> dict[str, tuple[RemoteFile, ...]]:
    if quant is None and len(models) == 1:
        return dict(models)
    wanted = (quant or _PREFERRED).lower()
    for accepted in ({wanted}, {f"ud-{wanted}"}):
        found = {stem: files for stem, files in models.items() if _tag(stem).lower() in accepted}
        if found:
            return found
    return {}


def _checkpoint(files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """The files of the safetensors checkpoint at the top of a repository, () if there is none."""
    by_name = {file.name: file for file in files}
    tensors = [name for name in by_name if name.endswith(".safetensors") and "/" not in name]
    if any(name.startswith("model") for name in tensors):
        tensors = [
            name for name in tensors if name.startswith("model")
        ]  # not a second copy in another layout
    if not tensors or "config.json" not in by_name:
        return ()
    settings = [name for name in (*SETTINGS, INDEX) if name in by_name]
    return tuple(by_name[name] for name in (*settings, *sorted(tensors)))
