"""Models on a Hugging Face hub: which files of a repository make a model, their download, and packing them."""

from leanmoe.hub.choose import Choice, RemoteFile, choose_files
from leanmoe.hub.pull import Pulled, parse_reference, pull

__all__ = ["Choice", "Pulled", "RemoteFile", "choose_files", "parse_reference", "pull"]
