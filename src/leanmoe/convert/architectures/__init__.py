"""One file per architecture: its keys, names and transforms. Each defines CONVERSIONS: model_type -> Conversion."""
